"""The command methods: a list that was made from the code, so that it need not import torch."""

import json
from importlib import resources
from typing import Any

from rich.console import Console
from rich.table import Table


def list_methods(as_json: bool) -> None:
    """Show all methods with the options of each."""
    text = (resources.files("fedspd.cli") / "methods.json").read_text("utf-8")
    methods = json.loads(text)
    if as_json:
        print(json.dumps(methods))
        return
    table = Table("method", "description", "options", title="Methods", title_justify="left")
    for name, method in methods.items():
        options = ", ".join(_option(key, value) for key, value in method["options"].items())
        table.add_row(name, method["about"], options)
    Console().print(table)


def _option(key: str, value: Any) -> str:
    if value is None:
        return f"{key} (not set)"
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"
