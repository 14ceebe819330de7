"""The decoder: what was encoded comes back, and of everything else only MalformedError comes."""

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
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

import fedspd
from fedspd.core.errors import MalformedError
from fedspd.core.keys import Key
from fedspd.node.wire.codec import (
    ROOM,
    InvalidMessageError,
    OfferDecoder,
    OfferHeader,
    WireLimits,
    claimed,
    decode,
    encode,
    frames,
    pack,
    unpack,
)
from fedspd.node.wire.messages import Announcement, Hello, Offer, Request
from fedspd.node.wire.wire_pb2 import DESCRIPTOR

RULES = WireLimits("ab" * 32, clusters=3, size=5, dtype="float32")
REQUEST = Request(3, 0, (2, 0), 5)
OFFER = Offer((0, 2), torch.arange(10.0).reshape(2, 5))
HELLO = Hello(RULES.agreement, 4, "10.0.0.1:7700")
ANNOUNCEMENT = Announcement(3, 1, (2, 0), (10.0, 0.5), (2, 1), -5, 2)
HEADER = OfferHeader(3, 0, (0, 2), 100, b"\1" * 32)
BODIES = [HELLO, ANNOUNCEMENT, REQUEST, HEADER]

rounds = st.integers(0, 2**31 - 1)
clusters = st.lists(st.integers(0, 2), unique=True, max_size=3).map(tuple)


@st.composite
def announcements(draw):
    offered = draw(clusters)
    weights = tuple(draw(st.lists(st.floats(0, 1e9), min_size=len(offered), max_size=len(offered))))
    return Announcement(
        draw(rounds),
        draw(rounds),
        offered,
        weights,
        draw(clusters),
        draw(st.integers(-(2**63), 2**63 - 1)),
        draw(rounds),
    )


# ---- what comes back


@given(announcements())
def test_announcements_come_back(announcement):
    assert decode(RULES, encode(RULES, "a", announcement), "a", Announcement) == announcement


@given(rounds, st.integers(-1, 2**31 - 1), clusters.filter(len), st.integers(1, 5))
def test_requests_come_back(round, exchange, wants, size):
    request = Request(round, exchange, wants, size)
    assert decode(RULES, encode(RULES, "node-1", request), "node-1", Request) == request


@given(rounds, st.text("abc.:[]123-", max_size=255))
def test_hellos_come_back(round, address):
    hello = Hello(RULES.agreement, round, address)
    assert decode(RULES, encode(RULES, "a", hello), "a", Hello) == hello


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "size", [1, 5, 4086, 8181, 8182, 8183, 100_000]
)  # around the ends of chunks
def test_models_come_back(dtype, size):
    rules = replace(RULES, size=size, dtype=dtype)
    request = replace(REQUEST, size=size)
    offer = Offer(
        (0, 2), torch.randn(2, size, dtype=getattr(torch, dtype), generator=Key(1).torch())
    )
    intake = OfferDecoder(rules, "a", request)
    for frame in frames(rules, "a", request, pack(offer)):
        intake.take(frame)
    found = intake.offer()
    assert found.clusters == (0, 2)
    assert torch.equal(found.model_KP, offer.model_KP)


def test_models_that_share_memory_with_others_are_sent_alone():
    """A row of a large table goes as that row."""
    table = torch.arange(5000.0).reshape(1000, 5)
    assert len(pack(Offer((1,), table[3:4])).payload) < 20 + ROOM


def test_who_claims_to_have_sent_it():
    assert claimed(RULES, encode(RULES, "node-7", HELLO)) == "node-7"
    for name in ("", "../x", "A b", "x" * 33):
        with pytest.raises(InvalidMessageError, match="is no name of a node"):
            claimed(RULES, encode(RULES, name, HELLO))


def test_the_longest_messages_fit():
    for count in (1, 3, 50):
        rules = replace(RULES, clusters=count)
        every = tuple(range(count))
        longest = [
            Announcement(2**31 - 1, 2**31 - 1, every, (1e300,) * count, every, -(2**63), 2**31 - 1),
            Request(2**31 - 1, 2**31 - 1, every, 2**63),
            OfferHeader(2**31 - 1, 2**31 - 1, every, 2**63, b"\1" * 32),
            Hello(RULES.agreement, 2**31 - 1, "x" * 255),
        ]
        assert max(len(encode(rules, "n" * 32, body)) for body in longest) <= rules.message_bytes


# ---- what is refused


