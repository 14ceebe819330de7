"""Print the config reference: `python tools/config_reference.py > docs/config.md`.

It also writes the list that `fedspd methods` shows: with it, the command need not import torch.
"""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from fedspd.algorithms import METHODS
from fedspd.config import METHOD_TABLES, ExperimentConfig
from fedspd.core.options import Options

HEAD = """# Config reference

This page lists every key of a config with its type, default and meaning. All keys are optional.

A config is a TOML file. The keys of a table go below its heading, `degree = 6` below `[topology]`.
On the command line, `topology.degree=6` sets the same key and takes precedence over the file. In
Python, a config is a dictionary: `fedspd.run({"rounds": 30, "topology": {"degree": 6}})`. Unknown
keys, wrong types and impossible values are errors.

`make docs` writes this page from the code, and a test checks that it is up to date.
"""
METHODS_FILE = Path(__file__).parents[1] / "src/fedspd/cli/methods.json"
TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def reference() -> str:
    """Return the page."""
    sections = [section(f"`[{name}]`", f"{name}.", table) for name, table in tables()]
    return "\n".join([HEAD, section("Top level", "", ExperimentConfig), *sections])


def tables() -> Iterator[tuple[str, type[Options]]]:
    """Yield the name and the class of each table."""
    for name, field in ExperimentConfig.model_fields.items():
        if table := table_of(field):
            yield name, table


def table_of(field: FieldInfo) -> type[Options] | None:
    """Return the class of a field that is a table."""
    found = field.annotation
    return found if isinstance(found, type) and issubclass(found, Options) else None


def section(title: str, prefix: str, table: type[Options]) -> str:
    """Return the section of one table."""
    rows = [row(prefix + name, field) for name, field in keys(table)]
    head = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines = [*head, *rows] if rows else ["This table has no keys of its own."]
    return "\n".join([f"## {title}", "", about(table), "", *lines, ""])


def keys(table: type[Options]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the keys of a table that are not tables themselves."""
    for name, field in table.model_fields.items():
        if not table_of(field):
            yield field.alias or name, field


def about(table: type[Options]) -> str:
    """Return the sentence above a table."""
    for method, own in METHOD_TABLES.items():
        if own is table:
            return f'The options of `method = "{method}"`.'
    return table.__doc__ or ""


def row(key: str, field: FieldInfo) -> str:
    """Return the row of one key."""
    default = "not set" if field.default is None else f"`{json.dumps(field.default)}`"
    kind = ", ".join([type_name(field.annotation), *bounds(field)])
    description = (field.description or "").replace("|", "\\|")
    return f"| `{key}` | {kind} | {default} | {description} |"


def type_name(annotation: Any) -> str:
    """Return the name of a type in TOML's words, or the values of a Literal."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in get_args(annotation))
    present = [option for option in get_args(annotation) if option is not NoneType]
    return type_name(present[0]) if present else TYPES[annotation]


def bounds(field: FieldInfo) -> Iterator[str]:
    """Yield the bounds of a number in words."""
    for bound in field.metadata:
        for name, words in BOUNDS.items():
            if hasattr(bound, name):
                yield f"{words} {getattr(bound, name)}"


def methods_list() -> str:
    """Return every method with what it is and the defaults of its options, as JSON."""
    methods = {
        name: {
            "about": first_paragraph(inspect.getdoc(inspect.getmodule(method)) or ""),
            "options": METHOD_TABLES[name]().model_dump(by_alias=True),
        }
        for name, method in METHODS.items()
    }
    return json.dumps(methods, indent=1) + "\n"


def first_paragraph(text: str) -> str:
    """Return the text up to its first empty line, in one line."""
    return " ".join(text.partition("\n\n")[0].split())


if __name__ == "__main__":
    METHODS_FILE.write_text(methods_list())
    print(reference(), end="")
