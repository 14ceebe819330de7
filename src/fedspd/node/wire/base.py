"""The part that all transports share: encode, validate, count, mute, and answer neighbours."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Literal, NoReturn

from fedspd.core.errors import MalformedError, RejectedError, TransportError, UnreachableError
from fedspd.node.identity.manifest import Manifest
from fedspd.node.wire.codec import (
    Body,
    InvalidMessageError,
    OfferDecoder,
    WireLimits,
    decode,
    encode,
    encode_frames,
    encode_offer,
)
from fedspd.node.wire.messages import Announcement, Handler, Hello, Offer, Request
from fedspd.node.wire.misbehaviour import MisbehaviourTracker, RejectionLog

log = logging.getLogger("fedspd.node")
RpcMethod = Literal["Hello", "Announce", "Fetch"]
FrameStream = AsyncGenerator[bytes, None]  # each frame is at most one chunk

MAX_CALLS = 8  # of one neighbour at a time
# Rules that honest nodes break: the operator made a mistake, or an insider's numbers overflowed. A
# vector that is not finite costs no more than any other.
HONEST = ("agreement", "finite")
MAX_FETCHES = 2  # among them: each keeps its models in memory


class BaseTransport:
    """A transport except for moving bytes: subclasses implement `send`, `start` and `stop`."""

    def __init__(self, manifest: Manifest, name: str) -> None:
        self.manifest, self.name = manifest, name
        self.limits = WireLimits.from_manifest(manifest)
        self.misbehaviour, self.rejection_log = MisbehaviourTracker(), RejectionLog()
        self.sent: Counter[str] = Counter()  # bytes of messages by neighbour
        self.received: Counter[str] = Counter()
        self.handler: Handler | None = None
        self._active_calls: Counter[tuple[str, str]] = Counter()  # by sender and method

    def send(
        self, neighbour: str, method: RpcMethod, data: bytes, timeout_seconds: float
    ) -> FrameStream:
        """Send an encoded message and yield the frames of the answer.

        Raise UnreachableError, or RejectedError with the neighbour's sentence.
        """
        raise NotImplementedError

    def client_of(self, neighbour: str) -> int:
        """Return the neighbour's client number."""
        return self.manifest.member(neighbour).client

    def is_muted(self, neighbour: str) -> bool:
        """Return whether the neighbour is muted."""
        return self.misbehaviour.is_muted(neighbour)

    @property
    def malformed(self) -> Counter[str]:
        """The number of malformed messages by neighbour."""
        return self.misbehaviour.counts

    @property
    def rejected(self) -> Counter[str]:
        """The number of rejected calls and messages by reason."""
        return self.rejection_log.counts

    # ---- calls to neighbours

    async def hello(self, neighbour: str, hello: Hello, timeout_seconds: float) -> Hello:
        """Send a heartbeat and return the neighbour's answer."""
        with self._counting_malformed(neighbour):
            answer = await self._call(neighbour, "Hello", hello, timeout_seconds)
            return decode(self.limits, answer, neighbour, Hello)

    async def announce(
        self, neighbour: str, announcement: Announcement, timeout_seconds: float
    ) -> None:
        """Send an announcement."""
        with self._counting_malformed(neighbour):
            answer = await self._call(neighbour, "Announce", announcement, timeout_seconds)
            if answer:
                raise InvalidMessageError(
                    "size", f"{len(answer)} bytes in answer to an announcement; expected none."
                )

    async def fetch(self, neighbour: str, request: Request, timeout_seconds: float) -> Offer:
        """Return the models that the neighbour sends for the request."""
        decoder = OfferDecoder(self.limits, neighbour, request)
        with self._counting_malformed(neighbour):
            stream = self._stream(neighbour, "Fetch", request, timeout_seconds)
            async with aclosing(stream) as frames:
                async for frame in frames:
                    decoder.feed(frame)
            return await asyncio.to_thread(decoder.finish)

    async def _call(
        self, neighbour: str, method: RpcMethod, body: Body, timeout_seconds: float
    ) -> bytes:
        """Return the only frame of an answer."""
        answer: bytes | None = None
        async with aclosing(self._stream(neighbour, method, body, timeout_seconds)) as frames:
            async for frame in frames:
                if answer is not None:
                    raise InvalidMessageError("size", "a second frame; expected only one.")
                answer = frame
        if answer is None:
            raise InvalidMessageError("size", "the answer is empty.")
        return answer

    async def _stream(
        self, neighbour: str, method: RpcMethod, body: Body, timeout_seconds: float
    ) -> FrameStream:
        if self.is_muted(neighbour):
            raise RejectedError(
                f"'{neighbour}' is muted for a while: it sent too many malformed messages."
            )
        data = encode(self.limits, self.name, body)
        self.sent[neighbour] += len(data)
        async with aclosing(self.send(neighbour, method, data, timeout_seconds)) as frames:
            async for frame in frames:
                self.received[neighbour] += len(frame)
                yield frame

    @contextmanager
    def _counting_malformed(self, neighbour: str) -> Iterator[None]:
        """Count a MalformedError against the neighbour, unless it may be honest."""
        try:
            yield
        except MalformedError as error:
            rule = error.rule if isinstance(error, InvalidMessageError) else "content"
            self.rejection_log.record(neighbour, rule, str(error))
            if rule not in HONEST:
                self.misbehaviour.record_malformed(neighbour)
                if self.handler is not None and self.is_muted(neighbour):
                    self.handler.handle_mute(neighbour)
            raise

    # ---- calls from neighbours

    @contextmanager
    def admit(self, sender: str, method: RpcMethod) -> Iterator[None]:
        """Admit a call of a neighbour, or reject it before its request is read.

        Every call takes memory, so a neighbour has only a few at a time.
        """
        if self.is_muted(sender):
            self.reject(sender, "muted", "it sent too many malformed messages; try again later.")
        slots = {(sender, "any"): MAX_CALLS}
        if method == "Fetch":
            slots[sender, method] = MAX_FETCHES
        for slot, maximum in slots.items():
            if self._active_calls[slot] >= maximum:
                self.reject(sender, "busy", f"{maximum} of its calls are active already.")
        self._active_calls.update(list(slots))
        try:
            yield
        finally:
            self._active_calls.subtract(list(slots))

    async def serve(self, sender: str, method: RpcMethod, data: bytes) -> FrameStream:
        """Yield the frames of the answer to a neighbour.

        Raise RejectedError with a sentence for the neighbour, or UnreachableError if this node
        failed.
        """
        self.received[sender] += len(data)
        with self._translating_errors(sender, method):
            async with aclosing(self._answer(sender, method, data)) as frames:
                async for frame in frames:
                    self.sent[sender] += len(frame)
                    yield frame

    async def _answer(self, sender: str, method: RpcMethod, data: bytes) -> FrameStream:
        if self.handler is None:
            raise UnreachableError("this node is not ready yet.")
        if method == "Hello":
            hello = self.handler.handle_hello(sender, decode(self.limits, data, sender, Hello))
            yield encode(self.limits, self.name, hello)
        elif method == "Announce":
            announcement = decode(self.limits, data, sender, Announcement)
            self.handler.handle_announcement(sender, announcement)
            yield b""
        else:
            request = decode(self.limits, data, sender, Request)
            offer = self.handler.handle_request(sender, request)
            if not offer.clusters:
                raise RejectedError(
                    f"none of the clusters {list(request.wants)} is offered here in round "
                    f"{request.round}."
                )
            _, dtype = self.limits.offer_type(request)
            offer = replace(offer, model_KP=offer.model_KP.to(dtype))
            encoded = await asyncio.to_thread(encode_offer, offer)
            for frame in encode_frames(self.limits, self.name, request, encoded):
                yield frame

    @contextmanager
    def _translating_errors(self, sender: str, method: RpcMethod) -> Iterator[None]:
        """Turn any error into one that the sender may see."""
        try:
            with self._counting_malformed(sender):
                yield
        except MalformedError as error:
            raise RejectedError(str(error)) from None
        except TransportError:
            raise
        except Exception as error:
            log.exception("answer failed: node=%s method=%s", sender, method)
            raise UnreachableError(
                f"this node failed to answer ({type(error).__name__})."
            ) from None

    def reject(self, sender: str, reason: str, sentence: str) -> NoReturn:
        """Count, log and raise a rejection."""
        self.rejection_log.record(sender, reason, sentence)
        raise RejectedError(f"{reason}: {sentence}")
