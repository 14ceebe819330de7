"""What breaks a rule is refused, counted and at last muted, over every transport."""

import asyncio
import zlib
from dataclasses import replace

import pytest
import torch

from fedspd.core.errors import MalformedError, RejectedError
from fedspd.node.wire.codec import WireLimits, encode, frames, pack
from fedspd.node.wire.messages import Offer
from fedspd.node.wire.wire_pb2 import Chunk

LIMIT = 20.0


def run(work):
    return asyncio.run(asyncio.wait_for(work, 120))


# ---- rubbish that is sent here


def rubbish(world):
    rules = WireLimits.of(world.manifest)
    good = encode(rules, "b", world.announcement)
    return {
        "format": b"\xff" * 40,
        "size": good + b"\0" * rules.message_bytes,
        "sender": encode(rules, "d", world.announcement),
        "kind": encode(rules, "b", world.request),
        "clusters": encode(rules, "b", replace(world.announcement, clusters=(0, 3))),
        "weights": encode(rules, "b", replace(world.announcement, weights=(1.0, float("nan")))),
        "round": encode(rules, "b", replace(world.announcement, round=-1)),
    }


@pytest.mark.parametrize(
    "rule", ["format", "size", "sender", "kind", "clusters", "weights", "round"]
)
def test_rubbish_is_refused_with_its_rule(world, rule):
    if world.kind == "plaintext" and rule in ("format", "size", "sender"):
        pytest.skip("nobody knows who sent it")

    async def work():
        async with world.running("a", "b") as (a, b):
            with pytest.raises(RejectedError):
                await spent(b.carry("a", "Announce", rubbish(world)[rule], LIMIT))
            assert a.refused == {rule: 1}
            assert a.rubbish == {"b": 1}
            assert world.nodes["a"].heard == []
            await b.announce("a", world.announcement, LIMIT)

    run(work())


async def spent(frames):
    return [frame async for frame in frames]


def test_who_keeps_sending_rubbish_is_muted_and_the_others_are_not(world):
    async def work():
        async with world.running("a", "b", "d") as (a, b, d):
            for _ in range(5):
                assert not a.muted("b")
                with pytest.raises(RejectedError, match="round = -1"):
                    await spent(b.carry("a", "Announce", rubbish(world)["round"], LIMIT))
            assert a.muted("b")
            with pytest.raises(RejectedError, match="muted"):
                await b.hello("a", world.said(), LIMIT)
            with pytest.raises(RejectedError, match="'b' is muted here"):
                await a.hello("b", world.said(), LIMIT)
            await d.hello("a", world.said(), LIMIT)
            assert (world.nodes["b"].heard, [sender for sender, _ in world.nodes["a"].heard]) == (
                [],
                ["d"],
            )
            assert a.refused == {"round": 5, "muted": 1}

    run(work())


def test_what_the_node_calls_rubbish_counts_too(world):
    def announced(sender, announcement):
        raise MalformedError("round 3: this network has rounds 1 to 2.")

    world.nodes["a"].announced = announced

    async def work():
        async with world.running("a", "b") as (a, b):
            with pytest.raises(RejectedError, match="rounds 1 to 2"):
                await b.announce("a", world.announcement, LIMIT)
            assert (a.refused, a.rubbish) == ({"content": 1}, {"b": 1})

    run(work())


# ---- rubbish that is fetched


def lies(world):
    """What a liar answers to the request: the rule that it breaks, the sentence about it, and the frames."""
    rules, request, size = WireLimits.of(world.manifest), world.request, world.manifest.size

    def parcel(clusters=(0, 2), model_KP=None, request=request, sender="b"):
        return list(
            frames(
                rules,
                sender,
                request,
                pack(Offer(clusters, torch.zeros(2, size) if model_KP is None else model_KP)),
            )
        )

    good = parcel()
    short = Chunk(index=1, crc32=zlib.crc32(b"short"), data=b"short").SerializeToString()
    return [
        ("size", "the answer is empty", []),
        ("size", "the answer ended 20512 bytes too early", good[:-1]),
        ("size", "more, where 0 were missing", [*good, good[-1]]),
        ("size", "bytes for 1 models of", parcel((0,))),
        ("size", "a chunk of 5 bytes: expected 65536", [good[0], good[1], short]),
        ("order", "chunk 1 came, where chunk 0", [good[0], good[2], good[1]]),
        ("order", "chunk 0 came, where chunk 1", [good[0], good[1], good[1]]),
        ("checksum", "chunk 1 does not have the CRC-32", [good[0], good[1], good[2][:-1] + b"\1"]),
        ("checksum", "SHA-256", [parcel(model_KP=torch.ones(2, size))[0], *good[1:]]),
        ("sender", "from 'd', but it came from 'b'", parcel(sender="d")),
        (
            "agreement",
            "another manifest",
            list(
                frames(
                    replace(rules, agreement="00" * 32),
                    "b",
                    request,
                    pack(Offer((0,), torch.zeros(1))),
                )
            ),
        ),
        (
            "round",
            "round 2, exchange 0: asked for round 3",
            parcel(request=replace(request, round=2)),
        ),
        (
            "round",
            "round 4, exchange 0: asked for round 3",
            parcel(request=replace(request, round=4)),
        ),
        (
            "round",
            "round 3, exchange 1: asked for round 3, exchange 0",
            parcel(request=replace(request, exchange=1)),
        ),
        ("clusters", r"clusters \(0, 1\): asked for \[2, 0\]", parcel((0, 1))),
        ("clusters", "each once", parcel((0, 0))),
        ("shape", "expected", parcel(model_KP=torch.zeros(size, 2))),
        ("type", "I32: expected F32", parcel(model_KP=torch.zeros(2, size, dtype=torch.int32))),
        ("finite", "not finite", parcel(model_KP=torch.full((2, size), torch.nan))),
        ("finite", "not finite", parcel(model_KP=torch.full((2, size), -torch.inf))),
        ("kind", "'hello': expected 'header'", [encode(rules, "b", world.said())]),
        ("format", "100 bytes that are no message", [b"\xff" * 100]),
        ("format", "100 bytes that are no chunk", [good[0], b"\xff" * 100]),
    ]


def test_fetched_rubbish_is_rubbish(world, tools):
    """Every lie by a node of its own, so that none is muted for another's."""

    async def work():
        for rule, sentence, told in lies(world):
            async with world.running("a", world.make("b", serve=tools["lying"](*told))) as (a, _):
                with pytest.raises(MalformedError, match=sentence):
                    await a.fetch("b", world.request, LIMIT)
                assert a.refused == {rule: 1}, sentence
                assert a.rubbish == ({} if rule == "agreement" else {"b": 1})

    run(work())


@pytest.mark.parametrize(
    "told", [(), (b"", b""), (b"\xff" * 20,)], ids=["nothing", "too much", "noise"]
)
def test_other_answers_are_checked_too(world, told, tools):
    async def work():
        async with world.running("a", world.make("b", serve=tools["lying"](*told))) as (a, _):
            with pytest.raises(MalformedError):
                await a.hello("b", world.said(), LIMIT)
            with pytest.raises(MalformedError):
                await a.announce("b", world.announcement, LIMIT)
            assert a.rubbish == {"b": 2}

    run(work())
