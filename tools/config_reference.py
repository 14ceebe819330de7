"""The config reference from the code: `python tools/config_reference.py > docs/config.md`."""

import json
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from fedspd.config import METHOD_TABLES, ExperimentConfig
from fedspd.core.options import Options

HEAD = """# Config reference

Every key of a config, with its default. A run needs none of them: what is not given has its default.

A config is a TOML file; a key of a table is given under its heading (`[topology]`, then `degree = 6`) or on the command line as
`topology.degree=6`, which counts above the file. From Python the same tree is a dictionary:
`fedspd.run({"rounds": 30, "topology": {"degree": 6}})`. Unknown keys, wrong types and impossible values are refused.

This page is written by `make docs` from the code; a test keeps it up to date.
"""
TYPES = {int: "integer", float: "number", bool: "boolean", str: "text"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def reference() -> str:
    sections = [section(f"`[{name}]`", f"{name}.", table) for name, table in tables()]
    return "\n".join([HEAD, section("Top level", "", ExperimentConfig), *sections])


def tables() -> Iterator[tuple[str, type[Options]]]:
    for name, field in ExperimentConfig.model_fields.items():
        if table := nested(field):
            yield name, table


def nested(field: FieldInfo) -> type[Options] | None:
    found = field.annotation
    return found if isinstance(found, type) and issubclass(found, Options) else None


def section(title: str, prefix: str, table: type[Options]) -> str:
    rows = [row(prefix + name, field) for name, field in keys(table)]
    lines = (
        ["| key | type | default | what it is |", "|---|---|---|---|", *rows]
        if rows
        else ["It has no keys of its own."]
    )
    return "\n".join([f"## {title}", "", *about(table), *lines, ""])


def keys(table: type[Options]) -> Iterator[tuple[str, FieldInfo]]:
    return (
        (field.alias or name, field)
        for name, field in table.model_fields.items()
        if not nested(field)
    )


def about(table: type[Options]) -> list[str]:
    for method, own in METHOD_TABLES.items():
        if own is table:
            return [f'Used where `method = "{method}"`.', ""]
    return [table.__doc__, ""] if table.__doc__ else []


def row(key: str, field: FieldInfo) -> str:
    default = "not set" if field.default is None else f"`{json.dumps(field.default)}`"
    description = (field.description or "").replace("|", "\\|")
    return f"| `{key}` | {', '.join([kind(field.annotation), *bounds(field)])} | {default} | {description} |"


def kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in get_args(annotation))
    present = [option for option in get_args(annotation) if option is not NoneType]
    return kind(present[0]) if present else TYPES[annotation]


def bounds(field: FieldInfo) -> Iterator[str]:
    for bound in field.metadata:
        for name, words in BOUNDS.items():
            if hasattr(bound, name):
                yield f"{words} {getattr(bound, name)}"


if __name__ == "__main__":
    print(reference(), end="")
