"""The addresses of a network's nodes, as its operator gives them."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedspd.core.errors import ConfigError
from fedspd.node.identity.manifest import check_address, check_name


def read_addresses(path: Path) -> dict[str, str]:
    """Return the addresses of a TOML file by name."""
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--addresses {path}: cannot be read ({error}); "
            'expected TOML with name = "host:port" for each node. Correct the file.'
        ) from None
    for name, address in found.items():
        if not isinstance(address, str):
            raise ConfigError(
                f'--addresses {path}: {name} = {address}: expected a text "host:port".'
            )
    return found


def assign_addresses(
    clients: int,
    names: Sequence[str] | None,
    addresses: Mapping[str, str] | None,
    host: str,
    port: int,
) -> dict[str, str]:
    """Return the address of every node by name, in the order of the clients."""
    names = names or list(addresses or ()) or [f"node-{i}" for i in range(clients)]
    if repeated := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(
            f"node = '{repeated[0]}': the name is given twice; expected another for each node."
        )
    if len(names) != clients:
        raise ConfigError(
            f"clients = {clients}: there are {len(names)} node names; expected as many."
        )
    if addresses is None:
        host = f"[{host}]" if ":" in host else host
        addresses = {name: f"{host}:{port + i}" for i, name in enumerate(names)}
    if unmatched := sorted(set(addresses) ^ set(names)):
        raise ConfigError(
            f"node = '{unmatched[0]}': only among the names or the addresses; expected it in both."
        )
    return {check_name(name): check_address(addresses[name]) for name in names}
