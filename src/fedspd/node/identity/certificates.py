"""Read and issue X.509 certificates, private keys and certificate revocation lists (CRLs).

`credentials` decides which certificates a node trusts. Keys are on the curve P-256; files are PEM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from fedspd.core.errors import ConfigError, MissingExtraError, RejectedError, StorageError
from fedspd.core.machine import IS_POSIX
from fedspd.node.identity.manifest import NETWORK, check_address, check_name

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise MissingExtraError.of("A network of peers", "node") from None

Certificate = x509.Certificate
PrivateKey = ec.EllipticCurvePrivateKey
Extensions = Sequence[tuple[x509.ExtensionType, bool]]  # with whether it is critical

MAX_CLOCK_SKEW = timedelta(minutes=5)
BACKDATING = timedelta(days=1)  # a device whose clock is slow still accepts a new certificate


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


def host_name(network: str, node: str) -> str:
    """Return the host name that TLS checks for a node, independent of its address.

    Both parts are short enough for a label of a DNS name.
    """
    return f"{node}.{network}.fedspd"


# ---- the identity in a node's certificate


@dataclass(frozen=True)
class NodeIdentity:
    """The identity that a node's certificate states in its URI."""

    network: str
    name: str
    client: int
    neighbours: tuple[str, ...]
    address: str
    serial: int
    valid_until: datetime


def parse_identity(certificate: bytes) -> NodeIdentity:
    """Return the identity in a PEM certificate without verifying its issuer or validity."""
    try:
        return _identity(parse_certificate(certificate))
    except (
        ValueError,
        KeyError,
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
        ConfigError,
    ) as error:
        raise RejectedError(f"malformed: not the certificate of a fedspd node ({error}).") from None


def read_identity(path: Path) -> NodeIdentity:
    """Return the identity in the certificate file of a bundle."""
    try:
        return parse_identity(encode_certificate(read_certificate(path)))
    except RejectedError:
        raise StorageError(
            f"'{path}': not the certificate of a node; expected the node.crt of a bundle. "
            "Copy the complete bundle again."
        ) from None


