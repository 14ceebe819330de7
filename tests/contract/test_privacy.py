"""Private methods keep the contract, send no count, and release what their plan says."""

from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedspd.algorithms import METHODS, fedspd_split
from fedspd.algorithms.fedspd_split import FOLDS
from fedspd.algorithms.populations import centre_folds
from fedspd.core.block import Block
from fedspd.core.exchange import Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.core.ledger import NO_CLUSTER
from fedspd.core.mechanism import Mechanism
from fedspd.engines.simulator import Simulator
from fedspd.privacy.budget import PlannedRound, Schedule, planned_releases
from fedspd.privacy.mechanisms import DPSGD, NoisyUpdate
from fedspd.privacy.randomness import NoiseSource
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.plan import Plan
from fedspd.testing import CHECKS, Check, Subject
from fedspd.testing.subject import ROUNDS, make_examples, path_graph, run

MECHANISM = DPSGD.of(noise=0.7, clip=1.0, rate=0.5, epochs=2)
OPTIONS = {
    "fedspd-split": {"warmup": 1, "final_epochs": 1, "prior": False},
    "fedspd": {"align_every": 2, "final_epochs": 1, "selection": "uniform"},
    "fedavg": {"finetune": 1},
}
PRIVATE = [name for name, method in METHODS.items() if method.EXAMPLES_MEET is None]


def subject_of(name: str, mechanism: Mechanism = MECHANISM) -> Subject:
    return Subject(METHODS[name], 2, OPTIONS.get(name, {}), mechanism)


SUBJECTS = {name: subject_of(name) for name in PRIVATE}


def test_these_methods_can_be_private():
    assert set(PRIVATE) == {"fedspd-split", "fedspd", "fedavg", "fedper", "local"}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_private_fedspd_keeps_the_contract(check: Check) -> None:
    check(SUBJECTS["fedspd"])


def test_private_split_has_one_result_with_two_workers() -> None:
    subject = SUBJECTS["fedspd-split"]
    with closing(Simulator(subject.plan(), workers=2)) as engine:
        assert run(engine, path_graph()) == subject.reference()


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PRIVATE if name != "fedspd"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_private_method_keeps_the_contract(name: str, check: Check) -> None:
    check(SUBJECTS[name])


@pytest.mark.parametrize("name", PRIVATE)
def test_method_releases_what_its_plan_says(name: str) -> None:
    check_releases(subject_of(name).plan())


@pytest.mark.parametrize("options", [{"warmup": ROUNDS}, {"clusters": 1}], ids=str)
def test_split_pays_for_no_search_and_no_mixture_that_it_does_not_make(options) -> None:
    plan = subject_of("fedspd-split").plan(**options)
    check_releases(plan)
    schedule = Schedule.of(plan.algorithm, plan.learner.training, ROUNDS, None)
    assert [len(own) for own in planned_releases(MECHANISM, schedule)] == [1] * ROUNDS


def check_releases(plan: Plan) -> None:
    """Check that a run releases in every round what its plan says, and nothing after the last."""
    schedule = Schedule.of(plan.algorithm, plan.learner.training, ROUNDS, None)
    planned = planned_releases(MECHANISM, schedule)
    engine = Simulator(plan)
    engine.begin()
    for t in range(1, ROUNDS + 1):
        report = engine.round(t, path_graph())
        assert sorted(report.releases) == list(range(5))
        for own in report.releases.values():
            assert sorted(own) == sorted(planned[t - 1])
    assert not engine.finish(ROUNDS + 1).releases  # it stays at home


def test_first_round_of_all_clusters_is_paid_once():
    """Each example is in one of the clusters; a client is in all of them."""
    algorithm = METHODS["fedspd"](clusters=3, first_round="all", selection="uniform")
    plan = subject_of("fedavg").plan()
    schedule = Schedule.of(algorithm, plan.learner.training, 2, None)
    assert schedule.rounds == (PlannedRound(4, 3, 3, 0), PlannedRound(2, 1, 1, 0))
    steps = [sum(r.times for r in own) for own in planned_releases(MECHANISM, schedule)]
    assert steps == [8, 4]
    updates = [sum(r.times for r in own) for own in planned_releases(NoisyUpdate(1, 1), schedule)]
    assert updates == [3, 1]


