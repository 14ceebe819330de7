"""A node's credentials, the verification of its peers, and the authority of a network.

BUNDLE/              everything that a device needs
  manifest.json      the agreement of the network and its members (manifest.py)
  node.key node.crt  the node's private key, and its certificate, which states its `NodeIdentity`
  ca.crt             the certificate of the network's authority
  revoked.crl        the authority's list of revoked certificates
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from fedspd.core.errors import ConfigError, NodeError, RejectedError, StorageError
from fedspd.node.identity import certificates
from fedspd.node.identity.certificates import (
    Certificate,
    NodeIdentity,
    PrivateKey,
    RevocationList,
    encode_certificate,
    encode_key,
    now,
    parse_identity,
    read_certificate,
    read_key,
)
from fedspd.node.identity.manifest import Manifest

AUTHORITY_DAYS = 3653  # ten years
NODE_DAYS = 365
COPY_SECONDS = 2.0  # a younger list may still be written: cp and tee do so in several steps
Stamp = tuple[int, int, int]  # time of the last change (ns), size and inode of a file
Clock = Callable[[], datetime]
log = logging.getLogger("fedspd.node")


@dataclass(frozen=True)
class Credentials:
    """The authority's certificate, a node's certificate and its private key, each as PEM."""

    ca: bytes
    certificate: bytes
    key: bytes

    @classmethod
    def load(cls, bundle: Path, clock: Clock = now) -> "Credentials":
        """Load the credentials of a bundle, and check that they belong together and are valid."""
        ca, certificate = read_certificate(bundle / "ca.crt"), read_certificate(bundle / "node.crt")
        key = read_key(bundle / "node.key")
        if key.public_key() != certificate.public_key():
            raise StorageError(
                f"'{bundle / 'node.key'}': not the key of node.crt in the same folder; "
                "expected both from one bundle. Copy the complete bundle again."
            )
        if not certificates.is_issued_by(certificate, ca):
            raise StorageError(
                f"'{bundle / 'node.crt'}': not issued by the authority of ca.crt in the same "
                "folder; expected both from one bundle. Copy the complete bundle again."
            )
        if problem := certificates.validity_problem(certificate, clock()):
            raise NodeError(
                f"'{bundle / 'node.crt'}': {problem}. Set this device's clock, or issue a new "
                "bundle with 'fedspd network add'."
            )
        return cls(encode_certificate(ca), encode_certificate(certificate), encode_key(key))


class CertificateVerifier:
    """Verifies the certificates of peers.

    It reads revoked.crl again whenever the file changes, so a revocation needs no restart.
    """

    def __init__(self, bundle: Path, own: NodeIdentity, clock: Clock = now) -> None:
        self.own, self._clock = own, clock
        self._ca = read_certificate(bundle / "ca.crt")
        self._crl_path = bundle / "revoked.crl"
        self._memory: Path | None = None
        self._crl_stamp = self._stamp()
        self._crl = RevocationList.read(self._crl_path, self._ca)

    def remember(self, memory: Path) -> None:
        """Keep the number of the newest list in a file; refuse an older one, or this node in it."""
        self._memory = memory
        self._accept(self._crl, _read_number(memory))
        if self.is_revoked(self.own.serial):
            raise StorageError(
                f"'{self._crl_path.with_name('node.crt')}': revoked by the network's operator; "
                "expected a valid bundle. Issue a new one with 'fedspd network add'."
            )

    def verify(self, certificate: bytes) -> NodeIdentity:
        """Return the identity in a peer's certificate.

        Raise RejectedError, with a message of the form `reason: sentence`, if it is not valid.
        """
        try:
            parsed = certificates.parse_certificate(certificate)
        except ValueError:
            raise RejectedError("malformed: the peer's certificate cannot be parsed.") from None
        if not certificates.is_issued_by(parsed, self._ca):
            issuer = certificates.issuer_name(parsed)
            raise RejectedError(
                f"foreign CA: the peer's certificate was issued by '{issuer}', "
                "not by this network's authority."
            )
        peer = parse_identity(certificate)
        self._reject_invalid(parsed, peer)
        if peer.name not in self.own.neighbours and self.own.name not in peer.neighbours:
            raise RejectedError(
                f"not a neighbour: '{peer.name}' and '{self.own.name}' have no link."
            )
        return peer

    def _reject_invalid(self, certificate: Certificate, peer: NodeIdentity) -> None:
        if peer.network != self.own.network:
            raise RejectedError(
                f"foreign network: '{peer.name}' belongs to the network {peer.network}, "
                f"not to {self.own.network}."
            )
        if problem := certificates.validity_problem(certificate, self._clock()):
            raise RejectedError(f"{problem} (node '{peer.name}').")
        if self.is_revoked(peer.serial):
            raise RejectedError(
                f"revoked: the certificate of '{peer.name}' (serial number {peer.serial:x}) "
                "is listed in revoked.crl."
            )

    def is_revoked(self, serial: int) -> bool:
        """Return whether the current revoked.crl lists the serial number."""
        if (stamp := self._stamp()) != self._crl_stamp and self._reload(stamp):
            self._crl_stamp = stamp  # so that a broken file is logged once, not at every call
        return serial in self._crl.revoked_at

    def _stamp(self) -> Stamp | None:
        try:
            found = os.stat(self._crl_path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _reload(self, stamp: Stamp | None) -> bool:
        """Replace the list, unless the new one is damaged, missing, forged or older.

        Return False for one that cannot be used and may still be under way.
        """
        try:
            self._accept(RevocationList.read(self._crl_path, self._ca), self._crl.number)
        except StorageError as error:
            if stamp is not None and 0 <= time.time() - stamp[0] / 1e9 < COPY_SECONDS:
                return False
            log.error('revocation list rejected, last valid list kept: error="%s"', error)
        else:
            revoked = len(self._crl.revoked_at)
            log.info("revocation list loaded: path=%s revoked=%d", self._crl_path, revoked)
            if self.own.serial in self._crl.revoked_at:
                log.error("this node is revoked, its neighbours refuse it: node=%s", self.own.name)
        return True

    def _accept(self, found: RevocationList, least: int) -> None:
        """Use a list, unless its number is too low."""
        if found.number < least:
            raise StorageError(
                f"'{self._crl_path}': number = {found.number} is older than the list in use; "
                f"expected at least {least}. Copy revoked.crl again."
            )
        self._crl = found
        if self._memory is not None:
            _write_number(self._memory, found.number)


def _read_number(memory: Path) -> int:
    """Return the number of the newest list that a node has seen; 0 before the first."""
    if not memory.exists():
        return 0
    try:
        return int(memory.read_text("ascii"))
    except ValueError:
        raise StorageError(
            f"'{memory}': damaged; expected the number of a revocation list. Copy revoked.crl "
            "again, and remove this file."
        ) from None


def _write_number(memory: Path, number: int) -> None:
    from fedspd.storage.atomic import write_atomically  # imports torch, which `show` avoids

    try:
        write_atomically(memory, f"{number}\n")
    except OSError as error:  # the list itself is in use all the same
        log.error('number of the revocation list not kept: path=%s error="%s"', memory, error)


class Authority:
    """The certificate authority of one network, whose name it carries."""

    def __init__(self, key: PrivateKey, certificate: Certificate, crl: RevocationList) -> None:
        self._key, self._certificate, self._crl = key, certificate, crl
        self.network = certificates.network_of(certificate)

    @classmethod
    def create(cls) -> "Authority":
        """Create the authority of a new network with a random name."""
        key = certificates.generate_key()
        certificate = certificates.issue_authority(secrets.token_hex(16), key, AUTHORITY_DAYS)
        return cls(key, certificate, RevocationList(0, {}))

    @classmethod
    def load(cls, folder: Path) -> "Authority":
        """Load the authority from the folder of its network."""
        certificate, key = read_certificate(folder / "ca.crt"), read_key(folder / "ca.key")
        if key.public_key() != certificate.public_key():
            raise StorageError(
                f"'{folder / 'ca.key'}': not the key of ca.crt in the same folder; expected both "
                "from one network. Restore both from one copy."
            )
        return cls(key, certificate, RevocationList.read(folder / "revoked.crl", certificate))

    def encode_files(self) -> dict[str, bytes]:
        """Return the files that `load` reads, by name."""
        return {
            "ca.key": encode_key(self._key),
            "ca.crt": encode_certificate(self._certificate),
            "revoked.crl": self.encode_crl(),
        }

    def encode_crl(self) -> bytes:
        """Return the signed list of revoked certificates as PEM."""
        return self._crl.sign(self._certificate, self._key)

    def issue(
        self, name: str, client: int, neighbours: Sequence[str], address: str, days: int = NODE_DAYS
    ) -> Credentials:
        """Generate a key for a node and issue a certificate for it."""
        days_left = (self._certificate.not_valid_after_utc - now()).days
        if not 1 <= days <= days_left:
            raise ConfigError(
                f"days = {days}: not a possible lifetime of a certificate; expected 1 to "
                f"{days_left}, the days left for the network's authority."
            )
        key = certificates.generate_key()
        uri = certificates.identity_uri(self.network, name, client, neighbours, address)
        certificate = certificates.issue_node(self._certificate, self._key, key, name, uri, days)
        return Credentials(
            encode_certificate(self._certificate), encode_certificate(certificate), encode_key(key)
        )

    def sign(self, manifest: Manifest) -> Manifest:
        """Return the manifest with this authority's signature."""
        signature = certificates.sign(self._key, manifest.signed_content)
        return replace(manifest, signature=signature)

    def is_revoked(self, serial: int) -> bool:
        """Return whether the certificate with this serial number is revoked."""
        return serial in self._crl.revoked_at

    def revoke(self, serial: int) -> None:
        """Add the certificate with this serial number to the list, which gets the next number."""
        revoked_at = {serial: now(), **self._crl.revoked_at}
        self._crl = replace(self._crl, number=self._crl.number + 1, revoked_at=revoked_at)
