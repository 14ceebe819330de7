"""Certificates of a network, and whom a node believes: with real keys, real files and real TLS."""

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
from fedspd.node.identity.credentials import (
    Authority,
    CertificateVerifier,
    Credentials,
    host_name,
    passport,
)

NETWORK = "0123456789abcdef" * 2
PLACE = "127.0.0.1:7700"


def reason(gate: CertificateVerifier, certificate: bytes) -> str:
    with pytest.raises(RejectedError) as refused:
        gate.check(certificate)
    sentence = str(refused.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence.partition(":")[0]


def later(days: float):
    return lambda: datetime.now(UTC) + timedelta(days=days)


# ---- what a certificate says


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
def test_a_passport_says_what_was_issued(name, client, neighbours, address):
    authority = Authority.create()
    said = passport(authority.issue(name, client, neighbours, address, days=30).certificate)
    assert (said.network, said.name, said.client, said.neighbours) == (
        authority.network,
        name,
        client,
        tuple(neighbours),
    )
    assert said.address == address
    assert timedelta(days=29, hours=23) < said.until - datetime.now(UTC) <= timedelta(days=30)


def test_a_certificate_is_for_both_sides_of_tls_and_signs_no_others(authority):
    made = x509.load_pem_x509_certificate(authority.issue("a", 3, ["b", "c"], PLACE).certificate)
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uri = f"fedspd://{authority.network}/a?client=3&neighbours=b,c&address={PLACE}"
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [uri]
    assert names.get_values_for_type(x509.DNSName) == [host_name(authority.network, "a")]
    assert {
        use._name for use in made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    } == {"serverAuth", "clientAuth"}
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert isinstance(made.public_key().curve, ec.SECP256R1)
    assert made.not_valid_before_utc < datetime.now(UTC) - timedelta(hours=23)


def test_every_node_has_a_key_and_a_serial_number_of_its_own(authority):
    two = [authority.issue("a", 0, [], PLACE) for _ in range(2)]
    assert two[0].key != two[1].key
    assert passport(two[0].certificate).serial != passport(two[1].certificate).serial
    assert len({Authority.create().network for _ in range(3)}) == 3


def test_the_longest_names_fit_into_a_host_name():
    assert max(len(label) for label in host_name(NETWORK, "a" * 32).split(".")) <= 63


@pytest.mark.parametrize("days", [0, -1, 4000])
def test_a_certificate_lasts_a_day_at_least_and_never_longer_than_its_authority(authority, days):
    with pytest.raises(
        ConfigError, match=rf"days = {days}: expected at least 1, and at most the 365[0-9] that"
    ):
        authority.issue("a", 0, [], PLACE, days)


@pytest.mark.parametrize(
    ("name", "neighbours", "address"),
    [
        ("A", [], PLACE),
        ("a", ["b&client=9"], PLACE),
        ("a", [], "x:1&client=9"),
        ("../a", [], PLACE),
    ],
)
def test_nothing_is_smuggled_into_a_certificate(authority, name, neighbours, address):
    with pytest.raises(ConfigError, match="is no"):
        authority.issue(name, 0, neighbours, address)


# ---- what a node holds


def test_credentials_are_those_of_the_bundle(authority, tmp_path, write_bundle):
    own = authority.issue("a", 0, ["b"], PLACE)
    assert Credentials.load(write_bundle(tmp_path / "a", authority, own)) == own


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o610])
def test_a_key_that_others_can_use_is_refused(bundle, mode):
    (bundle / "node.key").chmod(mode)
    with pytest.raises(
        StorageError,
        match=rf"node\.key' has the mode {mode:04o}, so others can use it: expected 0600",
    ):
        Credentials.load(bundle)


def test_a_key_or_an_authority_of_somebody_else_is_refused(bundle, authority):
    (bundle / "node.key").write_bytes(authority.issue("a", 0, ["b"], PLACE).key)
    with pytest.raises(StorageError, match=r"node\.key' does not belong to node\.crt beside it"):
        Credentials.load(bundle)
    stranger = Authority.create().issue("a", 0, ["b"], PLACE)
    (bundle / "node.key").write_bytes(stranger.key)
    (bundle / "node.crt").write_bytes(stranger.certificate)
    with pytest.raises(
        StorageError, match=r"node\.crt' was not issued by the authority of ca\.crt"
    ):
        Credentials.load(bundle)


