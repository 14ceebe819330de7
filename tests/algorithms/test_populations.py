"""Directions, corners and means by gossip against the exact ones, with all clients at hand.

Shapes: N clients, F folds, M directions, Q length of a vector, S clusters.
"""

import networkx as nx
import numpy as np
import pytest
import torch

from fedspd.algorithms import populations
from fedspd.algorithms.populations import (
    LEAST_RATIO,
    centre_folds,
    choose_clusters,
    coordinates,
    find_corners,
    find_directions,
    find_slopes,
    first_mixture,
    largest_gap,
    mean_by_cluster,
    network_largest,
    network_mean,
)
from fedspd.core.block import Block
from fedspd.core.exchange import Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.ledger import NO_CLUSTER

KEY = Key(0, 3).of("directions")


def graph_of(n: int, degree: int, seed: int = 0) -> Graph:
    edges = nx.random_regular_graph(degree, n, seed=seed).edges
    return Graph.from_edges(n, list(edges))


def diameter(graph: Graph) -> int:
    found = nx.Graph(graph.edges().tolist())
    return max(nx.diameter(found.subgraph(part)) for part in nx.connected_components(found))


def block(graph: Graph, clients: range | None = None) -> Block:
    clients = clients or range(graph.clients)
    one = [torch.zeros(1, 1)] * len(clients)
    hops = 1 if graph.is_complete else diameter(graph)
    return Block(clients, graph.clients, one, one, 1, rounds=10, diameter=hops)


def drive(generators, graph: Graph, blocks):
    """Run the generators of some blocks, which meet at every exchange; return their results."""
    asked, results = [next(generator) for generator in generators], [None] * len(generators)
    while any(result is None for result in results):
        stacked = [torch.cat([getattr(one, name) for one in asked]) for name in
                   ("cluster_CK", "model_CKP", "weight_CK", "want_CM")]  # fmt: skip
        notes = [one.note_C for one in asked]
        offers = type(asked[0])(*stacked, None if notes[0] is None else torch.cat(notes))
        for b, (generator, own) in enumerate(zip(generators, blocks, strict=True)):
            try:
                asked[b] = generator.send(Neighbourhood.of(graph, own.clients, offers))
            except StopIteration as end:
                results[b] = end.value
    return results


def solve(make, graph: Graph):
    """Return the result of one generator over all clients."""
    data = block(graph)
    return drive([make(data)], graph, [data])[0]


def nobody(data: Block) -> torch.Tensor:
    """No client was left alone."""
    return torch.zeros(len(data), dtype=torch.bool)


def heads(n: int, populations: int, seed: int = 0, noise: float = 0.1, Q: int = 40, folds: int = 3):
    """Fold vectors of clients that each belong to one of several populations, minus their mean."""
    rng = np.random.default_rng(seed)
    center_SQ = rng.normal(size=(populations, Q))
    own_NQ = center_SQ[np.arange(n) % populations]
    d_NFQ = own_NQ[:, None] + noise * rng.normal(size=(n, folds, Q))
    return torch.tensor(d_NFQ - d_NFQ.mean((0, 1)))


def exact_operator(d_NFQ):
    """The mean over clients and pairs of different folds of d_f d_g', each of length 1."""
    unit_NFQ = d_NFQ / d_NFQ.norm(dim=2, keepdim=True)
    F, total_NQ = unit_NFQ.shape[1], unit_NFQ.sum(1)
    all_pairs, same_fold = total_NQ.T @ total_NQ, torch.einsum("nfq,nfp->qp", unit_NFQ, unit_NFQ)
    return (all_pairs - same_fold) / (len(d_NFQ) * F * (F - 1))


def exact_directions(d_NFQ, count: int):
    return torch.linalg.eigh(exact_operator(d_NFQ))[1].flip(1)[:, :count].T


