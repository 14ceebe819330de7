"""FedSPD-Split on problems whose answer is known: populations that label differently.

Shapes: N clients, S clusters, P parameters of a model, E examples, K classes.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedspd.algorithms.em import posterior
from fedspd.algorithms.fedavg import FedAvg
from fedspd.algorithms.fedspd_split import FedSPDSplit, rate_factors
from fedspd.algorithms.final_phase import choose_return
from fedspd.algorithms.populations import balanced_weights
from fedspd.algorithms.split_state import (
    log_prior,
    prior_strength,
    refit,
    rows_of,
    update_mixture,
)
from fedspd.core.block import Block
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.engines.simulator import Simulator
from fedspd.runtime.plan import Plan

TRAINING = TrainingOptions(lr=0.2, batch=10, decay=1)


def two_labellings(n: int, examples: int, share_N: np.ndarray, seed: int = 0):
    """Points whose class a linear teacher tells; one population calls the classes differently."""
    rng = np.random.default_rng(seed)
    other, teacher = np.array([2, 3, 0, 1]), rng.normal(size=(10, 4))
    x, y, truth = [], [], []
    for share in share_N:
        point = rng.normal(size=(examples, 10)).astype(np.float32)
        label = (point @ teacher).argmax(1)
        which = (rng.random(examples) < share).astype(int)
        x.append(torch.from_numpy(point))
        y.append(torch.from_numpy(np.where(which, other[label], label)))
        truth.append(which)
    return x, y, truth


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))


def simulate(algorithm, x, y, truth, rounds: int, graph: Graph, factory=mlp, last=None):
    width = max(len(own) for own in y)
    data = Block(range(len(y)), len(y), x, y, width, rounds=rounds, diameter=len(y))
    learner = Learner(factory, TRAINING)
    engine = Simulator(Plan(algorithm, learner, data, data, truth, 2, Key(0)))
    engine.begin()
    for t in range(1, (last or rounds) + 1):
        engine.round(t, graph)
    return engine


def state_of(engine):
    return engine.block.state


RING = Graph.from_edges(12, [(i, (i + k) % 12) for i in range(12) for k in (1, 2)])


def test_one_cluster_without_prior_is_fedavg_to_the_bit():
    x, y, truth = two_labellings(12, 20, np.zeros(12))
    split = simulate(FedSPDSplit(clusters=1, prior=False, final_epochs=0), x, y, truth, 5, RING)
    average = simulate(FedAvg(), x, y, truth, 5, RING)
    assert torch.equal(state_of(split).model_CP, state_of(average).model_CP)


@pytest.mark.parametrize(("kind", "clusters"), [("pure", 0), ("mixed", 2)])
def test_split_finds_two_labellings_and_beats_fedavg(kind, clusters):
    rng = np.random.default_rng(1)
    share_N = np.arange(12) % 2 if kind == "pure" else rng.uniform(0.1, 0.9, 12)
    x, y, truth = two_labellings(12, 100, share_N)
    everyone = Graph.complete(12)
    split = simulate(FedSPDSplit(clusters=clusters), x, y, truth, 15, everyone)
    measures = split.measure()
    average = simulate(FedAvg(), x, y, truth, 15, everyone).measure()
    state = state_of(split)
    assert state.clusters_C.tolist() == [2] * 12
    table_SD = measures.table_CSD.sum(0)
    purity = max(np.trace(table_SD[:2]), np.trace(table_SD[1::-1])) / table_SD.sum()
    assert purity > {"pure": 0.99, "mixed": 0.85}[kind]
    found_N = state.mixture_CS[:, 0].numpy()
    true_N = np.array([np.mean(own) for own in truth])
    assert abs(np.corrcoef(found_N, true_N)[0, 1]) > 0.95
    gain = measures.accuracy_C.mean() - average.accuracy_C.mean()
    assert gain > {"pure": 0.3, "mixed": 0.05}[kind]


@pytest.mark.parametrize(
    ("differ", "rule"), [(False, "uniform"), (True, "uniform"), (True, "median")]
)
def test_clusters_have_bodies_of_their_own_only_if_their_features_differ(differ, rule):
    pure_N = np.arange(12) % 2
    x, y, truth = two_labellings(12, 60, pure_N)
    if differ:
        x = [own + 0.7 * which for own, which in zip(x, pure_N.tolist(), strict=True)]
    engine = simulate(FedSPDSplit(), x, y, truth, 8, Graph.complete(12, rule), last=7)
    state, cut = state_of(engine), engine.plan.learner.cut
    assert state.clusters_C.tolist() == [2] * 12
    body_NB = cut.body(state.model_CP)
    assert torch.equal(body_NB[0], body_NB[2])
    assert torch.equal(body_NB[0], body_NB[1]) != differ
    observed = engine.plan.algorithm.observe(state).bodies_C
    assert observed.tolist() == [2 if differ else 1] * 12


def test_one_population_is_one_cluster_and_no_offset():
    x, y, truth = two_labellings(12, 60, np.zeros(12))
    state = state_of(simulate(FedSPDSplit(), x, y, truth, 6, RING))
    assert state.clusters_C.tolist() == [1] * 12
    assert not state.offsets_CSQ.any()
    assert state.mixture_CS[:, 0].tolist() == [1.0] * 12


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4, bias=False))


@pytest.mark.parametrize("factory", [mlp, without_bias])
def test_search_finds_labellings_with_and_without_a_bias_in_the_head(factory):
    x, y, truth = two_labellings(12, 40, np.arange(12) % 2)
    engine = simulate(FedSPDSplit(), x, y, truth, 5, RING, factory, last=4)
    assert state_of(engine).clusters_C.tolist() == [2] * 12
    largest = state_of(engine).mixture_CS.argmax(1)
    assert len(set(largest[::2].tolist())) == 1
    assert largest[0] != largest[1]


def test_search_finds_nothing_where_only_label_frequencies_differ():
    """Half of the clients have few examples of two of the four classes."""
    x, y, truth = two_labellings(12, 400, np.zeros(12))
    for i in range(12):
        is_rare = (y[i] < 2) if i % 2 else (y[i] >= 2)
        kept = torch.cat([(~is_rare).nonzero()[:, 0], is_rare.nonzero()[:40, 0]])
        x[i], y[i], truth[i] = x[i][kept], y[i][kept], truth[i][kept.numpy()]
    state = state_of(simulate(FedSPDSplit(check=False), x, y, truth, 4, RING))
    assert state.clusters_C.tolist() == [1] * 12


def test_balanced_weights_make_labels_come_equally_often():
    y = [torch.tensor([0] * 300 + [1] * 100), torch.tensor([1] * 50)]
    data = Block(range(2), 2, [own[:, None] for own in y], y, 400)
    log_prior_NK = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).mul(2).log()
    weight_NE = balanced_weights(log_prior_NK, data)
    assert weight_NE[0, :300].sum() == pytest.approx(200)
    assert weight_NE[0, 300:].sum() == pytest.approx(200)
    assert weight_NE[1].tolist() == [1.0] * 400
    no_classes = balanced_weights(torch.zeros(2, 0), data)
    assert no_classes.tolist() == [[1.0] * 400] * 2, "a regression"


def test_exchange_of_heads_keeps_every_sum_of_v_and_offset():
    """D_1 moves into V, so that S heads travel; what a cluster predicts with stays the same."""
    x, y, truth = two_labellings(12, 40, np.arange(12) % 2)
    engine = simulate(FedSPDSplit(clusters=2), x, y, truth, 6, RING, last=4)
    state = state_of(engine)
    assert not state.offsets_CSQ[:, 0].any()
    assert state.offsets_CSQ[:, 1].any()
    moved = replace(state, model_CP=state.model_CP.clone(), offsets_CSQ=state.offsets_CSQ + 0.5)
    moved.model_CP[:, -68:] -= 0.5  # V, which is last: 16 x 4 weights and 4 biases
    learner = engine.plan.learner
    outputs = [FedSPDSplit(clusters=2).predict(learner, one, x) for one in (state, moved)]
    assert torch.allclose(outputs[0][0], outputs[1][0], atol=1e-5)


def test_run_of_the_warm_up_alone_is_not_split():
    x, y, truth = two_labellings(12, 60, np.arange(12) % 2)
    state = state_of(simulate(FedSPDSplit(clusters=2), x, y, truth, 3, RING))
    assert not state.offsets_CSQ.any()
    assert state.clusters_C.tolist() == [1] * 12


@pytest.mark.parametrize("clusters", [0, 2])
def test_clients_whose_updates_do_not_differ_get_no_offset_and_equal_shares(clusters):
    """All inputs are 0, and the body has no bias: nothing tells what a label belongs to."""

    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 16, bias=False), nn.ReLU(), nn.Linear(16, 4))

    x, y, truth = two_labellings(12, 20, np.arange(12) % 2)
    x = [torch.zeros_like(own) for own in x]
    state = state_of(simulate(FedSPDSplit(clusters=clusters), x, y, truth, 6, RING, factory))
    assert not state.offsets_CSQ.any()
    assert state.clusters_C.tolist() == [max(1, clusters)] * 12
    assert state.mixture_CS[:, 0].tolist() == [0.5 if clusters else 1.0] * 12


def test_mixture_of_two_linear_labellings_is_the_share_of_each():
    """Every example has another label in the other population, and a linear model learns both.

    So r is 0 or 1, and u_is = (n_is / n + 0.001) / 1.002 with n_is examples of population s.
    """
    x, y, truth = two_labellings(12, 100, np.linspace(0.1, 0.9, 12))
    engine = simulate(FedSPDSplit(clusters=2), x, y, truth, 15, RING, lambda: nn.Linear(10, 4))
    state, share_N = state_of(engine), np.array([np.mean(own) for own in truth])
    known_NS = (np.stack([1 - share_N, share_N], 1) + 0.001) / 1.002
    errors = [abs(state.mixture_CS.numpy()[:, order] - known_NS) for order in ([0, 1], [1, 0])]
    assert min(error.max() for error in errors) < 0.1


def test_model_of_one_linear_layer_has_no_body():
    x, y, truth = two_labellings(12, 40, np.arange(12) % 2)
    engine = simulate(FedSPDSplit(clusters=2), x, y, truth, 5, RING, lambda: nn.Linear(10, 4))
    assert np.isfinite(engine.measure().test_loss_C).all()


def test_clients_with_one_example_one_class_or_no_neighbour_take_part():
    x, y, truth = two_labellings(6, 12, np.arange(6) % 2)
    x[0], y[0], truth[0] = x[0][:1], y[0][:1], truth[0][:1]
    y[1] = torch.zeros_like(y[1])
    graph = Graph.from_edges(6, [(0, 1), (1, 2), (2, 3), (3, 4)])
    engine = simulate(FedSPDSplit(clusters=2), x, y, truth, 6, graph)
    engine.finish(7)
    assert np.isfinite(engine.measure().test_loss_C).all()


# ---- by hand


def test_prior_is_uniform_where_labels_are_alike_and_follows_the_counts_where_not():
    even = log_prior(torch.arange(100) % 4, 4)
    assert even.tolist() == pytest.approx([0.0] * 4, abs=1e-12)
    skewed = log_prior(torch.tensor([0] * 90 + [1] * 10), 4)
    assert prior_strength(torch.tensor([90.0, 10.0, 0.0, 0.0])) == pytest.approx(10.0)
    assert skewed.exp().tolist() == pytest.approx(
        [4 * (90 + 2.5) / 110, 4 * 12.5 / 110, 4 * 2.5 / 110, 4 * 2.5 / 110]
    )
    assert prior_strength(torch.full((4,), 25.0)) > 1e4


def small_state(losses_SE, mixture_S):
    data = Block([0], 1, [torch.zeros(2, 1)], [torch.zeros(2, dtype=torch.long)], 3)
    state = FedSPDSplit(clusters=2).begin(Learner(lambda: nn.Linear(1, 2)), data, Key(0))
    return data, replace(
        state,
        losses_CSE=torch.tensor([losses_SE]),
        mixture_CS=torch.tensor([mixture_S], dtype=torch.double),
        clusters_C=torch.tensor([2]),
    )


def test_posterior_and_shares_are_bayes_rule():
    p_SE = torch.tensor([[0.5, 0.1, 1.0], [0.25, 0.4, 1.0]])
    data, state = small_state((-p_SE.log()).tolist(), [0.5, 0.5])
    r_CSE = posterior(state.mixture_CS, state.losses_CSE, data)
    assert r_CSE[0, :, 0].tolist() == pytest.approx([2 / 3, 1 / 3])
    assert r_CSE[0, :, 1].tolist() == pytest.approx([0.2, 0.8])
    assert r_CSE[0, :, 2].tolist() == [0.0, 0.0], "there is no third example"
    mean = np.array([(2 / 3 + 0.2) / 2, (1 / 3 + 0.8) / 2]) + 0.001
    found = update_mixture(Learner(lambda: nn.Linear(1, 2)), state, r_CSE, data, Key(0))
    assert found.mixture_CS[0].tolist() == pytest.approx((mean / mean.sum()).tolist())


def test_refit_is_em_on_the_mixture_alone():
    p_SE = torch.tensor([[0.5, 0.1, 1.0], [0.25, 0.4, 1.0]])
    data, state = small_state((-p_SE.log()).tolist(), [0.5, 0.5])
    learner = Learner(lambda: nn.Linear(1, 2))
    once = refit(learner, state, data, 1, Key(0))
    r_CSE = posterior(state.mixture_CS, state.losses_CSE, data)
    u_S = update_mixture(learner, state, r_CSE, data, Key(0)).mixture_CS[0].tolist()
    assert once.mixture_CS[0].tolist() == pytest.approx(u_S)
    likelihood = [u_S[0] * 0.5 + u_S[1] * 0.25, u_S[0] * 0.1 + u_S[1] * 0.4]
    assert once.loss_C.item() == pytest.approx(-np.log(likelihood).mean())
    assert refit(learner, once, data, 4, Key(0)).loss_C < once.loss_C, "each step gains"


def test_em_finds_the_share_of_a_labelling_that_is_known():
    """Each cluster explains its own examples with 0.9 and the others with 0.1.

    With a share u of the first cluster, its 14 of 20 examples have 0.1 + 0.8 u each, and the rest
    0.9 - 0.8 u. So the likelihood is largest where 0.1 + 0.8 u = 14 / 20.
    """
    one_S, is_first_E = torch.tensor([0.1, 0.9]), torch.arange(20) < 14
    p_SE = torch.stack([one_S[is_first_E.long()], one_S[(~is_first_E).long()]])
    data = Block([0], 1, [torch.zeros(20, 1)], [torch.zeros(20, dtype=torch.long)], 20)
    learner = Learner(lambda: nn.Linear(1, 2))
    state = replace(
        FedSPDSplit(clusters=2).begin(learner, data, Key(0)),
        losses_CSE=-p_SE.log()[None],
        mixture_CS=torch.tensor([[0.5, 0.5]], dtype=torch.double),
        clusters_C=torch.tensor([2]),
    )
    found = refit(learner, state, data, 50, Key(0)).mixture_CS[0, 0]
    assert float(found) == pytest.approx((14 / 20 - 0.1) / 0.8, abs=0.002)


def test_heads_train_slower_than_the_body():
    learner = Learner(lambda: nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 2)))
    offsets, body, V = rate_factors(learner.split(2)).split([16, 6, 8])
    assert (offsets.unique().item(), body.unique().item(), V.unique().item()) == (0.5, 1, 0.25)


def test_return_is_chosen_only_if_its_gain_exceeds_its_standard_error():
    one = [torch.zeros(4, 1)] * 3
    data = Block(range(3), 3, one, [torch.zeros(4)] * 3, 4)
    gain_ACE = torch.zeros(5, 3, 4)
    gain_ACE[2, 0] = torch.tensor([1.0, 1.0, 1.0, 0.9])  # clear
    gain_ACE[4, 1] = torch.tensor([4.0, -3.0, 0.0, 0.0])  # a mean of 0.25, an error of 1.4
    assert choose_return(gain_ACE, data).tolist() == [0.5, 0.0, 0.0]


# ---- a client's model by itself


@pytest.mark.parametrize("clusters", [1, 2])
def test_personal_model_is_a_module_that_predicts_as_the_method_does(clusters):
    x, y, truth = two_labellings(4, 20, np.arange(4) % 2)
    algorithm = FedSPDSplit(clusters=clusters, warmup=1)
    engine = simulate(algorithm, x, y, truth, 3, Graph.complete(4))
    learner, state = engine.plan.learner, state_of(engine)
    expected = algorithm.predict(learner, state, x)
    for c in range(4):
        module = algorithm.personal_model(learner, rows_of(state, [c]))
        with torch.no_grad():
            assert torch.allclose(module(x[c]), expected[c], atol=1e-6)
        assert isinstance(module, nn.Module)
        assert not module.training


def test_run_that_is_too_short_to_split_says_so():
    assert FedSPDSplit().warnings(4) == []
    (sentence,) = FedSPDSplit().warnings(3)
    assert sentence.startswith("The run is not split: rounds = 3 is not above")


def test_continued_run_says_which_rounds_differ_from_a_longer_one():
    algorithm = FedSPDSplit()
    assert FedSPDSplit(clusters=1).continuation_warnings(10, 20, bodies=1) == []
    assert algorithm.continuation_warnings(10, 20, bodies=1) == [], "all clusters share one body"
    (sentence,) = algorithm.continuation_warnings(10, 20, bodies=2)
    assert sentence.startswith("Rounds 6 to 10 averaged bodies by cluster")
    assert algorithm.continuation_warnings(5, 6, bodies=2) == [], "both begin after the warm-up"
    (sentence,) = algorithm.continuation_warnings(3, 20, bodies=1)
    assert "so that it is not split" in sentence
