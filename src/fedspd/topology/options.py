"""What a user may ask of a graph, and what is refused."""

import math
from dataclasses import dataclass
from typing import get_args

from fedspd.core.errors import TopologyError, nearest
from fedspd.core.graph import LinkRule

# every kind, and the options that have a meaning for it besides weights and remove
KINDS: dict[str, tuple[str, ...]] = {
    "er": ("degree", "probability"),
    "ba": ("degree",),
    "rgg": ("degree", "radius"),
    "ring": (),
    "grid": (),
    "complete": (),
    "star": (),
    "file": ("file",),
}
USUAL_DEGREE = 6


@dataclass(frozen=True)
class TopologyOptions:
    """The table [topology] of a config.

    kind         er, ba, rgg, ring, grid, complete, star or file
    degree       average number of neighbours (er: exactly; ba: about; rgg: exactly); 6 if nothing is said
    probability  er: the probability of an edge, instead of degree
    radius       rgg: the distance in the unit square up to which two clients are neighbours, instead of degree
    file         an edge list: one "i j" per line, comments after #, clients are 0..N-1
    weights      how a mean weighs what it hears; if nothing is said, uniform, and for a star examples; median, trimmed and
                 clipped are means that a liar can move only a little
    remove       each round every edge goes with this probability, and as many come on average
    """

    kind: str = "er"
    degree: float | None = None
    probability: float | None = None
    radius: float | None = None
    file: str | None = None
    weights: LinkRule | None = None
    remove: float = 0.0

    @property
    def rule(self) -> LinkRule:
        return self.weights or ("examples" if self.kind == "star" else "uniform")

    def usual_degree(self, clients: int) -> float:
        return min(USUAL_DEGREE, clients - 1) if self.degree is None else self.degree


def check(options: TopologyOptions, clients: int) -> None:
    """Refuse what has no meaning, whatever the draw."""
    if clients < 1:
        raise TopologyError(f"clients = {clients} is impossible: a network has at least 1 client.")
    _check_names(options)
    _check_fit(options)
    if not 0 <= options.remove <= 1:
        raise TopologyError(
            f"topology.remove = {options.remove:g} is not a probability: give a number from 0 to 1."
        )
    if options.weights == "clipped" and options.kind == "star":
        raise TopologyError(
            "topology.weights = 'clipped' has no meaning for topology.kind = 'star': a server has no model to measure from; "
            "use median or trimmed."
        )
    if options.remove and options.kind == "star":
        raise TopologyError(
            f"topology.remove = {options.remove:g} has no meaning for topology.kind = 'star': leave it out."
        )
    if clients > 1:
        _check_numbers(options, clients)


def _check_names(options: TopologyOptions) -> None:
    if options.kind not in KINDS:
        raise TopologyError(
            f"topology.kind = '{options.kind}' is unknown: {nearest(options.kind, KINDS)}"
        )
    rules = get_args(LinkRule)
    if options.weights is not None and options.weights not in rules:
        raise TopologyError(
            f"topology.weights = '{options.weights}' is unknown: {nearest(options.weights, rules)}"
        )


def _check_fit(options: TopologyOptions) -> None:
    """Every option that is given must mean something to this kind, and only one may say how many edges there are."""
    given = {
        name: value
        for name in ("degree", "probability", "radius", "file")
        if (value := getattr(options, name)) is not None
    }
    for name, value in given.items():
        if name not in KINDS[options.kind]:
            raise TopologyError(
                f"topology.{name} = {value} has no meaning for topology.kind = '{options.kind}': leave it out."
            )
    if len(given) > 1:
        both = " and ".join(f"topology.{name} = {value:g}" for name, value in given.items())
        raise TopologyError(f"{both} both say how many edges there are: give one of them.")
    if options.kind == "file" and not options.file:
        raise TopologyError(
            "topology.kind = 'file' needs topology.file, the path of an edge list: give it."
        )


def _check_numbers(options: TopologyOptions, clients: int) -> None:
    degree, probability, radius = options.degree, options.probability, options.radius
    if degree is not None and not 0 < degree <= clients - 1:
        raise TopologyError(
            f"topology.degree = {degree:g} is impossible with clients = {clients}: give a number above 0 and at most {clients - 1}."
        )
    if probability is not None and not 0 <= probability <= 1:
        raise TopologyError(
            f"topology.probability = {probability:g} is not a probability: give a number from 0 to 1."
        )
    if probability is not None and probability < 2 / clients:
        _refuse_sparse("probability", probability, clients, 2 / clients)
    if radius is not None and not radius > 0:
        raise TopologyError(f"topology.radius = {radius:g} is impossible: give a distance above 0.")
    if (
        options.kind in ("er", "rgg")
        and degree is not None
        and edges_of_degree(degree, clients) < clients - 1
    ):
        _refuse_sparse("degree", degree, clients, 2 * (clients - 1) / clients)


def edges_of_degree(degree: float, clients: int) -> int:
    return round(degree * clients / 2)


def _refuse_sparse(name: str, value: float, clients: int, smallest: float) -> None:
    enough = math.ceil(smallest * 10_000) / 10_000
    raise TopologyError(
        f"topology.{name} = {value:g} gives fewer than the {clients - 1} edges that join {clients} clients: give at least {enough:g}."
    )
