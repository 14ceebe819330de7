"""What a run will cost, before it runs: a few clients really do one round, and the rest is counted."""

import dataclasses
import resource
import sys

from fedspd.build import Experiment
from fedspd.core.graph import Graph
from fedspd.core.ledger import SERVER, Traffic
from fedspd.engines.simulator import Simulator
from fedspd.record import Json

SAMPLE = 6  # clients that try a round


def estimate(experiment: Experiment, workers: int = 1) -> Json:
    """Memory, bytes, gradient steps and seconds. Evaluation is not counted, nor is the final phase but for its steps' time."""
    config, plan = experiment.config, experiment.plan
    sample = plan.first(SAMPLE)
    engine = Simulator(sample)
    engine.begin()
    graph = experiment.topology.at(1)
    everyone = Graph.from_edges(len(sample.train), [(i, j) for i in range(len(sample.train)) for j in range(i)], server=graph.server)
    report = engine.round(max(2, config.rounds // 2 + 1), everyone)  # the first one is longer
    final = engine.finish(config.rounds + 1)
    clients = plan.clients / len(sample.train)
    rounds = config.rounds + plan.learner.sgd.first_round - 1
    seconds = (report.seconds["total"] * rounds + final.seconds["total"]) * clients / min(workers, plan.clients)
    return {
        "clients": plan.clients,
        "rounds": config.rounds,
        "numbers_in_a_model": plan.learner.size,
        "memory": _memory(experiment, engine, report.traffic),
        "bytes": _bytes(report.traffic, len(sample.train), graph, config.rounds),
        "steps": round((report.steps * rounds + final.steps) * clients),
        "seconds": round(seconds, 1),
        "from": f"one round and the final phase of {len(sample.train)} clients, tests and checkpoints not counted",
    }


def _memory(experiment: Experiment, engine: Simulator, sent: list[Traffic]) -> Json:
    """Bytes at the peak of a round: the state and its successor, what is offered twice over, the data, the program."""
    state = engine.workers[0].desk.runner.state  # type: ignore[union-attr]
    tensors = [getattr(state, field.name) for field in dataclasses.fields(state)]
    clients = experiment.plan.clients
    per_client = sum(tensor.nbytes for tensor in tensors) / len(tensors[0])
    offered = max((traffic.copies * traffic.model_bytes for traffic in sent), default=0) / len(tensors[0])
    parts = (experiment.federation.train, experiment.federation.test)
    unit = 1 if sys.platform == "darwin" else 1024
    found = {
        "state": round(2 * per_client * clients),
        "offers": round(2 * offered * clients),
        "data": sum(part.x.nbytes + part.y.nbytes for part in parts),
        "program": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }
    return {**found, "total": sum(found.values())}


def _bytes(sent: list[Traffic], sample: int, graph: Graph, rounds: int) -> Json:
    """Models per directed edge, and per client where one sending reaches all, as the sample had them."""
    clients, edges = graph.clients, int(graph.degree.sum())
    found = {"multicast": 0.0, "point_to_point": 0.0}
    for traffic in sent:
        up = int((traffic.transfer_T3[:, 0] != SERVER).sum())
        if graph.server:  # everybody to the server, and back; a mean is sent down once if all can hear it
            models, announced = len(traffic.transfer_T3) / sample * clients, clients
            copies = up / sample * clients + traffic.copies - up
        else:
            models, announced = up / max(1, sample * (sample - 1)) * edges, edges
            copies = traffic.copies / sample * clients
        announcements = announced * traffic.announcement_bytes
        found["point_to_point"] += models * traffic.model_bytes + announcements
        found["multicast"] += copies * traffic.model_bytes + announcements
    return {kind: round(count * rounds) for kind, count in found.items()}
