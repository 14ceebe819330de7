"""Configs from TOML files and KEY=VALUE overrides, and back to text."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedspd.config.messages import as_json
from fedspd.config.schema import ExperimentConfig
from fedspd.config.validation import validate, without_other_methods
from fedspd.core.errors import ConfigError
from fedspd.storage.atomic import flatten

DEFAULT = "default"  # the value that unsets a key


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Return the config of a TOML file; KEY=VALUE overrides take precedence over the file."""
    tree = _read(Path(path)) if path else {}
    for override in overrides:
        set_key(tree, *parse_override(override))
    return validate(tree)


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the config file and the overrides among the arguments [CONFIG] [KEY=VALUE]..."""
    overrides = [argument for argument in arguments if _is_override(argument)]
    paths = [argument for argument in arguments if argument not in overrides]
    if len(paths) > 1:
        raise ConfigError(
            f"'{paths[1]}': neither an override nor the only config file, which is '{paths[0]}'; "
            "expected [CONFIG] [KEY=VALUE]..., for example rounds=30 or topology.degree=6."
        )
    return Path(paths[0]) if paths else None, overrides


def _is_override(argument: str) -> bool:
    """Return whether this is KEY=VALUE; folders of a comparison have an equals sign too."""
    key, equals, _ = argument.partition("=")
    return bool(equals) and "/" not in key and not Path(argument).is_file()


def parse_override(override: str) -> tuple[str, Any]:
    """Return the key and the value of KEY=VALUE; a value that is not TOML is a string."""
    key, equals, value = override.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise ConfigError(
            f"'{override}': not an override; expected KEY=VALUE, for example rounds=30 or "
            "topology.degree=6."
        )
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a tree of values, in place; the value DEFAULT unsets it."""
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{key} = {as_json(value)}: '{parent}' is a value; expected a table.")
    if value == DEFAULT:
        tree.pop(last, None)
    else:
        tree[last] = value


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(
            f"config = '{path}': no such file; expected a TOML file, and KEY=VALUE for single keys."
        ) from None
    except IsADirectoryError:
        raise ConfigError(
            f"config = '{path}': a folder; expected a TOML file. That of a run is config.toml in "
            "its folder."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config = '{path}': the file cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config = '{path}': not valid TOML: {error}.") from None


def as_dict(config: ExperimentConfig) -> dict[str, Any]:
    """Return the config as a tree of values, without keys that are not set."""
    return config.model_dump(exclude_none=True, by_alias=True)


def given_dict(config: ExperimentConfig) -> dict[str, Any]:
    """Return the config as a tree, without a number of clients that the data may know better."""
    tree = as_dict(config)
    if "clients" not in config.model_fields_set:
        del tree["clients"]
    return tree


def changes(before: ExperimentConfig, now: ExperimentConfig) -> dict[str, tuple[Any, Any]]:
    """Return both values of every dotted key that makes these configs different runs.

    Options of other methods do not count. A key that a file of older code does not have has its
    default here, which a hash in that file could not know.
    """
    old, new = (flatten(without_other_methods(as_dict(one), one.method)) for one in (before, now))
    keys = [*old, *(key for key in new if key not in old)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def as_toml(config: ExperimentConfig) -> str:
    """Return the config as the text of a TOML file, without the options of other methods."""
    tree = without_other_methods(as_dict(config), config.method)
    tables = {name: table for name, table in tree.items() if isinstance(table, dict)}
    lines = _toml_lines({key: value for key, value in tree.items() if key not in tables})
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_toml_lines(table)]
    return "\n".join(lines) + "\n"


def _toml_lines(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {as_json(value)}" for key, value in table.items()]
