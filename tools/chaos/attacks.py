"""What each aggregation rule withstands: insiders against honest peers, by degree.

The peers run in this process, over the in-memory transport, with every check of a real node.
`python -m chaos.attacks` writes docs/attacks.json and the table of docs/security.md. It keeps the
results that are in attacks.json already, so an interrupted measurement goes on where it stopped.
"""

import argparse
import asyncio
import itertools
import json
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chaos import table
from chaos.insiders import InsiderNetwork, Lie
from fedspd.algorithms.labellings import MAX_LABELLING, OWN_BODIES
from fedspd.config import validate
from fedspd.core.graph import Graph, LinkRule
from fedspd.experiment.build import build_experiment
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.wire.messages import Announcement, Offer, Request
from fedspd.storage.atomic import write_atomically
from fedspd.testing.peers import open_peers, run_together

Json = dict[str, Any]
NODES, ROUNDS, SEEDS = 8, 15, 3
CLASSES, HIDDEN = 10, 16
DIRECTION = CLASSES * HIDDEN  # numbers of one; populations.py has the shapes
MOMENTS = DIRECTION + CLASSES + HIDDEN + 1  # from which the mean feature follows
INSIDERS = ("n3", "n6")  # a lie of one insider is that of the first
TEST_EXAMPLES = 44  # of each node: as many as the digits have
DOCS = Path(__file__).parents[2] / "docs"
TIMEOUTS = Timeouts(start=60, min_deadline=30, max_deadline=60, heartbeat_interval=1, linger=0.3)
RULES: tuple[LinkRule, ...] = ("uniform", "median", "trimmed", "clipped")
GRAPHS = {"3": (1, 4), "6": (1, 2, 3), "complete": (1, 2, 3, 4)}  # steps along the ring


# ---- lies


@dataclass(frozen=True)
class SendsInstead(Lie):
    """Sends other models than its own, which may depend on those of all honest nodes."""

    forge: Callable[[Tensor, Tensor], Tensor]  # own_P, honest_HP -> lie_P

    def offer(self, network: InsiderNetwork, to: str, request: Request, truth: Offer) -> Offer:
        """Return a false model or head for every cluster; the numbers of a search stay true."""
        if not network.has_parameters(request):
            return truth
        offers, rows = network.honest_offers(request).values(), []
        for cluster, own_P in zip(truth.clusters, truth.model_KP, strict=True):
            honest = [
                offer.model_KP[offer.clusters.index(cluster)].double()
                for offer in offers
                if cluster in offer.clusters and offer.model_KP.shape[1] == len(own_P)
            ]
            honest_HP = torch.stack(honest) if honest else own_P.double()[None]
            rows.append(self.forge(own_P.double(), honest_HP))
        return Offer(truth.clusters, torch.stack(rows).to(truth.model_KP))


def flip_sign(own_P: Tensor, honest_HP: Tensor) -> Tensor:
    """Negate the own model."""
    return -own_P


def little_is_enough(own_P: Tensor, honest_HP: Tensor) -> Tensor:
    """Stay within the honest spread, at its edge (Baruch et al., NeurIPS 2019)."""
    return honest_HP.mean(0) - 1.5 * honest_HP.std(0, correction=0)


def inner_product(own_P: Tensor, honest_HP: Tensor) -> Tensor:
    """Turn the mean around (Xie et al., UAI 2019)."""
    return -2 * honest_HP.mean(0)


def send_huge(own_P: Tensor, honest_HP: Tensor) -> Tensor:
    """Send the largest numbers that travel."""
    return torch.full_like(own_P, 3e38)


@dataclass(frozen=True)
class Dissensus(Lie):
    """Pushes each neighbour away from the others (He et al., 2022)."""

    def offer(self, network: InsiderNetwork, to: str, request: Request, truth: Offer) -> Offer:
        """Return a model that lies beyond that of the neighbour, seen from the insider."""
        theirs, rows = network.honest_offers(request).get(to), []
        for cluster, own_P in zip(truth.clusters, truth.model_KP, strict=True):
            if theirs is None or cluster not in theirs.clusters:
                rows.append(own_P)
                continue
            victim_P = theirs.model_KP[theirs.clusters.index(cluster)]
            rows.append(victim_P + 5 * (victim_P - own_P))
        return Offer(truth.clusters, torch.stack(rows))


@dataclass(frozen=True)
class Announces(Lie):
    """Changes its announcements."""

    change: Callable[[Announcement], Announcement]

    def announcement(self, to: str, truth: Announcement) -> Announcement:
        """Return the changed announcement."""
        return self.change(truth)


