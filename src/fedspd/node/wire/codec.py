"""Messages as bytes, and back. No byte that a neighbour sent gets past this file unchecked, and none is ever unpickled.

A small message is one protobuf Message (wire.proto). The answer to a request is a stream of frames: a header, then chunks of
CHUNK bytes, the last one shorter, which together are one safetensors file with one tensor "models". Whoever asked knows
how long it may be before the first of them comes. Whatever breaks a rule raises InvalidMessageError, a MalformedError that names the rule.

Shapes: K models offered, P numbers in a model.
"""

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save
from torch import Tensor

from fedspd.core.errors import MalformedError, MissingExtraError
from fedspd.core.ledger import NO_CLUSTER
from fedspd.node.identity.manifest import NAME, Manifest
from fedspd.node.wire.messages import JOINING, Announcement, Hello, Offer, Request

try:
    from google.protobuf.message import DecodeError

    from fedspd.node.wire import wire_pb2 as pb
except ImportError:
    raise MissingExtraError.of("A network of peers", "node") from None

CHUNK = 64 * 1024  # bytes: half a second of a slow link, so that small messages need not wait long
CHUNK_FRAME = CHUNK + 32  # with its index and checksum
ROOM = 512  # bytes: the header of a safetensors file with one tensor, and the parts of a message that do not grow
PER_CLUSTER = 24  # bytes of a message for each cluster: two numbers and a weight
TYPES = {"float32": ("F32", torch.float32), "float64": ("F64", torch.float64)}
MODELS = "models"
LARGEST = 2**31 - 1


class InvalidMessageError(MalformedError):
    """MalformedError, and which rule it breaks: `rule` is a word for counters."""

    def __init__(self, rule: str, sentence: str) -> None:
        super().__init__(sentence)
        self.rule = rule


@dataclass(frozen=True)
class WireLimits:
    """All that the manifest says about messages."""

    agreement: str
    clusters: int
    size: int  # P
    dtype: str

    @classmethod
    def of(cls, manifest: Manifest) -> "WireLimits":
        return cls(
            manifest.agreement,
            max(1, int(manifest.config["clusters"])),
            manifest.size,
            manifest.dtype,
        )

    @property
    def message_bytes(self) -> int:
        """The longest that a small message can be."""
        return ROOM + PER_CLUSTER * self.clusters

    def offer_bytes(self, models: int, size: int) -> int:
        return ROOM + models * size * TYPES[self.dtype][1].itemsize


@dataclass(frozen=True)
class OfferHeader:
    """What the answer to a request will be."""

    round: int
    exchange: int
    clusters: tuple[int, ...]
    total: int  # bytes of all chunks
    sha256: bytes  # of all chunks


Body = Hello | Announcement | Request | OfferHeader
AnyBody = TypeVar("AnyBody", Hello, Announcement, Request, OfferHeader)
BODY_FIELDS: dict[type[Body], str] = {  # the names of wire.proto
    Hello: "hello",
    Announcement: "announcement",
    Request: "request",
    OfferHeader: "header",
}


# ---- small messages


def encode(rules: WireLimits, sender: str, body: Body) -> bytes:
    message = pb.Message(sender=sender, agreement=bytes.fromhex(rules.agreement))
    match body:
        case Hello():
            message.hello.CopyFrom(pb.Hello(round=body.round, address=body.address))
        case Announcement():
            message.announcement.CopyFrom(pb.Announcement(**vars(body)))
        case Request():
            message.request.CopyFrom(pb.Request(**vars(body)))
        case OfferHeader():
            message.header.CopyFrom(pb.Header(**vars(body)))
    return bytes(message.SerializeToString())


def decode(rules: WireLimits, data: bytes, sender: str, kind: type[AnyBody]) -> AnyBody:
    """What the sender says, if it is of that kind, and if it is the sender who says it."""
    message = _message(rules, data)
    if message.sender != sender:
        raise InvalidMessageError(
            "sender",
            f"the message says that it is from '{_short(message.sender)}', but it came from '{sender}'.",
        )
    if message.agreement.hex() != rules.agreement:
        raise InvalidMessageError(
            "agreement",
            "the sender has another manifest: its config, its model or its network is not the one agreed on here.",
        )
    return _body(rules, message, kind)


def claimed(rules: WireLimits, data: bytes) -> str:
    """Who says to have sent a message: no more than that."""
    name: str = _message(rules, data).sender
    if not NAME.fullmatch(name):
        raise InvalidMessageError("sender", f"the sender '{_short(name)}' is no name of a node.")
    return name


