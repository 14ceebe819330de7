"""The exchanges of every method: known numbers of models, and a ledger that counts every byte."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch

from fedspd.algorithms import populations
from fedspd.core.exchange import Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.ledger import CLUSTER_ID_BYTES, HEADER_BYTES
from fedspd.engines.simulator import Simulator
from fedspd.runtime.block_runner import BlockRunner
from fedspd.testing import StrictEngine
from fedspd.testing.subject import CLASSES, ROUNDS, path_graph, run, run_rounds

ENGINES = {"in-process": Simulator, "2 workers": partial(Simulator, workers=2)}
AVERAGING = ("fedavg", "fedem", "fedper", "fedrep", "pfedme", "ditto")  # with all neighbours

# On the path: 4 edges, both ways, S = 2. On the star: 5 clients, up and down.
SENT_ON_A_PATH = {
    "local": 0,
    "fedavg": 8,
    "fedem": 16,
    "fedsoft": 8,
    "ifca": 8,
    "facade": 16,  # a body and a head each
    "fedper": 8,
    "fedrep": 8,
    "pfedme": 8,
    "ditto": 8,
}
SENT_ON_A_STAR = {
    "local": 0,
    "fedavg": 10,
    "fedem": 20,
    "fedper": 10,
    "fedrep": 10,
    "pfedme": 10,
    "ditto": 10,
}


def complete_graph(server: bool = False) -> Graph:
    """Five clients whose means are weighted as a server's are."""
    edges = [(i, j) for i in range(5) for j in range(i)]
    return Graph.from_edges(5, edges, "examples", server)


def graph_of(server: bool) -> Graph:
    return complete_graph(server=True) if server else path_graph()


@pytest.fixture(params=ENGINES)
def make_engine(request):
    engines = []

    def make(plan):
        engines.append(ENGINES[request.param](plan))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("server", [False, True])
def test_ledger_counts_every_transfer(subject, server):
    graph, plan = graph_of(server), subject.plan(server=server)
    with (
        closing(StrictEngine(plan)) as strict,
        closing(Simulator(plan)) as alone,
        closing(Simulator(plan, workers=2)) as divided,
    ):
        for engine in (strict, alone, divided):
            engine.begin()
        for t in range(1, 4):
            expected = strict.round(t, graph)
            announcements = [5 if server else 8] * len(expected)
            for engine in (alone, divided):
                traffic = engine.round(t, graph).traffic
                counted = [sorted(map(tuple, sent.transfer_T3.tolist())) for sent in traffic]
                assert counted == [sorted(sent) for sent in expected]
                assert [sent.announcements for sent in traffic] == announcements


@pytest.mark.parametrize(("server", "known"), [(False, SENT_ON_A_PATH), (True, SENT_ON_A_STAR)])
def test_round_sends_the_known_number_of_models(subject, method, server, known):
    if method == "fedspd-split":
        return  # see below: what it sends depends on the round
    engine = StrictEngine(subject.plan(server=server))
    engine.begin()
    for t in (1, 3):
        sent = sum(len(exchange) for exchange in engine.round(t, graph_of(server)))
        assert sent == known.get(method, sent)
        assert method in known or 0 < sent <= (25 if server else 8)


