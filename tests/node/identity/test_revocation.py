"""Revocation lists: a valid list takes effect at once, and an invalid one never does."""

import base64
import logging
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from fedspd.core.errors import RejectedError, StorageError
from fedspd.node.identity import certificates
from fedspd.node.identity.certificates import RevocationList, parse_identity
from fedspd.node.identity.credentials import Authority, CertificateVerifier

ADDRESS = "127.0.0.1:7700"


def rejects(verifier: CertificateVerifier, certificate: bytes) -> bool:
    """Return whether the certificate of b is rejected because it is revoked."""
    with pytest.raises(RejectedError) as rejected:
        verifier.verify(certificate)
    return str(rejected.value).startswith("revoked: the certificate of 'b' (serial number ")


@pytest.fixture
def b(authority) -> bytes:
    """The certificate of node b, a neighbour of a."""
    return authority.issue("b", 1, ["a"], ADDRESS).certificate


def age(path: Path) -> None:
    """Let a file be old enough that nobody is writing it any more."""
    os.utime(path, (time.time() - 60, time.time() - 60))


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file as `fedspd network revoke` does: by a new file of the same name."""
    path.with_suffix(".new").write_bytes(content)
    os.replace(path.with_suffix(".new"), path)


def test_verifier_rejects_a_revoked_certificate_once_the_list_arrives(
    verifier, bundle, authority, b
):
    serial = parse_identity(b).serial
    assert verifier.verify(b).name == "b"
    assert not verifier.is_revoked(serial)
    authority.revoke(serial)
    assert verifier.verify(b).name == "b"  # the device does not have the list yet
    replace_file(bundle / "revoked.crl", authority.encode_crl())
    assert rejects(verifier, b)
    assert verifier.is_revoked(serial)
    other_serial = authority.issue("b", 1, ["a"], ADDRESS).certificate
    assert verifier.verify(other_serial).name == "b"  # a list names certificates, not nodes


def invalid_lists(authority: Authority) -> dict[str, bytes]:
    foreign = Authority.create()
    foreign.revoke(x509.random_serial_number())
    key, certificate = authority._key, authority._certificate
    other_key = certificates.generate_key()
    namesake = certificates.issue_authority(authority.network, other_key, 10)
    unnumbered = x509.CertificateRevocationListBuilder(
        certificate.subject, datetime.now(UTC), datetime.now(UTC) + timedelta(1)
    )
    return {
        "empty": b"",
        "truncated": authority.encode_crl()[:100],
        "foreign authority": foreign.encode_crl(),
        "foreign authority of the same name": RevocationList(99, {}).sign(namesake, other_key),
        "without a number": unnumbered.sign(key, SHA256()).public_bytes(Encoding.PEM),
        "older": RevocationList(0, {}).sign(certificate, key),
    }


@pytest.mark.parametrize("kind", invalid_lists(Authority.create()))
def test_verifier_logs_an_invalid_list_once_and_keeps_the_last_valid_one(
    verifier, bundle, authority, b, caplog, kind
):
    authority.revoke(parse_identity(b).serial)
    replace_file(bundle / "revoked.crl", authority.encode_crl())
    assert rejects(verifier, b)
    with caplog.at_level(logging.WARNING, logger="fedspd.node"):
        replace_file(bundle / "revoked.crl", invalid_lists(authority)[kind])
        age(bundle / "revoked.crl")
        assert [rejects(verifier, b) for _ in range(3)] == [True] * 3
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    start = "revocation list rejected, last valid list kept: error=\"'"
    assert record.getMessage().startswith(f"{start}{bundle / 'revoked.crl'}'")


def test_list_that_is_being_copied_is_read_again_without_an_error(
    verifier, bundle, authority, b, caplog
):
    authority.revoke(parse_identity(b).serial)
    complete = authority.encode_crl()
    with caplog.at_level(logging.INFO, logger="fedspd.node"):
        for content in (b"", complete[: len(complete) // 2]):  # as cp and tee write it
            (bundle / "revoked.crl").write_bytes(content)
            assert verifier.verify(b).name == "b"
        (bundle / "revoked.crl").write_bytes(complete)
        assert rejects(verifier, b)
    assert caplog.messages == [f"revocation list loaded: path={bundle / 'revoked.crl'} revoked=1"]


def test_list_whose_copy_ended_early_is_an_error_two_seconds_later(verifier, bundle, b, caplog):
    (bundle / "revoked.crl").write_bytes(b"half of a list")
    assert verifier.verify(b).name == "b"
    assert not caplog.messages
    os.utime(bundle / "revoked.crl", (time.time() - 3, time.time() - 3))
    assert verifier.verify(b).name == "b"
    assert verifier.verify(b).name == "b"
    (message,) = caplog.messages
    assert message.endswith(
        'damaged; expected a certificate revocation list. Restore it from a copy."'
    )


def test_list_of_an_unknown_version_is_as_damaged_as_any_other(
    verifier, bundle, authority, b, caplog
):
    """The library has an error of its own for it, which left every call of a node unanswered."""
    path, der = bundle / "revoked.crl", x509.load_pem_x509_crl(authority.encode_crl())
    content = der.public_bytes(Encoding.DER)
    assert content.count(b"\x02\x01\x01") >= 1  # version 2 is the integer 1
    damaged = content.replace(b"\x02\x01\x01", b"\x02\x01\x25", 1)
    text = base64.encodebytes(damaged).decode()
    replace_file(path, f"-----BEGIN X509 CRL-----\n{text}-----END X509 CRL-----\n".encode())
    age(path)
    assert verifier.verify(b).name == "b"
    assert "revocation list rejected, last valid list kept" in caplog.text


def test_verifier_keeps_a_deleted_list_and_loads_the_next_one(
    verifier, bundle, authority, b, caplog
):
    (bundle / "revoked.crl").unlink()
    assert verifier.verify(b).name == "b"
    assert "cannot be read" in caplog.text
    authority.revoke(parse_identity(b).serial)
    replace_file(bundle / "revoked.crl", authority.encode_crl())
    with caplog.at_level(logging.INFO, logger="fedspd.node"):
        assert rejects(verifier, b)
    loaded = f"revocation list loaded: path={bundle / 'revoked.crl'} revoked=1"
    assert caplog.messages[-1] == loaded


@pytest.mark.parametrize(
    "kind", [kind for kind in invalid_lists(Authority.create()) if kind != "older"]
)
def test_verifier_does_not_start_with_an_invalid_list(bundle, authority, verifier_of, kind):
    (bundle / "revoked.crl").write_bytes(invalid_lists(authority)[kind])
    with pytest.raises(
        StorageError, match=r"revoked\.crl': (damaged|not signed by this network's)"
    ):
        verifier_of(bundle)


def test_authority_keeps_its_revocations_when_saved(authority, tmp_path, b):
    authority.revoke(parse_identity(b).serial)
    for name, content in authority.encode_files().items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    loaded = Authority.load(tmp_path)
    assert loaded.network == authority.network
    assert loaded.is_revoked(parse_identity(b).serial)
    c = loaded.issue("c", 2, ["a"], ADDRESS).certificate
    loaded.revoke(parse_identity(c).serial)
    crl = x509.load_pem_x509_crl(loaded.encode_crl())
    serials = {parse_identity(b).serial, parse_identity(c).serial}
    assert {entry.serial_number for entry in crl} == serials
    assert crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number == 2


def test_authority_rejects_a_key_of_another_authority(authority, tmp_path):
    for name, content in authority.encode_files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "ca.key").write_bytes(Authority.create().encode_files()["ca.key"])
    (tmp_path / "ca.key").chmod(0o600)
    with pytest.raises(StorageError, match=r"ca\.key': not the key of ca\.crt"):
        Authority.load(tmp_path)


def test_verifier_remembers_the_newest_list_after_a_restart(
    verifier_of, bundle, authority, b, tmp_path
):
    """Who puts the old list back must not bring a revoked node back."""
    old, memory = (bundle / "revoked.crl").read_bytes(), tmp_path / "revocations"
    authority.revoke(parse_identity(b).serial)
    first = verifier_of(bundle)
    first.remember(memory)
    replace_file(bundle / "revoked.crl", authority.encode_crl())
    assert rejects(first, b)  # the list was replaced while the node ran
    replace_file(bundle / "revoked.crl", old)
    with pytest.raises(StorageError, match=r"number = 0 is older .* expected at least 1\. Copy"):
        verifier_of(bundle).remember(memory)
    replace_file(bundle / "revoked.crl", authority.encode_crl())
    again = verifier_of(bundle)
    again.remember(memory)
    assert rejects(again, b)
    memory.write_text("damaged")
    with pytest.raises(StorageError, match="expected the number of a revocation list"):
        verifier_of(bundle).remember(memory)


def test_revoked_node_refuses_to_start_and_says_so_while_it_runs(
    verifier, verifier_of, bundle, authority, b, tmp_path, caplog
):
    verifier.remember(tmp_path / "revocations")
    authority.revoke(verifier.own.serial)
    replace_file(bundle / "revoked.crl", authority.encode_crl())
    assert verifier.verify(b).name == "b"  # the new list is read here
    assert "this node is revoked, its neighbours refuse it: node=a" in caplog.text
    with pytest.raises(StorageError, match=r"node\.crt': revoked by the network's operator"):
        verifier_of(bundle).remember(tmp_path / "revocations")
