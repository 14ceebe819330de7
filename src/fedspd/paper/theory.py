"""Measure what the paper proves, on problems whose optimum and constants are known.

Two regressions and a logistic problem: every client has examples of both distributions, FedSPD runs
as it is, and after every round the theorems' quantities are computed beside their bounds.

Shapes: N clients, S = 2 clusters, E examples of a client, D features, P parameters of a model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspd.algorithms.fedspd import FedSPD, State, cluster_examples
from fedspd.core.block import Block
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.core.losses import Loss, cross_entropy, squared_error
from fedspd.core.metrics import CenterMoments
from fedspd.core.options import Options
from fedspd.engines.simulator import Simulator
from fedspd.runtime.plan import Plan
from fedspd.storage.atomic import Json
from fedspd.topology import TopologyOptions, build_topology, consensus_rate

Kind = Literal["regression", "logistic"]
Weights = Literal["uniform", "metropolis"]
KINDS: tuple[Kind, ...] = ("regression", "logistic")
WEIGHTS: tuple[Weights, ...] = ("uniform", "metropolis")
CLUSTERS = 2
NOISE = 0.1  # standard deviation of the regression's targets
RIDGE = 0.1  # makes the logistic problem strongly convex
START = 0.3  # distance of the first centers to their optima, relative to that between the optima
GRADIENTS_EVERY = 10  # rounds: sigma and v are the largest of these
SEED = 0


class TheoryScale(Options):
    """How large the problems are, and what is varied."""

    clients: int
    examples: int
    dimension: int
    rounds: int
    rates: list[float]
    degrees: list[float]


@dataclass(frozen=True)
class Problem:
    """The examples of all clients, the optimum of each distribution, and mu and L (Assumption 1).

    A distribution is that of all its examples at all clients, so its optimum is exact.
    """

    kind: Kind
    train: Block
    truth: list[NDArray[np.int64]]
    optimum_SP: Tensor
    mu: float
    L: float

    @property
    def loss(self) -> Loss:
        return squared_error if self.kind == "regression" else cross_entropy

    @property
    def ridge(self) -> float:
        return 0.0 if self.kind == "regression" else RIDGE

    def risk(self, model_P: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a model on these examples, with the ridge."""
        output = _outputs(self.kind, model_P, x)
        return self.loss(output, y).mean() + self.ridge / 2 * model_P.square().sum()

    def pooled(self, s: int) -> tuple[Tensor, Tensor]:
        """Return all examples of a distribution."""
        rows = [torch.from_numpy(own == s) for own in self.truth]
        x = torch.cat([x[row] for x, row in zip(self.train.x, rows, strict=True)])
        return x, torch.cat([y[row] for y, row in zip(self.train.y, rows, strict=True)])


def _outputs(kind: Kind, model_P: Tensor, x: Tensor) -> Tensor:
    weight = model_P.view(-1, x.shape[1])
    output = x @ weight.T
    return output[:, 0] if kind == "regression" else output


