"""Certificates of a network and their verification, with real keys, real files and real TLS."""

import shutil
import socket
import ssl
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from fedspd.core.errors import ConfigError, NodeError, RejectedError, StorageError
from fedspd.node.identity import certificates
from fedspd.node.identity.certificates import host_name, parse_identity, read_identity
from fedspd.node.identity.credentials import Authority, CertificateVerifier, Credentials

NETWORK = "0123456789abcdef" * 2
ADDRESS = "127.0.0.1:7700"


def reason(verifier: CertificateVerifier, certificate: bytes) -> str:
    """Return why a certificate is rejected."""
    with pytest.raises(RejectedError) as rejected:
        verifier.verify(certificate)
    sentence = str(rejected.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence.partition(":")[0]


def later(days: float):
    """Return a clock that is ahead by some days."""
    return lambda: datetime.now(UTC) + timedelta(days=days)


# ---- identities


@given(
    name=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", fullmatch=True),
    client=st.integers(0, 10**6),
    neighbours=st.lists(
        st.from_regex(r"[a-z0-9]([a-z0-9-]{0,5}[a-z0-9])?", fullmatch=True), max_size=40
    ),
    address=st.sampled_from(
        ["10.0.0.7:1", "[::1]:65535", "[fe80::1%eth0]:7700", "plant.example:7700"]
    ),
)
def test_identity_states_what_was_issued(name, client, neighbours, address):
    authority = Authority.create()
    issued = authority.issue(name, client, neighbours, address, days=30)
    said = parse_identity(issued.certificate)
    assert (said.network, said.name, said.client, said.neighbours) == (
        authority.network,
        name,
        client,
        tuple(neighbours),
    )
    assert said.address == address
    assert timedelta(days=29, hours=23) < said.valid_until - datetime.now(UTC) <= timedelta(days=30)


def test_certificate_serves_both_sides_of_tls_and_signs_no_others(authority):
    made = x509.load_pem_x509_certificate(authority.issue("a", 3, ["b", "c"], ADDRESS).certificate)
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uri = f"fedspd://{authority.network}/a?client=3&neighbours=b,c&address={ADDRESS}"
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [uri]
    assert names.get_values_for_type(x509.DNSName) == [host_name(authority.network, "a")]
    assert {
        use._name for use in made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    } == {"serverAuth", "clientAuth"}
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert isinstance(made.public_key().curve, ec.SECP256R1)
    assert made.not_valid_before_utc < datetime.now(UTC) - timedelta(hours=23)


def test_authority_issues_distinct_keys_and_serial_numbers(authority):
    two = [authority.issue("a", 0, [], ADDRESS) for _ in range(2)]
    assert two[0].key != two[1].key
    assert parse_identity(two[0].certificate).serial != parse_identity(two[1].certificate).serial
    assert len({Authority.create().network for _ in range(3)}) == 3


def test_host_name_fits_the_longest_names():
    assert max(len(label) for label in host_name(NETWORK, "a" * 32).split(".")) <= 63


@pytest.mark.parametrize("days", [0, -1, 4000])
def test_authority_rejects_a_lifetime_beyond_its_own(authority, days):
    with pytest.raises(ConfigError, match=rf"days = {days}: .*; expected 1 to 365[0-9], the days"):
        authority.issue("a", 0, [], ADDRESS, days)


@pytest.mark.parametrize(
    ("name", "neighbours", "address"),
    [
        ("A", [], ADDRESS),
        ("a", ["b&client=9"], ADDRESS),
        ("a", [], "x:1&client=9"),
        ("../a", [], ADDRESS),
    ],
)
def test_authority_rejects_names_and_addresses_that_inject_fields(
    authority, name, neighbours, address
):
    with pytest.raises(ConfigError, match=r"not (a node name|an address); expected"):
        authority.issue(name, 0, neighbours, address)


# ---- credentials


def test_credentials_load_what_the_authority_issued(authority, tmp_path, write_bundle):
    own = authority.issue("a", 0, ["b"], ADDRESS)
    assert Credentials.load(write_bundle(tmp_path / "a", authority, own)) == own


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o610])
def test_credentials_reject_a_key_that_others_can_read(bundle, mode):
    (bundle / "node.key").chmod(mode)
    with pytest.raises(
        StorageError,
        match=rf"node\.key': mode = {mode:04o} gives other users access.*; expected 0600",
    ):
        Credentials.load(bundle)


def test_credentials_reject_a_foreign_key_and_a_foreign_authority(bundle, authority):
    (bundle / "node.key").write_bytes(authority.issue("a", 0, ["b"], ADDRESS).key)
    with pytest.raises(StorageError, match=r"node\.key': not the key of node\.crt in the same"):
        Credentials.load(bundle)
    stranger = Authority.create().issue("a", 0, ["b"], ADDRESS)
    (bundle / "node.key").write_bytes(stranger.key)
    (bundle / "node.crt").write_bytes(stranger.certificate)
    with pytest.raises(StorageError, match=r"node\.crt': not issued by the authority of ca\.crt"):
        Credentials.load(bundle)


