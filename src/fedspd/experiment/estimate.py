"""Estimate the cost of a run before it starts.

A few clients train one round and the final phase. The other rounds are rehearsed by a learner that
only counts its steps, and memory is measured in a fork.
"""

import gc
import json
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedspd.core.block import Block
from fedspd.core.graph import Graph
from fedspd.core.heads import SplitLearner
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.core.ledger import SERVER, Traffic
from fedspd.engines.engine import RoundReport
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import Experiment
from fedspd.experiment.events import round_event
from fedspd.privacy.mechanisms import DPSGD
from fedspd.runtime.plan import Plan
from fedspd.runtime.processes import (
    MOST_KEPT_BYTES,
    Child,
    MemoryMeter,
    give_memory_back,
    require_fork,
    resident_bytes,
)
from fedspd.storage.atomic import Json

SAMPLED_CLIENTS = 6  # train a round
REHEARSED_STATE_BYTES = 256 << 20  # in the fork that measures memory
REHEARSED_ROUNDS = 40  # at most, to count steps and bytes
MEMORY_ROUNDS = 10  # at most, to measure memory
GOLDEN_RATIO = 5**0.5 / 2 - 0.5  # the fractions of its multiples are spread evenly


@dataclass(frozen=True)
class RehearsedRound:
    """A rehearsed round, and how many rounds of the run it stands for."""

    report: RoundReport
    weight: float


