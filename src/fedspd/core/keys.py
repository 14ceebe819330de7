"""Randomness has a name.

A key is a seed, a round and a path of names such as (client, "train"). The draws follow from these alone, so they are
the same whatever the block, the engine, the number of workers or the order of arrival.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass(frozen=True)
class Key:
    seed: int
    round: int = 0
    names: tuple[int | str, ...] = ()

    def at(self, round: int) -> "Key":
        return replace(self, round=round)

    def of(self, *names: int | str) -> "Key":
        return replace(self, names=(*self.names, *names))

    def number(self) -> int:
        """63 bits that belong to this name."""
        names = tuple(
            name if isinstance(name, str) else int(name) for name in self.names
        )  # numpy's numbers have another repr
        name = repr((int(self.seed), int(self.round), names)).encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1

    def numpy(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self.number()))

    def torch(self, device: torch.device | str = "cpu") -> torch.Generator:
        return torch.Generator(device=device).manual_seed(self.number())