def test_credentials_reject_a_certificate_outside_its_validity(bundle):
    expired = r"node\.crt': expired: the certificate was valid until 20..-..-.. ..:.. UTC\. Set"
    with pytest.raises(NodeError, match=expired):
        Credentials.load(bundle, later(366))
    with pytest.raises(
        NodeError, match=r"node\.crt': not yet valid: the certificate is valid from"
    ):
        Credentials.load(bundle, later(-2))
    tolerated = -1 - 4 / 1440  # four minutes before the day by which it is backdated
    assert Credentials.load(bundle, later(tolerated)) == Credentials.load(bundle, later(364))


@pytest.mark.parametrize("name", ["ca.crt", "node.crt", "node.key"])
def test_credentials_name_a_missing_or_damaged_file(bundle, name):
    (bundle / name).write_bytes(b"-----BEGIN CERTIFICATE-----\nnoise\n")
    with pytest.raises(StorageError, match=rf"{name}': damaged; expected .* as PEM"):
        Credentials.load(bundle)
    (bundle / name).unlink()
    with pytest.raises(StorageError, match=rf"{name}': cannot be read \(No such file or dir"):
        Credentials.load(bundle)


def test_credentials_reject_an_rsa_key(bundle):
    key = rsa.generate_private_key(65537, 2048)
    (bundle / "node.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    with pytest.raises(StorageError, match=r"node\.key': damaged; expected a key on the curve P-2"):
        Credentials.load(bundle)


# ---- verification


def test_verifier_accepts_a_link_that_either_certificate_states(verifier, authority):
    both = authority.issue("b", 1, ["a"], ADDRESS).certificate
    own_only = authority.issue("b", 1, [], ADDRESS).certificate
    theirs_only = authority.issue("new", 7, ["a"], "10.0.0.9:1").certificate
    assert verifier.verify(both).name == "b"
    assert verifier.verify(own_only).client == 1
    assert verifier.verify(theirs_only).address == "10.0.0.9:1"


def test_verifier_rejects_a_node_without_a_link(verifier, authority):
    other = authority.issue("c", 2, ["b"], ADDRESS).certificate
    itself = authority.issue("a", 0, ["b"], ADDRESS).certificate
    assert reason(verifier, other) == "not a neighbour"
    assert reason(verifier, itself) == "not a neighbour"


def test_verifier_rejects_a_foreign_authority(verifier):
    foreign = Authority.create().issue("b", 1, ["a"], ADDRESS).certificate
    assert reason(verifier, foreign) == "foreign CA"


def test_verifier_rejects_a_foreign_authority_of_the_same_name(verifier, authority):
    key = certificates.generate_key()
    certificate = certificates.issue_authority(authority.network, key, 10)
    impostor = Authority(key, certificate, certificates.RevocationList(0, {}))
    forged = impostor.issue("b", 1, ["a"], ADDRESS, days=5).certificate
    assert reason(verifier, forged) == "foreign CA"


def test_verifier_rejects_another_network_of_the_same_authority(verifier, authority, tmp_path):
    key = certificates.generate_key()
    uri = certificates.identity_uri(NETWORK, "b", 1, ["a"], ADDRESS)
    other = certificates.issue_node(authority._certificate, authority._key, key, "b", uri, 10)
    assert reason(verifier, certificates.encode_certificate(other)) == "foreign network"


def test_verifier_rejects_a_certificate_outside_its_validity(bundle, authority):
    own = read_identity(bundle / "node.crt")
    theirs = authority.issue("b", 1, ["a"], ADDRESS, days=30).certificate

    def verifier_at(days: float) -> CertificateVerifier:
        return CertificateVerifier(bundle, own, later(days))

    assert reason(verifier_at(31), theirs) == "expired"
    assert reason(verifier_at(-2), theirs) == "not yet valid"
    assert verifier_at(29).verify(theirs).name == "b"
    assert verifier_at(-1 - 4 / 1440).verify(theirs).name == "b"  # clocks may differ by 5 minutes
    assert reason(verifier_at(-1 - 6 / 1440), theirs) == "not yet valid"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"noise",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        b"\xff" * 5000,
    ],
)
def test_verifier_rejects_bytes_that_are_not_a_certificate(verifier, text):
    assert reason(verifier, text) == "malformed"
    with pytest.raises(RejectedError, match="malformed: "):
        parse_identity(text)


def test_verifier_rejects_the_certificate_of_the_authority(verifier, bundle):
    assert reason(verifier, (bundle / "ca.crt").read_bytes()) == "malformed"


@pytest.mark.parametrize(
    "uri",
    [
        "https://example.org",
        f"fedspd://{NETWORK}/b",
        f"fedspd://{NETWORK}/b?client=1&neighbours=a",
        f"fedspd://{NETWORK}/b?client=x&neighbours=a&address={ADDRESS}",
        f"fedspd://{NETWORK}/b?client=1&client=2&neighbours=a&address={ADDRESS}",
        f"fedspd://{NETWORK}/b?client=1&neighbours=A&address={ADDRESS}",
        f"fedspd://{NETWORK}/b?client=1&neighbours=a&address=here",
        f"fedspd://{NETWORK}/B?client=1&neighbours=a&address={ADDRESS}",
        f"fedspd://elsewhere/b?client=1&neighbours=a&address={ADDRESS}",
        "fedspd://[",
    ],
)
def test_verifier_rejects_a_certificate_with_a_malformed_uri(verifier, authority, uri):
    key = certificates.generate_key()
    made = certificates.issue_node(authority._certificate, authority._key, key, "b", uri, 10)
    assert reason(verifier, certificates.encode_certificate(made)) == "malformed"


