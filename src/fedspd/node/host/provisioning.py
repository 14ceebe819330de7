"""A network of peers as a folder: made, shown and changed by its operator. A device gets a bundle, and never needs this folder.

NETWORK/
  ca.key  ca.crt    the network's own certificate authority; the key stays here
  network.json      the manifest: what is agreed on, and every node that there ever was
  revoked.crl       which of them count no more; copied to the devices when it changes
  nodes/NAME/       bundles (identity.py)
"""

import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedspd.core.errors import ConfigError, StorageError
from fedspd.node.identity.certificates import (
    RevocationList,
    parse_identity,
    read_certificate,
    read_identity,
)
from fedspd.node.identity.credentials import NODE_DAYS, Authority, Credentials
from fedspd.node.identity.manifest import (
    Json,
    Manifest,
    Member,
    check_address,
    check_name,
    file_exists,
)
from fedspd.storage.lock import Lock

if TYPE_CHECKING:
    from fedspd.config import ExperimentConfig
    from fedspd.core.learner import Learner

HOST, PORT = "127.0.0.1", 7700
SECRETS = ("ca.key", "node.key")
LOCK_TIMEOUT_SECONDS = 60.0  # an authority issues its certificates in less
Example = tuple[tuple[int, ...], int]  # its shape, and the number of classes


# ---- what an operator does


def create(
    config: "ExperimentConfig",
    out: Path,
    *,
    names: Sequence[str] | None = None,
    addresses: Mapping[str, str] | None = None,
    host: str = HOST,
    port: int = PORT,
    example: Example | None = None,
    secure: bool = True,
    days: int = NODE_DAYS,
) -> Manifest:
    """A new network. `addresses` is host:port by name; without it, node i is at port + i of one host. `example` spares loading data."""
    _refuse_what_peers_cannot(config)
    _refuse_unless_vacant(out)
    places = _places(config.clients, names, addresses, host, port)
    authority, neighbours = Authority.create(), _neighbours(config, list(places))
    credentials = [
        authority.issue(name, i, neighbours[i], address, days)
        for i, (name, address) in enumerate(places.items())
    ]
    manifest = _manifest(
        config, authority.network, secure, example, [_member(each) for each in credentials]
    )
    manifest.check()
    with _vacant(out) as draft:
        text, files = manifest.to_json(), authority.encode_files()
        for member, own in zip(manifest.members, credentials, strict=True):
            _write_bundle(draft / "nodes" / member.name, own, files["revoked.crl"], text)
        _write(draft, {**files, "network.json": text.encode()})
    return manifest


def add(
    network: Path,
    name: str,
    neighbours: Sequence[str],
    address: str | None = None,
    days: int = NODE_DAYS,
) -> Member:
    """Add one node.

    Running devices need no news of it: its certificate says whose neighbour it is. In plaintext only a manifest does."""
    with _opened(network) as (authority, manifest):
        _refuse_newcomer(authority, manifest, check_name(name), neighbours)
        number = 1 + max((member.client for member in manifest.members), default=-1)
        credentials = authority.issue(
            name, number, neighbours, address or _next_address(manifest), days
        )
        linked = [
            replace(m, neighbours=(*m.neighbours, name)) if m.name in neighbours else m
            for m in manifest.members
        ]
        manifest = replace(manifest, members=(*linked, _member(credentials)))
        manifest.check()
        text = manifest.to_json()
        with _new_folder(network / "nodes" / name) as draft:
            _write_bundle(draft, credentials, (network / "revoked.crl").read_bytes(), text)
        _write(network, {"network.json": text.encode()})
        for bundle in bundles(network, manifest):
            _write(bundle, {"manifest.json": text.encode()})
    return manifest.members[-1]


def revoke(network: Path, name: str) -> Member:
    """From the moment that a device has the new revoked.crl, it refuses the node. Again: writes the list anew."""
    with _opened(network) as (authority, manifest):
        member = manifest.member(name)
        if not manifest.secure:
            raise ConfigError(
                f"Node {name} cannot be shut out: this network is for plaintext, where anybody can speak in any node's name."
            )
        if not authority.is_revoked(member.serial):
            authority.revoke(member.serial)
        crl = {"revoked.crl": authority.encode_crl()}
        for folder in (network, *bundles(network, manifest)):
            _write(folder, crl)
    return member


