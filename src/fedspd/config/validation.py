"""From a tree of values to a checked config."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import PydanticUserError, ValidationError

from fedspd.algorithms import METHODS
from fedspd.config.messages import as_json, error_message
from fedspd.config.schema import (
    METHOD_TABLES,
    CustomMethodOptions,
    ExperimentConfig,
    method_table,
)
from fedspd.core.algorithm import check_method_class
from fedspd.core.errors import ConfigError, nearest
from fedspd.core.imports import load_object, options_table
from fedspd.core.options import Options
from fedspd.privacy.checks import check_private_method, private_options

LARGEST_INTEGER = 2**63 - 1  # as in TOML
DEFAULT_CLUSTERS = 2  # of a method that does not find their number


def validate(tree: Mapping[str, Any]) -> ExperimentConfig:
    """Return the config with these values, and the defaults for all others."""
    try:
        config = ExperimentConfig.model_validate(_plain(tree))
    except ValidationError as error:
        raise ConfigError(error_message(error, ExperimentConfig)) from None
    clusters_of(config)
    config.training.check()
    _check_types(config)
    _check_patience(config)
    config = _protected(config, tree)
    if config.method in METHODS:
        return config
    options = _custom_options(config).model_dump(exclude_none=True, by_alias=True)
    return config.model_copy(update={"options": CustomMethodOptions(**options)})


def _plain(value: Any, key: str = "") -> Any:
    """Return the values of numpy and pathlib as those that a TOML file has."""
    if isinstance(value, Mapping):
        below = f"{key}." if key else ""
        return {name: _plain(item, f"{below}{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist(), key)
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER and key != "seed":
        raise ConfigError(f"{key} = {value}: expected a number of at most {LARGEST_INTEGER}.")
    return str(value) if isinstance(value, Path) else value


def check_used(config: ExperimentConfig, methods: Sequence[str]) -> None:
    """Refuse options of methods that do not take part: they would change nothing.

    It does not matter whether a file, the command line or Python gave them. Options at their
    defaults do not count. The config's own method always takes part.
    """
    used = {options_table(method) for method in (*methods, config.method)}
    unused = {
        f"{table}.{name}": value
        for table in sorted({*METHODS, "options"} - used)
        for name, value in _chosen(config, table).items()
    }
    if unused:
        raise _unused(unused, methods)


def _chosen(config: ExperimentConfig, table: str) -> dict[str, Any]:
    """Return the options in a method's table that neither are defaults nor follow from privacy."""
    options: dict[str, Any] = getattr(config, table).model_dump(by_alias=True)
    if table == "options":
        return options
    defaults = METHOD_TABLES[table]().model_dump(by_alias=True)
    if config.privacy.is_on:
        defaults |= private_options(table, METHODS[table], {})
    return {name: value for name, value in options.items() if value != defaults[name]}


def _unused(options: Mapping[str, Any], methods: Sequence[str]) -> ConfigError:
    named = f"method = '{methods[0]}'" if len(methods) == 1 else f"methods = {', '.join(methods)}"
    shown = ", ".join(f"{key} = {as_json(value)}" for key, value in options.items())
    defaults = " ".join(f"{key}=default" for key in options)
    if len(options) > 1:
        return ConfigError(
            f"{shown}: options of other methods, and {named}. Leave them out, or unset them with "
            f"{defaults}."
        )
    table = next(iter(options)).partition(".")[0]
    owner = "a method given as module:Class" if table == "options" else f"'{table}'"
    return ConfigError(
        f"{shown}: an option of {owner} only, and {named}. Leave it out, or unset it with "
        f"{defaults}."
    )


def without_other_methods(tree: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return a config's tree without the options of other methods."""
    others = {*METHODS, "options"} - {options_table(method)}
    return {key: value for key, value in tree.items() if key not in others}


def _check_types(config: ExperimentConfig) -> None:
    """Refuse to shorten parameters that were asked for in float64."""
    chosen = {"precision": config.precision, "exchange.dtype": config.exchange.dtype}
    for key, value in chosen.items():
        if config.dtype == "float64" and value != "float32":
            raise ConfigError(
                f"{key} = '{value}': not with dtype = 'float64'; expected float32. "
                "Set dtype = 'float32' or leave this key out."
            )


def _protected(config: ExperimentConfig, tree: Mapping[str, Any]) -> ExperimentConfig:
    """Return the config with the options that privacy needs, if it is on."""
    config.privacy.check()
    if not config.privacy.is_on:
        return config
    check_private_method(config.method, method_class(config))
    if config.data.validation:
        raise ConfigError(
            f"data.validation = {config.data.validation:g}: not with privacy, since the choice of "
            "a round would tell of the examples; expected 0. Leave this key out."
        )
    if config.precision != "float32":
        raise ConfigError(
            f"precision = '{config.precision}': not with privacy, which trains example by example; "
            "expected float32. Leave this key out."
        )
    if config.data.scale != "none" and config.privacy.is_of_examples:
        raise ConfigError(
            f"data.scale = '{config.data.scale}': not with privacy, since the mean and the "
            "deviation of a client's inputs would shape every gradient; expected 'none'. Scale the "
            "inputs by public numbers beforehand."
        )
    tables = {
        name: getattr(config, name).model_copy(
            update=private_options(name, method, tree.get(name, {}))
        )
        for name, method in METHODS.items()
        if method.PRIVATE_OPTIONS
    }
    return config.model_copy(update=tables)


def _check_patience(config: ExperimentConfig) -> None:
    if config.patience is None:
        return
    if not config.data.validation:
        raise ConfigError(
            f"patience = {config.patience}: there are no validation examples to stop by; expected "
            "data.validation above 0, such as 0.1."
        )
    if config.patience < config.evaluate_every:
        raise ConfigError(
            f"patience = {config.patience}: no round would be evaluated in between; expected at "
            f"least evaluate_every = {config.evaluate_every}."
        )


def method_class(config: ExperimentConfig) -> type[Any]:
    """Return the class of the config's method, which may be a custom one, module:Class."""
    if config.method in METHODS:
        return METHODS[config.method]
    if ":" not in config.method:
        raise ConfigError(
            f"method = '{config.method}': unknown method; {nearest(config.method, METHODS)}"
        )
    found = load_object("method", config.method, ConfigError)
    return check_method_class(config.method, found, has_newcomers=config.holdout_clients > 0)


def clusters_of(config: ExperimentConfig) -> int:
    """Return S, or 0 where the method finds it."""
    chooses = method_class(config).CHOOSES_CLUSTERS
    if config.clusters == "auto" and not chooses:
        raise ConfigError(
            f"clusters = 'auto': method = '{config.method}' does not find the number of clusters; "
            "expected an integer from 1."
        )
    if isinstance(config.clusters, int):
        return config.clusters
    return 0 if chooses else DEFAULT_CLUSTERS


def method_options(config: ExperimentConfig) -> dict[str, Any]:
    """Return the options of the config's method, by field name."""
    if config.method in METHODS:
        return dict(getattr(config, config.method))
    return dict(_custom_options(config))


def _custom_options(config: ExperimentConfig) -> Options:
    """Return the table `options` as the fields of the custom method's class."""
    try:
        table = method_table(method_class(config))
        return table.model_validate(config.options.model_dump())
    except ValidationError as error:
        raise ConfigError(error_message(error, table, prefix=("options",))) from None
    except (NameError, PydanticUserError) as error:
        raise ConfigError(
            f"method = '{config.method}': the types of its fields cannot be read: {error}"
        ) from None
