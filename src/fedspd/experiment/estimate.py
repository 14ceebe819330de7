"""What a run will cost, before it runs: a few clients really do one round, and the rest is counted or rehearsed."""

import dataclasses
import gc
import sys
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fedspd.core.block import Block
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.core.ledger import SERVER, Traffic
from fedspd.engines.engine import RoundReport
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import Experiment
from fedspd.runtime.plan import Plan
from fedspd.runtime.processes import Child, give_memory_back, require_fork
from fedspd.storage.atomic import Json

SAMPLE = 6  # clients that try a round
REHEARSED = 256 << 20  # bytes of state that a rehearsal handles
ROUNDS = 40  # of a rehearsal at most
IDLE_ROUNDS = 10  # that show how much memory rounds take
GOLDEN = (
    5**0.5 / 2 - 0.5
)  # its multiples, without what is whole in them, lie evenly in any number of intervals


def estimate(experiment: Experiment, workers: int = 1) -> Json:
    """Memory, bytes, gradient steps and seconds. Evaluation is not counted."""
    require_fork("The estimate of a run's memory")
    config, plan = experiment.config, experiment.plan
    sample = plan.first(SAMPLE)
    graph = experiment.topology.at(1)
    everybody = Graph.complete(len(sample.train), server=graph.server)
    engine = Simulator(sample)
    engine.begin()
    report = engine.round(max(2, config.rounds // 2 + 1), everybody)  # the first one is longer
    final = engine.finish(config.rounds + 1)
    rehearsed = _rehearsed(sample, everybody, config.rounds)
    steps = sum(often * idle.steps for often, idle in rehearsed)
    busy = report.seconds["total"] * (steps / report.steps if report.steps else config.rounds)
    clients = plan.clients / len(sample.train)
    return {
        "clients": plan.clients,
        "rounds": config.rounds,
        "parameters": plan.learner.size,
        "memory": _memory(experiment, engine, report.traffic, workers),
        "bytes": _bytes(rehearsed, len(sample.train), graph),
        "steps": round((steps + final.steps) * clients),
        "seconds": round((busy + final.seconds["total"]) * clients / min(workers, plan.clients), 1),
        "from": f"one round and the final phase of {len(sample.train)} clients, tests and checkpoints not counted; steps grow where "
        "clusters become uneven",
    }


def _rehearsed(sample: Plan, everybody: Graph, rounds: int) -> list[tuple[float, RoundReport]]:
    """Idle rounds of the sample, each with how often it counts: a method may do and send more in some rounds than in others."""
    engine = Simulator(dataclasses.replace(sample, learner=Idle(sample.learner)))
    engine.begin()
    first, *others = _some(rounds)
    often = [1.0, *[(rounds - 1) / max(1, len(others))] * len(others)]
    return [
        (count, engine.round(t, everybody))
        for count, t in zip(often, [first, *others], strict=True)
    ]


def _some(rounds: int) -> list[int]:
    """All rounds, or as many as a rehearsal has: the first, which is longer, and others that follow no rhythm that a method may have."""
    if rounds <= ROUNDS:
        return list(range(1, rounds + 1))
    return [1, *sorted({2 + int((i * GOLDEN % 1) * (rounds - 1)) for i in range(ROUNDS - 1)})]


# ---- memory


class Idle(Learner):
    """A learner that learns nothing: what a round then allocates is what it needs besides the training of one client."""

    def __init__(self, learner: Learner) -> None:
        if learner.device.type == "cpu":
            self.__dict__.update(learner.__dict__)
        else:  # a fork cannot use a GPU that its parent has used
            super().__init__(learner.factory, learner.training, learner.loss, "cpu", learner.dtype)

    def train(self, model_CP: Tensor, data: Block, key: Key, **options: Any) -> Tensor:
        """Only counts its steps."""
        rates, only_CE = options.get("rates"), options.get("only_CE")
        count_C = data.counts_C if only_CE is None else only_CE.sum(1)
        epochs = len(self.training.rates(key.round) if rates is None else rates)
        self.steps += epochs * int((count_C / self.training.batch).ceil().sum())
        return model_CP.clone()

    def losses(self, model_CSP: Tensor, data: Block) -> Tensor:
        """At random, so that no cluster takes all."""
        return torch.rand(
            *model_CSP.shape[:2],
            data.width,
            dtype=self.dtype,
            generator=torch.Generator().manual_seed(0),
        )


def _memory(experiment: Experiment, engine: Simulator, sent: list[Traffic], workers: int) -> Json:
    """Bytes at the peak of a run: the program with its data as they are now, and what rounds of all clients add."""
    state = engine.workers[0].desk.runner.tables()  # type: ignore[union-attr]
    sample = len(next(iter(state.values())))
    per_client = sum(table.nbytes for table in state.values()) / sample
    offered = max((traffic.copies * traffic.model_bytes for traffic in sent), default=0) / sample
    plan = experiment.plan
    rehearsed = plan.first(max(1, round(REHEARSED / per_client)))
    program, peak = _rehearse(
        dataclasses.replace(rehearsed, learner=Idle(plan.learner)), experiment
    )
    shared = offered if workers > 1 else 0  # where the offers of all workers meet
    found = {
        "program": program,
        "state": round(per_client * plan.clients),
        "rounds": round(
            ((peak - program) / rehearsed.clients + shared - per_client) * plan.clients
        ),
    }
    return {**found, "total": sum(found.values())}


def _rehearse(plan: Plan, experiment: Experiment) -> tuple[int, int]:
    """Return the bytes in use before idle rounds and at their peak.

    A fork of this process runs them: its memory is freed with it, and it has a peak of its own.
    """
    gc.collect()  # a fork should not begin with garbage
    give_memory_back()
    graph = _like(experiment.topology.at(1), plan.clients)
    work = partial(_idle_rounds, plan, graph, experiment.config.rounds)
    with closing(Child("The rehearsal of a round", work)) as child:
        before, peak = child.receive()
    return before, peak


def _idle_rounds(plan: Plan, graph: Graph, rounds: int, connection: Connection) -> None:
    before = _peak()
    engine = Simulator(plan)
    engine.begin()
    for t in range(1, min(rounds, IDLE_ROUNDS) + 1):
        engine.round(t, graph)
    engine.finish(rounds + 1)
    connection.send((before, _peak()))


def _like(graph: Graph, clients: int) -> Graph:
    """A graph of so many clients, with as many neighbours."""
    reach = round(float(graph.degree.mean()) / 2)
    if graph.is_complete or 2 * reach >= clients:
        return Graph.complete(clients, graph.rule, graph.server)
    return Graph.from_edges(
        clients,
        [(i, (i + hop) % clients) for i in range(clients) for hop in range(1, reach + 1)],
        graph.rule,
    )


def _peak() -> int:
    import resource  # every system that can fork has it

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


# ---- traffic


def _bytes(rehearsed: list[tuple[float, RoundReport]], sample: int, graph: Graph) -> Json:
    """Models per directed edge, and per client where one sending reaches all, as the sample had them."""
    clients, edges = graph.clients, int(graph.degree.sum())
    found = {"multicast": 0.0, "point_to_point": 0.0}
    for often, traffic in (
        (often, traffic) for often, idle in rehearsed for traffic in idle.traffic
    ):
        up = int((traffic.transfer_T3[:, 0] != SERVER).sum())
        if (
            graph.server
        ):  # everybody to the server, and back; a mean is sent down once if all can hear it
            models, announced = len(traffic.transfer_T3) / sample * clients, clients
            copies = up / sample * clients + traffic.copies - up
        else:
            models, announced = up / max(1, sample * (sample - 1)) * edges, edges
            copies = traffic.copies / sample * clients
        announcements = announced * traffic.announcement_bytes
        found["point_to_point"] += often * (models * traffic.model_bytes + announcements)
        found["multicast"] += often * (copies * traffic.model_bytes + announcements)
    return {kind: round(count) for kind, count in found.items()}
