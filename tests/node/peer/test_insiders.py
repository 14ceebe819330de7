"""Insiders against honest peers, over the in-memory transport."""

import asyncio
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chaos.insiders import InsiderNetwork, Lie, SaysAnything, SaysRound, SendsModels
from chaos.virtual_time import run_instantly
from fedspd.config import validate
from fedspd.core.errors import NodeError, RejectedError, StorageError, UnreachableError
from fedspd.core.graph import Graph
from fedspd.experiment.build import build_experiment
from fedspd.node.peer.inbox import ExchangeId
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.peer.peer import Peer
from fedspd.node.peer.protocol import REPEATED_FETCHES, REPEATED_FETCHES_PER_SECOND
from fedspd.node.peer.sanity import MAX_NUMBER, MAX_VALUE_RATIO, is_finite, own_loss
from fedspd.node.wire.base import RpcMethod
from fedspd.node.wire.memory import NetworkConditions, ideal_conditions
from fedspd.node.wire.messages import JOINING, Announcement, Hello, Offer, Request
from fedspd.storage import run_folder
from fedspd.testing.peers import open_peers

COMPLETE = Graph.complete(4)
TIMEOUTS = Timeouts(
    start=60, min_deadline=2, max_deadline=20, heartbeat_interval=0.05, down_after=20, linger=0.2
)


@contextmanager
def peers_of(
    lies: Mapping[str, Lie],
    graph: Graph,
    folder: Path,
    conditions: NetworkConditions = ideal_conditions,
    timeouts: Timeouts = TIMEOUTS,
    rounds: int = 6,
    **settings: Any,
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
    network = InsiderNetwork(lies, conditions)
    with open_peers(plan, graph, rounds, network, folder, timeouts) as peers:
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

    run_instantly(work())


def committed(peer: Peer) -> list[int]:
    events = peer.journal.run_folder.events()
    return [event["round"] for event in events if event["event"] == "round"]


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
            peer.detector.record_reached(name)
        with caplog.at_level("INFO"):
            assert peer._skip_rounds(4) == 8
        assert "rounds skipped: from=4 to=8 said=401 said_by=n1,n2" in caplog.text
        assert peer._skip_rounds(9) == 9  # a second later it would be 10
        clock.seconds += 10_000
        for name in ("n1", "n2"):
            peer.detector.record_message(name, 401)
            peer.detector.record_reached(name)
        assert peer._skip_rounds(9) == 399  # the last round and the final phase are its own


# ---- time


async def cut_one_way(sender: str, receiver: str, method: RpcMethod) -> None:
    """Lose all that n0 sends to n2; n2 reaches n0."""
    if (sender, receiver) == ("n0", "n2"):
        raise UnreachableError("the name does not resolve.")


def test_link_that_works_one_way_delays_nobody(tmp_path: Path) -> None:
    """n2 hears nothing from n0, and n0 never reaches n2: neither waits for the other."""
    brief = replace(TIMEOUTS, down_after=1.0, min_deadline=600.0, max_deadline=600.0)
    with peers_of({}, Graph.complete(4), tmp_path, cut_one_way, brief) as peers:
        run(peers, [])
        for peer in peers:
            events = [e for e in peer.journal.run_folder.events() if e["event"] == "round"]
            assert [event["round"] for event in events] == [1, 2, 3, 4, 5, 6]
            waited = sum(event["seconds"]["waiting"] for event in events)
            assert waited <= brief.down_after  # until one of them counts as down


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("fedspd", "examples"),
        *[
            pytest.param(method, rule, marks=pytest.mark.long)
            for method in ("fedavg", "fedem", "fedsoft", "ifca", "facade", "fedspd-split")
            for rule in ("uniform", "examples", "metropolis", "median", "clipped")
        ],
    ],
)
def test_insider_that_says_anything_stops_nobody(method: str, rule: Any, tmp_path: Path) -> None:
    graph = Graph.from_edges(4, itertools.combinations(range(4), 2), rule)
    brief, model = replace(TIMEOUTS, min_deadline=0.5), {"name": "mlp", "hidden": 8}
    clusters = 1 if method == "fedavg" else 2
    with peers_of(
        {"n3": SaysAnything(6)},
        graph,
        tmp_path,
        timeouts=brief,
        method=method,
        clusters=clusters,
        model=model,
    ) as peers:
        run(peers[:3], peers[3:])
        for peer in peers[:3]:
            rounds = committed(peer)
            assert rounds == sorted(set(rounds))
            assert rounds[-1] == 6
            assert peer.journal.last["event"] == "final"
            assert is_finite(peer.runner)


