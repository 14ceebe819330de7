"""Validation errors as sentences for a person."""

import json
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import ValidationError

from fedspd.config.schema import METHOD_TABLES
from fedspd.core.errors import nearest
from fedspd.core.imports import SHARED_TABLES
from fedspd.core.options import Options

EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
}

OTHER_NAMES = {  # of other packages
    "algorithm": "method",
    "batch_size": "batch",
    "dataset": "name",
    "learning_rate": "lr",
    "local_epochs": "epochs",
}

Location = Sequence[int | str]


def error_message(error: ValidationError, table: type[Options], prefix: Location = ()) -> str:
    """Return the first error as a sentence, and how many more there are."""
    first, more = error.errors()[0], error.error_count() - 1
    key = ".".join(str(part) for part in (*prefix, *first["loc"]))
    rest = f" ({more} more {'key is' if more == 1 else 'keys are'} wrong.)" if more else ""
    match first["type"]:
        case "extra_forbidden" | "invalid_key":
            return f"{key}: unknown key; {_known_keys(first['loc'], table)}{rest}"
        case "missing":
            return f"{key}: no value and no default; expected a value.{rest}"
        case "literal_error":
            problem = f"unknown value; expected {first['ctx']['expected']}."
        case "model_type":
            keys = ", ".join(_keys(first["loc"], table))
            problem = f"expected a table with the keys {keys}."
        case kind:
            problem = f"expected {EXPECTED.get(kind) or _bound(first['msg'])}."
    return f"{key} = {as_json(first['input'])}: {problem}{rest}"


def _bound(message: str) -> str:
    words = message.removeprefix("Input should be ")
    return f"a number {words}" if words.startswith(("greater", "less")) else words


def _known_keys(location: Location, table: type[Options]) -> str:
    """Return which methods have this option, or else the key that may be meant."""
    last = str(location[-1])
    if location[0] in METHOD_TABLES:
        owners = [name for name, own in METHOD_TABLES.items() if last in _keys((), own)]
        if owners:
            return f"'{last}' is an option of {', '.join(owners)}."
    if len(location) > 1 and last in _keys((), table):
        return f"did you mean '{last}', outside the table?"
    known = _keys(location[:-1], table)
    if not known:
        return f"{location[0]} has no options."
    name = OTHER_NAMES.get(last.lower(), last)
    if name in known:
        return f"did you mean '{name}'?"
    if len(location) == 1 and set(SHARED_TABLES) <= set(known):
        head, _, tail = last.partition(".")
        if tail and head in known:
            return f"expected a table, {{'{head}': {{'{tail}': ...}}}}."
        for shared in SHARED_TABLES:
            if name in _keys((shared,), table):
                return f"did you mean '{shared}.{name}'?"
    return nearest(last, known)


def _keys(location: Location, table: type[Options]) -> list[str]:
    """Return the keys of the table at this location below a table."""
    found: Any = table
    for part in location:
        is_index = isinstance(part, int)
        found = get_args(found)[0] if is_index else found.model_fields[part].annotation
    return [field.alias or name for name, field in found.model_fields.items()]


def as_json(value: Any) -> str:
    """Return a value as JSON that is valid TOML too."""
    return json.dumps(value, default=str, ensure_ascii=False).replace("\x7f", "\\u007f")