# ---- disjoint parts


def test_training_on_disjoint_parts_is_paid_once_for_examples_and_each_time_for_clients():
    for mechanism, updates in ((MECHANISM, 1), (NoisyUpdate(1.0, 1.0), 3)):
        plan = subject_of("fedavg", mechanism).plan()
        learner, data = plan.learner, plan.train
        model_CP = learner.draw(plan.key).repeat(len(data), 1)
        fold_CE = torch.arange(data.width).expand(len(data), -1) % 3
        parts = [data.present_CE & (fold_CE == f) for f in range(3)]
        trained = list(learner.train_parts([model_CP] * 3, data, plan.key.at(2), parts))
        assert len(trained) == 3
        assert [len(learner.effort.releases[client]) for client in data.clients] == [updates] * 5
        with pytest.raises(AssertionError, match="overlap"):
            next(learner.train_parts([model_CP] * 2, data, plan.key, [data.present_CE] * 2))


def test_disjoint_part_is_paid_for_before_it_is_given_out():
    """A method may send one part before it asks for the next, or never ask for the end."""
    for mechanism, updates in ((MECHANISM, [1, 1]), (NoisyUpdate(1.0, 1.0), [1, 2])):
        plan = subject_of("fedavg", mechanism).plan()
        learner, data = plan.learner, plan.train
        models = [learner.draw(plan.key).repeat(len(data), 1)] * 2
        parts = [data.present_CE, torch.zeros_like(data.present_CE)]
        given, found = learner.train_parts(models, data, plan.key.at(2), parts), []
        for _ in range(2):
            next(given)
            found.append(len(learner.effort.releases[0]))
        assert found == updates
        given = learner.train_parts(models, data, plan.key.at(3), parts)
        for _ in range(2):
            learner.effort.releases.clear()  # as an exchange does
            next(given)
            assert len(learner.effort.releases[0]) == 1


def test_private_folds_are_drawn_for_each_example_alone():
    """One example less: the folds of those before it stay, and none is balanced by the others."""
    plan = subject_of("fedspd-split").plan(counts=[400])
    fewer = subject_of("fedspd-split").plan(counts=[399])
    one, two = (p.learner.choose_folds(p.train, FOLDS, Key(3))[0] for p in (plan, fewer))
    assert torch.equal(one[:, :399], two)
    assert (one.sum(0) == 1).all()
    sizes = one.sum(1)
    assert 60 < int(sizes.min()) <= int(sizes.max()) < 140
    assert int(sizes.max()) - int(sizes.min()) > 1


def test_empty_fold_is_not_told():
    """Client 1 has one example, so that three of its folds have none: each sends its noise."""
    plan = subject_of("fedspd-split").plan()
    runner, seen = BlockRunner(plan), []
    runner.begin()
    announced = runner.start_round(1)
    with patch_centre(seen):
        runner.advance(Neighbourhood.of(path_graph(), range(5), runner.exchange))
    assert announced is not None
    assert seen[0].all()


@contextmanager
def patch_centre(seen: list[torch.Tensor]):
    """Note which folds count."""
    with pytest.MonkeyPatch.context() as patch:

        def noted(weight_CFKB, bias_CFK, is_used_CF, data):
            seen.append(is_used_CF)
            return centre_folds(weight_CFKB, bias_CFK, is_used_CF, data)

        patch.setattr(fedspd_split, "centre_folds", noted)
        yield