def test_a_certificate_out_of_its_time_is_refused_with_the_time(bundle):
    with pytest.raises(
        NodeError,
        match=r"node\.crt' is expired: it was valid until 20..-..-.. ..:.. UTC: look at this machine's clock",
    ):
        Credentials.load(bundle, later(366))
    with pytest.raises(NodeError, match=r"node\.crt' is not yet valid: it is valid from"):
        Credentials.load(bundle, later(-2))
    assert Credentials.load(bundle, later(-1 - 4 / 1440)) == Credentials.load(
        bundle, later(364)
    )  # four minutes are within clocks' reach


@pytest.mark.parametrize("name", ["ca.crt", "node.crt", "node.key"])
def test_files_that_are_missing_or_damaged_are_named(bundle, name):
    (bundle / name).write_bytes(b"-----BEGIN CERTIFICATE-----\nrubbish\n")
    with pytest.raises(StorageError, match=rf"{name}' is damaged: expected .* as PEM"):
        Credentials.load(bundle)
    (bundle / name).unlink()
    with pytest.raises(
        StorageError, match=rf"{name}' cannot be read \(No such file or directory\)"
    ):
        Credentials.load(bundle)


def test_another_kind_of_key_is_refused(bundle):
    key = rsa.generate_private_key(65537, 2048)
    (bundle / "node.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    with pytest.raises(
        StorageError, match=r"node\.key' is damaged: expected a key of the curve P-256"
    ):
        Credentials.load(bundle)


# ---- whom a node believes


def test_a_neighbour_by_either_certificate_is_let_in(gate, authority):
    assert gate.check(authority.issue("b", 1, ["a"], PLACE).certificate).name == "b"
    assert gate.check(authority.issue("b", 1, [], PLACE).certificate).client == 1  # mine names it
    assert (
        gate.check(authority.issue("new", 7, ["a"], "10.0.0.9:1").certificate).address
        == "10.0.0.9:1"
    )  # it names me


def test_whoever_has_no_link_is_refused(gate, authority):
    assert reason(gate, authority.issue("c", 2, ["b"], PLACE).certificate) == "not a neighbour"
    assert (
        reason(gate, authority.issue("a", 0, ["b"], PLACE).certificate) == "not a neighbour"
    )  # nor is a node one of itself


def test_a_foreign_authority_is_refused_whatever_it_signs(gate):
    assert reason(gate, Authority.create().issue("b", 1, ["a"], PLACE).certificate) == "foreign CA"


def test_a_foreign_authority_of_the_same_name_is_refused(gate, authority):
    key = certificates.new_key()
    false = Authority(
        key,
        certificates.authority_certificate(authority.network, key, 10),
        certificates.Revocations(0, {}),
    )
    assert reason(gate, false.issue("b", 1, ["a"], PLACE, days=5).certificate) == "foreign CA"


def test_another_network_of_the_same_authority_is_refused(gate, authority, tmp_path):
    key = certificates.new_key()
    uri = certificates.passport_uri(NETWORK, "b", 1, ["a"], PLACE)
    other = certificates.node_certificate(authority._certificate, authority._key, key, "b", uri, 10)
    assert reason(gate, certificates.certificate_pem(other)) == "foreign network"


def test_certificates_out_of_their_time_are_refused(bundle, authority):
    mine, theirs = (
        passport((bundle / "node.crt").read_bytes()),
        authority.issue("b", 1, ["a"], PLACE, days=30).certificate,
    )
    assert reason(CertificateVerifier(bundle, mine, later(31)), theirs) == "expired"
    assert reason(CertificateVerifier(bundle, mine, later(-2)), theirs) == "not yet valid"
    assert CertificateVerifier(bundle, mine, later(29)).check(theirs).name == "b"
    assert CertificateVerifier(bundle, mine, later(-1 - 4 / 1440)).check(theirs).name == "b"
    assert (
        reason(CertificateVerifier(bundle, mine, later(-1 - 6 / 1440)), theirs) == "not yet valid"
    )


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"rubbish",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        b"\xff" * 5000,
    ],
)
def test_what_is_no_certificate_is_refused(gate, text):
    assert reason(gate, text) == "malformed"
    with pytest.raises(RejectedError, match="malformed: "):
        passport(text)


def test_the_authoritys_own_certificate_is_none_of_a_node(gate, bundle):
    assert reason(gate, (bundle / "ca.crt").read_bytes()) == "malformed"


