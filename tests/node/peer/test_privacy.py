"""A node's ledger: written before anything is sent, never twice, never forgotten."""

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chaos.virtual_time import run_instantly
from fedspd.algorithms import METHODS
from fedspd.algorithms.fedavg import FedAvg
from fedspd.cli.node_status import read_status
from fedspd.cli.privacy import show
from fedspd.core.errors import ConfigError, RejectedError, StorageError
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.ledger import NO_CLUSTER
from fedspd.engines.simulator import Simulator
from fedspd.node.peer.inbox import ExchangeId
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.privacy import NodePrivacy
from fedspd.privacy.accountant import epsilon
from fedspd.privacy.budget import Budget, Schedule, planned_releases
from fedspd.privacy.mechanisms import DPSGD
from fedspd.privacy.options import PrivacyOptions
from fedspd.privacy.randomness import NoiseSource
from fedspd.runtime.block_runner import BlockRunner
from fedspd.testing import Subject
from fedspd.testing.peers import MemoryNetwork, open_peers, run_together
from fedspd.testing.subject import path_graph, run, select_clients

MECHANISM = DPSGD.of(noise=2.0, clip=1.0, rate=1.0, epochs=2)
OWNER = {"network": "a", "node": "n0", "agreement": "b"}
ROUNDS = 3
NO_LIMIT = PrivacyOptions(noise=2.0)
SPLIT = {"warmup": 1, "final_epochs": 0, "prior": False, "check": False}


def budget_of(options: PrivacyOptions = NO_LIMIT) -> Budget:
    return Budget(options, MECHANISM, [])


def subject(method: str = "fedavg", **options: object) -> Subject:
    """Return a method with its own source of noise."""
    return Subject(METHODS[method], 2, options, replace(MECHANISM, source=NoiseSource()))


def runner_of(method: str = "fedavg", client: int = 0, **options: object) -> BlockRunner:
    return BlockRunner(select_clients(subject(method, **options).plan(), [client]))


class Node:
    """A node without a network: it sends its offers into a file, and hears itself alone."""

    def __init__(
        self,
        folder: Path,
        options: PrivacyOptions = NO_LIMIT,
        method: str = "fedavg",
        **own: object,
    ) -> None:
        self.folder, self.runner = folder, runner_of(method, **own)
        self.journal = Journal(folder / "state", OWNER)
        self.privacy = NodePrivacy(self.journal, self.runner, budget_of(options))

    def send(self, exchange: ExchangeId, model: torch.Tensor) -> None:
        with open(self.folder / "sent.jsonl", "a") as file:
            file.write(json.dumps([exchange, model.flatten().tolist()]) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def run(self, step: Callable[[], None] = lambda: None) -> None:
        """Run all rounds as a peer does; `step` is called after every effect on the disk."""
        change = self.privacy._change

        def change_and_step(**fields: object) -> None:
            change(**fields)
            step()

        self.privacy._change = change_and_step
        done = self.journal.restore(self.runner, False)
        for t in range(done + 1, ROUNDS + 1):
            self.privacy.begin_round(t)
            announced = self.runner.start_round(t)
            step()
            number = 0
            while announced is not None:
                exchange = self.runner.exchange
                if (exchange.cluster_CK != NO_CLUSTER).all():
                    self.privacy.record_receiver("n1")
                    self.send(ExchangeId(t, number), exchange.model_CKP)
                    step()
                number += 1
                answer = Neighbourhood.of(Graph.from_edges(1, []), [0], exchange)
                announced = self.runner.advance(answer)
            self.privacy.keep_shared()
            step()
            self.journal.commit(self.runner, t, {"seconds": {"total": 0.1}}, False)
            step()
        self.journal.close()

    def sent(self) -> dict[ExchangeId, set[tuple[float, ...]]]:
        """Return the different models that were sent in each exchange."""
        models: dict[ExchangeId, set[tuple[float, ...]]] = {}
        for line in (self.folder / "sent.jsonl").read_text().splitlines():
            exchange, model = json.loads(line)
            models.setdefault(ExchangeId(*exchange), set()).add(tuple(model))
        return models


def killed_at(folder: Path, step: int, method: str, options: dict[str, object]) -> bool:
    """Run a node in a process that is killed at a step; return whether it came so far."""
    child = os.fork()
    if child == 0:
        calls = 0

        def count() -> None:
            nonlocal calls
            calls += 1
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)

        Node(folder, method=method, **options).run(count)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def bill(node: Node) -> list[tuple[int, list[list[float]]]]:
    """Return the rounds and the releases of all payments."""
    return [(entry["round"], entry["spent"]) for entry in node.privacy.ledger["releases"]]