@pytest.mark.parametrize(
    ("rule", "body"),
    [
        ("round", replace(HELLO, round=-1)),
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
def test_a_message_that_breaks_a_rule(rule, body):
    with pytest.raises(InvalidMessageError) as caught:
        decode(RULES, encode(RULES, "a", body), "a", type(body))
    assert caught.value.rule == rule


def test_an_offer_that_is_not_made_may_be_announced():
    """Cluster -1, as in the ledger."""
    announcement = Announcement(1, 0, (-1, 2, -1), (0.0, 1.0, 0.0), (2,), 0, 1)
    assert decode(RULES, encode(RULES, "a", announcement), "a", Announcement) == announcement


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
def test_models_that_break_a_rule(rule, tensors):
    with pytest.raises(InvalidMessageError) as caught:
        unpack(RULES, save(tensors), 2, 5)
    assert caught.value.rule == rule


def test_sentences_are_short_and_on_one_line():
    """Whatever is in a message, a log is not flooded by it."""
    noise = [
        encode(RULES, "a\n" * 200, HELLO),
        encode(replace(RULES, agreement="00" * 32), "a", HELLO),
        b"\n" * 500,
    ]
    for data in noise:
        with pytest.raises(InvalidMessageError) as caught:
            decode(RULES, data, "a", Hello)
        assert len(str(caught.value)) < 200
        assert "\n" not in str(caught.value)


# ---- fuzz


def samples():
    """Valid bytes, and how each is taken in."""
    rules = replace(RULES, size=70_000)
    request = replace(REQUEST, size=70_000)
    large = list(frames(rules, "a", request, pack(Offer((0, 2), torch.zeros(2, 70_000)))))
    small = list(frames(RULES, "a", REQUEST, pack(OFFER)))
    payload = pack(OFFER).payload
    return [
        *[(encode(RULES, "a", body), partial(opened, type(body))) for body in BODIES],
        (encode(RULES, "a", HELLO), lambda data: claimed(RULES, data)),
        (payload, lambda data: unpack(RULES, data, 2, 5)),
        (small[0], lambda data: taken(RULES, REQUEST, [data, *small[1:]])),
        (small[1], lambda data: taken(RULES, REQUEST, [small[0], data])),
        (large[0], lambda data: taken(rules, request, [data, *large[1:]])),
    ]


def opened(kind, data):
    return decode(RULES, data, "a", kind)


def taken(rules, request, told):
    intake = OfferDecoder(rules, "a", request)
    for frame in told:
        intake.take(frame)
    return intake.offer()


def mutated(data, draw):
    """Some bytes changed, cut, doubled, inserted; or none of them left."""
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
            case _:
                found = (
                    bytearray(draw.bytes(int(draw.integers(0, 200))))
                    if draw.random() < 0.2
                    else found
                )
    return bytes(found)


def fuzz(count, seed):
    """How many were refused; the rest were taken for good. Anything but MalformedError goes through to the test."""
    draw, refused, known = np.random.default_rng(seed), 0, samples()
    for number in range(count):
        data, take = known[number % len(known)]
        try:
            take(mutated(data, draw))
        except MalformedError:
            refused += 1
    return refused


def test_of_two_thousand_mutations_only_rubbish_comes():
    assert fuzz(2_000, seed=1) > 1_000


@pytest.mark.long
def test_of_two_hundred_thousand_mutations_only_rubbish_comes():
    started = time.monotonic()
    assert fuzz(200_000, seed=2) > 100_000
    assert time.monotonic() - started < 250  # a millisecond each


@given(st.binary(max_size=700), st.sampled_from([Hello, Announcement, Request, OfferHeader]))
def test_random_bytes_are_rubbish_or_a_message(data, kind):
    with suppress(MalformedError):
        assert isinstance(decode(RULES, data, "a", kind), kind)


@given(st.binary(max_size=700))
def test_random_bytes_are_no_models(data):
    with pytest.raises(MalformedError):
        unpack(RULES, data, 2, 5)


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_random_frames_are_no_answer(told):
    with pytest.raises(MalformedError):
        taken(RULES, REQUEST, told)


# ---- the generated code


def test_the_generated_code_is_that_of_the_definition(tmp_path):
    """Write it anew as wire.proto says."""
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    source = Path(fedspd.__file__).parents[1]
    assert (
        protoc.main(
            [
                "",
                f"--proto_path={source}",
                f"--python_out={tmp_path}",
                "fedspd/node/wire/wire.proto",
            ]
        )
        == 0
    )
    generated = (tmp_path / "fedspd/node/wire/wire_pb2.py").read_text()
    (described,) = re.findall(r"AddSerializedFile\((b'.*')\)", generated)
    assert ast.literal_eval(described) == DESCRIPTOR.serialized_pb