def test_neighbour_gets_the_same_models_again_only_now_and_then(tmp_path: Path) -> None:
    """Each answer costs bytes and time; an honest neighbour repeats a call that failed."""
    with peers_of({}, COMPLETE, tmp_path) as peers:
        protocol = peers[0].protocol
        protocol.runner.begin()
        protocol.runner.start_round(1)
        exchange, size = protocol.runner.exchange, protocol.runner.plan.learner.size
        protocol.offers |= {ExchangeId(1, 0): exchange, ExchangeId(1, 1): exchange}

        def fetch(name: str, number: int, times: int) -> int:
            served = 0
            for _ in range(times):
                with suppress(RejectedError):
                    served += len(
                        protocol.handle_request(name, Request(1, number, (0,), size)).clusters
                    )
            return served

        assert fetch("n1", 0, 100) == 1 + REPEATED_FETCHES
        assert fetch("n1", 1, 100) == 1  # the next models are given at once
        assert fetch("n2", 0, 1) == 1
        protocol.clock.seconds += 2.0
        assert fetch("n1", 0, 100) == 2 * REPEATED_FETCHES_PER_SECOND


# ---- the log


def test_neighbour_that_goes_back_again_and_again_fills_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with peers_of({}, Graph.from_edges(2, [(0, 1)]), tmp_path) as peers:
        peer = peers[0]
        with caplog.at_level("INFO"):
            for t in range(200):
                peer.protocol.handle_hello("n1", Hello("", 1 + t % 2, "host:7000"))
                peer.protocol._record_error("n1", RejectedError(f"another sentence: {t}"))
        assert caplog.text.count("neighbour went back") == 1
        assert caplog.text.count("call failed") == 1
        assert peer.detector.neighbours["n1"].round == 2
        peer.protocol.clock.seconds += 10.0
        with caplog.at_level("INFO"):
            peer.protocol.handle_hello("n1", Hello("", 1, "host:7000"))
            peer.protocol._record_error("n1", RejectedError("the last sentence"))
        assert caplog.text.count("neighbour went back") == 2
        assert caplog.text.count("call failed") == 2


# ---- models