def show(network: Path) -> Json:
    manifest = _manifest_of(network)
    crl = RevocationList.read(network / "revoked.crl", read_certificate(network / "ca.crt"))
    nodes = [
        {
            "name": member.name,
            "client": member.client,
            "address": member.address,
            "neighbours": list(member.neighbours),
            "serial": f"{member.serial:x}",
            "until": _until(network / "nodes" / member.name / "node.crt"),
            "revoked": member.serial in crl.revoked_at,
        }
        for member in manifest.members
    ]
    return {
        "network": manifest.network,
        "secure": manifest.secure,
        "agreement": manifest.agreement,
        "nodes": nodes,
    }


def bundles(network: Path, manifest: Manifest) -> list[Path]:
    """Those that are still here: an operator may have moved them to the devices."""
    return [
        folder
        for member in manifest.members
        if (folder := network / "nodes" / member.name).is_dir()
    ]


def read_addresses(path: Path) -> dict[str, str]:
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The addresses '{path}' cannot be read ({error}): expected TOML, with name = \"host:port\" for each node."
        ) from None
    for name, address in found.items():
        if not isinstance(address, str):
            raise ConfigError(f"'{path}': {name} = {address}: expected a text, \"host:port\".")
    return found


# ---- what a network is made of


def _refuse_what_peers_cannot(config: "ExperimentConfig") -> None:
    if config.topology.kind == "star":
        raise ConfigError(
            "topology.kind = 'star': peers have no server; use 'complete', where everyone hears everyone."
        )
    if config.topology.remove:
        raise ConfigError(
            f"topology.remove = {config.topology.remove:g}: peers keep their neighbours; leave it out."
        )
    if config.holdout_clients:
        raise ConfigError(
            f"holdout_clients = {config.holdout_clients}: newcomers are added with 'fedspd network add'; leave it out."
        )


def _places(
    clients: int,
    names: Sequence[str] | None,
    addresses: Mapping[str, str] | None,
    host: str,
    port: int,
) -> dict[str, str]:
    """The address of every node, by name and in the order of the clients."""
    names = names or list(addresses or ()) or [f"node-{i}" for i in range(clients)]
    if repeated := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(
            f"The name '{repeated[0]}' is given twice: expected a name of its own for each node."
        )
    if len(names) != clients:
        raise ConfigError(
            f"There are {len(names)} names of nodes, and clients = {clients}: expected as many."
        )
    if addresses is None:
        host = f"[{host}]" if ":" in host else host
        addresses = {name: f"{host}:{port + i}" for i, name in enumerate(names)}
    if strange := sorted(set(addresses) ^ set(names)):
        raise ConfigError(
            f"'{strange[0]}' is among the names of the nodes or among the addresses, but not in both: expected it in both."
        )
    return {check_name(name): check_address(addresses[name]) for name in names}


def _neighbours(config: "ExperimentConfig", names: Sequence[str]) -> list[list[str]]:
    """Those of the simulated network."""
    from fedspd import topology
    from fedspd.core.keys import Key

    graph = topology.build_topology(config.topology, config.clients, Key(config.seed)).at(1)
    return [[names[j] for j in graph.neighbours(i)] for i in range(len(names))]


def _manifest(
    config: "ExperimentConfig",
    network: str,
    secure: bool,
    example: Example | None,
    members: Sequence[Member],
) -> Manifest:
    from fedspd.config import as_dict

    shape, classes, learner = _learner(
        config.model_copy(update={"device": "cpu"}), example
    )  # devices may have what is not here
    return Manifest(
        network, secure, as_dict(config), shape, classes, learner.size, config.dtype, tuple(members)
    )


