"""The codec: messages survive it, and everything else raises MalformedError."""

import ast
import re
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save

import fedspd
from fedspd.core.errors import MalformedError
from fedspd.core.keys import Key
from fedspd.node.wire.codec import (
    OVERHEAD_BYTES,
    InvalidMessageError,
    OfferDecoder,
    OfferHeader,
    WireLimits,
    claimed_sender,
    decode,
    decode_models,
    encode,
    encode_frames,
    encode_offer,
)
from fedspd.node.wire.messages import Announcement, Hello, Offer, Request
from fedspd.node.wire.wire_pb2 import DESCRIPTOR

ROUNDS = 100
LIMITS = WireLimits(
    "ab" * 32, clusters=3, size=5, dtype="float32", model_dtype="float32", rounds=ROUNDS
)
REQUEST = Request(3, 0, (2, 0), 5)
OFFER = Offer((0, 2), torch.arange(10.0).reshape(2, 5))
HELLO = Hello(LIMITS.agreement, 4, "10.0.0.1:7700")
ANNOUNCEMENT = Announcement(3, 1, (2, 0), (10.0, 0.5), (2, 1), -5, 2)
HEADER = OfferHeader(3, 0, (0, 2), 100, b"\1" * 32)
BODIES = [HELLO, ANNOUNCEMENT, REQUEST, HEADER]

rounds, int32 = st.integers(1, ROUNDS), st.integers(0, 2**31 - 1)
clusters = st.lists(st.integers(0, 2), unique=True, max_size=3).map(tuple)


@st.composite
def announcements(draw):
    offered = draw(clusters)
    weights = tuple(draw(st.lists(st.floats(0, 1e9), min_size=len(offered), max_size=len(offered))))
    return Announcement(
        draw(rounds),
        draw(int32),
        offered,
        weights,
        draw(clusters),
        draw(st.integers(-(2**63), 2**63 - 1)),
        draw(int32),
    )


# ---- round trips


@given(announcements())
def test_codec_keeps_announcements(announcement):
    assert decode(LIMITS, encode(LIMITS, "a", announcement), "a", Announcement) == announcement


@given(rounds, st.integers(-1, 2**31 - 1), clusters.filter(len), st.integers(1, 5))
def test_codec_keeps_requests(round, exchange, wants, size):
    request = Request(round, exchange, wants, size)
    assert decode(LIMITS, encode(LIMITS, "node-1", request), "node-1", Request) == request


@given(st.integers(0, ROUNDS + 1), st.text("abc.:[]123-", max_size=255))
@example(ROUNDS + 1, "")  # of a node that is done
def test_codec_keeps_hellos(round, address):
    hello = Hello(LIMITS.agreement, round, address)
    assert decode(LIMITS, encode(LIMITS, "a", hello), "a", Hello) == hello


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 5, 4086, 8181, 8182, 8183, 100_000])  # around chunk ends
def test_codec_keeps_models(dtype, size):
    limits, request = replace(LIMITS, size=size, dtype=dtype), replace(REQUEST, size=size)
    model_KP = torch.randn(2, size, dtype=getattr(torch, dtype), generator=Key(1).torch())
    frames = encode_frames(limits, "a", request, encode_offer(Offer((0, 2), model_KP)))
    found = decode_all(limits, request, frames)
    assert found.clusters == (0, 2)
    assert torch.equal(found.model_KP, model_KP)


def test_encode_offer_sends_a_row_of_a_large_table_alone():
    table = torch.arange(5000.0).reshape(1000, 5)
    assert len(encode_offer(Offer((1,), table[3:4])).payload) < 20 + OVERHEAD_BYTES


def test_claimed_sender_returns_only_node_names():
    assert claimed_sender(LIMITS, encode(LIMITS, "node-7", HELLO)) == "node-7"
    for name in ("", "../x", "A b", "x" * 33):
        with pytest.raises(InvalidMessageError, match="not a node name"):
            claimed_sender(LIMITS, encode(LIMITS, name, HELLO))


def test_message_bytes_bound_the_longest_messages():
    for count in (1, 3, 50):
        limits = replace(LIMITS, clusters=count)
        every = tuple(range(count))
        longest = [
            Announcement(2**31 - 1, 2**31 - 1, every, (1e300,) * count, every, -(2**63), 2**31 - 1),
            Request(2**31 - 1, 2**31 - 1, every, 2**63),
            OfferHeader(2**31 - 1, 2**31 - 1, every, 2**63, b"\1" * 32),
            Hello(LIMITS.agreement, 2**31 - 1, "x" * 255),
        ]
        assert max(len(encode(limits, "n" * 32, body)) for body in longest) <= limits.message_bytes