@dataclass(frozen=True)
class AnnouncesAndSends(SendsInstead):
    """Changes its announcements and its models."""

    change: Callable[[Announcement], Announcement] = lambda truth: truth

    def announcement(self, to: str, truth: Announcement) -> Announcement:
        """Return the changed announcement."""
        return self.change(truth)


@dataclass(frozen=True)
class SwapsLabels(Lie):
    """Claims to lead the alignment of two clusters, and swaps their labels."""

    def announcement(self, to: str, truth: Announcement) -> Announcement:
        """Return the announcement with the lowest note of all and the other label."""
        clusters = tuple(1 - cluster for cluster in truth.clusters)
        return replace(truth, note=-(2**62), clusters=clusters)

    def request(self, truth: Request) -> Request:
        """Return the request with the true labels."""
        return replace(truth, wants=tuple(1 - cluster for cluster in truth.wants))

    def offer(self, network: InsiderNetwork, to: str, request: Request, truth: Offer) -> Offer:
        """Return the true models under the other labels."""
        return replace(truth, clusters=tuple(1 - cluster for cluster in truth.clusters))


@dataclass(frozen=True)
class SearchLie(Lie):
    """Multiplies the numbers of FedSPD-Split's search for populations; its models are honest."""

    factor: float
    size: int | None = None  # of the vectors it lies about; None: of any

    def offer(self, network: InsiderNetwork, to: str, request: Request, truth: Offer) -> Offer:
        """Return false moments, directions, coordinates, corners and S, or one kind of these."""
        if network.has_parameters(request) or self.size not in (None, request.size):
            return truth
        return Offer(truth.clusters, self.factor * truth.model_KP)


# ---- runs


def graph_of(degree: str, rule: LinkRule) -> Graph:
    """Return a ring with chords, or the complete graph."""
    edges = {frozenset((i, (i + step) % NODES)) for i in range(NODES) for step in GRAPHS[degree]}
    return Graph.from_edges(NODES, [(min(edge), max(edge)) for edge in edges], rule)


def play(case: "Case", degree: str, rule: LinkRule, seed: int, is_honest: bool) -> float:
    """Return the mean accuracy of the honest nodes after the final phase."""
    tree = {
        "method": case.method,
        "clients": NODES,
        "clusters": 2,
        "rounds": ROUNDS,
        "seed": seed,
        "data": {
            "name": "digits",
            "examples": 60,
            "test_examples": TEST_EXAMPLES,
            "mixture": "permutation",
            "shares": "pure",
        },
        "model": {"name": "mlp", "hidden": HIDDEN},
        "training": {"lr": 0.1, "epochs": 3, "batch": 20},
        **case.settings,
    }
    plan = build_experiment(validate(tree)).plan
    insiders = INSIDERS[: case.insiders]
    network = InsiderNetwork({} if is_honest else dict.fromkeys(insiders, case.lie))
    with (
        tempfile.TemporaryDirectory(prefix="fedspd-attack-") as folder,
        open_peers(plan, graph_of(degree, rule), ROUNDS, network, Path(folder), TIMEOUTS) as peers,
    ):
        asyncio.run(run_together(*(peer.run() for peer in peers)))
        honest = [peer for peer in peers if peer.context.name not in insiders]
        return float(np.mean([peer.journal.last["accuracy"] for peer in honest]))


@dataclass(frozen=True)
class Case:
    """One lie against one method; the settings override the common config."""

    name: str
    method: str
    lie: Lie
    rules: Sequence[LinkRule] = RULES
    settings: Json = field(default_factory=dict)
    insiders: int = 1

    def honest_key(self, degree: str, rule: LinkRule, seed: int) -> str:
        """Return what a run without the lie depends on."""
        return json.dumps([self.method, self.settings, self.insiders, degree, rule, seed])


def claim_labelling(truth: Announcement) -> Announcement:
    """Announce the largest labelling after the split."""
    return replace(truth, note=MAX_LABELLING - OWN_BODIES if truth.note > 0 else truth.note)