def largest_angle(V_MQ, W_MQ) -> float:
    """Return the largest angle between two subspaces, in degrees."""
    cosines = torch.linalg.svdvals(V_MQ.double() @ W_MQ.double().T)
    return float(torch.rad2deg(cosines.min().clamp(max=1).arccos()))


def test_network_mean_is_exact_on_a_complete_graph():
    x = torch.arange(12.0).reshape(6, 2)[:, None]
    found = solve(lambda data: network_mean(x, data), Graph.complete(6))
    assert torch.allclose(found, x.mean(0).expand_as(x))


@pytest.mark.parametrize(("n", "degree"), [(20, 6), (100, 6), (100, 3)])
def test_network_mean_of_a_regular_graph_is_near_the_mean(n, degree):
    x = torch.randn(n, 1, 5, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    graph = graph_of(n, degree)
    found = solve(lambda data: network_mean(x, data), graph)
    spread = (found - x.mean(0)).norm() / (x - x.mean(0)).norm()
    bound = 1 / np.cosh(populations.EXCHANGES * np.arccosh(1 / populations.LAMBDA))
    assert spread < bound < 0.065  # of the Chebyshev polynomial, for eigenvalues up to 0.96


def test_network_mean_beats_as_many_plain_exchanges():
    x = torch.randn(60, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    graph = Graph.from_edges(60, [(i, (i + k) % 60) for i in range(60) for k in (1, 2, 7)])
    found = solve(lambda data: network_mean(x, data), graph)
    W = torch.zeros(60, 60, dtype=torch.double)
    for i in range(60):
        W[i, graph.closed(i)] = 1 / len(graph.closed(i))
    plain = torch.linalg.matrix_power(W, 12) @ x[:, 0]
    assert (found[:, 0] - x[:, 0].mean(0)).norm() < 0.5 * (plain - x[:, 0].mean(0)).norm()


def test_network_largest_reaches_every_client_and_prefers_the_lowest_id():
    ring = Graph.from_edges(9, [(i, (i + 1) % 9) for i in range(9)])
    offer = torch.stack([torch.tensor([1.0, 5, 2, 5, 0, 0, 5, 3, 1]), torch.arange(9.0)], 1)
    found = solve(lambda data: network_largest(offer, data), ring)
    assert found.tolist() == [[5.0, 1.0]] * 9


def test_directions_converge_to_the_eigenvectors_on_a_complete_graph(monkeypatch):
    monkeypatch.setattr(populations, "ITERATIONS", 25)
    d_NFQ = heads(20, populations=3)
    value_Q = torch.linalg.eigvalsh(exact_operator(d_NFQ)).flip(0)
    assert value_Q[1] > 2 * value_Q[2:].abs().max(), "there is a gap after two directions"
    V_NMQ, _ = solve(lambda data: find_directions(d_NFQ, 2, data, KEY), Graph.complete(20))
    assert largest_angle(V_NMQ[0], exact_directions(d_NFQ, 2)) < 1
    assert torch.allclose(V_NMQ, V_NMQ[:1].expand_as(V_NMQ))


@pytest.mark.parametrize("degree", [3, 6])
def test_directions_come_nearer_with_every_iteration(monkeypatch, degree):
    d_NFQ, graph, angles = heads(40, populations=3, noise=2.5), graph_of(40, degree), []
    for iterations in (1, 3, 9):
        monkeypatch.setattr(populations, "ITERATIONS", iterations)
        V_NMQ, _ = solve(lambda data: find_directions(d_NFQ, 2, data, KEY), graph)
        angles.append(max(largest_angle(V, exact_directions(d_NFQ, 2)) for V in V_NMQ))
    assert angles[0] > angles[1] > angles[2]
    assert angles[2] < 15
    assert (V_NMQ * V_NMQ[:1]).sum(2).min() > 0.95, "signs and order agree across clients"


def test_directions_do_not_depend_on_the_blocks():
    d_NFQ, graph = heads(12, populations=2).float(), graph_of(12, 3)
    blocks = [block(graph, clients) for clients in (range(5), range(5, 6), range(6, 12))]
    parts = drive(
        [
            find_directions(d_NFQ[own.clients[0] : own.clients[-1] + 1], 3, own, KEY)
            for own in blocks
        ],
        graph,
        blocks,
    )
    whole, _ = solve(lambda data: find_directions(d_NFQ, 3, data, KEY), graph)
    assert torch.equal(torch.cat([V_CMQ for V_CMQ, _ in parts]), whole)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_clusters_are_as_many_as_populations(count):
    d_NFQ = heads(40, count, noise=0.3) if count > 1 else heads(40, 1, folds=4, Q=400)
    graph = graph_of(40, 6)

    def search(data):
        _, size_NM = yield from find_directions(d_NFQ, 4, data, KEY)
        return (yield from choose_clusters(size_NM, data, nobody(data))), size_NM

    clusters_N, size_NM = solve(search, graph)
    assert clusters_N.tolist() == [count] * 40
    clusters_1, ratio_1 = largest_gap(size_NM[:1], 40)
    assert clusters_1.tolist() == [count]
    assert (float(ratio_1[0]) >= LEAST_RATIO) == (count > 1)


def test_two_clients_are_never_two_populations():
    d_NFQ = torch.tensor([[1.0, 2.0, 0.0], [-1.0, -2.0, 0.0]])[:, None].repeat(1, 2, 1)

    def search(data):
        _, size_NM = yield from find_directions(d_NFQ, 3, data, KEY)
        return (yield from choose_clusters(size_NM, data, nobody(data))), size_NM

    clusters_N, size_NM = solve(search, Graph.from_edges(2, [(0, 1)]))
    assert clusters_N.tolist() == [1, 1]
    assert largest_gap(size_NM, 2)[1].tolist() == [0, 0]  # one eigenvalue has no ratio


def successive_projection(z_NM, S: int):
    """The S most extreme points, with all points at hand."""
    scale = z_NM.norm(dim=1).mean()
    rest = torch.cat([z_NM, torch.full((len(z_NM), 1), float(scale)).to(z_NM)], 1)
    chosen = []
    for _ in range(S):
        best = int(rest.norm(dim=1).argmax())
        chosen.append(best)
        along = rest[best] / rest[best].norm()
        rest = rest - (rest @ along)[:, None] * along
    return z_NM[chosen] - z_NM[chosen].mean(0)


def test_corners_are_those_of_an_exact_successive_projection():
    rng = np.random.default_rng(0)
    corner_SM = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 3.0]])
    z_NM = torch.tensor(rng.dirichlet([1, 1, 1], 30) @ corner_SM)
    z_NM = z_NM - z_NM.mean(0)
    clusters = torch.full((30,), 3)
    search = lambda data: find_corners(z_NM, clusters, 3, data, nobody(data))  # noqa: E731
    found, _ = solve(search, Graph.complete(30))
    assert torch.allclose(found[0], successive_projection(z_NM, 3))
    assert torch.equal(found, found[:1].expand_as(found))


