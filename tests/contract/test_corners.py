"""Networks that are as small, as lonely or as plain as can be, and newcomers. One of the five clients has a single example.

Shapes: C clients, K models shared by each, P numbers in a model.
"""

from dataclasses import fields

import numpy as np
import pytest
import torch

from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph


def predictions(used, x):
    """What every client of an engine that was driven by hand says of x."""
    return [
        runner.plan.algorithm.predict(runner.plan.learner, runner.state, [x])[0]
        for runner in used.runners
    ]


@pytest.mark.parametrize("clusters", [1, 2, 3])
def test_predictions_have_the_right_shape_before_between_and_after(lab, method, task, clusters):
    plan = lab.plan(method, task, clusters=clusters)
    used, x, shape = (
        lab.by_hand(plan),
        torch.randn(7, 4, generator=torch.Generator().manual_seed(2)),
        (7, 3 if task == "classes" else 2),
    )
    for step in (
        used.begin,
        lambda: used.round(1, lab.path()),
        lambda: used.round(2, lab.path()),
        lambda: used.finish(3),
    ):
        step()
        for output in predictions(used, x):
            assert output.shape == shape
            assert output.dtype == plan.learner.dtype
            assert output.isfinite().all()


@pytest.mark.parametrize("clusters", [1, 3])
def test_states_have_a_row_for_every_client_and_are_finite(lab, method, task, clusters):
    used = lab.run(
        lab.by_hand(lab.plan(method, task, clusters=clusters), [range(5)]), lab.path(), 3
    )
    used.finish(4)
    for field in fields(used.runners[0].state):
        table = getattr(used.runners[0].state, field.name)
        assert len(table) == 5, field.name
        assert table.isfinite().all(), field.name


@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("examples", [1, 8])
def test_a_network_of_one(lab, method, engine, server, examples):
    used = lab.run(
        engine(lab.plan(method, counts=[examples], server=server)),
        Graph.from_edges(1, [], "examples", server),
        2,
    )
    used.finish(3)
    assert np.isfinite(used.measure().test_loss_C).all()
    assert len(used.digests()) == 1


def test_a_client_that_never_hears_anybody_learns_as_if_it_were_alone(lab, method, engine):
    without_client_4, nobody = (
        Graph.from_edges(5, [(0, 1), (1, 2), (2, 3)]),
        Graph.from_edges(5, []),
    )
    among, alone = (
        lab.run(engine(lab.plan(method)), graph, 3) for graph in (without_client_4, nobody)
    )
    for used in (among, alone):
        used.finish(4)
    assert among.digests()[4] == alone.digests()[4]
    assert np.isfinite(among.measure().test_loss_C).all()


# ---- newcomers: client 5 hears 3 and 4; client 6 hears nobody

GRAPH = Graph.from_edges(7, [(0, 1), (1, 2), (2, 3), (3, 4), (5, 3), (5, 4)])


def joined(lab, plan, state, clients, spoil: int | None = None):
    """The state of some newcomers; one of the trained clients may share nonsense."""
    cluster_CK, model_CKP = plan.algorithm.share(state)
    if spoil is not None:
        model_CKP = model_CKP.clone()
        model_CKP[spoil] = torch.nan
    offers = Exchange(
        cluster_CK, model_CKP, plan.train.counts_C[:, None].expand_as(cluster_CK), cluster_CK
    )
    x, y = lab.examples("classes" if plan.learner.classifies else "regression", [6, 3], 3)
    rows = [client - 5 for client in clients]
    data = Block(clients, 7, [x[c] for c in rows], [y[c] for c in rows], 9)
    key = plan.key.at(3)
    state = plan.algorithm.join(
        plan.learner, data, Neighbourhood.of(GRAPH, clients, offers, np.arange(5)), key
    )
    return state, plan.algorithm.finish(plan.learner, state, data, key)


@pytest.fixture
def trained(lab, method, task):
    used = lab.run(lab.by_hand(lab.plan(method, task), [range(5)]), lab.path(), 2)
    return used.runners[0].plan, used.runners[0].state


def same(one, other) -> bool:
    return all(
        torch.equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
    )


def rows(state, c: int):
    return type(state)(
        **{field.name: getattr(state, field.name)[c : c + 1] for field in fields(state)}
    )


def test_clients_share_at_most_one_model_per_cluster(trained, method):
    plan, state = trained
    cluster_CK, model_CKP = plan.algorithm.share(state)
    K = {"local": 0, "fedavg": 1, "pfedme": 1, "ditto": 1}.get(method, 2)
    assert cluster_CK.tolist() == [list(range(K))] * 5
    assert model_CKP.shape == (5, K, plan.learner.size)
    assert model_CKP.dtype == plan.learner.dtype


def test_a_newcomer_gets_a_state_like_the_others_and_predicts(lab, trained):
    plan, old = trained
    new, finished = joined(lab, plan, old, [5, 6])
    for field in fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        assert (after.shape, after.dtype) == ((2, *before.shape[1:]), before.dtype), field.name
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(2))
    for state in (new, finished):
        for output in plan.algorithm.predict(plan.learner, state, [x, x]):
            assert output.shape == (7, 3 if plan.learner.classifies else 2)
            assert output.isfinite().all()


def test_a_newcomer_joins_alike_every_time_and_in_any_block(lab, trained):
    plan, old = trained
    together = joined(lab, plan, old, [5, 6])
    assert all(map(same, together, joined(lab, plan, old, [5, 6])))
    for c, client in enumerate((5, 6)):
        alone = joined(lab, plan, old, [client])
        assert all(same(one, rows(all_, c)) for one, all_ in zip(alone, together, strict=True))


def test_a_newcomer_hears_its_neighbours_and_nobody_else(lab, trained, method):
    plan, old = trained
    (first, _), (stranger, _), (neighbour, _) = (
        joined(lab, plan, old, [5], spoil) for spoil in (None, 1, 4)
    )
    assert same(first, stranger)
    assert same(first, neighbour) == (method == "local")
