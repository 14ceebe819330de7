"""The data of all clients: their examples as tensors, and the description of the partition.

Shapes: N examples of all clients together, ordered by client.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedspd.core.block import Block
from fedspd.core.errors import DataError
from fedspd.data.sources import Examples, Source, fingerprint

PartName = Literal["train", "test"]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Distribution:
    """How an example of a source is transformed.

    degrees   by which an image is rotated, a multiple of 90
    relabel   class c gets the label relabel[c]
    channels  channel c of an image is its channel channels[c] in the source
    """

    name: str
    source: int = 0
    degrees: int = 0
    relabel: tuple[int, ...] | None = None
    channels: tuple[int, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the record for partition.json: `rotated` is true for 90 degrees."""
        record = {
            "name": self.name,
            "source": self.source,
            "rotated": self.degrees == 90 if self.degrees in (0, 90) else self.degrees,
            "relabel": self.relabel,
        }
        # Left out where there are none, so that partitions from before keep their hash.
        return record if self.channels is None else record | {"channels": self.channels}


@dataclass(frozen=True)
class Partition:
    """Which examples of the sources each client has, and as examples of which distribution.

    Client i has index[start[i]:start[i + 1]]; truth has the distribution of each of them.
    """

    start: Indices
    index: Indices
    truth: Indices


@dataclass(frozen=True)
class ClientExamples:
    """Training or test examples of all clients; client i has the rows start[i]:start[i + 1].

    x      [N, ...] float32, or float64 as the source; images are scaled from 0..255 to [-1, 1]
    y      [N] int64 labels, or regression targets as float32 or float64
    truth  [N] the distribution of each example, which only metrics may use
    """

    x: Tensor
    y: Tensor
    start: Indices
    truth: Indices


