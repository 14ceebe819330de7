"""The data of a whole network: what was dealt to every client, as tensors, and the description that says who got what.

Shapes: N examples of all clients together, ordered by client.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedspd.core.block import Block
from fedspd.data.sources import Examples, Source, fingerprint

PartName = Literal["train", "test"]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Distribution:
    """How an original of a source becomes an example: turned by 90 degrees, or class c called relabel[c], or neither."""

    name: str
    source: int = 0
    rotated: bool = False
    relabel: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Partition:
    """Client i got the originals index[start[i]:start[i + 1]], each as an example of distribution truth[...]."""

    start: Indices
    index: Indices
    truth: Indices


@dataclass(frozen=True)
class ClientExamples:
    """Training or test examples of all clients; client i owns the rows start[i]:start[i + 1].

    x      [N, ...] float32, or float64 where the source is; images are scaled from 0..255 to [-1, 1]
    y      [N] int64 labels, or targets of a regression, float32 or float64
    truth  [N] the distribution that each example came from: for metrics only
    """

    x: Tensor
    y: Tensor
    start: Indices
    truth: Indices


@dataclass(frozen=True)
class Federation:
    train: ClientExamples
    test: ClientExamples
    classes: int
    distributions: int
    description: dict[str, Any]

    @property
    def clients(self) -> int:
        return len(self.train.start) - 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return tuple(self.train.x.shape[1:])

    def block(self, clients: Sequence[int], part: PartName = "train") -> Block:
        """Views of what these clients own, without the truth."""
        whole = self.train if part == "train" else self.test
        rows = [_rows(whole.start, i) for i in clients]
        width = int(np.diff(whole.start).max())
        return Block(
            clients,
            self.clients,
            [whole.x[own] for own in rows],
            [whole.y[own] for own in rows],
            width,
        )


def _rows(start: Indices, client: int) -> slice:
    return slice(int(start[client]), int(start[client + 1]))


def _float_like(numbers: NDArray[Any]) -> type[np.floating[Any]]:
    return np.float64 if numbers.dtype == np.float64 else np.float32


def gather(
    originals: Sequence[Examples], distributions: Sequence[Distribution], deal: Partition
) -> ClientExamples:
    """The dealt originals as examples of their distributions. All have the shape of the first source's."""
    shape = originals[0].x.shape[1:]
    y_type = (
        np.int64 if np.issubdtype(originals[0].y.dtype, np.integer) else _float_like(originals[0].y)
    )
    x = np.empty((len(deal.index), *shape), dtype=_float_like(originals[0].x))
    y = np.empty((len(deal.index), *originals[0].y.shape[1:]), dtype=y_type)
    for cluster, distribution in enumerate(distributions):
        rows = np.flatnonzero(deal.truth == cluster)
        chosen = deal.index[rows]
        source = originals[distribution.source]
        x[rows] = _transformed(source.x[chosen], distribution, shape)
        y[rows] = (
            source.y[chosen]
            if distribution.relabel is None
            else np.array(distribution.relabel)[source.y[chosen]]
        )
    if originals[0].x.dtype == np.uint8:
        _to_unit(x)
    return ClientExamples(torch.from_numpy(x), torch.from_numpy(y), deal.start, deal.truth)


def scaled(x: NDArray[Any]) -> Tensor:
    """Examples of any source as a model sees them."""
    real = x.astype(_float_like(x))
    return torch.from_numpy(_to_unit(real) if x.dtype == np.uint8 else real)


def _to_unit(pixels: NDArray[Any]) -> NDArray[Any]:
    """0..255 becomes [-1, 1], in place."""
    pixels /= 127.5
    pixels -= 1
    return pixels


def _transformed(
    x: NDArray[Any], distribution: Distribution, shape: tuple[int, ...]
) -> NDArray[Any]:
    if x.shape[1:] != shape:
        x = as_shaped(x, shape)
    return np.rot90(x, axes=(-2, -1)) if distribution.rotated else x


def as_shaped(x: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Images of another size and as many channels, or one, brought to the shape [channels, height, width]."""
    resized = (
        F.interpolate(torch.from_numpy(x).float(), size=shape[1:], mode="bilinear")
        .round()
        .to(torch.uint8)
    )
    return resized.expand(-1, shape[0], -1, -1).numpy()


def describe_partition(
    sources: Sequence[Source],
    options: Mapping[str, Any],
    seed: int,
    distributions: Sequence[Distribution],
    train: Partition,
    test: Partition,
) -> dict[str, Any]:
    """Who got what, ready for JSON. Equal inputs give an equal `hash`."""
    recipe = json.dumps([asdict(distribution) for distribution in distributions])
    receipts = [
        [_receipt(deal, i, recipe, len(distributions)) for deal in (train, test)]
        for i in range(len(train.start) - 1)
    ]
    description: dict[str, Any] = {
        "sources": [{"name": source.name, "sha256": fingerprint(source)} for source in sources],
        "options": dict(options),
        "seed": seed,
        "distributions": json.loads(recipe),
        "clients": [
            {"train": for_training, "test": for_testing} for for_training, for_testing in receipts
        ],
    }
    return description | {"hash": description_hash(description)}


def description_hash(description: Mapping[str, Any]) -> str:
    """SHA-256 over everything in a description but its own hash."""
    content = {name: value for name, value in description.items() if name != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _receipt(deal: Partition, client: int, recipe: str, distributions: int) -> dict[str, Any]:
    own = _rows(deal.start, client)
    digest = hashlib.sha256(recipe.encode())
    digest.update(deal.index[own].astype("<i8").tobytes())
    digest.update(deal.truth[own].astype("<i8").tobytes())
    counts = np.bincount(deal.truth[own], minlength=distributions)
    return {"rows": [own.start, own.stop], "counts": counts.tolist(), "sha256": digest.hexdigest()}