# ---- violated rules


@pytest.mark.parametrize(
    ("rule", "body"),
    [
        ("round", replace(HELLO, round=-1)),
        ("round", replace(HELLO, round=ROUNDS + 2)),  # a node that is done is in ROUNDS + 1
        ("round", replace(HELLO, round=2**31 - 1)),
        ("round", replace(ANNOUNCEMENT, round=0)),
        ("round", replace(ANNOUNCEMENT, round=ROUNDS + 1)),
        ("round", replace(REQUEST, round=ROUNDS + 1)),
        ("address", replace(HELLO, address="x" * 256)),
        ("address", replace(HELLO, address="a\nb:1")),
        ("exchange", replace(ANNOUNCEMENT, exchange=-1)),
        ("clusters", replace(ANNOUNCEMENT, clusters=(0, 3))),
        ("clusters", replace(ANNOUNCEMENT, clusters=(-2, 0))),
        ("clusters", replace(ANNOUNCEMENT, clusters=(1, 1))),
        ("clusters", replace(ANNOUNCEMENT, clusters=(0, 1, 2, -1), weights=(1.0,) * 4)),
        ("weights", replace(ANNOUNCEMENT, weights=(1.0,))),
        ("weights", replace(ANNOUNCEMENT, weights=(1.0, -1.0))),
        ("weights", replace(ANNOUNCEMENT, weights=(1.0, float("inf")))),
        ("wants", replace(ANNOUNCEMENT, wants=(3,))),
        ("degree", replace(ANNOUNCEMENT, degree=2**31)),
        ("exchange", replace(REQUEST, exchange=-2)),
        ("wants", replace(REQUEST, wants=())),
        ("wants", replace(REQUEST, wants=(1, 1))),
        ("wants", replace(REQUEST, wants=(-1,))),
        ("size", replace(REQUEST, size=6)),
        ("size", replace(REQUEST, size=0)),
    ],
)
def test_decode_names_the_violated_rule(rule, body):
    with pytest.raises(InvalidMessageError) as caught:
        decode(LIMITS, encode(LIMITS, "a", body), "a", type(body))
    assert caught.value.rule == rule


def test_decode_accepts_an_announcement_without_an_offer():
    """Cluster -1 means no model, as in the ledger."""
    announcement = Announcement(1, 0, (-1, 2, -1), (0.0, 1.0, 0.0), (2,), 0, 1)
    assert decode(LIMITS, encode(LIMITS, "a", announcement), "a", Announcement) == announcement


@pytest.mark.parametrize(
    ("rule", "tensors"),
    [
        ("format", {"other": OFFER.model_KP}),
        ("format", {"models": OFFER.model_KP, "more": torch.zeros(1)}),
        ("format", {}),
        ("shape", {"models": torch.zeros(10)}),
        ("shape", {"models": torch.zeros(5, 2)}),
        ("shape", {"models": torch.zeros(2, 5, 1)}),
        ("type", {"models": torch.zeros(2, 5, dtype=torch.float64)}),
        ("type", {"models": torch.zeros(2, 5, dtype=torch.bfloat16)}),
        ("finite", {"models": torch.full((2, 5), torch.inf)}),
    ],
)
def test_decode_models_names_the_violated_rule(rule, tensors):
    with pytest.raises(InvalidMessageError) as caught:
        decode_models(LIMITS, save(tensors), 2, REQUEST)
    assert caught.value.rule == rule


def test_invalid_message_error_is_short_and_on_one_line():
    """No message can flood a log."""
    noise = [
        encode(LIMITS, "a\n" * 200, HELLO),
        encode(replace(LIMITS, agreement="00" * 32), "a", HELLO),
        b"\n" * 500,
    ]
    for data in noise:
        with pytest.raises(InvalidMessageError) as caught:
            decode(LIMITS, data, "a", Hello)
        assert len(str(caught.value)) < 200
        assert "\n" not in str(caught.value)


# ---- fuzzing


