"""An experiment as a file: a table of runs at three scales, and the paper's values beside it.

A cell of the table is one config: that of the experiment, its row and its column, then what the
scale changes in them. So the file states the paper's setting, and a scale only shrinks it.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from fedspd.config import ExperimentConfig, load, validate, without_other_methods
from fedspd.config.messages import error_message
from fedspd.core.errors import ConfigError, nearest
from fedspd.core.options import Options
from fedspd.paper.measures import MEASURES, TRAINING

Tree = dict[str, Any]
ScaleName = Literal["tiny", "small", "paper"]
ReadingName = Literal["text", "code"]
SCALES: tuple[ScaleName, ...] = ("tiny", "small", "paper")
READINGS: dict[ReadingName, Tree] = {
    "text": {},
    "code": {"selection": "uniform", "first_round": "all", "init": "own"},
}
PaperValue = Annotated[
    float | None, BeforeValidator(lambda value: value if value == value else None)
]  # TOML has no null: nan stands for a value that the paper does not have
LABEL = re.compile(r" \([a-z]+:[^)]*\)")  # such as (tab:tau)
GRAPH_SIZES = ("degree", "probability", "radius")  # a graph is given by one of them


class Setting(Options):
    """A row or a column of the table, and what it changes in the config."""

    name: str
    config: Tree = Field(default_factory=dict)
    tiny: Tree = Field(default_factory=dict)
    small: Tree = Field(default_factory=dict)


class RowSetting(Setting):
    """A row, which may also differ in what it shows, how often it runs, and when."""

    measure: str | None = None  # instead of the experiment's
    seeds: int | None = Field(None, ge=1)  # at scale paper, instead of that scale's
    stands_in_for: str | None = None  # runs only where the data of that row are missing


class Scale(Options):
    """How an experiment is shrunk, and how often it is repeated."""

    seeds: int = Field(1, ge=1)
    config: Tree = Field(default_factory=dict)


class FigureSpec(Options):
    """A figure in the paper's arrangement.

    curves   a panel per row, a line per column, over rounds
    lines    a line per row over the columns, in one panel or in a panel per row
    boxes    a panel per row, a box over the clients per column
    """

    name: str
    kind: Literal["curves", "lines", "boxes"]
    caption: str
    measure: str = "accuracy"
    axis: str = ""  # of lines: what the columns are
    panels: bool = False  # of lines


class Definition(Options):
    """The content of an experiment file."""

    title: str
    source: str  # the table or figure of the paper, by its label
    says: str  # what the paper concludes
    leaves_open: list[str] = Field(
        default_factory=list
    )  # what the paper does not say, and what we chose
    measure: str = "accuracy"
    relative: bool = False  # the table has ratios to the first column instead of values
    config: Tree = Field(default_factory=dict)
    tiny: Scale = Scale()
    small: Scale = Scale()
    paper: Scale = Scale()
    rows: list[RowSetting]
    columns: list[Setting]
    values: dict[str, list[PaperValue]] = Field(default_factory=dict)  # the paper's, by row
    figures: list[FigureSpec] = Field(default_factory=list)


@dataclass(frozen=True)
class Cell:
    """One config of an experiment, to be run with all seeds, and the paper's value of it.

    other_data   whose value the paper's is, if it is not of the same data
    """

    row: RowSetting
    column: Setting
    measure: str
    configs: list[ExperimentConfig]  # by seed
    paper: float | None
    other_data: str | None

    @property
    def data(self) -> str:
        """What the cell's runs are of, beside `other_data`."""
        return self.row.name if self.row.stands_in_for else str(self.configs[0].data.name)


