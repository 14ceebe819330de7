"""A small network of peers, and a single node with its authority."""

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

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


def free_addresses(names: list[str]) -> dict[str, str]:
    """Return a free address of this machine for every name, all different.

    Every socket stays open until all ports are drawn.
    """
    with ExitStack() as held:
        ports = []
        for _ in names:
            drawn = held.enter_context(socket.socket())
            drawn.bind(("127.0.0.1", 0))
            ports.append(drawn.getsockname()[1])
    return {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}


@pytest.fixture
def plant(tmp_path) -> Path:
    """The folder of a network of four nodes on the ring a - b - c - d - a, clients 0 to 3."""
    addresses = free_addresses(["a", "b", "c", "d"])
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
