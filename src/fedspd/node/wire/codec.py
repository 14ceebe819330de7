"""Encode, decode and validate messages. Nothing is ever unpickled.

A small message is one protobuf `Message` (wire.proto). The answer to a request is a stream of
frames: a header, then chunks of CHUNK_BYTES (the last one may be shorter), which together are one
safetensors file with the single tensor "models". The receiver knows its size in advance. Decoding
validates every byte; a message that breaks a rule raises InvalidMessageError.

Shapes: K models offered, P parameters of a model.
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

CHUNK_BYTES = 64 * 1024  # half a second on a slow link, so that a heartbeat need not wait long
MAX_FRAME_BYTES = CHUNK_BYTES + 32  # a chunk with its index and checksum
OVERHEAD_BYTES = 512  # of a message or a safetensors header, apart from clusters and parameters
BYTES_PER_CLUSTER = 24  # of a message: two cluster numbers and a weight
DTYPES = {
    "float32": ("F32", torch.float32),
    "float64": ("F64", torch.float64),
    "bfloat16": ("BF16", torch.bfloat16),
}
TENSOR = "models"
INT32_MAX = 2**31 - 1


class InvalidMessageError(MalformedError):
    """A malformed message; `rule` is the violated rule, a word for counters."""

    def __init__(self, rule: str, sentence: str) -> None:
        super().__init__(sentence)
        self.rule = rule


@dataclass(frozen=True)
class WireLimits:
    """The limits that the manifest sets for messages."""

    agreement: str
    clusters: int  # the most that a node offers or wants in an exchange
    size: int  # the most numbers of a vector
    dtype: str
    model_dtype: str  # of models; dtype is that of other vectors
    rounds: int

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> "WireLimits":
        return cls(
            manifest.agreement,
            manifest.offer_limit,
            manifest.size_limit,
            manifest.dtype,
            manifest.model_dtype,
            manifest.rounds,
        )

    @property
    def message_bytes(self) -> int:
        """The maximum size of a small message."""
        return OVERHEAD_BYTES + BYTES_PER_CLUSTER * self.clusters

    def offer_type(self, request: Request) -> tuple[str, torch.dtype]:
        """Return the data type of the answer to a request, as safetensors and as torch name it."""
        return DTYPES[self.model_dtype if request.is_model else self.dtype]

    def offer_bytes(self, models: int, request: Request) -> int:
        """Return the maximum size of an encoded offer."""
        return OVERHEAD_BYTES + models * request.size * self.offer_type(request)[1].itemsize


@dataclass(frozen=True)
class OfferHeader:
    """The first frame of the answer to a request, which describes the chunks that follow."""

    round: int
    exchange: int
    clusters: tuple[int, ...]
    total: int  # bytes of all chunks
    sha256: bytes  # of all chunks


Body = Hello | Announcement | Request | OfferHeader
AnyBody = TypeVar("AnyBody", Hello, Announcement, Request, OfferHeader)
BODY_FIELDS: dict[type[Body], str] = {  # in wire.proto
    Hello: "hello",
    Announcement: "announcement",
    Request: "request",
    OfferHeader: "header",
}


# ---- small messages


def encode(limits: WireLimits, sender: str, body: Body) -> bytes:
    """Return a small message as bytes."""
    message = pb.Message(sender=sender, agreement=bytes.fromhex(limits.agreement))
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


def decode(limits: WireLimits, data: bytes, sender: str, body_type: type[AnyBody]) -> AnyBody:
    """Return the body of a small message of the expected sender and type."""
    message = _parse(limits, data)
    if message.sender != sender:
        claimed = _shorten(message.sender)
        raise InvalidMessageError(
            "sender", f"the message names the sender '{claimed}', but it came from '{sender}'."
        )
    if message.agreement.hex() != limits.agreement:
        raise InvalidMessageError(
            "agreement",
            "the sender has another manifest: its config, model or network differs from this "
            "node's. Copy bundles of one network to all devices.",
        )
    return _decode_body(limits, message, body_type)


def claimed_sender(limits: WireLimits, data: bytes) -> str:
    """Return the sender that a message names, without any proof."""
    name: str = _parse(limits, data).sender
    if not NAME.fullmatch(name):
        raise InvalidMessageError("sender", f"sender = '{_shorten(name)}': not a node name.")
    return name


def _parse(limits: WireLimits, data: bytes) -> pb.Message:
    if len(data) > limits.message_bytes:
        raise InvalidMessageError(
            "size", f"a message of {len(data)} bytes; expected at most {limits.message_bytes}."
        )
    try:
        message: pb.Message = pb.Message.FromString(data)
    except DecodeError:
        raise InvalidMessageError("format", f"{len(data)} bytes are not a message.") from None
    return message


def _decode_body(limits: WireLimits, message: pb.Message, body_type: type[AnyBody]) -> AnyBody:
    expected = BODY_FIELDS[body_type]
    if (found := message.WhichOneof("body")) != expected:
        raise InvalidMessageError("kind", f"the message is a '{found}'; expected '{expected}'.")
    raw = getattr(message, expected)
    # a node that is done greets from the round after the last
    _check_range("round", raw.round, 0, limits.rounds + (body_type is Hello))
    body: AnyBody = BODY_DECODERS[body_type](limits, raw)
    return body


def _decode_hello(limits: WireLimits, raw: pb.Hello) -> Hello:
    if len(raw.address) > 255 or not raw.address.isprintable():
        address = _shorten(raw.address)
        raise InvalidMessageError(
            "address", f"address = '{address}': not an address; expected host:port."
        )
    return Hello(limits.agreement, raw.round, raw.address)


def _decode_announcement(limits: WireLimits, raw: pb.Announcement) -> Announcement:
    _check_range("round", raw.round, 1, limits.rounds)
    _check_range("exchange", raw.exchange, 0, INT32_MAX)
    _check_clusters(limits, "clusters", raw.clusters, minimum=NO_CLUSTER)
    _check_clusters(limits, "wants", raw.wants, minimum=NO_CLUSTER)
    clusters, weights, wants = tuple(raw.clusters), tuple(raw.weights), tuple(raw.wants)
    if len(weights) != len(clusters):
        raise InvalidMessageError(
            "weights", f"{len(weights)} weights for {len(clusters)} clusters; expected one each."
        )
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        found = _shorten(str(list(weights)))
        raise InvalidMessageError("weights", f"weights = {found}; expected finite numbers from 0.")
    _check_range("degree", raw.degree, 0, INT32_MAX)
    return Announcement(raw.round, raw.exchange, clusters, weights, wants, raw.note, raw.degree)


def _decode_request(limits: WireLimits, raw: pb.Request) -> Request:
    _check_range("exchange", raw.exchange, JOINING, INT32_MAX)
    _check_clusters(limits, "wants", raw.wants, minimum=0)
    if not raw.wants:
        raise InvalidMessageError("wants", "wants = []: empty; expected at least one cluster.")
    _check_range("size", raw.size, 1, limits.size)
    return Request(raw.round, raw.exchange, tuple(raw.wants), raw.size, raw.is_model)


def _decode_header(limits: WireLimits, raw: pb.Header) -> OfferHeader:
    """Decode a header; OfferDecoder compares it with the request."""
    return OfferHeader(raw.round, raw.exchange, tuple(raw.clusters), raw.total, raw.sha256)


BODY_DECODERS: dict[type[Body], Callable[[WireLimits, Any], Any]] = {
    Hello: _decode_hello,
    Announcement: _decode_announcement,
    Request: _decode_request,
    OfferHeader: _decode_header,
}


def _check_clusters(limits: WireLimits, key: str, clusters: Sequence[int], minimum: int) -> None:
    if len(clusters) > limits.clusters:
        raise InvalidMessageError(
            key, f"{len(clusters)} {key}; expected at most {limits.clusters}, as many as clusters."
        )
    for cluster in clusters:
        _check_range(key, cluster, minimum, limits.clusters - 1)
    real = [cluster for cluster in clusters if cluster != NO_CLUSTER]
    if len(set(real)) < len(real):
        raise InvalidMessageError(key, f"{key} = {real}: repeated; expected each cluster once.")


def _check_range(key: str, value: int, minimum: int, maximum: int) -> None:
    if not minimum <= value <= maximum:
        raise InvalidMessageError(
            key, f"{key} = {value}: out of range; expected {minimum} to {maximum}."
        )


def _shorten(text: str) -> str:
    """Return the beginning of a foreign text on one line, for a log."""
    return text[:60].encode("unicode_escape").decode()


# ---- models


@dataclass(frozen=True)
class EncodedOffer:
    """The models of an offer as one safetensors file."""

    clusters: tuple[int, ...]
    payload: bytes
    sha256: bytes


def encode_offer(offer: Offer) -> EncodedOffer:
    """Encode the models of an offer."""
    payload = save({TENSOR: offer.model_KP.detach().cpu().contiguous()})
    return EncodedOffer(offer.clusters, payload, hashlib.sha256(payload).digest())


def encode_frames(
    limits: WireLimits, sender: str, request: Request, offer: EncodedOffer
) -> Iterator[bytes]:
    """Yield the frames of the answer to a request: the header, then the chunks."""
    total = len(offer.payload)
    header = OfferHeader(request.round, request.exchange, offer.clusters, total, offer.sha256)
    yield encode(limits, sender, header)
    for index, start in enumerate(range(0, total, CHUNK_BYTES)):
        data = offer.payload[start : start + CHUNK_BYTES]
        yield pb.Chunk(index=index, crc32=zlib.crc32(data), data=data).SerializeToString()


class OfferDecoder:
    """Decodes the frames of the answer to one request and validates each as it arrives."""

    def __init__(self, limits: WireLimits, sender: str, request: Request) -> None:
        self.limits, self.sender, self.request = limits, sender, request
        self.header: OfferHeader | None = None
        self.chunks: list[bytes] = []
        self.missing_bytes = 0

    def feed(self, frame: bytes) -> None:
        """Validate and keep the next frame."""
        if self.header is None:
            header = decode(self.limits, frame, self.sender, OfferHeader)
            self._check_header(header)
            self.header, self.missing_bytes = header, header.total
        else:
            self._feed_chunk(frame)

    def _check_header(self, header: OfferHeader) -> None:
        """Compare a header with the request before any byte of the models is read."""
        request, clusters = self.request, header.clusters
        if (header.round, header.exchange) != (request.round, request.exchange):
            raise InvalidMessageError(
                "round",
                f"models of round {header.round}, exchange {header.exchange}; "
                f"expected round {request.round}, exchange {request.exchange}.",
            )
        is_repeated = len(set(clusters)) < len(clusters)
        if not clusters or is_repeated or not set(clusters) <= set(request.wants):
            found, wants = _shorten(str(list(clusters))), list(request.wants)
            raise InvalidMessageError(
                "clusters", f"models of the clusters {found}; expected some of {wants}, each once."
            )
        maximum = self.limits.offer_bytes(len(clusters), request)
        minimum = maximum - OVERHEAD_BYTES
        if not minimum < header.total <= maximum:
            raise InvalidMessageError(
                "size",
                f"{header.total} bytes for {len(clusters)} models of {request.size} parameters; "
                f"expected {minimum + 1} to {maximum}.",
            )

    def _feed_chunk(self, frame: bytes) -> None:
        if not self.missing_bytes or len(frame) > MAX_FRAME_BYTES:
            raise InvalidMessageError(
                "size", f"a frame of {len(frame)} bytes; expected {self.missing_bytes} more bytes."
            )
        try:
            chunk = pb.Chunk.FromString(frame)
        except DecodeError:
            raise InvalidMessageError("format", f"{len(frame)} bytes are not a chunk.") from None
        if chunk.index != (expected := len(self.chunks)):
            raise InvalidMessageError("order", f"chunk {chunk.index}; expected chunk {expected}.")
        if len(chunk.data) != (expected := min(CHUNK_BYTES, self.missing_bytes)):
            raise InvalidMessageError(
                "size", f"a chunk of {len(chunk.data)} bytes; expected {expected}."
            )
        if zlib.crc32(chunk.data) != chunk.crc32:
            raise InvalidMessageError("checksum", f"the CRC-32 of chunk {chunk.index} is wrong.")
        self.chunks.append(chunk.data)
        self.missing_bytes -= len(chunk.data)

    def finish(self) -> Offer:
        """Return the models after the last frame."""
        if self.header is None:
            raise InvalidMessageError("size", "the answer is empty.")
        if self.missing_bytes:
            raise InvalidMessageError("size", f"the answer lacks {self.missing_bytes} bytes.")
        payload = b"".join(self.chunks)
        self.chunks.clear()
        if hashlib.sha256(payload).digest() != self.header.sha256:
            raise InvalidMessageError("checksum", "the SHA-256 of the models is wrong.")
        clusters = self.header.clusters
        return Offer(clusters, decode_models(self.limits, payload, len(clusters), self.request))


def decode_models(limits: WireLimits, payload: bytes, models: int, request: Request) -> Tensor:
    """Return model_KP from a safetensors file that contains nothing else."""
    try:
        tensors = dict(deserialize(payload))  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError, OverflowError) as error:
        raise InvalidMessageError(
            "format", f"the models are not a safetensors file ({_shorten(str(error))})."
        ) from None
    if list(tensors) != [TENSOR]:
        names = _shorten(str(list(tensors)))
        raise InvalidMessageError("format", f"the tensors are {names}; expected only '{TENSOR}'.")
    found, (code, dtype), size = tensors[TENSOR], limits.offer_type(request), request.size
    if found["dtype"] != code:
        found_code = _shorten(str(found["dtype"]))
        raise InvalidMessageError("type", f"the models have dtype {found_code}; expected {code}.")
    if found["shape"] != [models, size]:
        shape = _shorten(str(found["shape"]))
        raise InvalidMessageError(
            "shape", f"the models have shape {shape}; expected {[models, size]}."
        )
    model_KP = torch.frombuffer(found["data"], dtype=dtype).reshape(models, size)
    if not model_KP.isfinite().all():
        raise InvalidMessageError(
            "finite", "the models have parameters that are not finite; training may have diverged."
        )
    return model_KP