def _learner(
    config: "ExperimentConfig", example: Example | None
) -> "tuple[tuple[int, ...], int, Learner]":
    import torch

    from fedspd.data.custom import load_source
    from fedspd.experiment.build import build_learner

    if example is not None:
        return *example, build_learner(config, *example)
    sources = [
        load_source(name) for name in (config.data.name, config.data.second) if name is not None
    ]
    part, shape, classes = (
        sources[0].train,
        sources[0].shape,
        max(source.classes for source in sources),
    )
    return (
        shape,
        classes,
        build_learner(config, shape, classes, (torch.tensor(part.x[:2]), torch.tensor(part.y[:2]))),
    )


def _member(credentials: Credentials) -> Member:
    said = parse_identity(credentials.certificate)
    return Member(said.name, said.client, said.address, said.neighbours, said.serial)


def _refuse_newcomer(
    authority: Authority, manifest: Manifest, name: str, neighbours: Sequence[str]
) -> None:
    if name in (member.name for member in manifest.members):
        raise ConfigError(
            f"There is a node '{name}' already, and a name is given once: choose another."
        )
    if not neighbours:
        raise ConfigError(f"The node '{name}' has no neighbours: expected at least one.")
    for neighbour in neighbours:
        if authority.is_revoked(manifest.member(neighbour).serial):
            raise ConfigError(
                f"'{neighbour}' cannot be a neighbour, as it is revoked: choose others."
            )


def _next_address(manifest: Manifest) -> str:
    """At the same host as the last node, above all ports that are taken there."""
    places = [member.address.rpartition(":") for member in manifest.members]
    host = places[-1][0]
    return f"{host}:{1 + max(int(port) for other, _, port in places if other == host)}"


def _until(certificate: Path) -> str | None:
    """Of a bundle that is here, and for this user to read."""
    if not os.access(certificate, os.R_OK):
        return None
    return read_identity(certificate).valid_until.isoformat()


# ---- on disk


def _manifest_of(network: Path) -> Manifest:
    if not file_exists(network / "network.json"):
        raise StorageError(
            f"'{network}' is no network, as there is no network.json in it: make one with 'fedspd network create'."
        )
    return Manifest.load(network / "network.json")


@contextmanager
def _opened(network: Path) -> Iterator[tuple[Authority, Manifest]]:
    """For one process at a time."""
    _manifest_of(network)  # before we hold what is no network
    with _disk(network), _held(network):
        authority, manifest = Authority.load(network), _manifest_of(network)
        if authority.network != manifest.network:
            raise StorageError(
                f"'{network / 'network.json'}' and ca.crt beside it belong to two networks: restore both from one copy."
            )
        yield authority, manifest


def _refuse_unless_vacant(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise StorageError(
            f"'{folder}' exists and is not an empty folder: give another --out; a network is never overwritten."
        )


@contextmanager
def _vacant(folder: Path) -> Iterator[Path]:
    """A draft, whose content becomes the folder's when the block ends, network.json last; else nothing does."""
    with _disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _held(folder):
            _refuse_unless_vacant(folder)
            draft = folder / ".draft"
            draft.mkdir(mode=0o700)
            try:
                yield draft
                for each in sorted(draft.iterdir(), key=lambda path: path.name == "network.json"):
                    os.rename(each, folder / each.name)
            finally:
                shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A draft that becomes the folder when the block ends."""
    draft = folder.with_name(f".{folder.name}.draft")
    for leftover in (
        draft,
        folder,
    ):  # of a start that was cut short, before the node was in network.json
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        yield draft
        os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_bundle(bundle: Path, credentials: Credentials, crl: bytes, manifest: str) -> None:
    own = {"node.key": credentials.key, "node.crt": credentials.certificate}
    _write(
        bundle,
        {**own, "ca.crt": credentials.ca, "revoked.crl": crl, "manifest.json": manifest.encode()},
    )


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    from fedspd.storage.atomic import write_atomically

    folder.mkdir(
        mode=0o700, parents=True, exist_ok=True
    )  # so that nobody sees a key before it has its mode
    for name, content in files.items():
        write_atomically(folder / name, content.decode("ascii"))
        if name in SECRETS:
            (folder / name).chmod(0o600)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    lock = Lock(folder)
    lock.acquire(f"The network's folder '{folder}'", LOCK_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _disk(network: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"The network's folder '{network}' could not be written ({error}): put that right and try again."
        ) from None