@pytest.mark.parametrize("factor", [3e38, -1e4])
def test_one_huge_model_changes_no_mean_and_the_log_names_its_sender(
    factor: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lies = {"n3": SendsModels(factor, only_round=4)}
    with peers_of(lies, COMPLETE, tmp_path) as peers, caplog.at_level("WARNING"):
        run(peers[:3], peers[3:])
        for peer in peers[:3]:
            events = [one for one in peer.journal.run_folder.events() if one["event"] == "round"]
            assert [one["round"] for one in events if "n3" in one["missing"]] == [4]
            assert peer.protocol.refused == {"n3": 1}
            assert own_loss(peer.runner) < 2.3  # ln 10, the loss of a guess
    assert 'model refused: node=n3 round=4 reason="a model of norm' in caplog.text


def test_mean_that_ruins_the_own_loss_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Within the bounds a liar can still ruin a plain mean: n1 sends -9 times its model."""
    pair = Graph.from_edges(2, [(0, 1)])
    lies = {"n1": SendsModels(-9.0, only_round=5)}
    with peers_of(lies, pair, tmp_path, training={"epochs": 20}) as peers:
        with caplog.at_level("WARNING"):
            run(peers[:1], peers[1:])
        events = [one for one in peers[0].journal.run_folder.events() if one["event"] == "round"]
        assert [one.get("refused") for one in events] == [None] * 4 + [["n1"], None]
        assert [one["received"] for one in events] == [["n1"]] * 4 + [[], ["n1"]]
        assert own_loss(peers[0].runner) < 2.0
        assert peers[0].refused_means == 1
    assert "mean refused: round=5" in caplog.text


def test_node_stops_before_it_commits_a_state_that_is_not_finite(tmp_path: Path) -> None:
    with peers_of({}, Graph.from_edges(2, [(0, 1)]), tmp_path) as peers:
        peer = peers[0]
        train, diverges_from = peer.runner.plan.learner.train, 3

        def diverge(model_CP: Tensor, data: Any, key: Any, **options: Any) -> Tensor:
            found = train(model_CP, data, key, **options)
            return found if key.round < diverges_from else torch.full_like(found, torch.nan)

        object.__setattr__(peer.runner.plan.learner, "train", diverge)
        with pytest.raises(NodeError, match="Round 3: the training of this node diverged"):
            run(peers[:1], peers[1:])
        assert committed(peer) == [1, 2]


def test_examples_that_nobody_has_count_as_a_hundred_times_the_own_ones(tmp_path: Path) -> None:
    with peers_of({}, Graph.from_edges(2, [(0, 1)], "examples"), tmp_path) as peers:
        protocol = peers[0].protocol
        said = Announcement(1, 0, (0,), (1e308,), (0,), 0, 1)
        assert protocol._limit_weights(said).weights == (100 * 30,)


class ClaimsExamples(Lie):
    """An insider that says how many examples are behind its models."""

    def announcement(self, to: str, truth: Announcement) -> Announcement:
        return replace(truth, weights=(1e308,))


def test_mean_weighs_no_neighbour_by_more_examples_than_that(tmp_path: Path) -> None:
    pair = Graph.from_edges(2, [(0, 1)], "examples")
    with peers_of({"n1": ClaimsExamples()}, pair, tmp_path, rounds=1) as peers:
        build, seen = peers[0]._build_neighbourhood, []

        def watch(exchange: Any, answers: dict[str, Any]) -> Any:
            seen.extend(answer.announcement.weights for answer in answers.values())
            return build(exchange, answers)

        peers[0]._build_neighbourhood = watch  # type: ignore[method-assign]
        run(peers[:1], peers[1:])
        assert seen == [(100 * 30,)]


def test_only_a_newcomer_gets_all_models(tmp_path: Path) -> None:
    with peers_of({}, COMPLETE, tmp_path) as peers:
        protocol = peers[0].protocol
        protocol.runner.begin()
        request = Request(0, JOINING, (0,), protocol.runner.plan.learner.size)
        with pytest.raises(RejectedError, match="only a node that was added later"):
            protocol.handle_request("n1", request)


def test_newcomer_refuses_a_huge_first_model(tmp_path: Path) -> None:
    pair, lies = Graph.from_edges(2, [(0, 1)]), {"n1": SendsModels(3e38)}
    with peers_of(lies, pair, tmp_path) as (newcomer, insider):
        insider.protocol.context = replace(insider.context, clients=0)  # so that n0 is added later
        insider.runner.begin()
        blank, _ = newcomer.runner.blank_share()

        async def work() -> Offer | None:
            for peer in (newcomer, insider):
                await peer.protocol.transport.start(peer.protocol)
            return await newcomer.protocol.fetch_shared("n1", blank)

        assert run_instantly(work()) is None
        assert newcomer.protocol.refused == {"n1": 1}


class Inflates(Lie):
    """Sends numbers of a search that are as large as the neighbour just accepts."""

    def offer(self, network: InsiderNetwork, to: str, request: Request, truth: Offer) -> Offer:
        theirs = network.honest_offers(request).get(to)
        if theirs is None or network.has_parameters(request):
            return truth
        limit = max(MAX_NUMBER, 0.99 * MAX_VALUE_RATIO * float(theirs.model_KP.abs().max()))
        model_KP = limit * truth.model_KP.double().sign()
        return Offer(truth.clusters, model_KP.clamp(-3e38, 3e38).to(truth.model_KP))


def test_insider_does_not_make_honest_nodes_mute_each_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What follows from its numbers overflows, so that honest nodes offer what is not finite."""
    ring = Graph.from_edges(6, [(i, (i + 1) % 6) for i in range(6)])
    data = {"name": "digits", "examples": 60, "mixture": "permutation", "shares": "pure"}
    own = {"method": "fedspd-split", "clusters": 2, "model": {"name": "mlp", "hidden": 8}}
    settings = {**own, "data": data, "topology": {"kind": "ring"}}
    with peers_of({"n5": Inflates()}, ring, tmp_path, rounds=5, **settings) as peers:
        run(peers[:5], peers[5:])
        assert 'reason="finite"' in caplog.text
        assert "neighbour muted" not in caplog.text
        for peer in peers[:5]:
            assert peer.journal.last["event"] == "final"
            assert is_finite(peer.runner)


# ---- the journal


def test_rollback_returns_to_a_kept_round_and_tells_the_neighbours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Graph.from_edges(2, [(0, 1)])
    with peers_of({}, pair, tmp_path, rounds=8) as peers:
        run(peers, [])
        journal = peers[0].journal
        assert journal.run_folder.kept_rounds() == [5, 6, 7, 8, 9]  # 9: the final phase
        hashes = {one["round"]: one["hash"] for one in journal.run_folder.events()}
        with pytest.raises(StorageError, match="expected one of: 5, 6, 7, 8"):
            journal.roll_back(4)
        assert journal.roll_back(6) == 9
        assert committed(peers[0]) == [1, 2, 3, 4, 5, 6]
        assert journal.restore(peers[0].runner, is_newcomer=False) == 6
        assert peers[0].runner.digests() == [hashes[6]]
        with caplog.at_level("INFO"):
            peers[1].detector.record_message("n0", 9)
            peers[1].protocol.handle_hello("n0", Hello("", 7, "host:7000"))
        assert "neighbour went back: node=n0 from=9 to=7" in caplog.text


@pytest.mark.parametrize("ends_after", range(6))
def test_rollback_that_is_killed_leaves_a_journal_that_is_intact(
    ends_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes three checkpoints; the kill comes before one of its steps, or in the middle."""
    with peers_of({}, Graph.from_edges(2, [(0, 1)]), tmp_path, rounds=8) as peers:
        run(peers, [])
        journal, runner = peers[0].journal, peers[0].runner
        hashes = {one["round"]: one["hash"] for one in journal.run_folder.events()}
        left = iter(range(ends_after))

        def count() -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        remove, replace_file = shutil.rmtree, os.replace

        def rmtree(path: Path, **options: Any) -> None:
            (path / "checkpoint.json").unlink(missing_ok=True)  # half of it is gone
            count()
            remove(path, **options)

        def rename(source: Path, target: Path) -> None:
            count()
            replace_file(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(run_folder.shutil, "rmtree", rmtree)
            patch.setattr(run_folder.os, "replace", rename)
            with pytest.raises(KeyboardInterrupt):
                journal.roll_back(6)
        found = journal.restore(runner, is_newcomer=False)
        assert found in (6, 7, 8, 9)
        assert runner.digests() == [hashes[found]]
        if found > 6:
            journal.roll_back(6)
        assert journal.restore(runner, is_newcomer=False) == 6
        assert not (tmp_path / "n0" / "result.json").exists()


def test_journal_notices_every_flipped_bit_of_its_events(tmp_path: Path) -> None:
    with peers_of({}, Graph.from_edges(2, [(0, 1)]), tmp_path, rounds=2) as peers:
        run(peers, [])
        path = tmp_path / "n0" / "events.jsonl"
        content = path.read_bytes()
        for position in (*range(0, 8 * len(content), 61), 8 * len(content) - 5):
            damaged = bytearray(content)
            damaged[position // 8] ^= 1 << position % 8
            path.write_bytes(damaged)
            with pytest.raises(StorageError, match="is damaged"):
                peers[0].journal.restore(peers[0].runner, is_newcomer=False)


def test_journal_without_its_checkpoints_is_refused(tmp_path: Path) -> None:
    with peers_of({}, Graph.from_edges(2, [(0, 1)]), tmp_path, rounds=2) as peers:
        run(peers, [])
        content = (tmp_path / "n0" / "events.jsonl").read_bytes()
        shutil.rmtree(tmp_path / "n0" / "checkpoints")
        with pytest.raises(StorageError, match="checkpoints/ is lost"):
            peers[0].journal.restore(peers[0].runner, is_newcomer=False)
        assert (tmp_path / "n0" / "events.jsonl").read_bytes() == content
