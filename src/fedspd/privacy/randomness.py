"""Where noise and samples come from: the seed of a simulation, or a secret of a node."""

import hashlib
from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspd.core.keys import Key

# Where the words of the Mersenne Twister stand in the state of torch's generator, 8 bytes each.
TWISTER_WORDS = 624
TWISTER_STATE = slice(24, 24 + 8 * TWISTER_WORDS)


class Draws(ABC):
    """A stream of random numbers."""

    @abstractmethod
    def uniform(self, count: int) -> Tensor:
        """Return numbers from 0 to 1, in float64."""

    @abstractmethod
    def normal(self, count: int) -> Tensor:
        """Return standard normal numbers, in float64."""


class SeededDraws(Draws):
    """Draws that follow from a key, so that a simulation can be repeated."""

    def __init__(self, key: Key) -> None:
        self._generator = key.torch()

    def uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self._generator, dtype=torch.double)

    def normal(self, count: int) -> Tensor:
        return torch.randn(count, generator=self._generator, dtype=torch.double)


class SecretDraws(Draws):
    """Draws that nobody can repeat without the secret: the output of SHAKE-256."""

    def __init__(self, secret: bytes, key: Key) -> None:
        names = repr((int(key.round), key.names)).encode()
        self._seed, self._calls = hashlib.sha3_256(secret + names).digest(), 0

    def uniform(self, count: int) -> Tensor:
        return torch.from_numpy(((self._bits(count) >> np.uint64(12)) + 0.5) * 2.0**-52)  # exact

    def normal(self, count: int) -> Tensor:
        """The last bit of a number is its sign; the others are the chance of one farther out."""
        from scipy.special import ndtri  # here: a run without privacy starts sooner

        bits = self._bits(count)
        sign = np.where(bits & np.uint64(1), -1.0, 1.0)
        return torch.from_numpy(sign * ndtri(((bits >> np.uint64(1)) + 0.5) * 2.0**-64))

    def _bits(self, count: int) -> NDArray[np.uint64]:
        """Return the next numbers of 64 bits."""
        self._calls += 1
        stream = hashlib.shake_256(self._seed + self._calls.to_bytes(8, "little"))
        return np.frombuffer(stream.digest(8 * count), "<u8")


class SecretKey(Key):
    """A key of a node's secret, whose generator has all of it in its state.

    Of a seed, torch's generator keeps 32 bits, so few that all could be tried.
    """

    def torch(self) -> torch.Generator:
        generator = super().torch()
        state = generator.get_state()
        name = repr((int(self.seed), int(self.round), self.names)).encode()
        words = np.frombuffer(hashlib.shake_256(name).digest(4 * TWISTER_WORDS), "<u4")
        state.numpy()[TWISTER_STATE].view(np.uint64)[:] = words
        generator.set_state(state)
        return generator


class NoiseSource:
    """The draws of a mechanism.

    secret   None in a simulation, whose draws follow from keys. A node sets it before each round.

    At a node the draws follow from what they are added to as well: if two sums had the same noise,
    their difference would have none.
    """

    def __init__(self) -> None:
        self.secret: bytes | None = None
        self._drawn = ""  # a hash; Ray cannot pack the object that computes one

    def own_key(self, key: Key) -> Key:
        """Return the key for other draws about examples, which nobody else must know."""
        if self.secret is None:
            return key
        seed = int.from_bytes(hashlib.sha3_256(self.secret).digest(), "little")
        return SecretKey(seed, key.round, key.names)

    def draws(self, key: Key, *inputs: Tensor | str | None) -> Draws:
        """Return the stream of a key, for noise on what follows from these inputs."""
        if self.secret is None:
            return SeededDraws(key)
        name = b"".join(map(_digest, inputs))
        self._drawn = hashlib.sha256(self._drawn.encode() + name).hexdigest()
        return SecretDraws(hashlib.sha256(self.secret + name).digest(), key)

    def take_name(self) -> str:
        """Return a name of all inputs since the last call: others have other noise."""
        name, self._drawn = self._drawn, ""
        return name


def _digest(value: Tensor | str | None) -> bytes:
    if value is None:
        return bytes(hashlib.sha256().digest_size)
    if isinstance(value, str):
        return hashlib.sha256(value.encode()).digest()
    values = value.detach().cpu().contiguous()
    about = repr((values.dtype, tuple(values.shape))).encode()
    return hashlib.sha256(about + values.numpy().tobytes()).digest()