@pytest.mark.parametrize("rule", ["median", "trimmed", "clipped"])
@pytest.mark.parametrize("liars", [[7], [3, 8]])
def test_corner_needs_a_second_client_near_it_under_a_robust_rule(rule, liars):
    """Liars claim huge coordinates, each its own; the populations are at -1 and 1."""
    z_NM = torch.where(torch.arange(12) % 2 == 0, 1.0, -1.0)[:, None].double()
    z_NM = z_NM + 0.01 * torch.arange(12)[:, None]
    z_NM[liars, 0] = torch.tensor([1e6, -1e7])[: len(liars)].double()
    clusters = torch.full((12,), 2)
    ring = Graph.from_edges(12, [(i, (i + k) % 12) for i in range(12) for k in (1, 2, 3)], rule)
    found, _ = solve(lambda data: find_corners(z_NM, clusters, 2, data, nobody(data)), ring)
    honest = [i for i in range(12) if i not in liars]
    assert torch.equal(found[honest], found[honest[:1]].expand(len(honest), -1, -1))
    assert sorted(found[0].flatten().round().tolist()) == [-1.0, 1.0]


def test_clients_that_were_left_alone_are_no_corners_and_decide_nothing():
    z_NM = torch.tensor([[50.0], [50.0], [1.0], [1.1], [-1.0], [-1.1]]).double()
    alone_N, two = torch.arange(6) < 2, torch.full((6,), 2)
    everyone = Graph.complete(6, "median")
    found, _ = solve(lambda data: find_corners(z_NM, two, 2, data, alone_N), everyone)
    assert sorted(found[0].flatten().round().tolist()) == [-1.0, 1.0]
    size_NM = torch.tensor([[9.0, 9, 9, 1]] * 2 + [[9.0, 1, 1, 1]] * 4)
    for alone, S in ((alone_N, 2), (alone_N & False, 4)):
        chosen = solve(lambda data: choose_clusters(size_NM, data, alone), everyone)  # noqa: B023
        assert chosen.tolist() == [S] * 6