def _identity(certificate: Certificate) -> NodeIdentity:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    (text,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    uri = urlsplit(text)
    if uri.scheme != "fedspd" or not NETWORK.fullmatch(uri.netloc):
        raise ValueError(f"its URI begins with '{text[:50]}'")
    query = parse_qs(uri.query, keep_blank_values=True, strict_parsing=True)
    fields = {key: value for key, (value,) in query.items()}
    return NodeIdentity(
        network=uri.netloc,
        name=check_name(uri.path.removeprefix("/")),
        client=int(fields["client"]),
        neighbours=tuple(check_name(name) for name in fields["neighbours"].split(",") if name),
        address=check_address(fields["address"]),
        serial=certificate.serial_number,
        valid_until=certificate.not_valid_after_utc,
    )


def identity_uri(
    network: str, name: str, client: int, neighbours: Sequence[str], address: str
) -> str:
    """Return the URI that states a node's identity in its certificate."""
    fields = {
        "client": client,
        "neighbours": ",".join(check_name(neighbour) for neighbour in neighbours),
        "address": check_address(address),
    }
    return f"fedspd://{network}/{check_name(name)}?{urlencode(fields, safe=',:[]')}"


# ---- checks of a certificate


def parse_certificate(certificate: bytes) -> Certificate:
    """Parse a PEM certificate; raise ValueError for any other bytes."""
    try:
        return x509.load_pem_x509_certificate(certificate)
    except Exception as error:  # the library raises several types without a common base
        raise ValueError(f"{type(error).__name__}: {error}") from None


def is_issued_by(certificate: Certificate, ca: Certificate) -> bool:
    """Return whether the authority signed the certificate."""
    try:
        certificate.verify_directly_issued_by(ca)
    except Exception:  # a signature that cannot be verified is not valid
        return False
    return True


def sign(key: PrivateKey, content: bytes) -> str:
    """Return the signature of some content as hexadecimal digits."""
    return key.sign(content, ec.ECDSA(SHA256())).hex()


def is_signed_by(ca: Certificate, content: bytes, signature: str) -> bool:
    """Return whether the authority signed the content."""
    key = ca.public_key()
    try:
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(bytes.fromhex(signature), content, ec.ECDSA(SHA256()))
    except (ValueError, InvalidSignature):
        return False
    return True


def issuer_name(certificate: Certificate) -> str:
    """Return the issuer as text for a log line."""
    try:
        return certificate.issuer.rfc4514_string()[:80]
    except ValueError:
        return "unreadable name"


def validity_problem(certificate: Certificate, moment: datetime) -> str:
    """Return an empty string if the certificate is valid at that time, else `reason: sentence`."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if moment > end:
        return f"expired: the certificate was valid until {end:%Y-%m-%d %H:%M} UTC"
    if moment < begin - MAX_CLOCK_SKEW:
        return f"not yet valid: the certificate is valid from {begin:%Y-%m-%d %H:%M} UTC"
    return ""


@dataclass(frozen=True)
class RevocationList:
    """A list of revoked certificates, signed by the authority; a higher number is newer."""

    number: int
    revoked_at: dict[int, datetime]  # by serial number

    @classmethod
    def read(cls, path: Path, ca: Certificate) -> "RevocationList":
        """Read a CRL file and check that the authority signed it."""
        content = _read_bytes(path)
        try:
            crl = x509.load_pem_x509_crl(content)
            number = crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            key = ca.public_key()
            is_signed = (
                isinstance(key, ec.EllipticCurvePublicKey)
                and crl.issuer == ca.subject
                and crl.is_signature_valid(key)
            )
            revoked_at = {entry.serial_number: entry.revocation_date_utc for entry in crl}
        except Exception:  # the library raises several types without a common base
            raise _damaged(path, "a certificate revocation list") from None
        if not is_signed:
            raise StorageError(
                f"'{path}': not signed by this network's authority; expected the list of this "
                "network. Copy revoked.crl from the network's folder again."
            )
        return cls(number, revoked_at)

    def sign(self, ca: Certificate, key: PrivateKey) -> bytes:
        """Return the list as PEM.

        It is valid as long as the authority, so that a network runs on without its operator.
        """
        builder = x509.CertificateRevocationListBuilder(
            ca.subject, now() - BACKDATING, ca.not_valid_after_utc
        )
        builder = builder.add_extension(x509.CRLNumber(self.number), critical=False)
        for serial, moment in self.revoked_at.items():
            entry = x509.RevokedCertificateBuilder(serial, moment).build()
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(key, SHA256()).public_bytes(Encoding.PEM)


# ---- files


def read_certificate(path: Path) -> Certificate:
    """Read a certificate file."""
    try:
        return parse_certificate(_read_bytes(path))
    except ValueError:
        raise _damaged(path, "a certificate as PEM") from None


def read_key(path: Path) -> PrivateKey:
    """Read a private key that only its owner can access."""
    text = _read_bytes(path)
    mode = path.stat().st_mode & 0o777
    if IS_POSIX and mode & 0o077:  # elsewhere a mode says nothing about other users
        raise StorageError(
            f"'{path}': mode = {mode:04o} gives other users access to the key; expected 0600. "
            f"Run chmod 600 '{path}'."
        )
    try:
        key = load_pem_private_key(text, None)
    except (ValueError, TypeError):
        raise _damaged(path, "a private key as PEM, without a password") from None
    if not isinstance(key, PrivateKey):
        raise _damaged(path, "a key on the curve P-256")
    return key


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"'{path}': cannot be read ({error.strerror}). Restore it from a copy."
        ) from None


def _damaged(path: Path, expected: str) -> StorageError:
    return StorageError(f"'{path}': damaged; expected {expected}. Restore it from a copy.")


# ---- issuing


def generate_key() -> PrivateKey:
    """Generate a private key."""
    return ec.generate_private_key(ec.SECP256R1())


def encode_key(key: PrivateKey) -> bytes:
    """Return the private key as PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def encode_certificate(certificate: Certificate) -> bytes:
    """Return the certificate as PEM."""
    return certificate.public_bytes(Encoding.PEM)


def network_of(ca: Certificate) -> str:
    """Return the network identifier, which is the authority's common name."""
    (name,) = ca.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)


def issue_authority(network: str, key: PrivateKey, days: int) -> Certificate:
    """Issue the self-signed certificate of a network's authority."""
    subject = _subject(network)
    extensions: Extensions = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_key_usage(key_cert_sign=True, crl_sign=True), True),
    ]
    return _issue(subject, subject, key, key, days, extensions)


def issue_node(
    ca: Certificate, signer: PrivateKey, key: PrivateKey, name: str, uri: str, days: int
) -> Certificate:
    """Issue a node's certificate, which serves for both sides of a TLS connection."""
    names = [x509.DNSName(host_name(network_of(ca), name)), x509.UniformResourceIdentifier(uri)]
    both_sides = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    extensions: Extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage(digital_signature=True), True),
        (x509.ExtendedKeyUsage(both_sides), False),
        (x509.SubjectAlternativeName(names), False),
    ]
    return _issue(_subject(name), ca.subject, key, signer, days, extensions)


def _issue(
    subject: x509.Name,
    issuer: x509.Name,
    key: PrivateKey,
    signer: PrivateKey,
    days: int,
    extensions: Extensions,
) -> Certificate:
    identifiers: Extensions = [
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
    ]
    begin, end = now() - BACKDATING, now() + timedelta(days=days)
    serial = x509.random_serial_number()
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), serial, begin, end)
    for extension, is_critical in (*identifiers, *extensions):
        builder = builder.add_extension(extension, is_critical)
    return builder.sign(signer, SHA256())


def _subject(common_name: str) -> x509.Name:
    organisation = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "fedspd")
    return x509.Name([organisation, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(
    digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