@pytest.mark.parametrize(
    "uri",
    [
        "https://example.org",
        f"fedspd://{NETWORK}/b",
        f"fedspd://{NETWORK}/b?client=1&neighbours=a",
        f"fedspd://{NETWORK}/b?client=x&neighbours=a&address={PLACE}",
        f"fedspd://{NETWORK}/b?client=1&client=2&neighbours=a&address={PLACE}",
        f"fedspd://{NETWORK}/b?client=1&neighbours=A&address={PLACE}",
        f"fedspd://{NETWORK}/b?client=1&neighbours=a&address=here",
        f"fedspd://{NETWORK}/B?client=1&neighbours=a&address={PLACE}",
        f"fedspd://elsewhere/b?client=1&neighbours=a&address={PLACE}",
        "fedspd://[",
    ],
)
def test_a_certificate_that_says_nothing_of_use_is_refused(gate, authority, uri):
    key = certificates.new_key()
    made = certificates.node_certificate(authority._certificate, authority._key, key, "b", uri, 10)
    assert reason(gate, certificates.certificate_pem(made)) == "malformed"


@pytest.mark.filterwarnings(
    "ignore::cryptography.utils.CryptographyDeprecationWarning"
)  # of a serial number below 0
def test_a_certificate_with_any_bit_turned_of_what_is_signed_is_refused(gate, authority):
    good = ssl.PEM_cert_to_DER_cert(authority.issue("b", 1, ["a"], PLACE).certificate.decode())
    signed = x509.load_der_x509_certificate(good).tbs_certificate_bytes
    start = good.index(signed)
    for place in range(8 * start, 8 * (start + len(signed))):
        der = bytearray(good)
        der[place // 8] ^= 1 << place % 8
        assert reason(gate, ssl.DER_cert_to_PEM_cert(bytes(der)).encode()) in (
            "malformed",
            "foreign CA",
        )


# ---- on a real connection


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
    """The certificates that the server and the client saw, as PEM."""
    left, right = socket.socketpair()
    left.settimeout(60)
    right.settimeout(60)
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
            end.recv(1)  # TLS 1.3: only now the client knows that it was let in
    finally:
        right.close()
        thread.join()
    assert isinstance(seen[0], bytes)
    return ssl.DER_cert_to_PEM_cert(seen[0]).encode(), ssl.DER_cert_to_PEM_cert(shown).encode()


def test_two_nodes_shake_hands_and_know_one_another(
    authority, bundle, gate, tmp_path, write_bundle
):
    other = write_bundle(tmp_path / "b", authority, authority.issue("b", 1, ["a"], PLACE))
    server, client = (
        context(ssl.PROTOCOL_TLS_SERVER, bundle, crl=True),
        context(ssl.PROTOCOL_TLS_CLIENT, other, crl=True),
    )
    client_seen, server_seen = handshake(server, client, host_name(authority.network, "a"))
    assert gate.check(client_seen).name == "b"
    assert CertificateVerifier(other, passport(client_seen)).check(server_seen).name == "a"


@pytest.mark.parametrize("wrong", ["b", "*"])
def test_a_node_under_another_name_is_noticed(authority, bundle, tmp_path, wrong, write_bundle):
    other = write_bundle(tmp_path / "b", authority, authority.issue("b", 1, ["a"], PLACE))
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(
            context(ssl.PROTOCOL_TLS_SERVER, bundle),
            context(ssl.PROTOCOL_TLS_CLIENT, other),
            host_name(authority.network, wrong),
        )


def test_tls_itself_refuses_strangers_and_the_revoked(authority, bundle, tmp_path, write_bundle):
    stranger = Authority.create()
    other = write_bundle(tmp_path / "x", stranger, stranger.issue("b", 1, ["a"], PLACE))
    shutil.copy(bundle / "ca.crt", other / "ca.crt")  # it believes us
    with pytest.raises(ssl.SSLError, match="ALERT"):
        handshake(
            context(ssl.PROTOCOL_TLS_SERVER, bundle),
            context(ssl.PROTOCOL_TLS_CLIENT, other),
            host_name(authority.network, "a"),
        )
    gone = write_bundle(tmp_path / "b", authority, authority.issue("b", 1, ["a"], PLACE))
    authority.revoke(passport((gone / "node.crt").read_bytes()).serial)
    (bundle / "revoked.crl").write_bytes(authority.crl())
    with pytest.raises(ssl.SSLError, match="REVOKED"):
        handshake(
            context(ssl.PROTOCOL_TLS_SERVER, bundle, crl=True),
            context(ssl.PROTOCOL_TLS_CLIENT, gone),
            host_name(authority.network, "a"),
        )


def test_without_cryptography_the_extra_is_named():
    code = "import sys; sys.modules['cryptography'] = None; import fedspd.node.identity.credentials"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (
        "MissingExtraError: A network of peers needs the extra 'node', which is not installed: pip install 'fedspd[node]'."
        in done.stderr
    )