def samples():
    """Return valid bytes, each with its decoder."""
    limits, request = replace(LIMITS, size=70_000), replace(REQUEST, size=70_000)
    zeros = encode_offer(Offer((0, 2), torch.zeros(2, 70_000)))
    large = list(encode_frames(limits, "a", request, zeros))
    small = list(encode_frames(LIMITS, "a", REQUEST, encode_offer(OFFER)))
    payload = encode_offer(OFFER).payload
    return [
        *[(encode(LIMITS, "a", body), partial(decode_body, type(body))) for body in BODIES],
        (encode(LIMITS, "a", HELLO), lambda data: claimed_sender(LIMITS, data)),
        (payload, lambda data: decode_models(LIMITS, data, 2, REQUEST)),
        (small[0], lambda data: decode_all(LIMITS, REQUEST, [data, *small[1:]])),
        (small[1], lambda data: decode_all(LIMITS, REQUEST, [small[0], data])),
        (large[0], lambda data: decode_all(limits, request, [data, *large[1:]])),
    ]


def decode_body(body_type, data):
    return decode(LIMITS, data, "a", body_type)


def decode_all(limits, request, frames):
    decoder = OfferDecoder(limits, "a", request)
    for frame in frames:
        decoder.feed(frame)
    return decoder.finish()


def mutate(data, draw):
    """Return the data with some bytes replaced, deleted, inserted or repeated."""
    found = bytearray(data)
    for _ in range(int(draw.integers(1, 5))):
        at = int(draw.integers(0, len(found) + 1))
        match int(draw.integers(0, 6)):
            case 0:
                found[at : at + 1] = draw.bytes(1)
            case 1:
                del found[at : at + int(draw.integers(1, 20))]
            case 2:
                found[at:at] = draw.bytes(int(draw.integers(1, 20)))
            case 3:
                found[at:at] = found[: int(draw.integers(1, 40))]
            case 4:
                found[at : at + 4] = [0xFF] * 4
            case _ if draw.random() < 0.2:
                found = bytearray(draw.bytes(int(draw.integers(0, 200))))
    return bytes(found)


def fuzz(count, seed):
    """Return how many mutations were rejected; any error but MalformedError fails the test."""
    draw, rejected, known = np.random.default_rng(seed), 0, samples()
    for number in range(count):
        data, decoder = known[number % len(known)]
        try:
            decoder(mutate(data, draw))
        except MalformedError:
            rejected += 1
    return rejected


def test_decoders_raise_only_malformed_error_for_2000_mutations():
    assert fuzz(2_000, seed=1) > 1_000


@pytest.mark.long
def test_decoders_raise_only_malformed_error_for_200000_mutations():
    started = time.monotonic()
    assert fuzz(200_000, seed=2) > 100_000
    assert time.monotonic() - started < 250  # a millisecond each


@given(st.binary(max_size=700), st.sampled_from([Hello, Announcement, Request, OfferHeader]))
def test_decode_returns_a_message_or_rejects_random_bytes(data, body_type):
    with suppress(MalformedError):
        assert isinstance(decode(LIMITS, data, "a", body_type), body_type)


@given(st.binary(max_size=700))
def test_decode_models_rejects_random_bytes(data):
    with pytest.raises(MalformedError):
        decode_models(LIMITS, data, 2, REQUEST)


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_offer_decoder_rejects_random_frames(frames):
    with pytest.raises(MalformedError):
        decode_all(LIMITS, REQUEST, frames)


# ---- the generated code


def test_generated_code_matches_wire_proto(tmp_path):
    """If this fails, run the command in wire.proto."""
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    source = Path(fedspd.__file__).parents[1]
    options = [f"--proto_path={source}", f"--python_out={tmp_path}"]
    assert protoc.main(["protoc", *options, "fedspd/node/wire/wire.proto"]) == 0
    generated = (tmp_path / "fedspd/node/wire/wire_pb2.py").read_text()
    (described,) = re.findall(r"AddSerializedFile\((b'.*')\)", generated)
    assert ast.literal_eval(described) == DESCRIPTOR.serialized_pb


# ---- models as bfloat16


def test_models_travel_as_bfloat16_and_other_vectors_do_not():
    limits = replace(LIMITS, model_dtype="bfloat16")
    models, numbers = replace(REQUEST, is_model=True), replace(REQUEST, is_model=False)
    assert limits.offer_bytes(2, models) - OVERHEAD_BYTES == 2 * 5 * 2
    assert limits.offer_bytes(2, numbers) - OVERHEAD_BYTES == 2 * 5 * 4
    model_KP = torch.rand(2, 5).bfloat16()
    payload = save({"models": model_KP})
    assert torch.equal(decode_models(limits, payload, 2, models), model_KP)
    with pytest.raises(InvalidMessageError, match="dtype BF16; expected F32"):
        decode_models(limits, payload, 2, numbers)