# A flipped bit can make the serial number negative, of which the library warns.
@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
def test_verifier_rejects_a_flip_of_any_signed_bit(verifier, authority):
    good = ssl.PEM_cert_to_DER_cert(authority.issue("b", 1, ["a"], ADDRESS).certificate.decode())
    signed = x509.load_der_x509_certificate(good).tbs_certificate_bytes
    start = good.index(signed)
    for bit in range(8 * start, 8 * (start + len(signed))):
        der = bytearray(good)
        der[bit // 8] ^= 1 << bit % 8
        flipped = ssl.DER_cert_to_PEM_cert(bytes(der)).encode()
        assert reason(verifier, flipped) in ("malformed", "foreign CA")


# ---- TLS connections


def context(side: int, bundle: Path, *, crl: bool = False) -> ssl.SSLContext:
    made = ssl.SSLContext(side)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT | (ssl.VERIFY_CRL_CHECK_LEAF if crl else 0)
    made.load_verify_locations(bundle / "ca.crt")
    if crl:
        made.load_verify_locations(bundle / "revoked.crl")
    made.load_cert_chain(bundle / "node.crt", bundle / "node.key")
    return made


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> tuple[bytes, bytes]:
    """Return the certificates that the server and the client received, as PEM."""
    left, right = socket.socketpair()
    seen: list[bytes | ssl.SSLError] = []

    def serve() -> None:
        try:
            with server.wrap_socket(left, server_side=True) as end:
                seen.append(end.getpeercert(binary_form=True) or b"")
                end.sendall(b"x")
        except ssl.SSLError as error:
            seen.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(right, server_hostname=name) as end:
            shown = end.getpeercert(binary_form=True) or b""
            end.recv(1)  # in TLS 1.3 the client learns only now that the server accepted it
    finally:
        right.close()
        thread.join()
    assert isinstance(seen[0], bytes)
    return ssl.DER_cert_to_PEM_cert(seen[0]).encode(), ssl.DER_cert_to_PEM_cert(shown).encode()


def test_handshake_identifies_both_nodes(
    authority, bundle, verifier, verifier_of, tmp_path, write_bundle
):
    other = write_bundle(tmp_path / "b", authority, authority.issue("b", 1, ["a"], ADDRESS))
    server = context(ssl.PROTOCOL_TLS_SERVER, bundle, crl=True)
    client = context(ssl.PROTOCOL_TLS_CLIENT, other, crl=True)
    from_client, from_server = handshake(server, client, host_name(authority.network, "a"))
    assert verifier.verify(from_client).name == "b"
    assert verifier_of(other).verify(from_server).name == "a"


@pytest.mark.parametrize("wrong", ["b", "*"])
def test_handshake_rejects_a_server_of_another_name(
    authority, bundle, tmp_path, wrong, write_bundle
):
    other = write_bundle(tmp_path / "b", authority, authority.issue("b", 1, ["a"], ADDRESS))
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(
            context(ssl.PROTOCOL_TLS_SERVER, bundle),
            context(ssl.PROTOCOL_TLS_CLIENT, other),
            host_name(authority.network, wrong),
        )


def test_handshake_rejects_foreign_and_revoked_clients(authority, bundle, tmp_path, write_bundle):
    stranger = Authority.create()
    other = write_bundle(tmp_path / "x", stranger, stranger.issue("b", 1, ["a"], ADDRESS))
    shutil.copy(
        bundle / "ca.crt", other / "ca.crt"
    )  # it trusts this authority, which did not issue its certificate
    with pytest.raises(ssl.SSLError, match="ALERT"):
        handshake(
            context(ssl.PROTOCOL_TLS_SERVER, bundle),
            context(ssl.PROTOCOL_TLS_CLIENT, other),
            host_name(authority.network, "a"),
        )
    revoked = write_bundle(tmp_path / "b", authority, authority.issue("b", 1, ["a"], ADDRESS))
    authority.revoke(read_identity(revoked / "node.crt").serial)
    (bundle / "revoked.crl").write_bytes(authority.encode_crl())
    with pytest.raises(ssl.SSLError, match="REVOKED"):
        handshake(
            context(ssl.PROTOCOL_TLS_SERVER, bundle, crl=True),
            context(ssl.PROTOCOL_TLS_CLIENT, revoked),
            host_name(authority.network, "a"),
        )


def test_credentials_name_the_missing_extra():
    code = "import sys; sys.modules['cryptography'] = None; import fedspd.node.identity.credentials"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingExtraError: A network of peers needs the extra 'node'" in done.stderr
