"""The base of every table of a config. Options are declared beside the code that uses them."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """A frozen set of named values. An unknown key or a value of the wrong type is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )


def split_names(value: Any) -> Any:
    """Return the names of a text such as macro_f1,auc, which the command line gives.

    Modules of nn.Sequential have numbers, so that one alone arrives as an integer.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return [str(value)]
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value
