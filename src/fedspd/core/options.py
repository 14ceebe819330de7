"""The base of every table of a config. Options are declared beside the code that uses them."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from fedspd.core.errors import ConfigError


class Options(BaseModel):
    """A frozen set of named values. An unknown key or a value of the wrong type is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    def refuse_unused(self, key: str, chosen: str, users: Mapping[str, Collection[str]]) -> None:
        """Refuse options that the chosen value of a key does not use: they would change nothing.

        key    a key of the same table, such as data.mixture
        users  for each option, the values of the key that use it
        """
        table = key.partition(".")[0]
        for name, values in users.items():
            value = getattr(self, name)
            if chosen not in values and value != type(self).model_fields[name].default:
                owners = " or ".join(f"'{owner}'" for owner in values)
                raise ConfigError(
                    f"{table}.{name} = {_shown(value)}: an option of {key} = {owners} only, and "
                    f"{key} = '{chosen}'. Leave it out."
                )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if isinstance(value, str) else str(value)


def split_names(value: Any) -> Any:
    """Return the names of a text such as macro_f1,auc, which the command line gives.

    Modules of nn.Sequential have numbers, so that one alone arrives as an integer.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return [str(value)]
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value
