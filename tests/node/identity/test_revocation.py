"""The list of revoked certificates: it counts as soon as it is there, and a broken one never does."""

import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from fedspd.core.errors import RejectedError, StorageError
from fedspd.node.identity import certificates
from fedspd.node.identity.credentials import Authority, CertificateVerifier, passport

PLACE = "127.0.0.1:7700"


def refuses(gate: CertificateVerifier, certificate: bytes) -> bool:
    with pytest.raises(RejectedError) as refused:
        gate.check(certificate)
    return str(refused.value).startswith("revoked: the certificate of 'b' with the serial number ")


@pytest.fixture
def b(authority):
    return authority.issue("b", 1, ["a"], PLACE).certificate


def replace_file(path: Path, content: bytes) -> None:
    """As `fedspd network` does: a new file under the old name."""
    path.with_suffix(".new").write_bytes(content)
    os.replace(path.with_suffix(".new"), path)


def test_a_revoked_node_is_refused_as_soon_as_the_list_is_there(gate, bundle, authority, b):
    assert gate.check(b).name == "b"
    assert not gate.revoked(passport(b).serial)
    authority.revoke(passport(b).serial)
    assert gate.check(b).name == "b"  # the device does not have the list yet
    replace_file(bundle / "revoked.crl", authority.crl())
    assert refuses(gate, b)
    assert gate.revoked(passport(b).serial)
    assert (
        gate.check(authority.issue("b", 1, ["a"], PLACE).certificate).name == "b"
    )  # it is the certificate that is revoked


def broken_lists(authority: Authority) -> dict[str, bytes]:
    serial = x509.random_serial_number()
    stranger = Authority.create()
    stranger.revoke(serial)
    key = certificates.new_key()
    false = Authority(
        key,
        certificates.authority_certificate(authority.network, key, 10),
        certificates.Revocations(99, {}),
    )
    unnumbered = x509.CertificateRevocationListBuilder(
        authority._certificate.subject, datetime.now(UTC), datetime.now(UTC) + timedelta(1)
    )
    return {
        "empty": b"",
        "cut off": authority.crl()[:100],
        "of another authority": stranger.crl(),
        "of another authority of the same name": false.crl(),
        "without a number": unnumbered.sign(authority._key, SHA256()).public_bytes(Encoding.PEM),
        "older": Authority(
            authority._key, authority._certificate, certificates.Revocations(0, {})
        ).crl(),
    }


@pytest.mark.parametrize("kind", broken_lists(Authority.create()))
def test_a_broken_list_is_complained_about_once_and_the_last_good_one_holds(
    gate, bundle, authority, b, caplog, kind
):
    authority.revoke(passport(b).serial)
    replace_file(bundle / "revoked.crl", authority.crl())
    assert refuses(gate, b)
    with caplog.at_level(logging.WARNING, logger="fedspd.node"):
        replace_file(bundle / "revoked.crl", broken_lists(authority)[kind])
        assert [refuses(gate, b) for _ in range(3)] == [True] * 3
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert "The last good list of revoked nodes still holds" in caplog.text
    assert str(bundle / "revoked.crl") in caplog.text


def test_a_list_that_went_away_still_holds_and_a_good_one_counts_again(
    gate, bundle, authority, b, caplog
):
    (bundle / "revoked.crl").unlink()
    assert gate.check(b).name == "b"
    assert "cannot be read" in caplog.text
    authority.revoke(passport(b).serial)
    replace_file(bundle / "revoked.crl", authority.crl())
    assert refuses(gate, b)


@pytest.mark.parametrize(
    "kind", [kind for kind in broken_lists(Authority.create()) if kind != "older"]
)
def test_a_node_does_not_start_with_a_broken_list(bundle, authority, gate_of, kind):
    (bundle / "revoked.crl").write_bytes(broken_lists(authority)[kind])
    with pytest.raises(
        StorageError, match=r"revoked\.crl' is (damaged|not signed by the network's authority)"
    ):
        gate_of(bundle)


def test_an_authority_is_the_same_after_it_was_saved(authority, tmp_path, b):
    authority.revoke(passport(b).serial)
    for name, content in authority.files().items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    again = Authority.load(tmp_path)
    assert again.network == authority.network
    assert again.revoked(passport(b).serial)
    c = again.issue("c", 2, ["a"], PLACE)
    again.revoke(passport(c.certificate).serial)
    listed = x509.load_pem_x509_crl(again.crl())
    assert {entry.serial_number for entry in listed} == {
        passport(b).serial,
        passport(c.certificate).serial,
    }
    assert listed.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number == 2
    (tmp_path / "ca.key").write_bytes(Authority.create().files()["ca.key"])
    with pytest.raises(StorageError, match=r"ca\.key' does not belong to ca\.crt"):
        Authority.load(tmp_path)
