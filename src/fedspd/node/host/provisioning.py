"""A network of peers as a folder, which its operator creates, shows and changes.

A device gets a bundle and never needs this folder.

NETWORK/
  ca.key  ca.crt    the network's certificate authority; the key stays here
  network.json      the manifest: the agreed settings and every node that was ever added
  revoked.crl       the revoked nodes; copied to the devices when it changes
  nodes/NAME/       bundles (identity/credentials.py)
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedspd.core.errors import ConfigError, StorageError
from fedspd.core.imports import installed_code_only
from fedspd.core.machine import file_exists
from fedspd.node.host.addresses import assign_addresses
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
    check_name,
)
from fedspd.storage.lock import Lock

if TYPE_CHECKING:
    from fedspd.config import ExperimentConfig
    from fedspd.core.learner import Learner
    from fedspd.topology import Topology

HOST, PORT = "127.0.0.1", 7700
SECRETS = ("ca.key", "node.key")  # readable by their owner alone
LOCK_TIMEOUT_SECONDS = 60.0  # an authority issues its certificates in less
Example = tuple[tuple[int, ...], int]  # its shape and the number of classes


# ---- commands of an operator


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
    """Create a network.

    `addresses` is host:port by name; without it, node i listens on port + i of one host. With
    `example`, no data are loaded.
    """
    _check_supported(config)
    _check_vacant(out)
    addresses = assign_addresses(config.clients, names, addresses, host, port)
    authority, neighbours = Authority.create(), _find_neighbours(config, list(addresses))
    credentials = [
        authority.issue(name, i, neighbours[i], address, days)
        for i, (name, address) in enumerate(addresses.items())
    ]
    members = [_build_member(each) for each in credentials]
    with installed_code_only():
        manifest = _build_manifest(config, authority.network, secure, example, members)
    manifest.check()
    manifest = authority.sign(manifest)
    with _draft_network(out) as draft:
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

    Running devices need no update: the certificate names the node's neighbours. In a plaintext
    network only the manifest does.
    """
    with _open_network(network) as (authority, manifest):
        _check_newcomer(authority, manifest, check_name(name), neighbours)
        client = 1 + max((member.client for member in manifest.members), default=-1)
        address = address or _next_address(manifest)
        credentials = authority.issue(name, client, neighbours, address, days)
        linked = [
            replace(m, neighbours=(*m.neighbours, name)) if m.name in neighbours else m
            for m in manifest.members
        ]
        manifest = replace(manifest, members=(*linked, _build_member(credentials)))
        manifest.check()
        manifest = authority.sign(manifest)
        text = manifest.to_json()
        with _draft_bundle(network / "nodes" / name) as draft:
            _write_bundle(draft, credentials, (network / "revoked.crl").read_bytes(), text)
        _write(network, {"network.json": text.encode()})
        for bundle in _find_bundles(network, manifest):
            _write(bundle, {"manifest.json": text.encode()})
    return manifest.members[-1]


def revoke(network: Path, name: str) -> Member:
    """Revoke a node: devices reject it as soon as they have the new revoked.crl.

    For a node that is revoked already, only write the list again.
    """
    with _open_network(network) as (authority, manifest):
        member = manifest.member(name)
        if not manifest.secure:
            raise ConfigError(
                f"node = '{name}': cannot be revoked: in a plaintext network anyone can use it; "
                "expected a secure network. Create one without --insecure-plaintext."
            )
        if not authority.is_revoked(member.serial):
            authority.revoke(member.serial)
        crl = {"revoked.crl": authority.encode_crl()}
        for folder in (network, *_find_bundles(network, manifest)):
            _write(folder, crl)
    return member