def test_mean_by_cluster_reaches_clients_far_from_it_and_outvotes_a_liar():
    x_N, ring = torch.tensor([1.0, 1, 1, 1, 9, 9, 9, 9, 1, 9, -1e6, 1]), [1, 2, 3]
    edges = [(i, (i + k) % 12) for i in range(12) for k in ring]
    cluster_N = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, NO_CLUSTER])
    graph = Graph.from_edges(12, edges, "median")
    search = lambda data: mean_by_cluster(x_N[:, None], cluster_N, 3, data)  # noqa: E731
    mean_NSX, is_found_NS1 = solve(search, graph)
    assert mean_NSX[..., 0].tolist() == [[1, 9, 0]] * 12
    assert is_found_NS1[..., 0].tolist() == [[True, True, False]] * 12


def test_corner_without_a_second_client_is_found_only_without_a_robust_rule():
    z_NM = torch.tensor([[0.0], [0.1], [0.2], [0.1], [0.0], [50.0]]).double()
    for rule, spread in (("uniform", 50.0), ("median", 0.2)):
        found, _ = solve(
            lambda data: find_corners(z_NM, torch.full((6,), 2), 2, data, nobody(data)),
            Graph.complete(6, rule),
        )
        assert float(found[0].max() - found[0].min()) == pytest.approx(spread, abs=0.2)


def test_first_mixture_prefers_the_nearest_corner_and_uses_no_other_cluster():
    z_NM = torch.tensor([[-1.0], [1.0], [0.9], [0.0]], dtype=torch.double)
    clusters = torch.full((4,), 2)

    def search(data):
        corner_NSM, _ = yield from find_corners(z_NM, clusters, 4, data, nobody(data))
        return (yield from first_mixture(z_NM, corner_NSM, clusters, data))

    u_NS = solve(search, Graph.complete(4))
    assert u_NS[:, 2:].abs().max() == 0
    assert torch.allclose(u_NS.sum(1), torch.ones(4, dtype=torch.double))
    assert u_NS[3, 0] == pytest.approx(0.5)
    # distances to the corners -1 and 1: 0, 4; 4, 0; 3.61, 0.01; 1, 1, with a mean of 13.62 / 8
    scale = 13.62 / 8
    assert u_NS[0, 1] / u_NS[0, 0] in (
        pytest.approx(np.exp(-8 / scale)),
        pytest.approx(np.exp(8 / scale)),
    )