@dataclass(frozen=True)
class PaperExperiment:
    """An experiment with its name."""

    name: str
    definition: Definition

    def tree(self, row: Setting, column: Setting, scale: ScaleName, reading: ReadingName) -> Tree:
        """Return the config of a cell as a tree of values, with the options of its method alone."""
        own = self.definition
        tree: Tree = {}
        layers = [own.config, row.config, column.config, getattr(own, scale).config]
        layers += [getattr(setting, scale, {}) for setting in (row, column)]
        for layer in layers:
            merge(tree, layer)
        if tree.get("method") == "fedspd":
            tree["fedspd"] = READINGS[reading] | tree.get("fedspd", {})
        if tree.get("topology", {}).get("kind") == "star":
            tree["topology"] = {"kind": "star"}
        return without_other_methods(tree, tree.get("method", load().method))

    def cell(
        self, row: RowSetting, column: Setting, scale: ScaleName, reading: ReadingName = "text"
    ) -> Cell:
        """Return a cell of the table."""
        tree = self.tree(row, column, scale, reading)
        own = getattr(self.definition, scale).seeds
        seeds = range(row.seeds if scale == "paper" and row.seeds is not None else own)
        first = tree.get("seed", 0)
        try:
            configs = [validate({**tree, "seed": first + seed}) for seed in seeds]
            self._check_metrics(configs[0])
        except ConfigError as error:
            raise ConfigError(f"{self.name}, {row.name}, {column.name}: {error}") from None
        values = self.definition.values.get(row.stands_in_for or row.name)
        paper = values[self.definition.columns.index(column)] if values else None
        measure = row.measure or self.definition.measure
        other_data = row.stands_in_for
        if other_data is None and not self.definition.relative:
            full = self.tree(row, column, "paper", reading).get("data", {}).get("name")
            other_data = full if full != tree.get("data", {}).get("name") else None
        return Cell(row, column, measure, configs, paper, other_data)

    def _check_metrics(self, config: ExperimentConfig) -> None:
        """Refuse runs that would not record what the experiment shows of them."""
        own = self.definition
        shown = {own.measure, *(row.measure for row in own.rows), *(f.measure for f in own.figures)}
        if TRAINING in shown and TRAINING not in (config.metrics or ()):
            raise ConfigError(
                f"metrics = {json.dumps(config.metrics or [])}: no '{TRAINING}', which the "
                f'experiment shows; expected metrics = ["{TRAINING}"] in [config].'
            )

    def cells(self, scale: ScaleName, reading: ReadingName = "text") -> list[Cell]:
        """Return all cells, row by row."""
        own = self.definition
        return [self.cell(r, c, scale, reading) for r in own.rows for c in own.columns]


def merge(tree: Tree, layer: Mapping[str, Any]) -> None:
    """Add the values of a layer to the tree, in place.

    A graph is given by its degree, its probability or its radius: the last one counts.
    """
    for key, value in layer.items():
        if isinstance(value, Mapping):
            own = tree.setdefault(key, {})
            if key == "topology" and any(size in value for size in GRAPH_SIZES):
                tree[key] = own = {k: v for k, v in own.items() if k not in GRAPH_SIZES}
            merge(own, value)
        else:
            tree[key] = value


def without_labels(source: str) -> str:
    """Return where the paper has something without the labels, which only its LaTeX shows."""
    return LABEL.sub("", source)


# ---- files


def load_experiment(name: str) -> PaperExperiment:
    """Return the experiment of this name, or that in a user's own file."""
    known = experiment_names()
    if name in known:
        text = (_folder() / f"{name}.toml").read_text("utf-8")
        return parse_experiment(name, text)
    path = Path(name)
    if path.suffix != ".toml":
        raise ConfigError(
            f"'{name}': unknown experiment; {nearest(name, [*known, 'theory', 'all'])}"
        )
    try:
        return parse_experiment(path.stem, path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"'{path}': no such file; expected an experiment as TOML.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}': the file cannot be read: {error}.") from None


def experiment_names() -> list[str]:
    """Return the names of the experiments that come with fedspd."""
    files = (entry.name for entry in _folder().iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def _folder() -> Any:
    return resources.files("fedspd.paper") / "experiments"


def parse_experiment(name: str, text: str) -> PaperExperiment:
    """Return the experiment that the text of a file describes."""
    try:
        definition = Definition.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not valid TOML: {error}.") from None
    except ValidationError as error:
        raise ConfigError(f"{name}: {error_message(error, Definition)}") from None
    _check_names(name, definition)
    _check_measures(name, definition)
    return PaperExperiment(name, definition)


def _check_names(name: str, definition: Definition) -> None:
    rows = [row.name for row in definition.rows]
    for row, values in definition.values.items():
        if row not in rows:
            raise ConfigError(f"{name}: values.{row}: unknown row; {nearest(row, rows)}")
        if len(values) != len(definition.columns):
            raise ConfigError(
                f"{name}: values.{row}: {len(values)} values; expected one for each of the "
                f"{len(definition.columns)} columns."
            )
    for setting in definition.rows:
        other = setting.stands_in_for
        if other is not None and other not in rows:
            raise ConfigError(
                f"{name}: rows.stands_in_for = '{other}': unknown row; {nearest(other, rows)}"
            )


def _check_measures(name: str, definition: Definition) -> None:
    drawn: Sequence[str] = [figure.measure for figure in definition.figures]
    rows = [row.measure for row in definition.rows if row.measure]
    for measure in [definition.measure, *rows, *drawn]:
        if measure not in MEASURES:
            raise ConfigError(
                f"{name}: measure = '{measure}': unknown measure; {nearest(measure, MEASURES)}"
            )