def _message(rules: WireLimits, data: bytes) -> pb.Message:
    if len(data) > rules.message_bytes:
        raise InvalidMessageError(
            "size", f"a message of {len(data)} bytes: expected at most {rules.message_bytes}."
        )
    try:
        message: pb.Message = pb.Message.FromString(data)
    except DecodeError:
        raise InvalidMessageError("format", f"{len(data)} bytes that are no message.") from None
    return message


def _body(rules: WireLimits, message: pb.Message, kind: type[AnyBody]) -> AnyBody:
    name = BODY_FIELDS[kind]
    if (found := message.WhichOneof("body")) != name:
        raise InvalidMessageError(
            "kind", f"the message is of the kind '{found}': expected '{name}'."
        )
    raw = getattr(message, name)
    _within("round", raw.round, 0, LARGEST)
    body: AnyBody = READERS[kind](rules, raw)
    return body


def _hello(rules: WireLimits, raw: pb.Hello) -> Hello:
    if len(raw.address) > 255 or not raw.address.isprintable():
        raise InvalidMessageError(
            "address", f"the address '{_short(raw.address)}' is none: expected host:port."
        )
    return Hello(rules.agreement, raw.round, raw.address)


def _announcement(rules: WireLimits, raw: pb.Announcement) -> Announcement:
    _within("exchange", raw.exchange, 0, LARGEST)
    _check_clusters(rules, "clusters", raw.clusters, least=NO_CLUSTER)
    _check_clusters(rules, "wants", raw.wants, least=NO_CLUSTER)
    if len(raw.weights) != len(raw.clusters):
        raise InvalidMessageError(
            "weights",
            f"{len(raw.weights)} weights for {len(raw.clusters)} clusters: expected one for each.",
        )
    if not all(math.isfinite(weight) and weight >= 0 for weight in raw.weights):
        raise InvalidMessageError(
            "weights",
            f"the weights are {_short(str(list(raw.weights)))}: expected finite numbers, none below 0.",
        )
    _within("degree", raw.degree, 0, LARGEST)
    clusters, weights, wants = tuple(raw.clusters), tuple(raw.weights), tuple(raw.wants)
    return Announcement(raw.round, raw.exchange, clusters, weights, wants, raw.note, raw.degree)


def _request(rules: WireLimits, raw: pb.Request) -> Request:
    _within("exchange", raw.exchange, JOINING, LARGEST)
    _check_clusters(rules, "wants", raw.wants, least=0)
    if not raw.wants:
        raise InvalidMessageError("wants", "a request for nothing: expected at least one cluster.")
    _within("size", raw.size, 1, rules.size)
    return Request(raw.round, raw.exchange, tuple(raw.wants), raw.size)


def _header(rules: WireLimits, raw: pb.Header) -> OfferHeader:
    """Whether it answers the request, OfferDecoder knows."""
    return OfferHeader(raw.round, raw.exchange, tuple(raw.clusters), raw.total, raw.sha256)


READERS: dict[type[Body], Callable[[WireLimits, Any], Any]] = {
    Hello: _hello,
    Announcement: _announcement,
    Request: _request,
    OfferHeader: _header,
}


def _check_clusters(rules: WireLimits, name: str, clusters: Sequence[int], least: int) -> None:
    if len(clusters) > rules.clusters:
        raise InvalidMessageError(
            name, f"{len(clusters)} {name}: this network has {rules.clusters} clusters."
        )
    for cluster in clusters:
        _within(name, cluster, least, rules.clusters - 1)
    named = [cluster for cluster in clusters if cluster != NO_CLUSTER]
    if len(set(named)) < len(named):
        raise InvalidMessageError(name, f"{name} = {named}: expected each cluster once.")


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidMessageError(name, f"{name} = {value}: expected {least} to {most}.")


def _short(text: str) -> str:
    """For a log: one line, and not a long one."""
    return text[:60].encode("unicode_escape").decode()


# ---- models


@dataclass(frozen=True)
class EncodedOffer:
    """Models, ready to be sent."""

    clusters: tuple[int, ...]
    payload: bytes
    sha256: bytes


def pack(offer: Offer) -> EncodedOffer:
    payload = save({MODELS: offer.model_KP.detach().cpu().contiguous()})
    return EncodedOffer(offer.clusters, payload, hashlib.sha256(payload).digest())


def frames(
    rules: WireLimits, sender: str, request: Request, parcel: EncodedOffer
) -> Iterator[bytes]:
    header = OfferHeader(
        request.round, request.exchange, parcel.clusters, len(parcel.payload), parcel.sha256
    )
    yield encode(rules, sender, header)
    for index, start in enumerate(range(0, len(parcel.payload), CHUNK)):
        data = parcel.payload[start : start + CHUNK]
        yield pb.Chunk(index=index, crc32=zlib.crc32(data), data=data).SerializeToString()