@pytest.mark.parametrize(
    ("method", "options", "stride"),
    [
        ("fedavg", {}, 1),
        pytest.param("fedspd", {"selection": "uniform"}, 1, marks=pytest.mark.long),
        pytest.param("fedspd-split", SPLIT, 41, marks=pytest.mark.long),
    ],
)
def test_kill_at_every_step_neither_spends_twice_nor_forgets(tmp_path, method, options, stride):
    """FedSPD-Split has hundreds of exchanges in its first round, so that some steps are tried."""
    (tmp_path / "whole").mkdir()
    whole, step = Node(tmp_path / "whole", method=method, **options), 1
    whole.run()
    while True:
        folder = tmp_path / str(step)
        folder.mkdir()
        was_killed = killed_at(folder, step, method, options)
        node = Node(folder, method=method, **options)
        node.run()
        assert bill(node) == bill(whole)
        assert node.privacy.ledger["received"] == whole.privacy.ledger["received"]
        # a model that was sent twice was the same model: its noise was paid for once
        assert node.sent().keys() == whole.sent().keys()
        assert {len(models) for models in node.sent().values()} == {1}
        if not was_killed:
            break
        step += stride
    assert [t for t, _ in bill(whole)][-1] == ROUNDS
    assert step > 6 * ROUNDS


