"""What every transport does, whatever carries the bytes: encode, check, count, mute, and answer for the node behind it."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Literal, NoReturn

from fedspd.core.errors import MalformedError, RejectedError, TransportError, UnreachableError
from fedspd.node.identity.manifest import Manifest
from fedspd.node.wire.codec import (
    AnyBody,
    Body,
    InvalidMessageError,
    OfferDecoder,
    WireLimits,
    decode,
    encode,
    frames,
    pack,
)
from fedspd.node.wire.messages import Announcement, Handler, Hello, Offer, Request
from fedspd.node.wire.misbehaviour import MisbehaviourTracker, RejectionLog

log = logging.getLogger("fedspd.node")
Kind = Literal["Hello", "Announce", "Fetch"]
Frames = AsyncGenerator[bytes, None]  # each at most one chunk

CALLS = 8  # of one neighbour under way at once
FETCHES = 2  # among them: each holds the models in memory


class BaseTransport:
    """A transport but for the carrying: that is `carry`, with `start` and `stop`."""

    def __init__(self, manifest: Manifest, name: str) -> None:
        self.manifest, self.name, self.rules = manifest, name, WireLimits.of(manifest)
        self.guard, self.refusals = MisbehaviourTracker(), RejectionLog()
        self.sent: Counter[str] = Counter()  # bytes of messages by neighbour
        self.received: Counter[str] = Counter()
        self.handler: Handler | None = None
        self._under_way: Counter[tuple[str, str]] = Counter()

    def carry(self, neighbour: str, kind: Kind, data: bytes, limit: float) -> Frames:
        """The frames that the neighbour answers; UnreachableError, or RejectedError with its sentence."""
        raise NotImplementedError

    def client(self, neighbour: str) -> int:
        return self.manifest.member(neighbour).client

    def muted(self, neighbour: str) -> bool:
        return self.guard.muted(neighbour)

    @property
    def rubbish(self) -> Counter[str]:
        """Pieces of it by neighbour."""
        return self.guard.counts

    @property
    def refused(self) -> Counter[str]:
        """By reason."""
        return self.refusals.counts

    # ---- what the node asks

    async def hello(self, neighbour: str, said: Hello, limit: float) -> Hello:
        return self._decoded(neighbour, await self._one(neighbour, "Hello", said, limit), Hello)

    async def announce(self, neighbour: str, announcement: Announcement, limit: float) -> None:
        answer = await self._one(neighbour, "Announce", announcement, limit)
        with self._judged(neighbour):
            if answer:
                raise InvalidMessageError(
                    "size", f"{len(answer)} bytes in answer to an announcement: expected none."
                )

    async def fetch(self, neighbour: str, request: Request, limit: float) -> Offer:
        intake = OfferDecoder(self.rules, neighbour, request)
        with self._judged(neighbour):
            async with aclosing(self._ask(neighbour, "Fetch", request, limit)) as answer:
                async for frame in answer:
                    intake.take(frame)
            return await asyncio.to_thread(intake.offer)

    async def _one(self, neighbour: str, kind: Kind, body: Body, limit: float) -> bytes:
        """The only frame of an answer."""
        found: bytes | None = None
        with self._judged(neighbour):
            async with aclosing(self._ask(neighbour, kind, body, limit)) as answer:
                async for frame in answer:
                    if found is not None:
                        raise InvalidMessageError(
                            "size", "a second frame came, where one was expected."
                        )
                    found = frame
            if found is None:
                raise InvalidMessageError("size", "the answer is empty.")
        return found

    async def _ask(self, neighbour: str, kind: Kind, body: Body, limit: float) -> Frames:
        if self.muted(neighbour):
            raise RejectedError(
                f"'{neighbour}' is muted here for a while: it has sent too much rubbish."
            )
        data = encode(self.rules, self.name, body)
        self.sent[neighbour] += len(data)
        async with aclosing(self.carry(neighbour, kind, data, limit)) as answer:
            async for frame in answer:
                self.received[neighbour] += len(frame)
                yield frame

    def _decoded(self, neighbour: str, data: bytes, kind: type[AnyBody]) -> AnyBody:
        with self._judged(neighbour):
            return decode(self.rules, data, neighbour, kind)

    @contextmanager
    def _judged(self, neighbour: str) -> Iterator[None]:
        """MalformedError counts against whoever sent it; another manifest is an honest mistake."""
        try:
            yield
        except MalformedError as error:
            rule = error.rule if isinstance(error, InvalidMessageError) else "content"
            self.refusals.note(neighbour, rule, str(error))
            if rule != "agreement":
                self.guard.rubbish(neighbour)
            raise

    # ---- what neighbours ask

    @contextmanager
    def admitted(self, sender: str, kind: Kind) -> Iterator[None]:
        """A call takes memory here, so a neighbour has only so many under way. To be asked before anything of it is read."""
        if self.muted(sender):
            self.refuse(
                sender, "muted", "it is not listened to for a while: it has sent too much rubbish."
            )
        places = {(sender, "any"): CALLS} | ({(sender, kind): FETCHES} if kind == "Fetch" else {})
        for place, limit in places.items():
            if self._under_way[place] >= limit:
                self.refuse(sender, "busy", f"{limit} of its calls are under way already.")
        self._under_way.update(list(places))
        try:
            yield
        finally:
            self._under_way.subtract(list(places))

    async def serve(self, sender: str, kind: Kind, data: bytes) -> Frames:
        """The answer to a neighbour; RejectedError with a sentence that may travel to it, or UnreachableError where this node failed."""
        self.received[sender] += len(data)
        with self._faults(sender, kind):
            async with aclosing(self._answer(sender, kind, data)) as answer:
                async for frame in answer:
                    self.sent[sender] += len(frame)
                    yield frame

    async def _answer(self, sender: str, kind: Kind, data: bytes) -> Frames:
        if self.handler is None:
            raise UnreachableError("this node is not ready yet.")
        if kind == "Hello":
            yield encode(
                self.rules,
                self.name,
                self.handler.hello(sender, decode(self.rules, data, sender, Hello)),
            )
        elif kind == "Announce":
            self.handler.announced(sender, decode(self.rules, data, sender, Announcement))
            yield b""
        else:
            request = decode(self.rules, data, sender, Request)
            parcel = await asyncio.to_thread(pack, self._offered(sender, request))
            for frame in frames(self.rules, self.name, request, parcel):
                yield frame

    def _offered(self, sender: str, request: Request) -> Offer:
        assert self.handler is not None
        offer = self.handler.offered(sender, request)
        if not offer.clusters:
            raise RejectedError(
                f"none of the clusters {list(request.wants)} is on offer here in round {request.round}."
            )
        return offer

    @contextmanager
    def _faults(self, sender: str, kind: Kind) -> Iterator[None]:
        """What goes wrong here, as the sender is told of it."""
        try:
            with self._judged(sender):
                yield
        except MalformedError as error:
            raise RejectedError(str(error)) from None
        except TransportError:
            raise
        except Exception as error:
            log.exception("the answer to %s of %s failed", kind, sender)
            raise UnreachableError(
                f"this node failed to answer ({type(error).__name__})."
            ) from None

    def refuse(self, sender: str, reason: str, sentence: str) -> NoReturn:
        self.refusals.note(sender, reason, sentence)
        raise RejectedError(f"{reason}: {sentence}")
