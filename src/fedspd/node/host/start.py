"""From a bundle to a running peer."""

import asyncio
import signal
from pathlib import Path

import torch

from fedspd.config import validate
from fedspd.core.errors import ConfigError, StorageError
from fedspd.node.host.bundle import manifest_of, part_in, whose
from fedspd.node.host.plan import plan
from fedspd.node.host.status import StatusServer
from fedspd.node.identity.certificates import NodeIdentity
from fedspd.node.identity.manifest import Manifest, Member, check_address
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.peer.peer import Peer
from fedspd.node.wire.grpc_transport import GrpcTransport
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.processes import keep_memory
from fedspd.storage.atomic import Json


def run(
    bundle: Path,
    *,
    data: str | None = None,
    state: Path | None = None,
    listen: str | None = None,
    status_port: int = 0,
    insecure_plaintext: bool = False,
    joining: bool = False,
    patience: Timeouts | None = None,
) -> None:
    """One peer, until it is done or is told to stop. `joining`: refuse a node that was there from the beginning."""
    torch.set_num_threads(1)
    keep_memory()
    manifest = manifest_of(bundle)
    me = whose(bundle, manifest)
    if joining:
        _refuse_founder(manifest, me)
    address = check_address(listen) if listen else None
    transport = GrpcTransport(
        manifest, bundle, me.name, insecure_plaintext=insecure_plaintext, address=address
    )
    place = _place(manifest, me, transport)
    journal = _journal(state or bundle / "state", manifest, me.name)
    try:
        peer = Peer(
            place, BlockRunner(plan(manifest, me.client, data)), journal, transport, patience
        )
        asyncio.run(
            _live(
                peer,
                StatusServer(lambda: status(peer, transport), journal.record.folder, status_port),
            )
        )
    finally:
        journal.close()


async def _live(peer: Peer, server: StatusServer) -> None:
    _leave_on_signals(peer)
    await server.start()
    try:
        await peer.live()
    finally:
        await server.stop()


def _leave_on_signals(peer: Peer) -> None:
    """Let SIGTERM and Ctrl-C end the peer after its step."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, peer.leave)
        except NotImplementedError:  # the event loop of Windows takes no handlers
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(peer.leave))


def _refuse_founder(manifest: Manifest, me: NodeIdentity | Member) -> None:
    if me.client < validate(manifest.config).clients:
        raise ConfigError(
            f"'{me.name}' belongs to the network from its beginning and need not join: start it with 'fedspd node run'; "
            "'fedspd network add' makes the bundle of a newcomer."
        )


def _place(manifest: Manifest, me: NodeIdentity | Member, transport: GrpcTransport) -> NodeContext:
    config = validate(manifest.config)
    numbers = {member.name: member.client for member in manifest.members}
    names = dict.fromkeys((*me.neighbours, *manifest.member(me.name).neighbours))
    if unknown := [name for name in names if name not in numbers]:
        raise StorageError(
            f"The bundle's manifest.json does not know '{unknown[0]}', a neighbour of this node: copy the bundle again."
        )
    return NodeContext(
        name=me.name,
        client=me.client,
        address=me.address,
        neighbours={
            name: numbers[name]
            for name in names
            if not (transport.tls and transport.tls.is_revoked(name))
        },
        agreement=manifest.agreement,
        rounds=config.rounds,
        rule=config.topology.rule,
        evaluate_every=config.evaluate_every,
        newcomer=me.client >= config.clients,
    )


def _journal(folder: Path, manifest: Manifest, name: str) -> Journal:
    if folder.exists() and not (
        folder.is_dir() and (not any(folder.iterdir()) or _has_rounds(folder))
    ):
        raise StorageError(
            f"'{folder}' exists and holds something else than the rounds of a node: give another folder with --state."
        )
    return Journal(folder, part_in(manifest, name))


def _has_rounds(folder: Path) -> bool:
    """One that was copied back may lack the hidden file; one that was never finished, the other."""
    return (folder / ".lock").exists() or (folder / "run.json").exists()


def status(peer: Peer, transport: GrpcTransport) -> Json:
    """What a person, or a monitor, wants to know of a running node."""
    watch, last = peer.watch, peer.journal.last
    known = {
        name: {
            "alive": watch.alive(name),
            "round": neighbour.round,
            "seen_seconds_ago": None
            if neighbour.seen is None
            else round(peer.talk.clock() - neighbour.seen, 1),
            "malformed": transport.malformed[name],
            "muted": transport.is_muted(name),
            "last_error": peer.talk.troubles.get(name),
        }
        for name, neighbour in watch.neighbours.items()
    }
    return {
        "node": peer.place.name,
        "running": True,
        "healthy": not known or any(neighbour["alive"] for neighbour in known.values()),
        "round": peer.talk.moment[0],
        "rounds": peer.place.rounds,
        "done": last.get("event") == "final",
        "neighbours": known,
        "mixture": last.get("mixture"),
        "accuracy": last.get("accuracy"),
        "deadline": watch.deadline(),
        "bytes": {"sent": dict(transport.sent), "received": dict(transport.received)},
        "refused": dict(transport.rejected),
        "last_round": last,
    }
