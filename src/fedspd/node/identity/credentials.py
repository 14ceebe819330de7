"""Who a node is, and whom it believes.

BUNDLE/                    all that a device needs
  manifest.json            what the network has agreed on (manifest.py)
  node.key  node.crt       the node's key, for its eyes only, and its certificate, which says what a NodeIdentity says
  ca.crt    revoked.crl    the certificate of the network's own authority, and its list of those that count no more
"""

import logging
import os
import secrets
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
    Revocations,
    host_name,
    now,
    passport,
)

__all__ = [
    "Authority",
    "CertificateVerifier",
    "Credentials",
    "NodeIdentity",
    "host_name",
    "now",
    "passport",
]

AUTHORITY_DAYS = 3653  # ten years
NODE_DAYS = 365
Clock = Callable[[], datetime]
logger = logging.getLogger("fedspd.node")


@dataclass(frozen=True)
class Credentials:
    """As PEM."""

    ca: bytes
    certificate: bytes
    key: bytes

    @classmethod
    def load(cls, bundle: Path, clock: Clock = now) -> "Credentials":
        """Those of a bundle, if a node can live with them."""
        ca, certificate = (
            certificates.read_certificate(bundle / name) for name in ("ca.crt", "node.crt")
        )
        key = certificates.read_key(bundle / "node.key")
        if key.public_key() != certificate.public_key():
            raise StorageError(
                f"'{bundle / 'node.key'}' does not belong to node.crt beside it: copy the whole bundle again."
            )
        if not certificates.issued(certificate, ca):
            raise StorageError(
                f"'{bundle / 'node.crt'}' was not issued by the authority of ca.crt beside it: copy the whole bundle again."
            )
        if late := certificates.wrong_time(certificate, clock()):
            raise NodeError(
                f"'{bundle / 'node.crt'}' is {late}: look at this machine's clock, or add a new node to the network."
            )
        return cls(
            certificates.certificate_pem(ca),
            certificates.certificate_pem(certificate),
            certificates.key_pem(key),
        )


class CertificateVerifier:
    """Decides on peers. Whoever is revoked stays out from the moment that revoked.crl says so: the file may change at any time."""

    def __init__(self, bundle: Path, me: NodeIdentity, clock: Clock = now) -> None:
        self.me, self._clock = me, clock
        self._ca = certificates.read_certificate(bundle / "ca.crt")
        self._file = bundle / "revoked.crl"
        self._seen = self._stamp()
        self._list = Revocations.read(self._file, self._ca)

    def check(self, certificate: bytes) -> NodeIdentity:
        """Whose certificate it is; else RejectedError, with a sentence that begins with the reason and a colon."""
        try:
            parsed = certificates.parse(certificate)
        except ValueError:
            raise RejectedError(
                "malformed: the peer has no certificate that can be read."
            ) from None
        if not certificates.issued(parsed, self._ca):
            raise RejectedError(
                f"foreign CA: the peer's certificate is by '{certificates.issuer(parsed)}', not by this network's authority."
            )
        peer = passport(certificate)
        self._refuse_invalid(parsed, peer)
        if peer.name not in self.me.neighbours and self.me.name not in peer.neighbours:
            raise RejectedError(
                f"not a neighbour: '{peer.name}' and '{self.me.name}' have no link."
            )
        return peer

    def _refuse_invalid(self, certificate: Certificate, peer: NodeIdentity) -> None:
        if peer.network != self.me.network:
            raise RejectedError(
                f"foreign network: the node '{peer.name}' belongs to the network {peer.network}, not to {self.me.network}."
            )
        if late := certificates.wrong_time(certificate, self._clock()):
            raise RejectedError(f"{late} (the certificate of '{peer.name}').")
        if self.revoked(peer.serial):
            raise RejectedError(
                f"revoked: the certificate of '{peer.name}' with the serial number {peer.serial:x} is in revoked.crl."
            )

    def revoked(self, serial: int) -> bool:
        if (stamp := self._stamp()) != self._seen:
            self._seen = stamp  # a broken file is complained about once, not at every call
            self._renew()
        return serial in self._list.since

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._file)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _renew(self) -> None:
        """Whatever is wrong with the new list, and be it that it is older, the last good one holds."""
        try:
            found = Revocations.read(self._file, self._ca)
            if found.number < self._list.number:
                raise StorageError(
                    f"'{self._file}' is list number {found.number}, and number {self._list.number} was here before."
                )
        except StorageError as error:
            logger.warning("The last good list of revoked nodes still holds: %s", error)
        else:
            self._list = found
            logger.info("'%s' was read again: %d nodes are revoked.", self._file, len(found.since))


class Authority:
    """The network's own: its certificate has the network's name."""

    def __init__(self, key: PrivateKey, certificate: Certificate, revocations: Revocations) -> None:
        self._key, self._certificate, self._revocations = key, certificate, revocations
        self.network = certificates.authority_network(certificate)

    @classmethod
    def create(cls) -> "Authority":
        key = certificates.new_key()
        return cls(
            key,
            certificates.authority_certificate(secrets.token_hex(16), key, AUTHORITY_DAYS),
            Revocations(0, {}),
        )

    @classmethod
    def load(cls, folder: Path) -> "Authority":
        certificate, key = (
            certificates.read_certificate(folder / "ca.crt"),
            certificates.read_key(folder / "ca.key"),
        )
        if key.public_key() != certificate.public_key():
            raise StorageError(
                f"'{folder / 'ca.key'}' does not belong to ca.crt beside it: restore both from one copy."
            )
        return cls(key, certificate, Revocations.read(folder / "revoked.crl", certificate))

    def files(self) -> dict[str, bytes]:
        """As `load` reads them."""
        return {
            "ca.key": certificates.key_pem(self._key),
            "ca.crt": certificates.certificate_pem(self._certificate),
            "revoked.crl": self.crl(),
        }

    def issue(
        self, name: str, client: int, neighbours: Sequence[str], address: str, days: int = NODE_DAYS
    ) -> Credentials:
        """A new key, and a certificate for it."""
        left = self._certificate.not_valid_after_utc - now()
        if not 1 <= days <= left.days:
            raise ConfigError(
                f"days = {days}: expected at least 1, and at most the {left.days} that the network's authority has left."
            )
        key, uri = (
            certificates.new_key(),
            certificates.passport_uri(self.network, name, client, neighbours, address),
        )
        certificate = certificates.node_certificate(
            self._certificate, self._key, key, name, uri, days
        )
        return Credentials(
            certificates.certificate_pem(self._certificate),
            certificates.certificate_pem(certificate),
            certificates.key_pem(key),
        )

    def revoked(self, serial: int) -> bool:
        return serial in self._revocations.since

    def revoke(self, serial: int) -> None:
        before = self._revocations
        self._revocations = replace(
            before, number=before.number + 1, since={serial: now(), **before.since}
        )

    def crl(self) -> bytes:
        return self._revocations.signed(self._certificate, self._key)