NO_LABELS = {"fedspd": {"align_every": 0}}
ROBUST_OR_NOT: tuple[LinkRule, ...] = ("uniform", "median")
FLIP, ALIE, IPM = map(SendsInstead, (flip_sign, little_is_enough, inner_product))
CASES = [
    Case("sign flip", "fedspd", FLIP, settings=NO_LABELS),
    Case("ALIE", "fedspd", ALIE, settings=NO_LABELS),
    Case("IPM", "fedspd", IPM, settings=NO_LABELS),
    Case("dissensus", "fedspd", Dissensus(), settings=NO_LABELS),
    Case("huge values", "fedspd", SendsInstead(send_huge), settings=NO_LABELS),
    Case("two insiders: ALIE", "fedspd", ALIE, settings=NO_LABELS, insiders=2),
    Case("two insiders: IPM", "fedspd", IPM, settings=NO_LABELS, insiders=2),
    Case("label notes", "fedspd", SwapsLabels(), ROBUST_OR_NOT, {"fedspd": {"align_every": 2}}),
    Case(
        "1e308 examples",
        "fedspd",
        AnnouncesAndSends(flip_sign, lambda truth: replace(truth, weights=(1e308,))),
        ("examples",),
        NO_LABELS,
    ),
    Case("Split: sign flip", "fedspd-split", FLIP),
    Case("Split: IPM", "fedspd-split", IPM),
    Case("Split: mean feature", "fedspd-split", SearchLie(-5.0, MOMENTS), ROBUST_OR_NOT),
    Case("Split: directions", "fedspd-split", SearchLie(-5.0, DIRECTION), ROBUST_OR_NOT),
    Case("Split: directions and coordinates", "fedspd-split", SearchLie(-5.0)),
    Case("Split: corners and S", "fedspd-split", SearchLie(1e6)),
    Case("Split: labelling", "fedspd-split", Announces(claim_labelling)),
    Case(
        "Split: labelling, sign flip", "fedspd-split", AnnouncesAndSends(flip_sign, claim_labelling)
    ),
]


def run(
    cases: Sequence[Case], degrees: Sequence[str], seeds: int, known: Sequence[Json] = ()
) -> Iterator[Json]:
    """Yield a row for every case, rule and degree of each seed, beside a run without the lie.

    Rows that are known already are not played again, and not yielded.
    """
    by_name = {case.name: case for case in cases}
    about = [(row["case"], row["degree"], row["rule"], row["seed"]) for row in known]
    honest = {
        by_name[name].honest_key(*rest): row["honest"]
        for (name, *rest), row in zip(about, known, strict=True)
        if name in by_name
    }
    jobs = itertools.product(range(seeds), cases, degrees)
    # the runs of FedSPD-Split last: each takes five times as long
    for seed, case, degree in sorted(jobs, key=lambda job: job[1].method):
        for rule in case.rules:
            if (case.name, degree, rule, seed) in about:
                continue
            key = case.honest_key(degree, rule, seed)
            if key not in honest:
                honest[key] = play(case, degree, rule, seed, is_honest=True)
            yield {
                "case": case.name,
                "method": case.method,
                "rule": rule,
                "degree": degree,
                "seed": seed,
                "accuracy": play(case, degree, rule, seed, is_honest=False),
                "honest": honest[key],
            }


def render(rows: Sequence[Json]) -> str:
    """Return the table as Markdown: the loss in points with its standard error, over seeds."""
    head = ["insider of eight nodes", "rule", *(f"degree {d}" for d in GRAPHS)]
    lines = [head, ["---"] * len(head)]
    cells: defaultdict[tuple[str, str], defaultdict[str, list[Json]]]
    cells = defaultdict(lambda: defaultdict(list))
    order = {case.name: number for number, case in enumerate(CASES)}
    for row in sorted(rows, key=lambda row: order[row["case"]]):
        cells[row["case"], row["rule"]][row["degree"]].append(row)
    for (case, rule), by_degree in cells.items():
        found = [_render_cell(by_degree[degree]) for degree in GRAPHS]
        lines.append([case, f"`{rule}`", *found])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _render_cell(rows: Sequence[Json]) -> str:
    if not rows:
        return "–"
    losses = [100 * (row["honest"] - row["accuracy"]) for row in rows]
    spread = f" ± {np.std(losses, ddof=1) / len(losses) ** 0.5:.1f}" if len(losses) > 1 else ""
    honest = np.mean([100 * row["honest"] for row in rows])
    return f"{np.mean(losses):.1f}{spread} ({honest:.1f} %)"


def write(seeds: int = SEEDS) -> None:
    """Measure what is missing; write docs/attacks.json and the table of docs/security.md."""
    logging.getLogger("fedspd").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    path = DOCS / "attacks.json"
    rows: list[Json] = json.loads(path.read_text()) if path.exists() else []
    for row in run(CASES, list(GRAPHS), seeds, rows):
        rows.append(row)
        write_atomically(path, json.dumps(rows, indent=1) + "\n")
        print(time.strftime("%H:%M:%S"), json.dumps(row), flush=True)
    table.replace(DOCS / "security.md", render(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m chaos.attacks", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    write(parser.parse_args().seeds)