def test_draws_about_examples_are_secret_at_a_node():
    """The first assignment, the folds, dropout and augmentation go example by example."""
    plan = subject_of("fedspd", replace(MECHANISM, source=NoiseSource())).plan()
    first = plan.algorithm.begin(plan.learner, plan.train, plan.key).assignment_CE
    mechanism = plan.learner.mechanism
    mechanism.source.secret = b"a" * 32
    secret = plan.algorithm.begin(plan.learner, plan.train, plan.key).assignment_CE
    assert not torch.equal(first, secret)
    assert plan.learner.own_key(plan.key) != plan.key
    mechanism.source.secret = b"b" * 32
    other = plan.algorithm.begin(plan.learner, plan.train, plan.key).assignment_CE
    assert not torch.equal(secret, other)


def test_augmentation_is_secret_at_a_node():
    """The images that a local update gets are other ones with another secret, and without one."""
    seen = []

    class Noting(DPSGD):
        def train(self, learner, model_CP, updates, clients, key):
            seen.append(updates[0].x)
            return model_CP

    mechanism = Noting(**{**vars(MECHANISM), "source": NoiseSource()})
    learner = Learner(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),
        mechanism=mechanism,
        augmentations=["flip"],
    )
    x = torch.arange(4.0).expand(64, 1, 1, 4)
    data = Block([0], 1, [x], [torch.zeros(64, dtype=torch.long)], 64)
    for secret in (None, b"a" * 32, b"b" * 32, b"a" * 32):
        mechanism.source.secret = secret
        learner.train(torch.zeros(1, learner.size), data, Key(0, round=1))
    public, one, other, again = seen
    assert torch.equal(one, again)
    assert not torch.equal(public, one)
    assert not torch.equal(one, other)


# ---- what is sent


def offers(name: str, rounds: int, y: int | None = None) -> list:
    """Return what all clients send; with `y`, the labels of client 0 are all the same."""
    plan = subject_of(name).plan()
    if y is not None:
        plan.train.y[0][:] = y
    runner, sent = BlockRunner(plan), []
    runner.begin()
    for t in range(1, rounds + 1):
        announced = runner.start_round(t)
        while announced is not None:
            sent.append((announced, runner.exchange.model_CKP.clone()))
            answer = Neighbourhood.of(path_graph(), range(5), runner.exchange)
            announced = runner.advance(answer)
    return sent


@dataclass(frozen=True)
class Blind(DPSGD):
    """Its releases are noise alone, so that all that still depends on the examples is unpaid."""

    def _train_client(self, learner, gradients, model_P, update, key):
        empty = update._replace(x=update.x[:0], y=update.y[:0], weight=None, rows=None, examples=0)
        return super()._train_client(learner, gradients, model_P, empty, key)

    def mean_shares(self, learner, share_CSE, before_CS, data, key):
        return super().mean_shares(learner, torch.zeros_like(share_CSE), before_CS, data, key)


class BlindUpdate(NoisyUpdate):
    """The same for all examples of a client together."""

    def train(self, learner, model_CP, updates, clients, key):
        nothing = {"weight": None, "rows": None, "examples": 0}
        empty = [own._replace(x=own.x[:0], y=own.y[:0], **nothing) for own in updates]
        return super().train(learner, model_CP, empty, clients, key)


BLIND = Blind.of(noise=0.7, clip=1.0, rate=0.5, epochs=2)
BLIND_UPDATE = BlindUpdate(noise=0.7, clip=1.0)


def sent_blindly(subject: Subject, counts: tuple[int, ...], seed: int, server: bool) -> list[Any]:
    """Return all that clients with these random examples send, to newcomers as well."""
    mechanism = subject.mechanism or BLIND
    plan = replace(subject, mechanism=mechanism).plan(counts=counts, server=server)
    x, y = make_examples("classes", counts, seed)
    runner, sent = BlockRunner(replace(plan, train=replace(plan.train, x=x, y=y))), []
    graph = Graph.from_edges(5, [(i, i + 1) for i in range(4)], "examples", server)
    runner.begin()
    for t in range(1, ROUNDS + 2):
        if t == ROUNDS:  # what all of them share makes them newcomers, who send in the next round
            shared = runner.share()
            sent += [shared.cluster_CK, runner.exchange.model_CKP]
            runner.join(Neighbourhood.of(graph, range(5), runner.exchange), t)
            continue
        announced = runner.start_round(t)
        while announced is not None:
            sent += [*vars(announced).values(), runner.exchange.model_CKP]
            announced = runner.advance(Neighbourhood.of(graph, range(5), runner.exchange))
    return sent


