"""What crosses an edge: only what is declared, only one hop in a round, and every byte of it is in the ledger.

That a client is told nothing else is the engine "by hand" of conftest.py, which gives the same bits as the others.
"""

from dataclasses import replace

import pytest
import torch

from fedspd.core.ledger import CLUSTER_ID_BYTES, HEADER_BYTES

SENT_ON_A_PATH = {
    "local": 0,
    "fedavg": 8,
    "fedem": 16,
    "fedsoft": 8,
    "ifca": 8,
    "pfedme": 8,
    "ditto": 8,
}  # 4 edges, both ways, S = 2
SENT_ON_A_STAR = {
    "local": 0,
    "fedavg": 10,
    "fedem": 20,
    "pfedme": 10,
    "ditto": 10,
}  # 5 clients, up and down


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_news_travels_one_hop_in_a_round(lab, method, rounds):
    """Other examples at client 4, the end of the path, are noticed by nobody who is further away than the rounds that passed."""
    plan = lab.plan(method)
    x, y = list(plan.train.x), list(plan.train.y)
    x[4], y[4] = x[4].flip(0) + 1, (y[4] + 1) % 3
    other = replace(plan, train=replace(plan.train, x=x, y=y))
    one, two = (lab.run(lab.by_hand(p), lab.path(), rounds).digests() for p in (plan, other))
    changed = {i for i in range(5) if one[i] != two[i]}
    assert 4 in changed
    assert changed <= {i for i in range(5) if 4 - i <= rounds}
    if method in (
        "fedavg",
        "fedem",
        "pfedme",
        "ditto",
    ):  # a neighbour of the others need not listen to the same cluster
        assert changed == {i for i in range(5) if 4 - i <= rounds}


def test_a_model_of_a_stranger_changes_nothing_in_the_round(lab, method):
    one, two = (lab.run(lab.by_hand(lab.plan(method)), lab.path(), 1) for _ in range(2))
    stranger = two.runners[4]
    tables = {
        name: table * 2 if name in ("model_CP", "centers_CSP", "personal_CP") else table
        for name, table in vars(stranger.state).items()
    }
    stranger.state = type(stranger.state)(**tables)
    for used in (one, two):
        used.round(2, lab.path())
    assert one.digests()[:3] == two.digests()[:3]
    assert one.digests()[4] != two.digests()[4]


@pytest.mark.parametrize("server", [False, True])
def test_the_ledger_counts_what_is_sent(lab, method, recording_engine, server):
    graph = lab.everyone(server=True) if server else lab.path()
    plan = lab.plan(method, server=server)
    counted, used = lab.by_hand(plan), recording_engine(plan)
    for one in (counted, used):
        one.begin()
    for t in range(1, 4):
        expected, traffic = counted.round(t, graph), used.round(t, graph).traffic
        assert [sorted(map(tuple, one.transfer_T3.tolist())) for one in traffic] == [
            sorted(sent) for sent in expected
        ]
        assert [one.announcements for one in traffic] == [5 if server else 8] * len(expected)


@pytest.mark.parametrize(("server", "known"), [(False, SENT_ON_A_PATH), (True, SENT_ON_A_STAR)])
def test_the_number_of_models_is_the_known_one(lab, method, server, known):
    graph = lab.everyone(server=True) if server else lab.path()
    used = lab.run(lab.by_hand(lab.plan(method, server=server)), graph, 0)
    for t in (1, 3):
        sent = sum(len(exchange) for exchange in used.round(t, graph))
        assert sent == known.get(method, sent)
        assert method in known or 0 < sent <= (25 if server else 8)


def test_bytes_by_hand(lab, recording_engine):
    """FedEM with S = 2 on the path: on each of 8 directed edges an announcement and 2 models; 5 clients multicast 2 each."""
    used = recording_engine(lab.plan("fedem"))
    used.begin()
    (traffic,) = used.round(1, lab.path()).traffic
    size = (
        (4 * 6 + 6) + (4 * 6 + 1) + (6 * 3 + 3)
    )  # dense, BatchNorm with its statistics and counter, dense
    assert traffic.point_to_point_bytes == 8 * (HEADER_BYTES + 4 * CLUSTER_ID_BYTES) + 16 * 4 * size
    assert traffic.multicast_bytes == 8 * (HEADER_BYTES + 4 * CLUSTER_ID_BYTES) + 10 * 4 * size


def test_a_star_is_the_complete_graph_with_the_weights_of_a_server(lab, method, task):
    """FedSoft's server picks its voters, which no graph does: the two agree where it picks everybody for the only cluster.
    FedSPD aligns labels on a graph alone."""
    options = {"fedsoft": {"clusters": 1, "select": 5}, "fedspd": {"align_every": 0}}.get(
        method, {}
    )
    digests = []
    for server in (False, True):
        used = lab.run(
            lab.by_hand(lab.plan(method, task, server=server, **options)),
            lab.everyone(server=server),
            3,
        )
        used.finish(4)
        digests.append(used.digests())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("method", ["fedavg", "fedem", "fedsoft", "ifca", "pfedme", "ditto"])
def test_on_a_star_everybody_ends_with_the_same_shared_models(lab, method, task):
    """Not so with FedSPD, where a client takes only the mean of the cluster that it trained."""
    used = lab.run(lab.by_hand(lab.plan(method, task, server=True)), lab.everyone(server=True), 1)
    first, *others = (runner.plan.algorithm.share(runner.state)[1] for runner in used.runners)
    assert all(torch.equal(models, first) for models in others)