class LinearModel(nn.Module):
    """A linear model without a bias, so that its parameters are those of the problem."""

    def __init__(self, kind: Kind, dimension: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(dimension, 1 if kind == "regression" else 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        return output[:, 0] if self.kind == "regression" else output


# ---- the problem


def make_problem(kind: Kind, scale: TheoryScale) -> Problem:
    """Return a problem: opposite slopes in the two distributions, and 10 to 90 % of the first."""
    generator = np.random.default_rng(SEED)
    N, E, D = scale.clients, scale.examples, scale.dimension
    slope_D = generator.normal(size=D)
    slope_D *= (1 if kind == "regression" else 3) / np.linalg.norm(slope_D)
    x, y, truth = [], [], []
    for share in generator.uniform(0.1, 0.9, N):
        own_E = (generator.uniform(size=E) > share).astype(np.int64)
        x_ED = generator.normal(size=(E, D)) * np.sqrt(np.linspace(0.5, 1.5, D))
        score_E = (1 - 2 * own_E) * (x_ED @ slope_D)
        target_E = score_E + NOISE * generator.normal(size=E)
        if kind == "logistic":
            target_E = (generator.uniform(size=E) < 1 / (1 + np.exp(-score_E))).astype(np.int64)
        x.append(torch.from_numpy(x_ED))
        y.append(torch.from_numpy(target_E))
        truth.append(own_E)
    P = D if kind == "regression" else 2 * D
    block = Block(range(N), N, x, y, E, rounds=scale.rounds)
    problem = Problem(kind, block, truth, torch.zeros(CLUSTERS, P, dtype=torch.float64), 0.0, 0.0)
    optimum_SP = torch.stack([_minimise(problem, *problem.pooled(s)) for s in range(CLUSTERS)])
    mu, L = _curvature(problem)
    return replace(problem, optimum_SP=optimum_SP, mu=mu, L=L)


def _minimise(problem: Problem, x: Tensor, y: Tensor) -> Tensor:
    """Return the minimum of the risk by Newton's method."""
    model_P = torch.zeros_like(problem.optimum_SP[0])
    for _ in range(30):
        risk = partial(problem.risk, x=x, y=y)
        gradient_P = torch.func.grad(risk)(model_P)
        hessian_PP = torch.func.hessian(risk)(model_P)
        model_P = model_P - torch.linalg.solve(hessian_PP, gradient_P)
    return model_P


def _curvature(problem: Problem) -> tuple[float, float]:
    """Return mu and L over both distributions: p (1 - p) is at most 1/4, and twice in a softmax."""
    eigenvalues = []
    for s in range(CLUSTERS):
        x, _ = problem.pooled(s)
        eigenvalues += torch.linalg.eigvalsh(x.T @ x / len(x)).tolist()
    if problem.kind == "regression":
        return min(eigenvalues), max(eigenvalues)
    return RIDGE, RIDGE + max(eigenvalues) / 2


# ---- a run


def make_graph(scale: TheoryScale, degree: float, weights: Weights) -> Graph:
    """Return an Erdős-Rényi graph; the weights do not change its edges."""
    options = TopologyOptions(kind="er", degree=degree, weights=weights)
    return build_topology(options, scale.clients, Key(SEED)).at(1)


def make_engine(problem: Problem, graph: Graph, rate: float) -> Simulator:
    """Return FedSPD with one full-batch gradient step in a round, near the optima."""
    training = TrainingOptions(
        lr=rate,
        momentum=0.0,
        weight_decay=problem.ridge,
        batch=problem.train.width,
        epochs=1,
        first_round_factor=1,
        decay=1.0,
    )
    kind, dimension = problem.kind, problem.train.x[0].shape[1]
    learner = Learner(
        partial(LinearModel, kind, dimension), training, problem.loss, dtype=torch.float64
    )
    algorithm = FedSPD(clusters=CLUSTERS, align_every=0, final_epochs=0)
    plan = Plan(algorithm, learner, problem.train, problem.train, problem.truth, 2, Key(SEED))
    engine = Simulator(plan)
    engine.begin()
    engine.block.state = _near_optima(engine.block.state, learner, problem)
    return engine


def _near_optima(state: State, learner: Learner, problem: Problem) -> State:
    generator = torch.Generator().manual_seed(SEED)
    shape = state.centers_CSP.shape
    own_CSP = torch.randn(shape, generator=generator, dtype=torch.float64)
    common_SP = torch.randn(shape[1:], generator=generator, dtype=torch.float64)
    apart = (problem.optimum_SP[0] - problem.optimum_SP[1]).norm()
    offsets = (part / part.norm(dim=-1, keepdim=True) for part in (own_CSP, common_SP))
    centers_CSP = problem.optimum_SP + START * apart * sum(offsets, torch.tensor(0.0)) / 2
    trained = torch.ones_like(state.trained_CS)
    return cluster_examples(
        learner, replace(state, centers_CSP=centers_CSP, trained_CS=trained), problem.train
    )


@dataclass(frozen=True)
class Snapshot:
    """The theorems' quantities of cluster 0 after a round."""

    distance: float  # ||c_mean - c*||^2, of Theorem 1
    consensus: float  # E_t, of Theorem 3
    gap: float  # f(c_mean) - f(c*)
    wrong: float  # epsilon_N: expected number of clients that use a wrong example
    gradient: float = 0.0  # mean over clients of ||grad f_i(c_i)||^2, for sigma^2
    variance: float = 0.0  # mean over clients of ||grad f_i(c_mean) - grad F(c_mean)||^2, for v^2


def measure(problem: Problem, state: State, has_gradients: bool) -> Snapshot:
    """Return the quantities of cluster 0; near the optima, it stays the first distribution's."""
    mean_P = state.centers_CSP[:, 0].mean(0)
    x, y = problem.pooled(0)
    mine_CE = (state.assignment_CE == 0).numpy()
    wrong = sum(
        float((own & (truth == 1)).mean())
        for own, truth in zip(mine_CE, problem.truth, strict=True)
    )
    snapshot = Snapshot(
        float((mean_P - problem.optimum_SP[0]).square().sum()),
        float(CenterMoments.of(state.centers_CSP.numpy()).consensus_distance()[0]),
        float(problem.risk(mean_P, x, y) - problem.risk(problem.optimum_SP[0], x, y)),
        wrong,
    )
    return _with_gradients(snapshot, problem, state, mean_P) if has_gradients else snapshot


def _with_gradients(snapshot: Snapshot, problem: Problem, state: State, mean_P: Tensor) -> Snapshot:
    x, y = problem.pooled(0)
    gradient_P = torch.func.grad(partial(problem.risk, x=x, y=y))(mean_P)
    squares, variances = [], []
    for i, center_P in enumerate(state.centers_CSP[:, 0]):
        mine = state.assignment_CE[i] == 0
        if mine.any():
            own = partial(problem.risk, x=problem.train.x[i][mine], y=problem.train.y[i][mine])
            squares.append(float(torch.func.grad(own)(center_P).square().sum()))
            variances.append(float((torch.func.grad(own)(mean_P) - gradient_P).square().sum()))
    return replace(snapshot, gradient=float(np.mean(squares)), variance=float(np.mean(variances)))


def run_series(
    problem: Problem, scale: TheoryScale, degree: float, weights: Weights, rate: float
) -> Json:
    """Return what one run measures beside the bounds of Theorems 1 and 3."""
    graph = make_graph(scale, degree, weights)
    engine = make_engine(problem, graph, rate)
    taken = [measure(problem, engine.block.state, True)]
    for t in range(1, scale.rounds + 1):
        engine.round(t, graph)
        taken.append(measure(problem, engine.block.state, t % GRADIENTS_EVERY == 0))
    p = consensus_rate(graph, CLUSTERS, Key(SEED))
    bounds = Bounds(problem, scale.clients, p, rate, taken)
    kept = _thin(len(taken))
    pairs = range(len(taken) - 1)
    return {
        "kind": problem.kind,
        "degree": degree,
        "weights": weights,
        "rate": rate,
        "p": _short(p),
        "mu": _short(problem.mu),
        "L": _short(problem.L),
        "sigma2": _short(bounds.sigma2),
        "v2": _short(bounds.v2),
        "epsilon_N": _short(bounds.epsilon),
        "round": kept,
        "distance": [_short(taken[t].distance) for t in kept],
        "consensus": [_short(taken[t].consensus) for t in kept],
        "wrong": [_short(taken[t].wrong) for t in kept],
        "bound_1": [_short(bounds.theorem_1(t - 1)) if t else None for t in kept],
        "bound_3": [_short(bounds.theorem_3(t - 1)) if t and p > 0 else None for t in kept],
        "holds_1": _share(taken[t + 1].distance <= bounds.theorem_1(t) for t in pairs),
        "holds_1_descent": _share(taken[t + 1].distance <= bounds.descent(t) for t in pairs),
        "holds_3": _share(taken[t + 1].consensus <= bounds.theorem_3(t) for t in pairs)
        if p > 0
        else None,
        "rate_limit_3": _short(bounds.rate_limit),
        "rounds_to_error": _first_rounds([problem.mu * s.distance for s in taken]),
    }


@dataclass(frozen=True)
class Bounds:
    """The right-hand sides of Theorems 1 and 3 with beta = 1, from measured values."""

    problem: Problem
    clients: int
    p: float
    rate: float
    taken: Sequence[Snapshot]

    @property
    def n(self) -> float:
        return self.clients / CLUSTERS

    @property
    def epsilon(self) -> float:
        return max(s.wrong for s in self.taken)

    @property
    def sigma2(self) -> float:
        return max(s.gradient for s in self.taken)

    @property
    def v2(self) -> float:
        return max(s.variance for s in self.taken)

    @property
    def rate_limit(self) -> float:
        """The largest learning rate that the proof of Theorem 3 allows."""
        return float(self.p * np.sqrt(self.clients / (2 * self.n)) / (12 * self.problem.L))

    def _common(self, t: int) -> float:
        now, eta, n, epsilon = self.taken[t], self.rate, self.n, self.taken[t].wrong
        mu, L = self.problem.mu, self.problem.L
        return float(
            eta * (L + mu) * now.consensus
            + 18 * L**2 * epsilon**2 * eta**2 / n**2
            + self.v2 * eta**2
            + (1 - eta * mu + eta * mu * epsilon / n) * now.distance
            + 2 * epsilon * (CLUSTERS - 1) * self.v2 * eta**2 / n**2
        )

    def theorem_1(self, t: int) -> float:
        """Return the bound on the distance after round t + 1, as the proof of Theorem 1 ends."""
        eta, share = self.rate, 1 - self.taken[t].wrong / self.n
        factor = 4 * eta**2 * share**2 * self.problem.L + 2 * eta * share
        return self._common(t) + factor * self.taken[t].gap

    def descent(self, t: int) -> float:
        """Return the same with the gap's sign that Lemma A.3 needs: a descent by 2 eta gap."""
        eta, share = self.rate, 1 - self.taken[t].wrong / self.n
        factor = 4 * eta**2 * share**2 * self.problem.L - 2 * eta * share
        return self._common(t) + factor * self.taken[t].gap

    def theorem_3(self, t: int) -> float:
        """Return the bound on E_{t + 1}, with beta = 1."""
        now, p, n, N = self.taken[t], self.p, self.n, self.clients
        noise = (18 * n * self.sigma2 + n * self.v2 * p) / (N * p) * self.rate**2
        drift = 36 * self.problem.L * n * self.rate**2 / (p * N) * now.gap
        return float((1 - p / 2) * now.consensus + p / 16 * now.consensus + noise + drift)


# ---- numbers


ERRORS = [10 ** (-k / 4) for k in range(2, 25)]  # mu ||c_mean - c*||^2


def _first_rounds(error_T: Sequence[float]) -> list[int | None]:
    """Return for each of ERRORS the first round after which the error stays below it."""
    worst_later = np.maximum.accumulate(error_T[::-1])[::-1]
    return [
        int(np.argmax(worst_later <= error)) if worst_later[-1] <= error else None
        for error in ERRORS
    ]


def _thin(count: int) -> list[int]:
    """Return at most 60 rounds, evenly spaced."""
    return sorted({int(t) for t in np.linspace(0, count - 1, min(count, 60)).round()})


def _share(held: Iterable[bool]) -> float:
    values = list(held)
    return _short(sum(values) / len(values))


def _short(number: float) -> float:
    return float(f"{number:.4g}")