def test_all_vectors_zero_find_nothing():
    d_NFQ, graph = torch.zeros(6, 2, 5), graph_of(6, 3)

    def search(data):
        V_NMQ, size_NM = yield from find_directions(d_NFQ, 2, data, KEY)
        z_NM = coordinates(V_NMQ, d_NFQ)
        clusters = yield from choose_clusters(size_NM, data, nobody(data))
        two = torch.full((6,), 2)
        corner_NSM, _ = yield from find_corners(z_NM, two, 2, data, nobody(data))
        return clusters, corner_NSM, (yield from first_mixture(z_NM, corner_NSM, two, data))

    clusters, corner_NSM, u_NS = solve(search, graph)
    assert clusters.tolist() == [1] * 6
    assert not corner_NSM.any()
    assert torch.allclose(u_NS, torch.full((6, 2), 0.5, dtype=torch.double))


def test_each_part_of_a_disconnected_graph_searches_by_itself():
    edges = [(i, j) for part in (range(6), range(6, 12)) for i in part for j in part if i < j]
    graph = Graph.from_edges(12, edges)
    d_NFQ = torch.cat([heads(6, 2, seed=1), heads(6, 2, seed=2)])
    V_NMQ, _ = solve(lambda data: find_directions(d_NFQ, 1, data, KEY), graph)
    for rows in (range(6), range(6, 12)):
        assert largest_angle(V_NMQ[rows[0]], exact_directions(d_NFQ[list(rows)], 1)) < 2
    assert largest_angle(V_NMQ[0], V_NMQ[6]) > 20


def test_folds_of_a_client_that_agree_in_nothing_are_no_direction():
    """Chance differs between the folds of a client: its eigenvalue is near 0, not 1 / N."""
    rng, one = np.random.default_rng(0), Graph.complete(30)
    chance_NFQ = torch.tensor(rng.normal(size=(30, 4, 400)))
    _, size_NM = solve(lambda data: find_directions(chance_NFQ, 1, data, KEY), one)
    plain = torch.linalg.svdvals(chance_NFQ[:, 0] / chance_NFQ[:, 0].norm(dim=1, keepdim=True))
    assert float(size_NM[0, 0]) < 0.02 < float(plain[0] ** 2 / 30)


def test_sizes_are_the_eigenvalues_where_directions_have_converged():
    d_NFQ = heads(20, populations=3, noise=0.1)
    _, size_NM = solve(lambda data: find_directions(d_NFQ, 2, data, KEY), Graph.complete(20))
    V_MQ, unit_NFQ = exact_directions(d_NFQ, 2), d_NFQ / d_NFQ.norm(dim=2, keepdim=True)
    along_NFM, F = unit_NFQ @ V_MQ.T, d_NFQ.shape[1]
    pairs_NM = along_NFM.sum(1).square() - along_NFM.square().sum(1)
    exact_M = pairs_NM.mean(0) / (F * (F - 1))
    assert size_NM[0].sort().values.tolist() == pytest.approx(exact_M.sort().values.tolist(), 0.02)


def updates_of(label_NE, h_NEB, fold_E, K):
    """How a softmax head of zeros moves on folds of examples, to first order: weight and bias."""
    g_NEK = torch.nn.functional.one_hot(label_NE, K).double() - 1 / K
    folds = [fold_E == f for f in range(int(fold_E.max()) + 1)]
    weight = [torch.einsum("nek,neb->nkb", g_NEK[:, own], h_NEB[:, own]) for own in folds]
    return torch.stack(weight, 1), torch.stack([g_NEK[:, own].sum(1) for own in folds], 1)