def show(network: Path) -> Json:
    """Return a description of the network and its nodes."""
    manifest = _read_manifest(network)
    crl = RevocationList.read(network / "revoked.crl", read_certificate(network / "ca.crt"))
    nodes = [
        {
            "name": member.name,
            "client": member.client,
            "address": member.address,
            "neighbours": list(member.neighbours),
            "serial": f"{member.serial:x}",
            "until": _read_expiry(network / "nodes" / member.name / "node.crt"),
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


# ---- parts of a network


def _check_supported(config: "ExperimentConfig") -> None:
    """Refuse settings that only a simulation has."""
    if config.topology.kind == "star":
        raise ConfigError(
            "topology.kind = 'star': peers have no server; expected another kind. "
            "Use 'complete', in which all nodes are neighbours."
        )
    if config.topology.remove:
        raise ConfigError(
            f"topology.remove = {config.topology.remove:g}: peers keep their neighbours; "
            "expected 0. Leave it out."
        )
    if config.data.validation:
        raise ConfigError(
            f"data.validation = {config.data.validation:g}: peers have no common score to choose "
            "a round by; expected 0. Leave it out."
        )
    if config.holdout_clients:
        raise ConfigError(
            f"holdout_clients = {config.holdout_clients}: peers join while the network runs; "
            "expected 0. Leave it out and add newcomers with 'fedspd network add'."
        )


def _find_neighbours(config: "ExperimentConfig", names: Sequence[str]) -> list[list[str]]:
    """Return the neighbours of each node in the simulated network."""
    graph = _build_topology(config).at(1)
    return [[names[j] for j in graph.neighbours(i)] for i in range(len(names))]


def _build_topology(config: "ExperimentConfig") -> "Topology":
    from fedspd import topology
    from fedspd.core.keys import Key

    return topology.build_topology(config.topology, config.clients, Key(config.seed))


def _build_manifest(
    config: "ExperimentConfig",
    network: str,
    secure: bool,
    example: Example | None,
    members: Sequence[Member],
) -> Manifest:
    from fedspd import topology
    from fedspd.config import as_dict
    from fedspd.experiment.build import build_algorithm

    # the nodes may have a GPU or bfloat16 instructions, this machine need not
    on_cpu = config.model_copy(update={"device": "cpu", "precision": "float32"})
    shape, classes, learner = _build_learner(on_cpu, example)
    algorithm = build_algorithm(config)
    return Manifest(
        network=network,
        secure=secure,
        config=as_dict(config),
        shape=shape,
        classes=classes,
        size=learner.size,
        offer_limit=max(1, algorithm.offer_limit),
        size_limit=algorithm.size_limit(learner),
        diameter=topology.diameter_bound(_build_topology(config)),
        dtype=config.dtype,
        members=tuple(members),
    )


def _build_learner(
    config: "ExperimentConfig", example: Example | None
) -> "tuple[tuple[int, ...], int, Learner]":
    """Return the shape of an example, the number of classes and a learner for them.

    Without an example, the nodes share the config's data: build all that they would, so that the
    operator learns here what each of them would refuse.
    """
    from fedspd.experiment.build import build_experiment, build_learner

    if config.data.scale != "none":
        raise ConfigError(
            f"data.scale = '{config.data.scale}': not in a network of nodes. Leave it out, and "
            "scale the data on the devices."
        )
    if example is not None:
        return *example, build_learner(config, *example)
    experiment = build_experiment(config)
    federation = experiment.federation
    return federation.shape, federation.classes, experiment.plan.learner


def _build_member(credentials: Credentials) -> Member:
    node = parse_identity(credentials.certificate)
    return Member(node.name, node.client, node.address, node.neighbours, node.serial)


def _check_newcomer(
    authority: Authority, manifest: Manifest, name: str, neighbours: Sequence[str]
) -> None:
    if name in (member.name for member in manifest.members):
        raise ConfigError(
            f"node = '{name}': exists already; expected a new name, since names are never reused."
        )
    if not neighbours:
        raise ConfigError(f"node = '{name}': no neighbours are given; expected at least one.")
    for neighbour in neighbours:
        if authority.is_revoked(manifest.member(neighbour).serial):
            raise ConfigError(f"'{neighbour}' cannot be a neighbour: it is revoked. Choose others.")


def _next_address(manifest: Manifest) -> str:
    """Return an address on the last node's host, above all ports that are in use there."""
    addresses = [member.address.rpartition(":") for member in manifest.members]
    host = addresses[-1][0]
    return f"{host}:{1 + max(int(port) for other, _, port in addresses if other == host)}"


def _read_expiry(certificate: Path) -> str | None:
    """Return when a certificate expires, or None if it is not here or this user may not read it."""
    if not os.access(certificate, os.R_OK):
        return None
    return read_identity(certificate).valid_until.isoformat()


# ---- on disk


def _read_manifest(network: Path) -> Manifest:
    if not file_exists(network / "network.json"):
        raise StorageError(
            f"--network {network}: not a network; expected a folder with network.json. "
            "Create one with 'fedspd network create'."
        )
    return Manifest.load(network / "network.json")


def _find_bundles(network: Path, manifest: Manifest) -> list[Path]:
    """Return the bundles that are still here; an operator may have moved others to devices."""
    return [
        folder
        for member in manifest.members
        if (folder := network / "nodes" / member.name).is_dir()
    ]


@contextmanager
def _open_network(network: Path) -> Iterator[tuple[Authority, Manifest]]:
    """Lock a network's folder and read its authority and manifest."""
    _read_manifest(network)  # refuses any other folder before it is locked
    with _disk_errors(network), _locked(network):
        authority, manifest = Authority.load(network), _read_manifest(network)
        if authority.network != manifest.network:
            raise StorageError(
                f"'{network / 'network.json'}' and ca.crt beside it belong to two networks. "
                "Restore both from one copy."
            )
        yield authority, manifest


def _check_vacant(folder: Path) -> None:
    """Refuse to overwrite anything."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise StorageError(
            f"--out {folder}: exists and is not an empty folder; expected a new or empty one. "
            "Give another --out."
        )


@contextmanager
def _draft_network(folder: Path) -> Iterator[Path]:
    """Yield a draft whose files move to the folder if the block succeeds, network.json last."""
    with _disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            _check_vacant(folder)
            draft = folder / ".draft"
            draft.mkdir(mode=0o700)
            try:
                yield draft
                for path in sorted(draft.iterdir(), key=lambda path: path.name == "network.json"):
                    os.rename(path, folder / path.name)
            finally:
                shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _draft_bundle(folder: Path) -> Iterator[Path]:
    """Yield a draft that becomes the folder if the block succeeds."""
    draft = folder.with_name(f".{folder.name}.draft")
    # an interrupted command leaves them before the node is in network.json
    for leftover in (draft, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        yield draft
        os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_bundle(bundle: Path, credentials: Credentials, crl: bytes, manifest: str) -> None:
    files = {
        "node.key": credentials.key,
        "node.crt": credentials.certificate,
        "ca.crt": credentials.ca,
        "revoked.crl": crl,
        "manifest.json": manifest.encode(),
    }
    _write(bundle, files)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    from fedspd.storage.atomic import write_atomically

    # private from the start: a key is written before its mode is set
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content.decode("ascii"))
        if name in SECRETS:
            (folder / name).chmod(0o600)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes."""
    lock = Lock(folder)
    lock.acquire(f"The network's folder '{folder}'", LOCK_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _disk_errors(network: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"The network's folder '{network}' could not be written ({error}). "
            "Fix the cause and try again."
        ) from None