class OfferDecoder:
    """Takes the frames of one answer, each only if it is the one that must come next."""

    def __init__(self, rules: WireLimits, sender: str, request: Request) -> None:
        self.rules, self.sender, self.request = rules, sender, request
        self.header: OfferHeader | None = None
        self.chunks: list[bytes] = []
        self.missing = 0  # bytes

    def take(self, frame: bytes) -> None:
        if self.header is None:
            self.header = self._checked(decode(self.rules, frame, self.sender, OfferHeader))
            self.missing = self.header.total
        else:
            self._take_chunk(frame)

    def _checked(self, header: OfferHeader) -> OfferHeader:
        """Before a byte of the models is read."""
        asked = self.request
        if (header.round, header.exchange) != (asked.round, asked.exchange):
            moment = f"round {header.round}, exchange {header.exchange}"
            raise InvalidMessageError(
                "round",
                f"models of {moment}: asked for round {asked.round}, exchange {asked.exchange}.",
            )
        clusters = header.clusters
        if (
            not clusters
            or len(set(clusters)) < len(clusters)
            or not set(clusters) <= set(asked.wants)
        ):
            raise InvalidMessageError(
                "clusters",
                f"models of the clusters {_short(str(clusters))}: asked for {list(asked.wants)}, each once.",
            )
        most = self.rules.offer_bytes(len(clusters), asked.size)
        if not most - ROOM < header.total <= most:
            raise InvalidMessageError(
                "size",
                f"{header.total} bytes for {len(clusters)} models of {asked.size} numbers: expected {most - ROOM} to {most}.",
            )
        return header

    def _take_chunk(self, frame: bytes) -> None:
        if not self.missing or len(frame) > CHUNK_FRAME:
            raise InvalidMessageError(
                "size", f"{len(frame)} bytes more, where {self.missing} were missing."
            )
        try:
            chunk = pb.Chunk.FromString(frame)
        except DecodeError:
            raise InvalidMessageError("format", f"{len(frame)} bytes that are no chunk.") from None
        if chunk.index != len(self.chunks):
            raise InvalidMessageError(
                "order", f"chunk {chunk.index} came, where chunk {len(self.chunks)} was expected."
            )
        if len(chunk.data) != min(CHUNK, self.missing):
            raise InvalidMessageError(
                "size", f"a chunk of {len(chunk.data)} bytes: expected {min(CHUNK, self.missing)}."
            )
        if zlib.crc32(chunk.data) != chunk.crc32:
            raise InvalidMessageError(
                "checksum", f"chunk {chunk.index} does not have the CRC-32 that it names."
            )
        self.chunks.append(chunk.data)
        self.missing -= len(chunk.data)

    def offer(self) -> Offer:
        """The models, when all have come."""
        if self.header is None or self.missing:
            raise InvalidMessageError(
                "size",
                f"the answer ended {self.missing} bytes too early."
                if self.header
                else "the answer is empty.",
            )
        payload = b"".join(self.chunks)
        self.chunks.clear()
        if hashlib.sha256(payload).digest() != self.header.sha256:
            raise InvalidMessageError(
                "checksum", "the models do not have the SHA-256 that their header names."
            )
        clusters = self.header.clusters
        return Offer(clusters, unpack(self.rules, payload, len(clusters), self.request.size))


def unpack(rules: WireLimits, payload: bytes, models: int, size: int) -> Tensor:
    """model_KP out of a safetensors file that holds just this."""
    try:
        tensors = dict(deserialize(payload))  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError, OverflowError) as error:
        raise InvalidMessageError(
            "format", f"the models are no safetensors file ({_short(str(error))})."
        ) from None
    if list(tensors) != [MODELS]:
        raise InvalidMessageError(
            "format", f"the tensors are {_short(str(list(tensors)))}: expected one, '{MODELS}'."
        )
    found, (code, dtype) = tensors[MODELS], TYPES[rules.dtype]
    if found["dtype"] != code:
        raise InvalidMessageError(
            "type", f"the models are of the type {_short(str(found['dtype']))}: expected {code}."
        )
    if found["shape"] != [models, size]:
        raise InvalidMessageError(
            "shape",
            f"the models have the shape {_short(str(found['shape']))}: expected {[models, size]}.",
        )
    model_KP = torch.frombuffer(found["data"], dtype=dtype).reshape(models, size)
    if not model_KP.isfinite().all():
        raise InvalidMessageError(
            "finite",
            "the models have numbers that are not finite: the sender's training may have diverged.",
        )
    return model_KP
