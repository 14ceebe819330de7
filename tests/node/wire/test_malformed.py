"""Malformed messages are rejected, counted and finally muted, over every transport."""

import asyncio
import zlib
from dataclasses import replace

import pytest
import torch

from fedspd.core.errors import MalformedError, RejectedError
from fedspd.node.wire.base import HONEST
from fedspd.node.wire.codec import WireLimits, encode, encode_frames, encode_offer
from fedspd.node.wire.messages import Offer
from fedspd.node.wire.wire_pb2 import Chunk

TIMEOUT = 200.0  # seconds: far more than any of these calls needs


def run(work):
    return asyncio.run(work)


# ---- malformed requests


def malformed_announcements(world):
    """Return announcements of b by the rule that each violates."""
    limits, good = WireLimits.from_manifest(world.manifest), world.announcement
    return {
        "format": b"\xff" * 40,
        "size": encode(limits, "b", good) + b"\0" * limits.message_bytes,
        "sender": encode(limits, "d", good),
        "kind": encode(limits, "b", world.request),
        "clusters": encode(limits, "b", replace(good, clusters=(0, 3))),
        "weights": encode(limits, "b", replace(good, weights=(1.0, float("nan")))),
        "round": encode(limits, "b", replace(good, round=-1)),
    }


async def send_announcement(transport, data):
    return [frame async for frame in transport.send("a", "Announce", data, TIMEOUT)]


@pytest.mark.parametrize(
    "rule", ["format", "size", "sender", "kind", "clusters", "weights", "round"]
)
def test_transport_rejects_a_malformed_message_and_counts_its_rule(world, rule):
    if world.kind == "plaintext" and rule in ("format", "size", "sender"):
        pytest.skip("plaintext does not authenticate the sender")

    async def work():
        async with world.running("a", "b") as (a, b):
            with pytest.raises(RejectedError):
                await send_announcement(b, malformed_announcements(world)[rule])
            assert a.rejected == {rule: 1}
            assert a.malformed == {"b": 1}
            assert world.nodes["a"].received == []
            await b.announce("a", world.announcement, TIMEOUT)

    run(work())


def test_transport_mutes_only_the_neighbour_that_sends_malformed_messages(world):
    async def work():
        async with world.running("a", "b", "d") as (a, b, d):
            for _ in range(5):
                assert not a.is_muted("b")
                with pytest.raises(RejectedError, match="round = -1"):
                    await send_announcement(b, malformed_announcements(world)["round"])
            assert a.is_muted("b")
            with pytest.raises(RejectedError, match="muted"):
                await b.hello("a", world.hello(), TIMEOUT)
            with pytest.raises(RejectedError, match="'b' is muted for a while"):
                await a.hello("b", world.hello(), TIMEOUT)
            await d.hello("a", world.hello(), TIMEOUT)
            assert world.nodes["b"].received == []
            assert [sender for sender, _ in world.nodes["a"].received] == ["d"]
            assert a.rejected == {"round": 5, "muted": 1}

    run(work())


def test_transport_counts_what_the_handler_calls_malformed(world):
    def handle_announcement(sender, announcement):
        raise MalformedError("round 3: this network has rounds 1 to 2.")

    world.nodes["a"].handle_announcement = handle_announcement

    async def work():
        async with world.running("a", "b") as (a, b):
            with pytest.raises(RejectedError, match="rounds 1 to 2"):
                await b.announce("a", world.announcement, TIMEOUT)
            assert (a.rejected, a.malformed) == ({"content": 1}, {"b": 1})

    run(work())


# ---- malformed answers


def malformed_answers(world):
    """Return answers to the request: the violated rule, the sentence about it, and the frames."""
    limits, request = WireLimits.from_manifest(world.manifest), world.request
    size = world.manifest.size

    def answer(clusters=(0, 2), model_KP=None, sender="b", limits=limits, **changes):
        model_KP = torch.zeros(2, size) if model_KP is None else model_KP
        offer = encode_offer(Offer(clusters, model_KP))
        return list(encode_frames(limits, sender, replace(request, **changes), offer))

    good = answer()
    short = Chunk(index=1, crc32=zlib.crc32(b"short"), data=b"short").SerializeToString()
    other_limits = replace(limits, agreement="00" * 32)
    integers = torch.zeros(2, size, dtype=torch.int32)
    return [
        ("size", "the answer is empty", []),
        ("size", "the answer lacks 20512 bytes", good[:-1]),
        ("size", "expected 0 more bytes", [*good, good[-1]]),
        ("size", "bytes for 1 models of", answer((0,))),
        ("size", "a chunk of 5 bytes; expected 65536", [good[0], good[1], short]),
        ("order", "chunk 1; expected chunk 0", [good[0], good[2], good[1]]),
        ("order", "chunk 0; expected chunk 1", [good[0], good[1], good[1]]),
        ("checksum", "CRC-32 of chunk 1 is wrong", [good[0], good[1], good[2][:-1] + b"\1"]),
        ("checksum", "SHA-256", [answer(model_KP=torch.ones(2, size))[0], *good[1:]]),
        ("sender", "the sender 'd', but it came from 'b'", answer(sender="d")),
        ("agreement", "another manifest", answer(limits=other_limits)),
        ("round", "round 2, exchange 0; expected round 3", answer(round=2)),
        ("round", "round 4, exchange 0; expected round 3", answer(round=4)),
        ("round", "round 3, exchange 1; expected round 3, exchange 0", answer(exchange=1)),
        ("clusters", r"clusters \[0, 1\]; expected some of \[2, 0\]", answer((0, 1))),
        ("clusters", "each once", answer((0, 0))),
        ("shape", "expected", answer(model_KP=torch.zeros(size, 2))),
        ("type", "I32; expected F32", answer(model_KP=integers)),
        ("finite", "not finite", answer(model_KP=torch.full((2, size), torch.nan))),
        ("finite", "not finite", answer(model_KP=torch.full((2, size), -torch.inf))),
        ("kind", "'hello'; expected 'header'", [encode(limits, "b", world.hello())]),
        ("format", "100 bytes are not a message", [b"\xff" * 100]),
        ("format", "100 bytes are not a chunk", [good[0], b"\xff" * 100]),
    ]


def test_fetch_rejects_malformed_answers(world, tools):
    """Every answer comes from a new node, so that none is muted because of another."""

    async def work():
        for rule, sentence, frames in malformed_answers(world):
            b = world.transport("b", serve=tools["fixed_answer"](*frames))
            async with world.running("a", b) as (a, _):
                with pytest.raises(MalformedError, match=sentence):
                    await a.fetch("b", world.request, TIMEOUT)
                assert a.rejected == {rule: 1}, sentence
                assert a.malformed == ({} if rule in HONEST else {"b": 1})

    run(work())


@pytest.mark.parametrize(
    "frames", [(), (b"", b""), (b"\xff" * 20,)], ids=["nothing", "too much", "noise"]
)
def test_hello_and_announce_reject_malformed_answers(world, frames, tools):
    async def work():
        b = world.transport("b", serve=tools["fixed_answer"](*frames))
        async with world.running("a", b) as (a, _):
            with pytest.raises(MalformedError):
                await a.hello("b", world.hello(), TIMEOUT)
            with pytest.raises(MalformedError):
                await a.announce("b", world.announcement, TIMEOUT)
            assert a.malformed == {"b": 2}

    run(work())
