"""Insiders against honest peers, over the in-memory transport."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaos.insiders import InsiderNetwork, Lie
from fedspd.config import validate
from fedspd.core.graph import Graph
from fedspd.experiment.build import build_experiment
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.peer.peer import Peer
from fedspd.node.wire.messages import Hello
from fedspd.testing.peers import open_peers, run_together

TIMEOUTS = Timeouts(
    start=60, min_deadline=2, max_deadline=20, heartbeat_interval=0.05, down_after=20, linger=0.2
)


@contextmanager
def peers_of(
    lies: Mapping[str, Lie], graph: Graph, folder: Path, rounds: int = 6, **settings: Any
) -> Iterator[list[Peer]]:
    """Yield one peer per client of the graph; those of `lies` lie."""
    tree = {
        "clients": graph.clients,
        "rounds": rounds,
        "data": {"name": "digits", "examples": 30},
        "model": {"name": "linear"},
        "training": {"epochs": 1},
        "method": "fedavg",
        "clusters": 1,
    }
    plan = build_experiment(validate({**tree, **settings})).plan
    with open_peers(plan, graph, rounds, InsiderNetwork(lies), folder, TIMEOUTS) as peers:
        yield peers


def run(honest: list[Peer], insiders: list[Peer]) -> None:
    """Run all peers until the honest ones have finished."""

    async def work() -> None:
        attack = [asyncio.create_task(peer.run()) for peer in insiders]
        await asyncio.gather(*(peer.run() for peer in honest))
        for task in attack:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(run_together(work()))


def committed(peer: Peer) -> list[int]:
    events = peer.journal.run_folder.events()
    return [event["round"] for event in events if event["event"] == "round"]


class SaysRound(Lie):
    """An insider that says it is in another round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def hello(self, truth: Hello) -> Hello:
        return replace(truth, round=self.round)


# five honest nodes in a ring, and two insiders beside the same two of them
FIVE_AND_TWO = Graph.from_edges(
    7, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (5, 0), (6, 0), (5, 1), (6, 1), (5, 6)]
)


@pytest.mark.parametrize("round", [6, 7, 2**31 - 1])
def test_two_insiders_do_not_make_the_others_skip_rounds(round: int, tmp_path: Path) -> None:
    lies = {"n5": SaysRound(round), "n6": SaysRound(round)}
    with peers_of(lies, FIVE_AND_TWO, tmp_path) as peers:
        run(peers[:5], peers[5:])
        for peer in peers[:5]:
            assert committed(peer) == [1, 2, 3, 4, 5, 6]


def test_a_majority_of_insiders_moves_a_node_by_plausible_rounds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own fastest round took ten seconds, so at most one round passes in a second."""
    with peers_of({}, Graph.from_edges(3, [(0, 1), (0, 2)]), tmp_path, rounds=400) as peers:
        peer, clock = peers[0], peers[0].protocol.clock
        peer.pace.record_return(3, [10.0, 12.0], away_seconds=0.0)
        clock.seconds += 5.5
        for name in ("n1", "n2"):
            peer.detector.record_message(name, 401)  # as if they were done
        with caplog.at_level("INFO"):
            assert peer._skip_rounds(4) == 8
        assert "rounds skipped: from=4 to=8 said=401 said_by=n1,n2" in caplog.text
        assert peer._skip_rounds(9) == 9  # a second later it would be 10
        clock.seconds += 10_000
        for name in ("n1", "n2"):
            peer.detector.record_message(name, 401)
        assert peer._skip_rounds(9) == 399  # the last round and the final phase are its own