def estimate(experiment: Experiment, workers: int = 1) -> Json:
    """Return the memory, bytes, gradient steps and seconds of a run, without its evaluations."""
    require_fork("The estimate of a run's memory")
    config, plan = experiment.config, experiment.plan
    plan = _with_most_clusters(plan)
    sample = plan.shrink_to(SAMPLED_CLIENTS)
    graph = experiment.topology.at(1)
    complete = Graph.complete(sample.clients, server=graph.server)
    engine = Simulator(sample)
    engine.begin()
    report = engine.round(max(2, config.rounds // 2 + 1), complete)  # the first one is longer
    final = engine.finish(config.rounds + 1)
    rehearsed = _rehearse_rounds(sample, complete, config.rounds)
    if not experiment.plan.algorithm.clusters:
        search = _rehearse_rounds(
            experiment.plan.shrink_to(SAMPLED_CLIENTS), complete, config.rounds
        )
        rehearsed = [max(pair, key=_bytes_sent) for pair in zip(rehearsed, search, strict=True)]
    steps = sum(idle.weight * idle.report.steps for idle in rehearsed)
    repeats = steps / report.steps if report.steps else config.rounds
    seconds = report.seconds["total"] * repeats + final.seconds["total"]
    per_sample = plan.clients / sample.clients
    return {
        "clients": plan.clients,
        "rounds": config.rounds,
        "parameters": plan.learner.size,
        "memory": _estimate_memory(experiment, plan, engine, workers),
        "bytes": _estimate_bytes(rehearsed, sample.clients, graph),
        "steps": round((steps + final.steps) * per_sample),
        "seconds": round(seconds * per_sample / min(workers, plan.clients), 1),
        "from": f"one round and the final phase of {sample.clients} clients, without evaluations "
        "and checkpoints; steps grow where clusters become uneven",
    }


def _with_most_clusters(plan: Plan) -> Plan:
    """Return the plan with as many clusters as a method looks for that finds their number."""
    algorithm: Any = plan.algorithm
    if algorithm.clusters:
        return plan
    return replace(plan, algorithm=replace(algorithm, clusters=algorithm.cluster_limit))


# ---- rehearsals


class IdleLearner(Learner):
    """A learner that does not train: it counts its steps, and allocates what a round needs."""

    def __init__(self, learner: Learner) -> None:
        self._touched: set[int] = set()  # sizes of models that have been trained
        if learner.device.type == "cpu":
            self.__dict__.update(learner.__dict__, _splits={})
        else:  # a fork cannot use a GPU that its parent has used
            super().__init__(
                learner.factory,
                learner.training,
                learner.loss,
                "cpu",
                learner.dtype,
                learner.head,
                learner.precision,
            )

    def train(self, model_CP: Tensor, data: Block, key: Key, **options: Any) -> Tensor:
        """Count the steps, and return the models as they are."""
        return self._count(super().train, model_CP, data, key, **options)

    def _count(
        self,
        train: Callable[..., Tensor],
        model_CP: Tensor,
        data: Block,
        key: Key,
        **options: Any,
    ) -> Tensor:
        self._touch_memory(train, model_CP, data, key)
        rates, only_CE = options.get("rates"), options.get("only_CE")
        count_C = data.counts_C if only_CE is None else only_CE.sum(1)
        epochs = len(self.training.rates(key.round) if rates is None else rates)
        batches_C = (count_C / self.training.batch).ceil()
        if isinstance(self.mechanism, DPSGD):
            batches_C = torch.full_like(batches_C, self.mechanism.update_release(1).times)
        self.effort.steps += epochs * int(batches_C.sum())
        return model_CP.clone()

    def _touch_memory(
        self, train: Callable[..., Tensor], model_CP: Tensor, data: Block, key: Key
    ) -> None:
        """Train a few clients for one epoch, once: a step has memory of its own."""
        size = model_CP.shape[1]
        if size in self._touched or self.device.type != "cpu":
            return
        self._touched.add(size)
        steps, stacked = self.effort.steps, self.stacked_trainer
        rows = range(min(len(data), 1 if stacked is None else stacked.group_size))
        train(model_CP[: len(rows)], data.select(rows), key, rates=[0.0])
        self.effort.steps = steps

    def split(self, clusters: int) -> SplitLearner:
        """Return a learner of split models that does not train either."""
        if clusters not in self._splits:
            split = super().split(clusters)
            split.train = partial(self._count, split.train)  # type: ignore[method-assign]
            split.cluster_losses = self._cluster_losses  # type: ignore[method-assign]
        return self._splits[clusters]

    def _cluster_losses(self, model_CA: Tensor, data: Block) -> Tensor:
        return self.losses(model_CA[:, None], data)

    def losses(self, model_CSP: Tensor, data: Block) -> Tensor:
        """Return random losses, so that no cluster takes all examples."""
        shape = (*model_CSP.shape[:2], data.width)
        generator = torch.Generator().manual_seed(0)
        return torch.rand(shape, dtype=self.dtype, generator=generator)


def _idle(plan: Plan) -> Plan:
    return replace(plan, learner=IdleLearner(plan.learner))


def _rehearse_rounds(sample: Plan, graph: Graph, rounds: int) -> list[RehearsedRound]:
    """Rehearse the sample's rounds: a method may do and send more in some rounds than in others."""
    engine = Simulator(_idle(sample))
    engine.begin()
    first, *others = _choose_rounds(rounds)
    weight = (rounds - 1) / max(1, len(others))
    return [
        RehearsedRound(engine.round(first, graph), 1.0),
        *(RehearsedRound(engine.round(t, graph), weight) for t in others),
    ]


def _bytes_sent(idle: RehearsedRound) -> int:
    """Return what a round sends: its search for the clusters, or what it does with most of them.

    A method that looks for the number of clusters sends more before it knows them than one that is
    told, and in a rehearsal it finds only one.
    """
    return sum(sent.copies * sent.model_bytes for sent in idle.report.traffic)


def _choose_rounds(rounds: int) -> list[int]:
    """Return all rounds, or the first, which is longer, and others without a regular spacing.

    A method may do more in every tenth round, and a regular choice would miss or repeat those.
    """
    if rounds <= REHEARSED_ROUNDS:
        return list(range(1, rounds + 1))
    fractions = (i * GOLDEN_RATIO % 1 for i in range(REHEARSED_ROUNDS - 1))
    return [1, *sorted({2 + int(fraction * (rounds - 1)) for fraction in fractions})]


# ---- memory


def _estimate_memory(experiment: Experiment, plan: Plan, engine: Simulator, workers: int) -> Json:
    """Return the bytes at the peak of a run: the program, the clients' states and the rounds.

    Several workers hold what they copy of the program, while this process writes events.
    """
    state = engine.state_bytes() / engine.plan.clients
    rehearsed = plan.shrink_to(max(1, round(REHEARSED_STATE_BYTES / state)))
    needs = _measure_memory(_idle(rehearsed), experiment)
    added = needs.added + (needs.copied + needs.event if workers > 1 else 0)
    round_bytes = added / rehearsed.clients - state
    kept = (min(workers, plan.clients) - 1) * MOST_KEPT_BYTES  # free memory of other workers
    found = {
        "program": resident_bytes(),
        "state": round(state * plan.clients),
        "rounds": round(round_bytes * plan.clients) + kept,
    }
    return {**found, "total": sum(found.values())}


class MemoryNeeds(NamedTuple):
    """The bytes of idle rounds: added at their peak, copied of the program, and of an event."""

    added: int
    copied: int
    event: int


def _measure_memory(plan: Plan, experiment: Experiment) -> MemoryNeeds:
    """Return what idle rounds need.

    A fork of this process runs them: its memory is freed with it, and it has a peak of its own.
    """
    gc.collect()  # a fork should not begin with garbage
    give_memory_back()
    graph = _resize(experiment.topology.at(1), plan.clients)
    work = partial(_run_idle_rounds, plan, graph, experiment.config.rounds)
    with closing(Child("The rehearsal of a round", work)) as child:
        needs: MemoryNeeds = child.receive()
    return needs


def _run_idle_rounds(plan: Plan, graph: Graph, rounds: int, connection: Connection) -> None:
    meter = MemoryMeter()
    engine = Simulator(plan)
    engine.begin()
    for t in range(1, min(rounds, MEMORY_ROUNDS) + 1):
        report = engine.round(t, graph)
    engine.finish(rounds + 1)
    added = meter.added_bytes()
    measures = engine.measure()
    copied = meter.copied_bytes()
    tracemalloc.start()
    json.dumps(round_event(rounds, None, report, measures))
    connection.send(MemoryNeeds(added, copied, tracemalloc.get_traced_memory()[1]))


def _resize(graph: Graph, clients: int) -> Graph:
    """Return a graph of this many clients, with the same average degree."""
    reach = round(float(graph.degree.mean()) / 2)
    if graph.is_complete or 2 * reach >= clients:
        return Graph.complete(clients, graph.rule, graph.server)
    hops = range(1, reach + 1)
    edges = [(i, (i + hop) % clients) for i in range(clients) for hop in hops]
    return Graph.from_edges(clients, edges, graph.rule)


# ---- traffic


def _estimate_bytes(rehearsed: list[RehearsedRound], sample: int, graph: Graph) -> Json:
    """Return the bytes that the network sends, if clients send as those of the sample do."""
    found = {"multicast": 0.0, "point_to_point": 0.0}
    for idle in rehearsed:
        for traffic in idle.report.traffic:
            models, copies, announcements = _scale(traffic, sample, graph)
            announced = announcements * traffic.announcement_bytes
            point_to_point = models * traffic.model_bytes + announced
            found["point_to_point"] += idle.weight * point_to_point
            found["multicast"] += idle.weight * (copies * traffic.model_bytes + announced)
    return {kind: round(count) for kind, count in found.items()}


def _scale(traffic: Traffic, sample: int, graph: Graph) -> tuple[float, float, int]:
    """Return the models sent point to point and by multicast, and the announcements, of the graph.

    Without a server, models grow with the directed edges, and copies by multicast with the clients.
    With one, all clients send to it, and it sends each mean down once if all can receive it.
    """
    clients, edges = graph.clients, int(graph.degree.sum())
    up = int((traffic.transfer_T3[:, 0] != SERVER).sum())
    if graph.server:
        copies = up / sample * clients + traffic.copies - up
        return len(traffic.transfer_T3) / sample * clients, copies, clients
    pairs = max(1, sample * (sample - 1))
    return up / pairs * edges, traffic.copies / sample * clients, edges
