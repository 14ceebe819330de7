"""Bounds on the HTTP/2 frames of a caller (RFC 9113), before gRPC sees them."""

import time
from collections.abc import Callable

from fedspd.core.errors import RejectedError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9  # length (3), type (1), flags (1), stream (4)
HEADERS, CONTINUATION = 1, 9
END_HEADERS = 4
MAX_BLOCK_BYTES = 32 * 1024  # of one header block; gRPC refuses metadata of more than 8 kB
MAX_BLOCK_FRAMES = 16
CALL_UNITS = 10  # the price of a call, in frames
UNIT_BYTES = 16 * 1024  # the price of bytes, in frames


class FrameGuard:
    """Follows the frames of one connection; gRPC would read a header block that never ends."""

    def __init__(self) -> None:
        self._skip = len(PREFACE)  # bytes until the next frame
        self._header = b""
        self._block_bytes = self._block_frames = 0

    def feed(self, data: bytes) -> tuple[int, int]:
        """Return the units that the bytes cost, and the calls that begin in them.

        Raise RejectedError for a header block that is too long.
        """
        position, units, calls = 0, len(data) // UNIT_BYTES, 0
        while position < len(data):
            if self._skip:
                step = min(self._skip, len(data) - position)
                self._skip -= step
                position += step
                continue
            found = data[position : position + HEADER_BYTES - len(self._header)]
            self._header += found
            position += len(found)
            if len(self._header) == HEADER_BYTES:
                self._skip = int.from_bytes(self._header[:3])
                is_call = self._follow(self._header[3], self._header[4], self._skip)
                self._header = b""
                calls += is_call
                units += CALL_UNITS if is_call else 1
        return units, calls

    def _follow(self, kind: int, flags: int, length: int) -> bool:
        """Count a frame; return whether a call begins."""
        if kind not in (HEADERS, CONTINUATION):
            return False
        self._block_bytes += length
        self._block_frames += 1
        if self._block_bytes > MAX_BLOCK_BYTES or self._block_frames > MAX_BLOCK_FRAMES:
            raise RejectedError(
                f"headers of {self._block_bytes} bytes in {self._block_frames} frames; expected "
                f"at most {MAX_BLOCK_BYTES} in {MAX_BLOCK_FRAMES}."
            )
        if flags & END_HEADERS:
            self._block_bytes = self._block_frames = 0
        return kind == HEADERS


class TokenBucket:
    """An allowance that refills with time."""

    def __init__(
        self, size: float, per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.size, self.per_second, self.clock = size, per_second, clock
        self._left, self._at = size, clock()

    def take(self, amount: float) -> float:
        """Take an amount; return the seconds until nothing is owed any more, mostly 0."""
        self._refill()
        self._left -= amount
        return max(0.0, -self._left / self.per_second)

    def is_empty(self) -> bool:
        """Return whether less than one is left."""
        self._refill()
        return self._left < 1

    def _refill(self) -> None:
        now = self.clock()
        self._left = min(self.size, self._left + self.per_second * (now - self._at))
        self._at = now
