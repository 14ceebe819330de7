"""The keys of a config. Every table is declared beside the code that uses it."""

import dataclasses
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from fedspd.algorithms import METHODS
from fedspd.core.exchange import ExchangeOptions
from fedspd.core.learner import TrainingOptions
from fedspd.core.options import Options, split_names
from fedspd.core.precision import Precision
from fedspd.data.options import DataOptions
from fedspd.models import ModelOptions
from fedspd.privacy.options import PrivacyOptions
from fedspd.topology import TopologyOptions

Config = TypeVar("Config", bound=Options)
MetricName = Literal["macro_f1", "auc", "training_accuracy", "rmse", "r2"]


def method_table(method: type[Any]) -> type[Options]:
    """Return the table whose keys are the fields of a method, except `clusters`."""
    hints = get_type_hints(method, include_extras=True)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], _default(field))
        for field in dataclasses.fields(method)
        if field.init and field.name != "clusters"
    }
    return create_model(method.__name__, __base__=Options, **fields)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return Field(default_factory=field.default_factory)
    return ... if field.default is dataclasses.MISSING else field.default


METHOD_TABLES = {name: method_table(method) for name, method in METHODS.items()}


def _with_method_tables(config: type[Config]) -> type[Config]:
    """Return the config class with one more table for each method."""
    tables: dict[str, Any] = {name: (table, table()) for name, table in METHOD_TABLES.items()}
    return create_model(
        config.__name__,
        __base__=config,
        __doc__=config.__doc__,
        __module__=config.__module__,
        **tables,
    )


def _check_clusters(value: Any) -> Any:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if is_count or value in ("auto", None):
        return value
    raise PydanticCustomError("clusters", "an integer from 1, or auto")


class CustomMethodOptions(Options):
    """The options of a custom method, `method = "module:Class"`: the fields of that class."""

    model_config = ConfigDict(extra="allow")


@_with_method_tables
class ExperimentConfig(Options):
    """The complete description of an experiment."""

    seed: int = Field(0, ge=0, description="Every random draw follows from this seed.")
    method: str = Field(
        "fedspd-split",
        description="The method: a name from `fedspd methods`, or `module:Class`.",
    )
    clusters: Annotated[int | Literal["auto"] | None, BeforeValidator(_check_clusters)] = Field(
        None,
        description="The number of clusters (S). The default is 2. With `fedspd-split` it is "
        "`auto`: the method finds the number.",
    )
    clients: int = Field(20, ge=1, description="The number of clients (N).")
    holdout_clients: int = Field(
        0,
        ge=0,
        description="The number of further clients that do not train and join after training.",
    )
    rounds: int = Field(30, ge=1, description="The number of training rounds (T).")
    patience: int | None = Field(
        None,
        ge=1,
        description="Only with data.validation: the run stops early when the validation loss has "
        "not improved for this many rounds. The default is never.",
    )
    evaluate_every: int = Field(
        1, ge=1, description="The number of rounds between two evaluations of all clients."
    )
    metrics: Annotated[list[MetricName] | None, BeforeValidator(split_names)] = Field(
        None,
        description="Scores of every client beside its accuracy: `macro_f1`, `auc` (one class "
        "against the rest, averaged) and `training_accuracy` (on the examples that it trains on) "
        "for classes. The default is none. A regression always has `rmse` and `r2`.",
    )
    device: str = Field(
        "cpu",
        description="`cpu`, `cuda` or `cuda:0`; `auto` takes a GPU if there is one, else the CPU.",
    )
    dtype: Literal["float32", "float64"] = Field(
        "float32", description="The data type of a model's parameters."
    )
    precision: Precision = Field(
        "float32",
        description="The precision of local training. `bf16` runs its forward and backward passes "
        "in bfloat16, which speeds up convolutional models, and needs a processor with bfloat16 "
        "instructions. Parameters, momentum, means and evaluations stay in float32. Small dense "
        "models are slower: their clients train one after another.",
    )
    loss: Literal["auto", "cross_entropy", "squared_error"] = Field(
        "auto",
        description="`auto` means cross-entropy for class labels and squared error for regression.",
    )
    data: DataOptions = DataOptions()
    topology: TopologyOptions = TopologyOptions()
    model: ModelOptions = ModelOptions()
    training: TrainingOptions = TrainingOptions()
    exchange: ExchangeOptions = ExchangeOptions()
    privacy: PrivacyOptions = PrivacyOptions()
    options: CustomMethodOptions = CustomMethodOptions()
