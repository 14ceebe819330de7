"""Nodes that join a network of peers while it trains."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chaos.plant import (
    QUICK,
    Plant,
    build_config,
    wait_for_round,
)
from chaos.virtual_time import run_instantly
from fedspd.algorithms.split_state import NEWCOMER_STEPS
from fedspd.core.errors import NodeError
from fedspd.experiment.build import build_budget, build_learner
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.peer.peer import Peer
from fedspd.node.peer.privacy import NodePrivacy
from fedspd.node.wire.messages import Offer
from fedspd.privacy.mechanisms import DPSGD


async def run_with_newcomer(plant: Plant, prepare: Callable[[], None] = lambda: None) -> None:
    """Let node 5 join three of five running peers; prepare before it asks for their models."""
    tasks = [asyncio.create_task(plant.run(i)) for i in range(5)]
    await wait_for_round(plant, 1, 3)
    plant.introduce(5, [0, 1, 2])
    prepare()
    await asyncio.gather(plant.run(5), *tasks)


def test_newcomer_takes_the_models_of_its_neighbours_and_takes_part(tmp_path: Path) -> None:
    plant = Plant(build_config(rounds=25), tmp_path)
    run_instantly(run_with_newcomer(plant))
    rounds = plant.rounds(5)
    assert rounds[0] >= 3
    assert rounds[-1] == 25
    assert any("n5" in event.get("received", ()) for event in plant.events(0))
    assert plant.has_finished(5)
    losses = [event["loss"] for event in plant.events(5)]
    assert losses[0] < 2.1  # a guess has ln 10 = 2.303, so it did not start from scratch
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "method",
    [
        *("fedavg", "fedper", "fedem", "local"),
        *(pytest.param(m, marks=pytest.mark.long) for m in ("fedsoft", "ifca", "facade", "pfedme")),
    ],
)
def test_newcomer_joins_with_any_method(tmp_path: Path, method: str) -> None:
    """A method shares one model, its body, all clusters or nothing, even if clusters = 2."""
    model, training = {"name": "linear"}, {"epochs": 1}
    if method in ("facade", "fedper"):  # a body needs another layer
        model = {"name": "mlp", "hidden": 4}
    config = build_config(method, clusters=2, rounds=20, model=model, training=training)
    plant = Plant(config, tmp_path)
    run_instantly(run_with_newcomer(plant))
    assert plant.rounds(5)[0] >= 3
    assert plant.has_finished(5)


def test_newcomer_gets_only_what_travels(tmp_path: Path) -> None:
    """The hidden layer of the neighbours stays at home, also from a newcomer."""
    model, exchange = {"name": "mlp", "hidden": 8}, {"only": ["3"]}
    plant = Plant(build_config("fedavg", rounds=20, model=model, exchange=exchange), tmp_path)
    sizes: list[int] = []

    def note_sizes() -> None:
        for i in range(3):
            protocol = plant.peers[i].protocol
            honest = protocol._offer_to_newcomer

            def offer(*about: Any, honest: Callable[..., Offer] = honest) -> Offer:
                offered = honest(*about)
                sizes.append(offered.model_KP.shape[1])
                return offered

            protocol._offer_to_newcomer = offer  # type: ignore[method-assign]

    run_instantly(run_with_newcomer(plant, note_sizes))
    assert sizes == [8 * 10 + 10] * 3
    assert plant.has_finished(5)


def test_newcomer_ignores_a_neighbour_that_offers_too_few_clusters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = Plant(build_config(rounds=25), tmp_path)

    def offer_one_cluster() -> None:
        protocol = plant.peers[0].protocol
        honest = protocol._offer_to_newcomer
        monkeypatch.setattr(
            protocol,
            "_offer_to_newcomer",
            lambda *about: Offer((0,), honest(*about).model_KP[:1]),
        )

    with caplog.at_level("INFO"):
        run_instantly(run_with_newcomer(plant, offer_one_cluster))
    assert 'node=n0 error="offers a newcomer the clusters [0]; expected [0, 1]."' in caplog.text
    assert "network joined: node=n5 neighbours=2" in caplog.text
    assert plant.has_finished(5)


@pytest.mark.parametrize(
    "lie",
    [lambda model_KP: torch.full_like(model_KP, 3e7), lambda model_KP: -9 * model_KP],
    ids=["huge", "reversed"],
)
def test_newcomer_refuses_first_models_that_would_ruin_it(
    lie: Callable[[torch.Tensor], torch.Tensor],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plain mean of three first models, of which one is a lie within the bound of a number."""
    model, training = {"name": "linear"}, {"epochs": 20}
    plant = Plant(build_config("fedavg", rounds=10, model=model, training=training), tmp_path)

    def offer_lies() -> None:
        protocol = plant.peers[0].protocol
        honest = protocol._offer_to_newcomer

        def offer(*about: Any) -> Offer:
            truth = honest(*about)
            return Offer(truth.clusters, lie(truth.model_KP))

        monkeypatch.setattr(protocol, "_offer_to_newcomer", offer)

    with caplog.at_level("INFO"):
        run_instantly(run_with_newcomer(plant, offer_lies))
    assert "first models refused: node=n0" in caplog.text
    assert "network joined: node=n5 neighbours=2" in caplog.text
    assert plant.peers[5].protocol.refused["n0"] == 1
    assert plant.events(5)[0]["loss"] < 1.0  # a guess has 2.3


