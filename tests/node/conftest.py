"""A small network of peers, and a single node with its authority."""

from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.hosts import free_addresses
from fedspd import config
from fedspd.node.host import provisioning
from fedspd.node.identity.certificates import read_identity
from fedspd.node.identity.credentials import Authority, CertificateVerifier, Credentials

RING = {
    "method": "fedspd",
    "clients": 4,
    "rounds": 3,
    "topology": {"kind": "ring"},
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": 16},
}


@pytest.fixture
def plant(tmp_path) -> Path:
    """The folder of a network of four nodes on the ring a - b - c - d - a, clients 0 to 3."""
    addresses = dict(zip("abcd", free_addresses(4), strict=True))
    provisioning.create(config.validate(RING), tmp_path / "plant", addresses=addresses)
    return tmp_path / "plant"


@pytest.fixture
def authority() -> Authority:
    return Authority.create()


@pytest.fixture
def write_bundle() -> Callable[[Path, Authority, Credentials], Path]:
    """Return a function that writes a bundle without its manifest."""

    def write(folder: Path, authority: Authority, own: Credentials) -> Path:
        folder.mkdir()
        files = {
            "ca.crt": own.ca,
            "node.crt": own.certificate,
            "node.key": own.key,
            "revoked.crl": authority.encode_crl(),
        }
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (folder / "node.key").chmod(0o600)
        return folder

    return write


@pytest.fixture
def bundle(tmp_path, authority, write_bundle) -> Path:
    """The bundle of node a, whose neighbour is b."""
    return write_bundle(tmp_path / "a", authority, authority.issue("a", 0, ["b"], "127.0.0.1:7700"))


@pytest.fixture
def verifier_of() -> Callable[[Path], CertificateVerifier]:
    """Return a function that makes the verifier of a bundle."""
    return lambda bundle: CertificateVerifier(bundle, read_identity(bundle / "node.crt"))


@pytest.fixture
def verifier(bundle, verifier_of) -> CertificateVerifier:
    return verifier_of(bundle)
