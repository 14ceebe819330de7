"""The options of a graph, and the checks that involve more than one of them."""

import math
from typing import Literal

from pydantic import Field

from fedspd.core.errors import TopologyError
from fedspd.core.graph import LinkRule
from fedspd.core.options import Options

Kind = Literal["er", "ba", "rgg", "ring", "grid", "complete", "star", "file"]

# The options that a kind of graph has besides `weights` and `remove`.
KIND_OPTIONS: dict[Kind, tuple[str, ...]] = {
    "er": ("degree", "probability"),
    "ba": ("degree",),
    "rgg": ("degree", "radius"),
    "ring": (),
    "grid": (),
    "complete": (),
    "star": (),
    "file": ("file",),
}
DEFAULT_DEGREE = 6


class TopologyOptions(Options):
    """The graph of clients: which clients are neighbours, and how they aggregate."""

    kind: Kind = Field(
        "er",
        description="`er`: Erdős-Rényi; `ba`: Barabási-Albert; `rgg`: random geometric graph; "
        "`star`: a central server; `file`: an edge list.",
    )
    degree: float | None = Field(
        None,
        gt=0,
        description="Only for `er`, `ba` and `rgg`: the average number of neighbours. The default "
        "is 6.",
    )
    probability: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Only for `er`: the probability of an edge, instead of the degree.",
    )
    radius: float | None = Field(
        None,
        gt=0,
        description="Only for `rgg`: the largest distance of neighbours in the unit square, "
        "instead of the degree.",
    )
    file: str | None = Field(
        None, description="Only for `file`: the path of an edge list, with one `i j` per line."
    )
    weights: LinkRule | None = Field(
        None,
        description="The aggregation rule. The default is `examples` for a star and `uniform` "
        "(Eq. 1) otherwise; `median`, `trimmed` and `clipped` are robust to Byzantine neighbours.",
    )
    remove: float = Field(
        0.0,
        ge=0,
        le=1,
        description="The probability that an edge is removed in a round, which makes the graph "
        "dynamic. New edges appear at the same rate.",
    )

    @property
    def rule(self) -> LinkRule:
        """The aggregation rule, resolved to its default."""
        return self.weights or ("examples" if self.kind == "star" else "uniform")

    def expected_degree(self, clients: int) -> float:
        """Return the average degree that is asked for."""
        return min(DEFAULT_DEGREE, clients - 1) if self.degree is None else self.degree


def check(options: TopologyOptions, clients: int) -> None:
    """Raise an error if no graph of this many clients can have these options."""
    if clients < 1:
        raise TopologyError(f"clients = {clients}: too few; expected at least 1.")
    _check_kind(options)
    if clients > 1:
        _check_density(options, clients)


def _check_kind(options: TopologyOptions) -> None:
    of_some_kinds = {"degree", "probability", "radius", "file"}
    values = options.model_dump(include=of_some_kinds, exclude_none=True)
    given = {name: f"topology.{name} = {_shown(value)}" for name, value in values.items()}
    for name in given:
        if name not in KIND_OPTIONS[options.kind]:
            raise _not_for_kind(options, given[name])
    if len(given) > 1:
        both = " and ".join(given.values())
        raise TopologyError(f"{both}: both set the number of edges; expected one of them.")
    if options.kind == "file" and not options.file:
        raise TopologyError(
            "topology.kind = 'file': topology.file is missing; expected the path of an edge list."
        )
    if options.kind == "star" and options.remove:
        raise _not_for_kind(options, f"topology.remove = {options.remove:g}")
    if options.kind == "star" and options.weights == "clipped":
        raise TopologyError(
            "topology.weights = 'clipped': a server has no model of its own to clip around, and "
            "topology.kind = 'star'; expected another rule, such as median or trimmed."
        )


def _shown(value: float | str) -> str:
    return f"'{value}'" if isinstance(value, str) else f"{value:g}"


def _not_for_kind(options: TopologyOptions, given: str) -> TopologyError:
    return TopologyError(
        f"{given}: not an option of topology.kind = '{options.kind}'. Leave it out."
    )


def _check_density(options: TopologyOptions, clients: int) -> None:
    degree, probability = options.degree, options.probability
    if degree is not None and degree > clients - 1:
        raise TopologyError(
            f"topology.degree = {degree:g}: too large for clients = {clients}; "
            f"expected at most {clients - 1}."
        )
    if probability is not None and probability < 2 / clients:
        raise _too_sparse("probability", probability, clients, 2 / clients)
    if degree is None or options.kind == "ba":
        return
    if edge_count(degree, clients) < clients - 1:
        raise _too_sparse("degree", degree, clients, 2 * (clients - 1) / clients)


def edge_count(degree: float, clients: int) -> int:
    """Return the number of edges of a graph with this average degree."""
    return round(degree * clients / 2)


def _too_sparse(name: str, value: float, clients: int, smallest: float) -> TopologyError:
    enough = math.ceil(smallest * 10_000) / 10_000
    return TopologyError(
        f"topology.{name} = {value:g}: fewer than the {clients - 1} edges that connect {clients} "
        f"clients; expected at least {enough:g}."
    )
