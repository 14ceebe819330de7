"""One validated tree of small typed values. A key that nobody knows is refused, with the nearest one that is known."""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, ValidationError, create_model

from fedspd.algorithms import METHODS
from fedspd.core.algorithm import check_method_class
from fedspd.core.errors import ConfigError, nearest
from fedspd.core.graph import LinkRule
from fedspd.core.imports import load_object
from fedspd.core.learner import TrainingOptions
from fedspd.core.options import Options
from fedspd.data.mixtures import MIXTURES, MixtureOptions
from fedspd.models import MODELS
from fedspd.topology import KINDS, TopologyOptions


def table_of(cls: type[Any], leave_out: Sequence[str] = ()) -> type[Options]:
    """The table whose keys are the fields of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    kept = [f for f in dataclasses.fields(cls) if f.init and f.name not in leave_out]
    fields: dict[str, Any] = {f.name: (hints[f.name], _default(f)) for f in kept}
    return create_model(cls.__name__, __base__=Options, **fields)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return Field(default_factory=field.default_factory)
    return ... if field.default is dataclasses.MISSING else field.default


class DataTable(Options):
    """Which examples there are, and who gets which."""

    name: str = Field(
        "digits",
        description="a dataset (`fedspd data list`), a .npz file, a folder of images, or module:function",
    )
    second: str | None = Field(None, description="the other dataset of mixture = 'pair'")
    mixture: str = Field(
        "rotation",
        description="; ".join(f"`{name}`: {text.rstrip('.')}" for name, text in MIXTURES.items()),
    )
    examples: int | None = Field(
        None,
        ge=2,
        description="training examples per client; default: 80 % of an even share, at most 300",
    )
    test_examples: int | None = Field(
        None,
        ge=1,
        description="test examples per client; default: in proportion to the source's parts",
    )
    shares: Literal["uniform", "steps"] = Field(
        "uniform",
        description="a client's share of the first distribution: 10..90 % at random; steps: 10, 30, ... in turn",
    )
    imbalance: float = Field(
        1.0,
        ge=1,
        description="examples of the largest third of the clients over those of the smallest (r)",
    )
    distributions: int = Field(
        2, ge=1, description="number of distributions of mixture = 'permutation'"
    )
    alpha: float = Field(0.4, gt=0, description="concentration of mixture = 'dirichlet'")
    shards: int = Field(2, ge=1, description="shards per client of mixture = 'shards'")

    def options(self, clients: int, examples: int) -> MixtureOptions:
        given = self.model_dump(exclude={"name", "second", "examples"})
        return MixtureOptions(clients=clients, examples=examples, **given)


class TopologyTable(Options):
    """Who hears whom."""

    kind: str = Field("er", description=f"one of: {', '.join(KINDS)}")
    degree: float | None = Field(
        None, description="average number of neighbours (er, ba, rgg); default 6"
    )
    probability: float | None = Field(
        None, description="er: probability of an edge, instead of the degree"
    )
    radius: float | None = Field(
        None, description="rgg: reach in the unit square, instead of the degree"
    )
    file: str | None = Field(None, description="file: an edge list, one `i j` per line")
    weights: LinkRule | None = Field(
        None,
        description="how a mean weighs what it hears; a star's default is examples, else uniform (Eq. 1); "
        "median, trimmed, clipped: against a neighbour that lies",
    )
    remove: float = Field(
        0.0,
        description="dynamic graph: probability that an edge goes in a round; others come at the same rate",
    )

    def options(self) -> TopologyOptions:
        return TopologyOptions(**self.model_dump())


class ModelTable(Options):
    name: str | None = Field(
        None,
        description=f"one of: {', '.join(MODELS)}; or module:function; default: cnn for images of 16 pixels and more, else mlp",
    )
    small: bool = Field(
        False, description="cifar-cnn with a quarter of the channels and hidden units"
    )
    hidden: int = Field(64, ge=1, description="width of the mlp's hidden layer")


class OptionsTable(Options):
    """Used where `method = "module:Class"`: the fields of that class are its keys."""

    model_config = ConfigDict(extra="allow")


class ExperimentConfig(Options):
    seed: int = Field(0, ge=0, description="every draw follows from it")
    method: str = Field(
        "fedspd", description="one of the methods (`fedspd methods`), or module:Class"
    )
    clusters: int = Field(2, ge=1, description="number of clusters (S)")
    clients: int = Field(20, ge=1, description="number of clients (N)")
    holdout_clients: int = Field(
        0, ge=0, description="further clients that take no part in training and join after it"
    )
    rounds: int = Field(30, ge=1, description="rounds of training (T)")
    evaluate_every: int = Field(1, ge=1, description="rounds between two tests of all clients")
    device: str = Field(
        "cpu", description="cpu, cuda or cuda:0; auto: cuda where there is one, else cpu"
    )
    dtype: Literal["float32", "float64"] = Field(
        "float32", description="type of the numbers in a model"
    )
    loss: Literal["auto", "cross_entropy", "squared_error"] = Field(
        "auto", description="auto: cross_entropy for classes, else squared_error"
    )
    data: DataTable = DataTable()
    topology: TopologyTable = TopologyTable()
    model: ModelTable = ModelTable()
    training: TrainingOptions = TrainingOptions()
    options: OptionsTable = OptionsTable()


METHOD_TABLES = {name: table_of(cls, leave_out=["clusters"]) for name, cls in METHODS.items()}
_tables: dict[str, Any] = {name: (table, table()) for name, table in METHOD_TABLES.items()}
Config: type[ExperimentConfig] = create_model("Config", __base__=ExperimentConfig, **_tables)


def method_class(config: ExperimentConfig) -> type[Any]:
    """The class of a method of ours, or of one that is given as module:Class."""
    if config.method in METHODS:
        return METHODS[config.method]
    if ":" not in config.method:
        raise ConfigError(
            f"method = '{config.method}': there is no such method; {nearest(config.method, METHODS)}"
        )
    found = load_object("method", config.method, ConfigError)
    return check_method_class(config.method, found, has_newcomers=config.holdout_clients > 0)


def method_options(config: ExperimentConfig) -> dict[str, Any]:
    return dict(
        getattr(config, config.method) if config.method in METHODS else _own_options(config)
    )


def _own_options(config: ExperimentConfig) -> Options:
    """The table `options` as the fields of the user's class."""
    try:
        table = create_model(
            "Own",
            __base__=Options,
            options=(table_of(method_class(config), leave_out=["clusters"]), ...),
        )
        options: Options = table.model_validate({"options": config.options.model_dump()}).options  # type: ignore[attr-defined]
    except ValidationError as error:
        raise ConfigError(sentence(error, table)) from None
    except (NameError, PydanticUserError) as error:
        raise ConfigError(
            f"method = '{config.method}': the types of its fields cannot be read: {error}"
        ) from None
    return options


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """A config from a TOML file, with key=value pairs on top."""
    tree = _read(path) if path else {}
    for override in overrides:
        set_key(tree, *parse_override(override))
    return validate(tree)