def test_newcomer_with_one_live_neighbour_of_two_starts_in_its_round(tmp_path: Path) -> None:
    complete, one_epoch = {"kind": "complete"}, {"epochs": 1}
    config = build_config("fedavg", clients=2, rounds=40, topology=complete, training=one_epoch)
    plant = Plant(config, tmp_path)

    async def join_one_of_two() -> None:
        tasks = [asyncio.create_task(plant.run(i)) for i in range(2)]
        await wait_for_round(plant, 0, 5)
        plant.kill(1, tasks[1])
        plant.introduce(2, [0, 1])
        await asyncio.gather(plant.run(2), tasks[0])

    run_instantly(join_one_of_two())
    assert plant.rounds(2)[0] >= 5
    assert plant.rounds(2)[-1] == 40


@pytest.mark.parametrize("restarts", [False, True])
def test_newcomer_that_has_joined_soon_trusts_a_single_neighbour_no_more(
    restarts: bool, tmp_path: Path
) -> None:
    """Two of its three neighbours restart, and the third one lies about its round."""
    plant = Plant(build_config("fedavg", rounds=12), tmp_path)
    run_instantly(run_with_newcomer(plant))
    if restarts:
        plant.peers[5].journal.close()
        run_instantly(plant.run(5))
    detector, clock = plant.peers[5].detector, plant.peers[5].protocol.clock
    for name in ("n0", "n1", "n2"):
        detector.record_message(name, 5)
    clock.seconds += 2 * QUICK.down_after
    detector.record_message("n2", 12)
    detector.record_reached("n2", 12)
    assert [each.name for each in detector.live_neighbours()] == ["n2"]
    assert detector.confirmed_round() == 0
    clock.seconds += QUICK.start
    detector.record_message("n2", 12)
    detector.record_reached("n2", 12)
    assert detector.confirmed_round() == 12


def test_newcomer_leaves_while_it_waits_for_neighbours(tmp_path: Path) -> None:
    plant = Plant(build_config(), tmp_path)
    plant.links[5] = [0, 1]
    newcomer = plant.build(5)
    newcomer.leave()
    run_instantly(newcomer.run())
    assert plant.events(5) == []


def test_newcomer_without_a_live_neighbour_fails(tmp_path: Path) -> None:
    plant = Plant(build_config(), tmp_path)
    plant.links[5] = [0, 1]
    with pytest.raises(NodeError, match="No neighbour gave its models"):
        run_instantly(plant.run(5))


class PrivatePlant(Plant):
    """Peers with ledgers; each has its own learner, since one process has one source of noise."""

    def build(self, i: int, timeouts: Timeouts = QUICK) -> Peer:
        peer = super().build(i, timeouts)
        federation = self.experiment.federation
        learner = build_learner(self.config, federation.shape, federation.classes)
        peer.runner.plan = dataclasses.replace(peer.runner.plan, learner=learner)
        budget = build_budget(self.config)
        assert budget is not None
        peer.protect(NodePrivacy(peer.journal, peer.runner, budget))
        return peer

    def ledger_of(self, i: int) -> NodePrivacy:
        privacy = self.peers[i].privacy
        assert privacy is not None
        return privacy


def test_newcomer_pays_for_its_first_mixture_and_is_paid_for_by_its_neighbours(
    tmp_path: Path,
) -> None:
    """It fits a mixture by 20 noisy means, and wants clusters by it from its first exchange on."""
    own, training = {"warmup": 1, "final_epochs": 0}, {"epochs": 1, "batch": 30}
    options = {"fedspd-split": own, "privacy": {"noise": 2.0}, "training": training}
    plant = PrivatePlant(build_config("fedspd-split", rounds=14, **options), tmp_path)
    run_instantly(run_with_newcomer(plant))
    first, privacy = plant.rounds(5)[0], plant.ledger_of(5)
    assert plant.rounds(5)[-1] == 14
    assert isinstance(privacy.mechanism, DPSGD)
    mean, paid = privacy.mechanism.mean_release(), privacy.ledger["releases"][0]
    assert paid["round"] == first >= 3
    joining = [tuple(release) for release in paid["spent"]].count(tuple(mean))
    assert joining == NEWCOMER_STEPS + 1  # and the mean of its first round
    for i in range(3):
        ledger = plant.ledger_of(i).ledger
        before = [entry for entry in ledger["releases"] if entry["round"] < first]
        assert ledger["received"]["n5"] >= len(before) > 0
