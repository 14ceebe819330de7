"""Peers in one process, whose messages are encoded and checked as on the wire.

It needs the extra `node`.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from fedspd.core.graph import Graph
from fedspd.node.identity.manifest import Manifest, Member
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.peer.peer import Peer
from fedspd.node.wire.memory import MemoryNetwork
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.plan import Plan
from fedspd.testing.subject import select_clients

__all__ = ["MemoryNetwork", "run_peers"]

# No peer fails here, so a busy machine must not make one seem to; each wait ends long before.
TIMEOUTS = Timeouts(
    start=600, min_deadline=600, max_deadline=600, budget=600, down_after=600, linger=600
)


def run_peers(
    plan: Plan, graph: Graph, rounds: int, network: MemoryNetwork | None = None
) -> list[str]:
    """Run every client of the plan as a peer; return the digests after the final phase.

    The peers are named n0, n1 and so on. `network` may delay or lose their messages.
    """
    with (
        tempfile.TemporaryDirectory(prefix="fedspd-") as folder,
        open_peers(plan, graph, rounds, network or MemoryNetwork(), Path(folder)) as peers,
        ThreadPoolExecutor(1) as thread,  # so that it works where an event loop runs already
    ):
        thread.submit(asyncio.run, run_together(*(peer.run() for peer in peers))).result()
        return [peer.runner.digests()[0] for peer in peers]


@contextmanager
def open_peers(
    plan: Plan,
    graph: Graph,
    rounds: int,
    network: MemoryNetwork,
    folder: Path,
    timeouts: Timeouts = TIMEOUTS,
) -> Iterator[list[Peer]]:
    """Yield a peer for every client of the plan, with its journal in the folder."""
    manifest = build_manifest(plan, graph, rounds)
    with ExitStack() as stack:
        peers = []
        for i in range(graph.clients):
            peer = open_peer(manifest, i, plan, graph, rounds, network, folder, timeouts)
            stack.enter_context(closing(peer.journal))
            peers.append(peer)
        yield peers


def open_peer(
    manifest: Manifest,
    client: int,
    plan: Plan,
    graph: Graph,
    rounds: int,
    network: MemoryNetwork,
    folder: Path,
    timeouts: Timeouts = TIMEOUTS,
) -> Peer:
    """Return the peer of one client, which begins or continues from its journal."""
    member = manifest.members[client]
    owner = {"network": manifest.network, "node": member.name}
    journal = Journal(folder / member.name, {**owner, "agreement": manifest.agreement})
    runner = BlockRunner(select_clients(plan, [client]))
    transport = network.transport(manifest, member.name)
    context = _context(manifest, member, graph, rounds)
    return Peer(context, runner, journal, transport, timeouts)


async def run_together(*work: Awaitable[None]) -> None:
    """Run peers that share torch's random generator: only one may compute at a time."""
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        await asyncio.gather(*work)


def build_manifest(plan: Plan, graph: Graph, rounds: int) -> Manifest:
    """Return the manifest of a network with one node per client of the plan."""
    learner, shape = plan.learner, tuple(plan.train.x[0].shape[1:])
    members = tuple(
        Member(f"n{i}", i, f"host:{7000 + i}", tuple(f"n{j}" for j in graph.neighbours(i)), i + 1)
        for i in range(graph.clients)
    )
    return Manifest(
        network="0" * 32,
        secure=False,
        config={"rounds": rounds, "data": {}, "exchange": plan.exchange.model_dump()},
        shape=shape,
        classes=int(max(y.max() for y in plan.train.y)) + 1 if learner.classifies else 0,
        size=learner.size,
        offer_limit=max(1, plan.algorithm.offer_limit),
        size_limit=plan.algorithm.size_limit(learner),
        diameter=plan.train.diameter,
        dtype="float64" if learner.dtype.itemsize == 8 else "float32",
        members=members,
    )


def _context(manifest: Manifest, member: Member, graph: Graph, rounds: int) -> NodeContext:
    return NodeContext(
        name=member.name,
        client=member.client,
        address=member.address,
        neighbours={name: manifest.member(name).client for name in member.neighbours},
        agreement=manifest.agreement,
        rounds=rounds,
        rule=graph.rule,
        evaluate_every=rounds,
        clients=graph.clients,
    )