def is_told(subject: Subject, server: bool = False) -> bool:
    """Return whether anything that is sent depends on the examples otherwise than by releases."""
    one = sent_blindly(subject, (6, 1, 9, 4, 6), 0, server)
    two = sent_blindly(subject, (2, 7, 5, 11, 3), 7, server)
    assert len(one) > ROUNDS
    return len(one) != len(two) or not all(map(np.array_equal, one, two))


@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("name", [name for name in PRIVATE if name != "local"])
def test_all_that_is_sent_follows_from_what_is_paid_for(name: str, server: bool) -> None:
    """Other examples, and more or fewer of them, change nothing where releases are blind."""
    needed = {key: option.value for key, option in METHODS[name].PRIVATE_OPTIONS.items()}
    options = {**OPTIONS.get(name, {}), **needed}
    assert not is_told(Subject(METHODS[name], 2, options), server)
    if name == "fedspd-split":
        assert not is_told(Subject(METHODS[name], 0, options), server)


@pytest.mark.parametrize("name", ["fedspd-split", "fedspd"])
def test_all_that_is_sent_for_client_privacy_follows_from_noisy_updates(name: str) -> None:
    """A mixture of the client's own examples would be unpaid for: it stays that of the split."""
    needed = {key: option.value for key, option in METHODS[name].PRIVATE_OPTIONS.items()}
    options = {**OPTIONS.get(name, {}), **needed}
    assert not is_told(Subject(METHODS[name], 2, options, BLIND_UPDATE))


@pytest.mark.parametrize(
    ("name", "clusters", "option"),
    [
        ("fedspd-split", 2, {"check": True}),
        ("fedspd", 2, {"selection": "mixture"}),
        ("facade", 2, {}),
        ("ifca", 2, {}),
    ],
)
def test_methods_and_options_that_privacy_refuses_would_tell_of_the_examples(
    name: str, clusters: int, option: dict[str, Any]
) -> None:
    """So the test above can fail."""
    assert is_told(Subject(METHODS[name], clusters, {**OPTIONS.get(name, {}), **option}))


@pytest.mark.parametrize("name", [name for name in PRIVATE if name != "local"])
def test_no_count_of_examples_is_sent(name: str) -> None:
    for announced, _ in offers(name, 3):
        assert (announced.weight_CK == 1).all()


@pytest.mark.parametrize("name", ["fedspd", "fedavg", "fedper"])
def test_public_announcements_do_not_depend_on_the_examples(name: str) -> None:
    one, two = (offers(name, 4, y) for y in (0, 1))
    for (a, _), (b, _) in zip(one, two, strict=True):
        assert (a.cluster_CK == b.cluster_CK).all()
        assert (a.want_CM == b.want_CM).all()
        assert (a.note_C == b.note_C).all()
    assert any(not torch.equal(a, b) for (_, a), (_, b) in zip(one, two, strict=True))
    assert all((announced.cluster_CK != NO_CLUSTER).all() for announced, _ in one)


def test_client_unit_pays_one_release_per_update_and_none_for_the_mixture():
    subject = subject_of("fedspd-split", NoisyUpdate(1.0, 0.5))
    engine = Simulator(subject.plan())
    engine.begin()
    for t in range(1, 4):
        updates = 1 + FOLDS if t == 1 else 1
        assert engine.round(t, path_graph()).releases[0] == [(1.0, 1.0, 1)] * updates