@pytest.mark.parametrize("server", [False, True])
def test_split_sends_one_model_and_then_body_and_heads(subjects, server):
    """With w = 1 and S = 2, a round after the split sends a body, V and D_2 over every link.

    In the second half of the rounds, a body goes only to neighbours that picked the same cluster.
    """
    plan, graph = subjects["fedspd-split"].plan(server=server), graph_of(server)
    engine = Simulator(replace(plan, train=replace(plan.train, rounds=8)))
    engine.begin()
    links, P, Q = 10 if server else 8, 76, 21  # up and down; 6 x 3 weights and 3 biases
    found = []
    for t in range(1, 6):
        sent = engine.round(t, graph).traffic
        found.append([(s.is_model, len(s.transfer_T3), s.model_bytes // 4) for s in sent])
    (first, *search), *shared, picked = found
    assert first == (True, links, P)
    assert not any(is_model for is_model, _, _ in search)
    sizes, exchanges = [size for _, _, size in search], 1 if server else populations.EXCHANGES
    assert sizes.count(Q + 6 + 1) == exchanges  # the means of an update, with its moments
    assert sizes.count(Q - 3) == 5 * exchanges  # five iterations of one direction, without biases
    assert sizes.count(Q + 2) == exchanges  # the slope, with its moments
    assert shared == [[(True, links, P - Q), (False, 2 * links, Q)]] * 3
    (_, bodies, _), heads = picked
    assert 0 <= bodies <= links
    assert heads == (False, 2 * links, Q)


@pytest.mark.parametrize("clusters", [0, 2])
@pytest.mark.parametrize("server", [False, True])
def test_mixture_and_prior_of_split_never_travel(subjects, server, clusters):
    """No number of them is among those that an exchange offers, or that newcomers get."""
    plan, graph = subjects["fedspd-split"].plan(server=server, clusters=clusters), graph_of(server)
    runner, secrets, sent = BlockRunner(plan), [], []
    runner.begin()
    for t in range(1, ROUNDS + 1):
        announced = runner.start_round(t)
        while announced is not None:
            sent.append(runner.exchange.model_CKP.flatten())
            announced = runner.advance(Neighbourhood.of(graph, range(5), runner.exchange))
        log_prior_CK = runner.state.log_prior_CK
        secrets += [runner.state.mixture_CS, log_prior_CK, log_prior_CK.exp() / CLASSES]
    runner.share()
    sent.append(runner.exchange.model_CKP.flatten())
    hidden = torch.cat([table.flatten().float() for table in secrets]).unique()
    everyday = torch.tensor([0, 1 / 2, 1 / CLASSES, 1])  # that other numbers have, too
    hidden = hidden[~torch.isin(hidden, everyday)]
    assert len(hidden) > (40 if clusters else 15)
    assert not torch.isin(hidden, torch.cat(sent).float()).any()


def test_every_exchange_carries_models_of_the_known_size(subject, method):
    """FedSoft's server first asks for S numbers of each client, with S = 2.

    FACADE sends the body, then a head; FedPer and FedRep send the body alone.
    """
    plan = subject.plan(server=True)
    traffic = run_rounds(Simulator(plan), graph_of(server=True), 1, 0)
    traffic.begin()
    report = traffic.round(1, graph_of(server=True))
    sizes = [(sent.is_model, sent.model_bytes) for sent in report.traffic]
    model = (True, 4 * plan.learner.size)
    if method == "fedspd-split":  # the search for populations follows the model
        assert sizes[0] == model
        assert not any(is_model for is_model, _ in sizes[1:])
        return
    head = 4 * (6 * 3 + 3)
    body = (True, 4 * plan.learner.size - head)
    known = {
        "fedsoft": [(False, 8), model],
        "facade": [body, (False, head)],
        "fedper": [body],
        "fedrep": [body],
        "local": [],
    }
    assert sizes == known.get(method, [model])


def test_ledger_bytes_equal_those_counted_by_hand(subjects, make_engine):
    """FedEM with S = 2 on the path: on each of 8 directed edges an announcement and 2 models.

    By multicast, 5 clients send 2 models each.
    """
    engine = make_engine(subjects["fedem"].plan())
    engine.begin()
    (traffic,) = engine.round(1, path_graph()).traffic
    # Dense, BatchNorm with its statistics and counter, dense.
    size = (4 * 6 + 6) + (4 * 6 + 1) + (6 * 3 + 3)
    announced = 8 * (HEADER_BYTES + 4 * CLUSTER_ID_BYTES)
    assert traffic.point_to_point_bytes == announced + 16 * 4 * size
    assert traffic.multicast_bytes == announced + 10 * 4 * size


@pytest.mark.parametrize("method", AVERAGING)
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_news_reaches_every_client_within_reach(subjects, method, rounds):
    """Without client 4, everyone within as many hops as rounds passed ends in another state."""
    plan = subjects[method].plan()
    isolated = Graph.from_edges(5, [(0, 1), (1, 2), (2, 3)])
    one, two = (
        run_rounds(StrictEngine(plan), graph, 1, rounds).digests()
        for graph in (path_graph(), isolated)
    )
    assert {i for i in range(5) if one[i] != two[i]} == {i for i in range(5) if 4 - i <= rounds}


@pytest.mark.parametrize("task", ["classes", "regression"])
def test_star_equals_the_complete_graph_with_a_servers_weights(subject, method, task):
    """FedSoft's server picks its voters, which no graph does.

    The two agree where it picks all clients for the only cluster. FedSPD aligns labels on a graph
    alone. FACADE's server has one copy of every head, where a client on a graph has its own.
    """
    options = {
        "fedsoft": {"clusters": 1, "select": 5},
        "fedspd": {"align_every": 0},
        "facade": {"clusters": 1},
    }
    digests = []
    for server in (False, True):
        plan = subject.plan(task, server=server, **options.get(method, {}))
        plan = replace(plan, train=replace(plan.train, diameter=1))
        digests.append(run(StrictEngine(plan), complete_graph(server), last=3))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    "method",
    ["fedavg", "fedem", "fedsoft", "ifca", "facade", "fedper", "fedrep", "pfedme", "ditto"],
)
def test_star_gives_all_clients_the_same_shared_models(subjects, method):
    """Not so with FedSPD, where a client takes only the mean of the cluster that it trained."""
    engine = StrictEngine(subjects[method].plan(server=True))
    run_rounds(engine, complete_graph(server=True), 1, 1)
    first, *others = (runner.plan.algorithm.share(runner.state)[1] for runner in engine.runners)
    assert all(torch.equal(models, first) for models in others)


def test_clients_share_the_known_number_of_models(subject, method):
    engine = run_rounds(StrictEngine(subject.plan(), [range(5)]), path_graph(), 1, 2)
    cluster_CK, _ = subject.algorithm().share(engine.runners[0].state)
    one = ("fedspd-split", "fedavg", "fedper", "fedrep", "pfedme", "ditto")
    K = {"local": 0, **dict.fromkeys(one, 1)}.get(method, 2)
    assert cluster_CK.tolist() == [list(range(K))] * 5
