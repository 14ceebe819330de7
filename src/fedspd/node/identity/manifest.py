"""The agreement of a network and its members, as one JSON file that every node holds."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedspd.core.errors import ConfigError, nearest

FORMAT = 4
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")  # also a folder and a DNS label
NETWORK = re.compile(r"[0-9a-f]{32}")
LABEL = r"[A-Za-z0-9_-]{1,63}"  # of a host name
ADDRESS = re.compile(rf"({LABEL}(?:\.{LABEL})*\.?|\[[0-9A-Za-z:.%_-]+\]):([0-9]{{1,5}})")
DEVICE_DATA_KEYS = ("name", "second")
MINIMA = {"classes": 0, "size": 1, "offer_limit": 1, "size_limit": 1, "diameter": 0}
Json = dict[str, Any]


@dataclass(frozen=True)
class Member:
    """A node of the network: its client number, its address and its certificate's serial number."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    client: int
    address: str  # host:port
    neighbours: tuple[str, ...]
    serial: int


@dataclass(frozen=True)
class Manifest:
    """The agreement of a network, and its members when the file was written.

    Members may join and be revoked later; the agreement never changes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    network: str  # 128 random bits as hexadecimal digits
    secure: bool  # false only if the network was created with --insecure-plaintext
    config: Json  # from config.as_dict
    shape: tuple[int, ...]  # of an example
    classes: int  # 0 for a regression
    size: int  # parameters of a model, buffers included
    offer_limit: int  # the most vectors that a node offers in an exchange
    size_limit: int  # the most numbers of such a vector
    diameter: int  # a bound on the hops between two nodes when the network was created
    dtype: Literal["float32", "float64"]
    members: tuple[Member, ...]
    signature: str = ""  # of the network's authority, as hexadecimal digits

    @property
    def signed_content(self) -> bytes:
        """Everything that the authority signs: all but the device that a node computes on."""
        tree = asdict(self)
        del tree["signature"]
        tree["config"] = {key: value for key, value in self.config.items() if key != "device"}
        text = json.dumps({"format": FORMAT, **tree}, sort_keys=True, allow_nan=False)
        return text.encode()

    @property
    def agreement(self) -> str:
        """The SHA-256 of everything that peers must have in common."""
        common = {
            "network": self.network,
            "config": _shared_config(self.config),
            "shape": self.shape,
            "classes": self.classes,
            "size": self.size,
            "offer_limit": self.offer_limit,
            "size_limit": self.size_limit,
            "diameter": self.diameter,
            "dtype": self.dtype,
        }
        text = json.dumps(common, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def model_dtype(self) -> str:
        """The data type in which models travel: `exchange.dtype`, unless it says nothing new."""
        chosen: str = self.config.get("exchange", {}).get("dtype", "float32")
        return self.dtype if chosen == "float32" else chosen

    @property
    def rounds(self) -> int:
        """The number of rounds of the network."""
        return int(self.config["rounds"])

    def member(self, name: str) -> Member:
        """Return the member of that name."""
        for member in self.members:
            if member.name == name:
                return member
        known = (member.name for member in self.members)
        raise ConfigError(f"node = '{name}': not in this network; {nearest(name, known)}")

    def save(self, path: Path) -> None:
        """Write the manifest atomically."""
        from fedspd.storage.atomic import write_atomically  # imports torch, which `load` avoids

        write_atomically(path, self.to_json())

    def to_json(self) -> str:
        """Return the text that `load` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read and check a manifest; every error names the file and the key."""
        tree = _read(path)
        _check_format(path, tree.pop("format", None))
        try:
            manifest = _adapter().validate_json(json.dumps(tree), strict=True)
            manifest.check()
        except ValidationError as error:
            raise ConfigError(f"'{path}': {_describe(error)}") from None
        except ConfigError as error:
            raise ConfigError(f"'{path}': {error}") from None
        return manifest

    def check(self) -> None:
        """Raise ConfigError for the first inconsistency that types cannot express."""
        for problem in _problems(self):
            raise ConfigError(problem)


@cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _shared_config(config: Json) -> Json:
    """Return the config without the keys that every device sets for itself."""
    data = config.get("data", {})
    shared_data = {key: value for key, value in data.items() if key not in DEVICE_DATA_KEYS}
    shared = {key: value for key, value in config.items() if key != "device"}
    return {**shared, "data": shared_data}


# ---- checks


def check_name(name: str) -> str:
    """Return the name, or raise ConfigError if no node can have it."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"name = '{name}': not a node name; expected 1 to 32 of the characters a-z, 0-9 and -, "
            "without - at either end."
        )
    return name