def validate(tree: Mapping[str, Any]) -> ExperimentConfig:
    try:
        config = Config.model_validate(dict(tree))
    except ValidationError as error:
        raise ConfigError(sentence(error)) from None
    method_class(config)
    if config.method in METHODS:
        return config
    options = _own_options(config).model_dump(exclude_none=True, by_alias=True)
    return config.model_copy(update={"options": OptionsTable(**options)})


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"The config '{path}' does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config '{path}' could not be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The config '{path}' is not valid TOML: {error}.") from None


def parse_override(override: str) -> tuple[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"'{override}' is not an override: expected key=value, for example rounds=30 or topology.degree=6."
        )
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"'{key}' cannot be set: '{parent}' is a value, not a table.")
    tree[last] = value


EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "bool_type": "true or false",
}


def sentence(error: ValidationError, root: type[Options] = Config) -> str:
    """The first thing that is wrong, to a person."""
    first, more = error.errors()[0], error.error_count() - 1
    key = ".".join(str(part) for part in first["loc"])
    rest = f" ({more} more {'key is' if more == 1 else 'keys are'} wrong.)" if more else ""
    if first["type"] in ("extra_forbidden", "invalid_key"):
        return f"Unknown key '{key}': {_elsewhere(first['loc']) or nearest(str(first['loc'][-1]), _keys_beside(first['loc'], root))}{rest}"
    if first["type"] == "missing":
        return f"The key '{key}' is missing: it has no default.{rest}"
    return f"{key} = {_shown(first['input'])}: expected {_expected(first, root)}.{rest}"


def _expected(error: Any, root: type[Options]) -> str:
    if error["type"] == "model_type":
        return f"a table with the keys {', '.join(_keys_beside([*error['loc'], 'any'], root))}"
    words: str = error["msg"].removeprefix("Input should be ")
    return EXPECTED.get(error["type"]) or (
        f"a number {words}" if words.startswith(("greater", "less")) else words
    )


def _elsewhere(place: Sequence[int | str]) -> str:
    """Of an option that other methods have: whose it is."""
    owners = [
        method
        for method in METHOD_TABLES
        if place[0] in METHOD_TABLES and place[-1] in _keys_beside([method, "any"])
    ]
    return f"'{place[-1]}' belongs to {', '.join(owners)}." if owners else ""


def _keys_beside(place: Sequence[int | str], root: type[Options] = Config) -> list[str]:
    table: Any = root
    for part in place[:-1]:
        table = table.model_fields[str(part)].annotation
    return [field.alias or name for name, field in table.model_fields.items()]


def _shown(value: Any) -> str:
    """As JSON, in the way that is valid TOML too."""
    return json.dumps(value, default=str, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---- a config as text


def as_dict(config: ExperimentConfig) -> dict[str, Any]:
    return config.model_dump(exclude_none=True, by_alias=True)


def config_hash(config: ExperimentConfig) -> str:
    """Of all that the run depends on: the tables of other methods may change."""
    others = {*METHODS, "options"} - {config.method if config.method in METHODS else "options"}
    tree = {key: value for key, value in as_dict(config).items() if key not in others}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def as_toml(config: ExperimentConfig) -> str:
    tree = as_dict(config)
    lines = [
        f"{key} = {_shown(value)}" for key, value in tree.items() if not isinstance(value, dict)
    ]
    for name, table in tree.items():
        if isinstance(table, dict):
            lines += [
                "",
                f"[{name}]",
                *(f"{key} = {_shown(value)}" for key, value in table.items()),
            ]
    return "\n".join(lines) + "\n"