@dataclass(frozen=True)
class Federation:
    """The data of all clients.

    The description records the partition, as JSON values, for partition.json in the run folder:

    sources        name and SHA-256 of each source, and the names of its classes if they have any
    options        the options of the partition, defaults included
    seed           the seed that it was drawn with
    distributions  each Distribution, as its as_json() says
    clients        for the training and the test examples of each client: `rows`, the first row
                   and the end in x and y; `counts`, the examples of each distribution;
                   `sha256`, a hash of which examples these are and how they are transformed;
                   `name`, if the data came with clients; `scale`, the mean and the standard
                   deviation of each input, if they are scaled
    hash           SHA-256 of all of the above; a resumed run must have the same
    """

    train: ClientExamples
    test: ClientExamples
    classes: int
    distributions: int
    description: dict[str, Any]
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.train.start) - 1

    @property
    def names_of_classes(self) -> list[str]:
        """The names of the classes, which may be their numbers; none in a regression."""
        return list(self.class_names or map(str, range(self.classes)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train.x.shape[1:])

    def scale(self, client: int) -> dict[str, Any] | None:
        """Return the mean and the standard deviation of the client's inputs, if they are scaled."""
        found: dict[str, Any] | None = self.description["clients"][client].get("scale")
        return found

    def inputs(self, client: int, x: Any) -> Tensor:
        """Return a caller's examples as the inputs of this client's model."""
        values = model_inputs(x, self.shape)
        scale = self.scale(client)
        if scale is None:
            return values
        mean, std = (np.reshape(scale[name], self.shape) for name in ("mean", "std"))
        return (values - torch.from_numpy(mean)) / torch.from_numpy(std)

    def block(self, clients: Sequence[int], part: PartName = "train") -> Block:
        """Return views of these clients' examples, without the truth."""
        examples = self.train if part == "train" else self.test
        rows = [_rows(examples.start, client) for client in clients]
        x, y = [examples.x[own] for own in rows], [examples.y[own] for own in rows]
        return Block(clients, self.clients, x, y, width=int(np.diff(examples.start).max()))


def _rows(start: Indices, client: int) -> slice:
    return slice(int(start[client]), int(start[client + 1]))


def _float_dtype(values: NDArray[Any]) -> type[np.floating[Any]]:
    return np.float64 if values.dtype == np.float64 else np.float32


def gather(
    sources: Sequence[Examples], distributions: Sequence[Distribution], partition: Partition
) -> ClientExamples:
    """Return the partition's examples, transformed; all get the shape of the first source."""
    first, count = sources[0], len(partition.index)
    is_classes = np.issubdtype(first.y.dtype, np.integer)
    x = np.empty((count, *first.x.shape[1:]), _float_dtype(first.x))
    y = np.empty((count, *first.y.shape[1:]), np.int64 if is_classes else _float_dtype(first.y))
    for number, distribution in enumerate(distributions):
        rows = np.flatnonzero(partition.truth == number)
        chosen, source = partition.index[rows], sources[distribution.source]
        x[rows] = _transform(source.x[chosen], distribution, first.x.shape[1:])
        y[rows] = _relabel(source.y[chosen], distribution)
    if first.x.dtype == np.uint8:
        _scale_pixels(x)
    return ClientExamples(
        torch.from_numpy(x), torch.from_numpy(y), partition.start, partition.truth
    )


def scale_inputs(x: NDArray[Any]) -> Tensor:
    """Return examples of a source as the inputs of a model."""
    values = x.astype(_float_dtype(x))
    return torch.from_numpy(_scale_pixels(values) if x.dtype == np.uint8 else values)


def model_inputs(x: Any, shape: tuple[int, ...]) -> Tensor:
    """Return a caller's examples as the inputs of a model for examples of this shape."""
    try:
        array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
        is_number = array.dtype.kind in "fiub"
    except ValueError:  # a list of examples of several shapes
        is_number = False
    if not is_number:
        raise DataError("x: not an array of numbers; expected examples of one shape.")
    if array.shape[1:] == shape[1:] and shape[0] == 1 and array.ndim == len(shape) > 2:
        array = array[:, None]  # grey images without their channel
    if array.shape[1:] != shape:
        raise DataError(
            f"x: shape {array.shape}; expected [n, ...] with examples of shape {shape}."
        )
    return scale_inputs(array)


def _scale_pixels(pixels: NDArray[Any]) -> NDArray[Any]:
    """Scale 0..255 to [-1, 1], in place."""
    pixels /= 127.5
    pixels -= 1
    return pixels


def _transform(x: NDArray[Any], distribution: Distribution, shape: tuple[int, ...]) -> NDArray[Any]:
    if x.shape[1:] != shape:
        x = convert_images(x, shape)
    if distribution.channels is not None:
        x = x[:, distribution.channels]
    return np.rot90(x, distribution.degrees // 90, axes=(-2, -1)) if distribution.degrees else x


def _relabel(y: NDArray[Any], distribution: Distribution) -> NDArray[Any]:
    return y if distribution.relabel is None else np.array(distribution.relabel)[y]


def convert_images(x: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return images of another size, with one or as many channels, in [channels, height, width]."""
    resized = F.interpolate(torch.from_numpy(x).float(), size=shape[1:], mode="bilinear")
    return resized.round().to(torch.uint8).expand(-1, shape[0], -1, -1).numpy()


def build_federation(
    sources: Sequence[Source],
    options: Mapping[str, Any],
    seed: int,
    distributions: Sequence[Distribution],
    train: Partition,
    test: Partition,
    *,
    is_scaled: bool = False,
    names: Sequence[str] | None = None,
) -> Federation:
    """Return the data of all clients with the description of their partition.

    `names` are those of clients that the data came with.
    """
    parts = [
        gather([each.train for each in sources], distributions, train),
        gather([each.test for each in sources], distributions, test),
    ]
    described = describe_partition(sources, options, seed, distributions, train, test)
    for client, record in enumerate(described["clients"]):
        if names is not None:
            record["name"] = names[client]
        if is_scaled:
            record["scale"] = _scale_client(parts, client)
    for record, source in zip(described["sources"], sources, strict=True):
        if source.class_names:
            record["classes"] = list(source.class_names)
    return Federation(
        parts[0],
        parts[1],
        max(each.classes for each in sources),
        len(distributions),
        described | {"hash": description_hash(described)},
        sources[0].class_names,
        sources[0].notes,
    )


def _scale_client(parts: Sequence[ClientExamples], client: int) -> dict[str, list[float]]:
    """Scale a client's inputs in place by its training examples; return by how much."""
    own = [part.x[_rows(part.start, client)] for part in parts]
    mean, std = own[0].double().mean(0), own[0].double().std(0, correction=0)
    std = torch.where(std > 0, std, 1.0)  # a constant input becomes 0
    for x in own:
        x.copy_((x.double() - mean) / std)
    return {"mean": mean.ravel().tolist(), "std": std.ravel().tolist()}


def describe_partition(
    sources: Sequence[Source],
    options: Mapping[str, Any],
    seed: int,
    distributions: Sequence[Distribution],
    train: Partition,
    test: Partition,
) -> dict[str, Any]:
    """Return the description of a partition without its hash; Federation says what is in it."""
    transforms = json.dumps([distribution.as_json() for distribution in distributions])

    def record(partition: Partition, client: int) -> dict[str, Any]:
        return _client_record(partition, client, transforms, len(distributions))

    clients = range(len(train.start) - 1)
    description: dict[str, Any] = {
        "sources": [{"name": source.name, "sha256": fingerprint(source)} for source in sources],
        "options": dict(options),
        "seed": seed,
        "distributions": json.loads(transforms),
        "clients": [{"train": record(train, i), "test": record(test, i)} for i in clients],
    }
    return description


def description_hash(description: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a description, without its own `hash`."""
    content = {name: value for name, value in description.items() if name != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _client_record(
    partition: Partition, client: int, transforms: str, distributions: int
) -> dict[str, Any]:
    own = _rows(partition.start, client)
    digest = hashlib.sha256(transforms.encode())
    digest.update(partition.index[own].astype("<i8").tobytes())
    digest.update(partition.truth[own].astype("<i8").tobytes())
    counts = np.bincount(partition.truth[own], minlength=distributions)
    return {"rows": [own.start, own.stop], "counts": counts.tolist(), "sha256": digest.hexdigest()}