def check_address(address: str) -> str:
    """Return the address with its port in canonical form, or raise ConfigError."""
    host, _, port = address.rpartition(":")
    if not ADDRESS.fullmatch(address) or not 0 < int(port) < 65536:
        raise ConfigError(
            f"address = '{address}': not an address; expected host:port with a port from 1 to "
            "65535, such as 10.0.0.7:7700."
        )
    return f"{host}:{int(port)}"


def _check_format(path: Path, found: object) -> None:
    if found == FORMAT:
        return
    is_newer = isinstance(found, int) and found > FORMAT
    writer = "a newer version" if is_newer else "an older version"
    raise ConfigError(
        f"'{path}': format = {json.dumps(found)}: written by {writer} of fedspd; expected "
        f"{FORMAT}. Install the version of fedspd that created this network, or create the "
        "network again with 'fedspd network create'."
    )


def _read(path: Path) -> Json:
    try:
        tree = json.loads(path.read_text("utf-8"))
        json.dumps(tree, allow_nan=False)  # Python reads NaN, which is no JSON
    except OSError as error:
        raise ConfigError(
            f"'{path}': cannot be read ({error.strerror}); expected the manifest of a network. "
            "Create a network with 'fedspd network create'."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"'{path}': damaged ({error}); expected JSON. Restore it from a copy."
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"'{path}': not the manifest of a network; expected a JSON object. "
            "Restore it from a copy."
        )
    return tree


def _describe(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{key}: missing key. Restore the file from a copy."
    if first["type"] == "unexpected_keyword_argument":
        return f"{key}: unknown key. Restore the file from a copy."
    expected = first["msg"].removeprefix("Input should be ")
    return f"{key} = {json.dumps(first['input'])}: invalid value; expected {expected}."


def _problems(manifest: Manifest) -> Iterator[str]:
    if not NETWORK.fullmatch(manifest.network):
        yield f"network = '{manifest.network}': invalid value; expected 32 hexadecimal digits."
    if not manifest.shape or min(manifest.shape) < 1:
        yield f"shape = {list(manifest.shape)}: invalid value; expected lengths of at least 1."
    for key, minimum in MINIMA.items():
        if (value := getattr(manifest, key)) < minimum:
            yield f"{key} = {value}: too small; expected at least {minimum}."
    yield from _config_problems(manifest.config)
    for key in ("name", "client", "address", "serial"):
        values = Counter(getattr(member, key) for member in manifest.members)
        for value, count in values.most_common(1):
            if count > 1:
                yield f"members.{key} = {json.dumps(value)}: used by {count} nodes; expected one."
    links = {member.name: frozenset(member.neighbours) for member in manifest.members}
    for member in manifest.members:
        yield from _member_problems(member, links)


def _config_problems(config: Json) -> Iterator[str]:
    """Yield the problems of the keys that are read before the config as a whole is validated."""
    if not isinstance(value := config.get("data"), dict):
        yield f"config.data = {json.dumps(value)}: invalid value; expected a table."
    exchange = config.get("exchange", {})
    if not isinstance(exchange, dict):
        yield f"config.exchange = {json.dumps(exchange)}: invalid value; expected a table."
    elif (dtype := exchange.get("dtype", "float32")) not in ("float32", "bfloat16"):
        yield (
            f"config.exchange.dtype = {json.dumps(dtype)}: invalid value; expected float32 or "
            "bfloat16."
        )


def _member_problems(member: Member, links: dict[str, frozenset[str]]) -> Iterator[str]:
    try:
        check_name(member.name)
        check_address(member.address)
    except ConfigError as error:
        yield f"members: {error}"
    for key, minimum in (("client", 0), ("serial", 1)):
        if (value := getattr(member, key)) < minimum:
            yield f"members.{member.name}.{key} = {value}: too small; expected at least {minimum}."
    neighbours = f"members.{member.name}.neighbours = {json.dumps(member.neighbours)}"
    if len(links[member.name]) < len(member.neighbours):
        yield f"{neighbours}: a name is repeated; expected each once."
    for neighbour in member.neighbours:
        if neighbour == member.name:
            yield f"{neighbours}: the node is its own neighbour; expected other nodes only."
        elif neighbour not in links:
            yield f"{neighbours}: '{neighbour}' is not a member; {nearest(neighbour, links)}"
        elif member.name not in links[neighbour]:
            yield f"{neighbours}: '{neighbour}' lacks '{member.name}'; expected both or neither."