def test_centred_folds_are_products_of_labels_with_centred_features():
    """Features that have nothing to do with the labels leave what a centred product leaves."""
    rng, K = np.random.default_rng(0), 4
    label_NE = torch.tensor(rng.integers(K, size=(60, 40)))
    h_NEB = torch.tensor(rng.normal(size=(60, 40, 5))) + torch.arange(5.0)
    fold_E, is_used_NF = torch.arange(40) % 2, torch.ones(60, 2, dtype=torch.bool)
    update = updates_of(label_NE, h_NEB, fold_E, K)
    d_NFQ = solve(lambda data: centre_folds(*update, is_used_NF, data), Graph.complete(60))
    product_NFKB, _ = updates_of(label_NE, h_NEB - h_NEB.mean((0, 1)), fold_E, K)
    own_NFQ = product_NFKB.flatten(2)
    difference = d_NFQ - (own_NFQ - own_NFQ.mean((0, 1)))
    assert difference.norm() < 0.1 * own_NFQ.norm()
    assert own_NFQ.norm() < 0.6 * update[0].norm(), "the labels' counts were the larger part"


def test_centred_folds_are_free_of_how_often_labels_come():
    """Clients that differ in label counts alone, and have no features but a constant one."""
    bias_NFK = torch.tensor(np.random.default_rng(0).normal(size=(5, 2, 3)))
    weight_NFKB = bias_NFK[..., None] * torch.tensor([2.0, 7.0])
    is_used_NF = torch.tensor([[True, True]] * 4 + [[True, False]])
    search = lambda data: centre_folds(weight_NFKB, bias_NFK, is_used_NF, data)  # noqa: E731
    d_NFQ = solve(search, Graph.complete(5))
    assert torch.allclose(d_NFQ, torch.zeros_like(d_NFQ), atol=1e-12)
    without_bias = lambda data: centre_folds(  # noqa: E731
        weight_NFKB, torch.zeros_like(bias_NFK), is_used_NF, data
    )
    d_NFQ = solve(without_bias, Graph.complete(5))
    assert d_NFQ[:4].any()
    assert not d_NFQ[4, 1].any(), "a fold without examples has no vector"


def test_coordinates_are_a_mean_over_the_folds_with_examples():
    V_NMQ = torch.eye(2, 3)[None].repeat(2, 1, 1)
    d_NFQ = torch.tensor([[[1.0, 2, 9], [3, 6, 9]], [[5, 7, 9], [0, 0, 0]]])
    assert coordinates(V_NMQ, d_NFQ).tolist() == [[2.0, 4.0], [5.0, 7.0]]


def test_slopes_are_those_of_a_least_squares_fit():
    rng = np.random.default_rng(0)
    z_NM, common_Q = torch.tensor(rng.normal(size=(30, 1))), torch.tensor(rng.normal(size=5))
    slope_Q = torch.tensor(0.01 * rng.normal(size=5))
    update_NQ = common_Q + z_NM * slope_Q
    labelling_N = torch.full((30,), 7)
    search = lambda data: find_slopes(update_NQ, z_NM, labelling_N, data)  # noqa: E731
    found = solve(search, Graph.complete(30))
    assert found.shape == (30, 1, 5)
    unit_NQ = update_NQ / update_NQ.norm(dim=1, keepdim=True)
    z_N = z_NM[:, 0] - z_NM.mean()
    fitted_Q = (z_N @ unit_NQ) / (z_N @ z_N) * update_NQ.norm(dim=1).mean()
    assert torch.allclose(found[0, 0], fitted_Q)
    across = slope_Q - (slope_Q @ common_Q) / (common_Q @ common_Q) * common_Q
    assert torch.nn.functional.cosine_similarity(found[0, 0], across, dim=0) > 0.99


def test_slopes_come_from_clients_of_the_same_labelling():
    z_NM = torch.tensor([[-1.0], [1.0], [-1.0], [1.0]], dtype=torch.double)
    first, second = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    update_NQ = torch.stack([-first, first, -second, second]).double()
    labelling_N = torch.tensor([5, 5, 8, 8])
    search = lambda data: find_slopes(update_NQ, z_NM, labelling_N, data)  # noqa: E731
    found = solve(search, Graph.complete(4))
    assert found[:, 0].tolist() == [[0, 1], [0, 1], [1, 0], [1, 0]]
