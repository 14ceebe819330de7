"""What the peers of a network have agreed on, and who they are, as one JSON file that each of them holds."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedspd.core.errors import ConfigError, StorageError, nearest

FORMAT = 1
NAME = re.compile(
    r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"
)  # a folder, a DNS label, and no option of a command line
NETWORK = re.compile(r"[0-9a-f]{32}")
ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Za-z:.%_-]+\]):([0-9]{1,5})")
Json = dict[str, Any]


@dataclass(frozen=True)
class Member:
    """A node: its number in the simulated network, where it can be called, and the serial number of its certificate."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    client: int
    address: str  # host:port
    neighbours: tuple[str, ...]
    serial: int


@dataclass(frozen=True)
class Manifest:
    """`members` are those of when the file was written: the rest is agreed on, they may come and go."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    network: str  # 128 random bits in hexadecimal digits
    secure: bool  # false only where plaintext was asked for when the network was created
    config: Json  # as config.as_dict gives it
    shape: tuple[int, ...]  # of an example
    classes: int  # 0: regression
    size: int  # numbers in a model
    dtype: Literal["float32", "float64"]
    members: tuple[Member, ...]

    @property
    def agreement(self) -> str:
        """The hash of all that peers must have in common."""
        common = {
            "network": self.network,
            "config": _shared(self.config),
            "shape": self.shape,
            "classes": self.classes,
        }
        text = json.dumps(
            common | {"size": self.size, "dtype": self.dtype},
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def member(self, name: str) -> Member:
        for member in self.members:
            if member.name == name:
                return member
        raise ConfigError(
            f"There is no node '{name}' in the network; {nearest(name, (member.name for member in self.members))}"
        )

    def save(self, path: Path) -> None:
        from fedspd.storage.atomic import (
            write_atomically,  # brings torch with it, which whoever only reads does not need
        )

        write_atomically(path, self.text())

    def text(self) -> str:
        """As `load` reads it."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        tree = _read(path)
        if (version := tree.pop("format", None)) != FORMAT:
            raise ConfigError(
                f"'{path}': format = {json.dumps(version)}; expected {FORMAT}, the one that this version of fedspd knows."
            )
        try:
            manifest = _types().validate_json(json.dumps(tree), strict=True)
            manifest.check()
        except ValidationError as error:
            raise ConfigError(f"'{path}': {_sentence(error)}") from None
        except ConfigError as error:
            raise ConfigError(f"'{path}': {error}") from None
        return manifest

    def check(self) -> None:
        """What the types cannot say."""
        for fault in _faults(self):
            raise ConfigError(fault)


@cache
def _types() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _shared(config: Json) -> Json:
    """Without what says only where a device has its data, or how it computes: that is its own business."""
    data = {
        key: value for key, value in config.get("data", {}).items() if key not in ("name", "second")
    }
    return {key: value for key, value in config.items() if key != "device"} | {"data": data}


def is_here(path: Path) -> bool:
    """Whether there is such a file, as far as this user may look: bundles are for one account alone."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StorageError(
            f"'{path}' cannot be read ({error.strerror}): use the account that it belongs to, or another path."
        ) from None
    return True


# ---- what is refused


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' is no name for a node: expected 1 to 32 of the characters a-z, 0-9 and -, the first and the last of them no -."
        )
    return name


def check_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not ADDRESS.fullmatch(address) or not 0 < int(port) < 65536:
        raise ConfigError(
            f"'{address}' is no address: expected host:port, for example 10.0.0.7:7700, with a port from 1 to 65535."
        )
    return f"{host}:{int(port)}"


def _read(path: Path) -> Json:
    try:
        tree = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"'{path}' cannot be read ({error.strerror}): expected the manifest of a network."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"'{path}' is damaged, it is no JSON ({error}): restore it from a copy."
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"'{path}' is no manifest of a network: expected a JSON object.")
    return tree


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"the key '{key}' is missing."
    if first["type"] == "unexpected_keyword_argument":
        return f"the key '{key}' is unknown to this version of fedspd."
    return f"{key} = {json.dumps(first['input'])}: expected {first['msg'].removeprefix('Input should be ')}."


def _faults(manifest: Manifest) -> Iterator[str]:
    if not NETWORK.fullmatch(manifest.network):
        yield f"network = '{manifest.network}': expected 32 hexadecimal digits."
    if not manifest.shape or min(manifest.shape) < 1:
        yield f"shape = {list(manifest.shape)}: expected the lengths of an example, each at least 1."
    for key, least in (("classes", 0), ("size", 1)):
        if getattr(manifest, key) < least:
            yield f"{key} = {getattr(manifest, key)}: expected at least {least}."
    # what is read before the config as a whole is checked
    for key, kind, expected in (("clusters", int, "a whole number"), ("data", dict, "a table")):
        if not isinstance(found := manifest.config.get(key), kind):
            yield f"config.{key} = {json.dumps(found)}: expected {expected}."
    for key in ("name", "client", "address", "serial"):
        (value, times), *_ = Counter(
            getattr(member, key) for member in manifest.members
        ).most_common(1) or [(None, 0)]
        if times > 1:
            yield f"members.{key} = {json.dumps(value)} belongs to {times} nodes: expected one."
    links = {member.name: frozenset(member.neighbours) for member in manifest.members}
    for member in manifest.members:
        yield from _member_faults(member, links)


def _member_faults(member: Member, links: dict[str, frozenset[str]]) -> Iterator[str]:
    try:
        check_name(member.name)
        check_address(member.address)
    except ConfigError as error:
        yield f"members: {error}"
    if member.client < 0 or member.serial < 1:
        yield f"the node '{member.name}' has client = {member.client} and serial = {member.serial}: expected at least 0 and 1."
    if len(links[member.name]) < len(member.neighbours):
        yield f"the node '{member.name}' has a neighbour more than once among its neighbours: expected each once."
    for neighbour in member.neighbours:
        if neighbour == member.name:
            yield f"the node '{member.name}' is a neighbour of itself: take it out of its neighbours."
        elif neighbour not in links:
            yield f"the node '{member.name}' has the neighbour '{neighbour}', who is no member; {nearest(neighbour, links)}"
        elif member.name not in links[neighbour]:
            yield f"'{neighbour}' is a neighbour of '{member.name}', but not the other way round: expected both or neither."
