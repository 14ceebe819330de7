"""Keys: names of pieces of randomness.

A key is a seed, a round and a path of names such as (client, "train"). Draws follow from these
alone, so they depend neither on the block nor on the engine, the workers or the order of arrival.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass(frozen=True)
class Key:
    """The name of a piece of randomness."""

    seed: int
    round: int = 0
    names: tuple[int | str, ...] = ()

    def at(self, round: int) -> "Key":
        """Return the key of the same name in a round."""
        return replace(self, round=round)

    def of(self, *names: int | str) -> "Key":
        """Return the key with these names added."""
        return replace(self, names=(*self.names, *names))

    def number(self) -> int:
        """Return 63 bits that follow from the key."""
        # numpy's integers have another repr than Python's.
        names = tuple(name if isinstance(name, str) else int(name) for name in self.names)
        name = repr((int(self.seed), int(self.round), names)).encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1

    def numpy(self) -> np.random.Generator:
        """Return numpy's generator of this key."""
        return np.random.Generator(np.random.PCG64(self.number()))

    def torch(self) -> torch.Generator:
        """Return torch's generator of this key, on the CPU."""
        return torch.Generator().manual_seed(self.number())
