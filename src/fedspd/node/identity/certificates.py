"""X.509 in our words: certificates, keys and lists of revoked certificates, read and made. identity.py decides whom to believe.

Keys are P-256 throughout, and files are PEM.
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
Extensions = Sequence[tuple[x509.ExtensionType, bool]]  # and whether it is critical

SKEW = timedelta(minutes=5)  # by which clocks may differ
EARLIER = timedelta(days=1)  # a certificate is valid before its issue, for the same reason


def now() -> datetime:
    return datetime.now(UTC)


def host_name(network: str, node: str) -> str:
    """The name by which TLS knows a node, wherever it is; either part is short enough for a label of a DNS name."""
    return f"{node}.{network}.fedspd"


# ---- what a node's certificate says


@dataclass(frozen=True)
class NodeIdentity:
    network: str
    name: str
    client: int
    neighbours: tuple[str, ...]
    address: str
    serial: int
    until: datetime


def passport(certificate: bytes) -> NodeIdentity:
    """Read, not believed: CertificateVerifier.check does that."""
    try:
        return _passport(parse(certificate))
    except (
        ValueError,
        KeyError,
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
        ConfigError,
    ) as error:
        raise RejectedError(
            f"malformed: the certificate is not that of a node of fedspd ({error})."
        ) from None


def _passport(certificate: Certificate) -> NodeIdentity:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    (text,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    uri = urlsplit(text)
    said = {
        key: value
        for key, (value,) in parse_qs(
            uri.query, keep_blank_values=True, strict_parsing=True
        ).items()
    }
    if uri.scheme != "fedspd" or not NETWORK.fullmatch(uri.netloc):
        raise ValueError(f"its URI begins with '{text[:50]}'")
    return NodeIdentity(
        network=uri.netloc,
        name=check_name(uri.path.removeprefix("/")),
        client=int(said["client"]),
        neighbours=tuple(check_name(name) for name in said["neighbours"].split(",") if name),
        address=check_address(said["address"]),
        serial=certificate.serial_number,
        until=certificate.not_valid_after_utc,
    )


def passport_uri(
    network: str, name: str, client: int, neighbours: Sequence[str], address: str
) -> str:
    checked = {
        "client": client,
        "neighbours": ",".join(check_name(each) for each in neighbours),
        "address": check_address(address),
    }
    return f"fedspd://{network}/{check_name(name)}?{urlencode(checked, safe=',:[]')}"


def parse(certificate: bytes) -> Certificate:
    """Raises ValueError, whatever the bytes."""
    try:
        return x509.load_pem_x509_certificate(certificate)
    except Exception as error:  # the library has several kinds, of several parents
        raise ValueError(f"{type(error).__name__}: {error}") from None


def issued(certificate: Certificate, ca: Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except Exception:  # a signature that cannot be checked, for whatever reason, is none
        return False
    return True


def issuer(certificate: Certificate) -> str:
    try:
        return certificate.issuer.rfc4514_string()[:80]
    except ValueError:
        return "somebody whose name cannot be read"


def wrong_time(certificate: Certificate, moment: datetime) -> str:
    """Nothing if it is valid now, else a reason, a colon, and since or until when."""
    if moment > certificate.not_valid_after_utc:
        return f"expired: it was valid until {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if moment < certificate.not_valid_before_utc - SKEW:
        return f"not yet valid: it is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on"
    return ""


# ---- who counts no more


@dataclass(frozen=True)
class Revocations:
    """A list that the authority signs; of two lists, the one with the larger number is the newer."""

    number: int
    since: dict[int, datetime]  # by serial number

    @classmethod
    def read(cls, path: Path, ca: Certificate) -> "Revocations":
        try:
            crl = x509.load_pem_x509_crl(content(path))
            number = crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            key = ca.public_key()
            signed = (
                isinstance(key, ec.EllipticCurvePublicKey)
                and crl.issuer == ca.subject
                and crl.is_signature_valid(key)
            )
            since = {entry.serial_number: entry.revocation_date_utc for entry in crl}
        except (ValueError, x509.ExtensionNotFound) as error:
            raise _damaged(path, f"a list of revoked certificates ({error})") from None
        if not signed:
            raise StorageError(
                f"'{path}' is not signed by the network's authority: copy it again from the network's folder."
            )
        return cls(number, since)

    def signed(self, ca: Certificate, key: PrivateKey) -> bytes:
        """It holds as long as the authority: a network goes on without an operator at hand."""
        builder = x509.CertificateRevocationListBuilder(
            ca.subject, now() - EARLIER, ca.not_valid_after_utc
        )
        builder = builder.add_extension(x509.CRLNumber(self.number), critical=False)
        for serial, since in self.since.items():
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder(serial, since).build()
            )
        return builder.sign(key, SHA256()).public_bytes(Encoding.PEM)


# ---- files


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"'{path}' cannot be read ({error.strerror}): restore it from a copy."
        ) from None


def read_certificate(path: Path) -> Certificate:
    try:
        return parse(content(path))
    except ValueError:
        raise _damaged(path, "a certificate as PEM") from None


def read_key(path: Path) -> PrivateKey:
    """A key that others could have read is no secret any more."""
    text = content(path)
    mode = path.stat().st_mode & 0o777
    if IS_POSIX and mode & 0o077:  # elsewhere a mode says nothing about other users
        raise StorageError(
            f"'{path}' has the mode {mode:04o}, so others can use it: expected 0600; put that right with chmod 600."
        )
    try:
        key = load_pem_private_key(text, None)
    except (ValueError, TypeError):
        raise _damaged(path, "a private key as PEM, without a password") from None
    if not isinstance(key, PrivateKey):
        raise _damaged(path, "a key of the curve P-256")
    return key


def _damaged(path: Path, expected: str) -> StorageError:
    return StorageError(f"'{path}' is damaged: expected {expected}; restore it from a copy.")


# ---- what an authority makes


def new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def certificate_pem(certificate: Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def authority_certificate(network: str, key: PrivateKey, days: int) -> Certificate:
    return _signed(
        _name(network),
        _name(network),
        key,
        key,
        days,
        [
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_key_usage(key_cert_sign=True, crl_sign=True), True),
        ],
    )


def authority_network(ca: Certificate) -> str:
    (name,) = ca.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)


def node_certificate(
    ca: Certificate, signer: PrivateKey, key: PrivateKey, name: str, uri: str, days: int
) -> Certificate:
    names = [
        x509.DNSName(host_name(authority_network(ca), name)),
        x509.UniformResourceIdentifier(uri),
    ]
    extensions: Extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage(digital_signature=True), True),
        (
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            False,
        ),
        (x509.SubjectAlternativeName(names), False),
    ]
    return _signed(_name(name), ca.subject, key, signer, days, extensions)


def _signed(
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
    serial, begin, end = x509.random_serial_number(), now() - EARLIER, now() + timedelta(days=days)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), serial, begin, end)
    for extension, critical in (*identifiers, *extensions):
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, SHA256())


def _name(common: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "fedspd"),
            x509.NameAttribute(NameOID.COMMON_NAME, common),
        ]
    )


def _key_usage(
    digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    rest = (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(
        digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        **dict.fromkeys(rest, False),
    )
