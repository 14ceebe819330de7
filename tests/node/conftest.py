"""A small network of peers to try things on, and a single node with its authority."""

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from fedspd import config
from fedspd.node.host import provisioning
from fedspd.node.identity.credentials import Authority, CertificateVerifier, Credentials, passport

RING = {
    "clients": 4,
    "rounds": 3,
    "topology": {"kind": "ring"},
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": 16},
}


def free_addresses(names: list[str]) -> dict[str, str]:
    """Ports of this machine that nobody has; all are held while they are drawn, so that no two are the same."""
    with ExitStack() as held:
        ports = []
        for _ in names:
            drawn = held.enter_context(socket.socket())
            drawn.bind(("127.0.0.1", 0))
            ports.append(drawn.getsockname()[1])
    return {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}


@pytest.fixture
def plant(tmp_path) -> Path:
    """The folder of a network of four nodes on a ring: a - b - c - d - a, clients 0 to 3, with free ports of this machine."""
    provisioning.create(
        config.validate(RING), tmp_path / "plant", addresses=free_addresses(["a", "b", "c", "d"])
    )
    return tmp_path / "plant"


@pytest.fixture
def authority() -> Authority:
    return Authority.create()


@pytest.fixture
def write_bundle() -> Callable[[Path, Authority, Credentials], Path]:
    """A bundle without its manifest."""

    def write(folder: Path, authority: Authority, own: Credentials) -> Path:
        folder.mkdir()
        files = {
            "ca.crt": own.ca,
            "node.crt": own.certificate,
            "node.key": own.key,
            "revoked.crl": authority.crl(),
        }
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (folder / "node.key").chmod(0o600)
        return folder

    return write


@pytest.fixture
def bundle(tmp_path, authority, write_bundle) -> Path:
    """Of the node a, whose neighbour is b."""
    return write_bundle(tmp_path / "a", authority, authority.issue("a", 0, ["b"], "127.0.0.1:7700"))


@pytest.fixture
def gate_of() -> Callable[[Path], CertificateVerifier]:
    return lambda bundle: CertificateVerifier(bundle, passport((bundle / "node.crt").read_bytes()))


@pytest.fixture
def gate(bundle, gate_of) -> CertificateVerifier:
    return gate_of(bundle)