def test_noise_is_secret_and_the_same_after_a_restart(tmp_path):
    models = []
    for name in ("a", "a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        node = Node(tmp_path / name)
        node.journal.restore(node.runner, False)
        node.privacy.begin_round(1)
        node.runner.start_round(1)
        models.append(node.runner.exchange.model_CKP)
        node.journal.close()
    assert torch.equal(models[0], models[1])
    assert not torch.allclose(models[0], models[2], atol=1e-3)
    assert (tmp_path / "a" / "state" / "privacy.key").stat().st_mode & 0o077 == 0


def test_another_state_gets_other_noise_and_is_paid_again(tmp_path):
    """As when a damaged checkpoint makes a node go back by a round."""
    node = Node(tmp_path)
    node.journal.restore(node.runner, False)
    for shift in (0.0, 1.0):
        state = node.runner.state
        node.runner.state = replace(state, model_CP=state.model_CP + shift)
        node.privacy.begin_round(1)
        node.runner.start_round(1)
        node.runner.state = state
    assert len({release["id"] for release in node.privacy.ledger["releases"]}) == 2
    node.journal.close()


class TwoUpdates(FedAvg):
    """It trains, exchanges, trains the mean again with the same key, and exchanges once more."""

    def round(self, learner, state, data, key):
        model_CP, only_C1 = state.model_CP, torch.zeros(len(data), 1, dtype=torch.long)
        for _ in range(2):
            trained_CP = learner.train(model_CP, data, key)
            answer = yield Exchange(only_C1, trained_CP[:, None], torch.ones(1, 1), only_C1)
            model_CP = answer.mean(only_C1).model_CMP[:, 0]
        return replace(state, model_CP=model_CP)


def test_update_after_another_answer_gets_other_noise_and_is_paid_again(tmp_path):
    """As when a node is killed in a round, and its neighbours answer otherwise after that."""
    sent = []
    for shift in (0.0, 0.0, 100.0):
        node = Node(tmp_path)
        plan = replace(node.runner.plan, algorithm=TwoUpdates())
        node.runner.plan = plan
        node.journal.restore(node.runner, False)
        node.privacy.begin_round(1)
        node.runner.start_round(1)
        first = node.runner.exchange
        shifted = replace(first, model_CKP=first.model_CKP + shift)
        node.runner.advance(Neighbourhood.of(Graph.from_edges(1, []), [0], shifted))
        sent.append((first.model_CKP, node.runner.exchange.model_CKP - shift))
        ledger = node.privacy.ledger
        node.journal.close()
    assert torch.equal(sent[0][0], sent[2][0])
    assert torch.equal(sent[0][1], sent[1][1])
    noise = MECHANISM.noise * MECHANISM.clip / plan.learner.training.batch
    assert (sent[0][1] - sent[2][1]).std() > noise * plan.learner.training.rate(1)
    assert len(ledger["releases"]) == 3
    # the two updates of a round have the same key, and not the same noise
    assert not torch.allclose(sent[0][0] * 2, sent[0][1], atol=1e-3)


def test_neighbour_pays_for_every_release_up_to_the_last_that_it_received(tmp_path):
    node = Node(tmp_path)
    node.run()
    node.privacy.ledger["received"] = {"n1": 3, "n2": 1}
    spent = [MECHANISM.update_release(4), MECHANISM.update_release(2), MECHANISM.update_release(2)]
    report = node.privacy.report()
    assert report["neighbours"]["n1"] == pytest.approx(epsilon(spent, 1e-5), abs=1e-5)
    assert report["neighbours"]["n2"] == pytest.approx(epsilon(spent[:1], 1e-5), abs=1e-5)
    assert report["epsilon"] == report["neighbours"]["n1"]


def test_node_is_silent_once_its_budget_is_spent_and_shares_no_unpaid_model(tmp_path):
    two_rounds = epsilon([MECHANISM.update_release(4), MECHANISM.update_release(2)], 1e-5)
    node = Node(tmp_path, PrivacyOptions(epsilon=two_rounds + 1e-6))
    node.run()
    assert sorted(exchange.round for exchange in node.sent()) == [1, 2]
    assert len(node.privacy.ledger["releases"]) == 3  # it goes on training
    report = node.privacy.report()
    assert report["silent"]
    assert report["epsilon"] <= two_rounds + 1e-6
    with pytest.raises(RejectedError, match="nothing to share"):
        node.privacy.offer_to_newcomer("n9")
    again = Node(tmp_path, PrivacyOptions(epsilon=two_rounds + 1e-6))
    again.journal.restore(again.runner, False)
    again.privacy.keep_shared()
    with pytest.raises(RejectedError, match="nothing to share"):
        again.privacy.offer_to_newcomer("n9")
    again.journal.close()


def test_node_pays_for_every_exchange_of_a_round(tmp_path):
    """FedSPD-Split trains its folds between two exchanges of round 1."""
    node = Node(tmp_path, method="fedspd-split", warmup=1, final_epochs=0, prior=False)
    plan = node.runner.plan
    schedule = Schedule.of(plan.algorithm, plan.learner.training, ROUNDS, None)
    planned = planned_releases(MECHANISM, schedule)
    node.run()
    for t in range(1, ROUNDS + 1):
        entries = [e for e in node.privacy.ledger["releases"] if e["round"] == t]
        spent = [tuple(release) for entry in entries for release in entry["spent"]]
        assert sorted(spent) == sorted(planned[t - 1])


def test_status_of_a_stopped_node_has_all_that_was_spent(tmp_path):
    """Its last event is older after a kill in a round, or after a rollback."""
    node = Node(tmp_path)
    node.run()
    journal = Journal(tmp_path / "state", OWNER)
    journal.roll_back(1)
    journal.close()
    status = read_status(tmp_path / "state")
    assert status["round"] == 1
    assert status["privacy"] == node.privacy.report()
    assert status["privacy"]["epsilon"] > epsilon([MECHANISM.update_release(4)], 1e-5)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_nothing_counts_as_recorded_that_a_full_disk_did_not_take(tmp_path):
    """A neighbour asks again at once: it must not get what the ledger on the disk does not know."""
    node = Node(tmp_path)
    node.journal.restore(node.runner, False)
    node.privacy.begin_round(1)
    with full_disk(), pytest.raises(StorageError):
        node.runner.start_round(1)
    assert node.privacy.ledger["releases"] == []
    node.privacy.begin_round(1)
    node.runner.start_round(1)
    with full_disk():
        for _ in range(2):
            with pytest.raises(StorageError):
                node.privacy.record_receiver("n1")
    node.privacy.record_receiver("n1")
    written = json.loads((tmp_path / "state" / "privacy.json").read_text())
    assert written == node.privacy.ledger
    assert written["received"] == {"n1": 1}
    node.journal.close()


def test_ledger_of_other_data_or_without_its_file_is_refused(tmp_path):
    Node(tmp_path).run()
    journal = Journal(tmp_path / "state", OWNER)
    with pytest.raises(StorageError, match="training data have changed"):
        NodePrivacy(journal, runner_of(client=2), budget_of())
    (tmp_path / "state" / "privacy.json").unlink()
    with pytest.raises(StorageError, match="ledger of what this node has released"):
        NodePrivacy(journal, runner_of(), budget_of())
    journal.close()


def test_ledger_of_an_older_version_is_refused_in_a_sentence(tmp_path):
    Node(tmp_path).run()
    path = tmp_path / "state" / "privacy.json"
    whole, journal = json.loads(path.read_text()), Journal(tmp_path / "state", OWNER)
    for field, value, problem in (
        ("delta", None, "it has no 'delta'"),
        ("releases", [{"round": 1, "cost": 2.0}], "an entry is not complete"),
        ("received", ["n1"], "an entry is not complete"),
    ):
        ledger = whole | {field: value}
        if value is None:
            del ledger[field]
        path.write_text(json.dumps(ledger))
        with pytest.raises(StorageError, match=rf"privacy.json': {problem}"):
            NodePrivacy(journal, runner_of(), budget_of())
        with pytest.raises(StorageError, match=rf"privacy.json': {problem}"):
            show([str(tmp_path / "state")], as_json=True)
    journal.close()


def test_privacy_of_a_node_without_a_ledger_is_a_sentence(tmp_path):
    """As of one that has just been started, or that is not private."""
    Journal(tmp_path / "state", OWNER).close()
    with pytest.raises(ConfigError, match="has no ledger: it has not begun, or is not private"):
        show([str(tmp_path)], as_json=True)


@pytest.mark.parametrize("content", [None, b"", b"a" * 32])
def test_ledger_without_the_secret_of_its_noise_is_refused(tmp_path, content):
    """Other noise for a round that is paid for would be a release that is not."""
    Node(tmp_path).run()
    key = tmp_path / "state" / "privacy.key"
    key.unlink()
    if content is not None:
        key.write_bytes(content)
    with pytest.raises(StorageError, match=r"privacy.key.*secret of this node's noise"):
        Node(tmp_path)


# ---- a network


def test_loss_of_an_example_does_not_decide_whether_a_round_is_repeated(tmp_path):
    """An example may be so far off that its loss is infinite; others would see the repetition."""
    plan = subject("fedspd-split", prior=False).plan()
    with open_peers(plan, path_graph(), ROUNDS, MemoryNetwork(), tmp_path) as (peer, *_):
        peer.protect(NodePrivacy(peer.journal, peer.runner, budget_of()))
        peer.runner.begin()
        peer.runner.state.losses_CSE[:] = torch.inf
        assert not peer._is_ruined()
        peer.runner.state.model_CP[:] = torch.nan
        assert peer._is_ruined()


def test_network_goes_on_without_the_models_of_a_silent_node(tmp_path):
    plan, one_round = subject().plan(), epsilon([MECHANISM.update_release(4)], 1e-5) + 1e-6
    with open_peers(plan, path_graph(), ROUNDS, MemoryNetwork(), tmp_path) as peers:
        for client, peer in enumerate(peers):
            own = subject().plan().learner  # one process has one node, and one source of noise
            peer.runner.plan = replace(peer.runner.plan, learner=own)
            options = PrivacyOptions(epsilon=one_round) if client == 2 else NO_LIMIT
            peer.protect(NodePrivacy(peer.journal, peer.runner, budget_of(options)))
        run_instantly(run_together(*(peer.run() for peer in peers)))
    ledgers = [peer.privacy.ledger for peer in peers]
    assert [ledger["silent"] for ledger in ledgers] == [False, False, True, False, False]
    assert ledgers[2]["received"] == {"n1": 1, "n3": 1}
    assert ledgers[1]["received"] == {"n0": ROUNDS, "n2": ROUNDS}
    event = peers[1].journal.run_folder.read("privacy.json")
    assert event["received"] == ledgers[1]["received"]
    # Secret noise: a private network equals its simulation in distribution, not by hash.
    simulated = run(Simulator(plan), path_graph(), 1, ROUNDS)
    assert peers[0].runner.digests()[0] != simulated[0]
