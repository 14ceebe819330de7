"""One suite over every transport: memory, gRPC with mutual TLS, and plaintext gRPC."""

import asyncio
import time
from dataclasses import replace

import pytest
import torch

from fedspd.core.errors import RejectedError, UnreachableError
from fedspd.node.wire.codec import CHUNK
from fedspd.node.wire.messages import JOINING, Offer, Request

LIMIT = 20.0  # seconds: generous, for none of these calls should need them


def run(work):
    return asyncio.run(asyncio.wait_for(work, 120))


# ---- what works


def test_hello_tells_each_where_the_other_is(world):
    async def work():
        async with world.running("a", "b") as (a, _):
            answer = await a.hello("b", world.said(round=4), LIMIT)
            assert (answer.agreement, answer.round, answer.address) == (
                world.manifest.agreement,
                7,
                "node:1",
            )
            assert world.nodes["b"].heard == [("a", world.said(round=4))]

    run(work())


def test_an_announcement_arrives_as_it_was_made(world):
    async def work():
        async with world.running("a", "b") as (a, _):
            await a.announce("b", world.announcement, LIMIT)
            assert world.nodes["b"].heard == [("a", world.announcement)]

    run(work())


def test_models_arrive_bit_for_bit_in_several_chunks(world):
    async def work():
        async with world.running("a", "b") as (a, _):
            offer = await a.fetch("b", world.request, LIMIT)
            assert offer.clusters == (0, 2)
            assert torch.equal(offer.model_KP, world.nodes["b"].model_KP[[0, 2]])
            assert offer.model_KP.numel() * 4 > 10 * CHUNK
            assert world.nodes["b"].heard == [("a", world.request)]

    run(work())


def test_a_newcomer_may_ask_and_a_few_numbers_are_enough(world):
    async def work():
        async with world.running("a", "b") as (a, _):
            offer = await a.fetch("b", Request(0, JOINING, (0, 1, 2), 4), LIMIT)
            assert offer.model_KP.tolist() == world.nodes["b"].model_KP[:, :4].tolist()

    run(work())


def test_float64(tmp_path, tools):
    world = tools["World"]("memory", tmp_path / "plant", {**tools["CONFIG"], "dtype": "float64"})

    async def work():
        async with world.running("a", "b") as (a, _):
            offer = await a.fetch("b", world.request, LIMIT)
            assert offer.model_KP.dtype == torch.float64
            assert torch.equal(offer.model_KP, world.nodes["b"].model_KP[[0, 2]])

    run(work())


def test_both_sides_count_the_same_bytes(world):
    async def work():
        async with world.running("a", "b") as (a, b):
            await a.announce("b", world.announcement, LIMIT)
            await a.fetch("b", world.request, LIMIT)
            assert a.sent["b"] == b.received["a"]
            assert a.received["b"] == b.sent["a"]
            models = 2 * world.manifest.size * 4
            assert models < a.received["b"] < 1.002 * models
            assert 0 < a.sent["b"] < 250

    run(work())


def test_calls_at_once_do_not_mix(world):
    async def work():
        async with world.running("a", "b", "d") as (a, b, d):
            await asyncio.gather(
                a.fetch("b", world.request, LIMIT), a.fetch("d", world.request, LIMIT), b.fetch("a", world.request, LIMIT),
                d.hello("a", world.said(), LIMIT), a.announce("d", world.announcement, LIMIT),
            )  # fmt: skip
            assert sorted(sender for sender, _ in world.nodes["a"].heard) == ["b", "d"]

    run(work())


def test_everybody_has_a_client_number(world):
    assert world.make("a").client("b") == 1
    assert world.make("a").client("d") == 3


# ---- what fails


def test_a_refusal_travels_with_its_sentence(world):
    def offered(sender, request):
        raise RejectedError("nothing is on offer here for round 3: this node is in round 9.")

    world.nodes["b"].offered = offered

    async def work():
        async with world.running("a", "b") as (a, b):
            with pytest.raises(
                RejectedError,
                match=r"^nothing is on offer here for round 3: this node is in round 9\.$",
            ):
                await a.fetch("b", world.request, LIMIT)
            assert b.refused == {}  # the node's own business

    run(work())


def test_an_offer_of_nothing_is_a_refusal(world):
    world.nodes["b"].offered = lambda sender, request: Offer((), torch.zeros(0, request.size))

    async def work():
        async with world.running("a", "b") as (a, _):
            with pytest.raises(RejectedError, match=r"none of the clusters \[2, 0\]"):
                await a.fetch("b", world.request, LIMIT)

    run(work())


def test_a_node_that_fails_to_answer_goes_on(world, caplog):
    def announced(sender, announcement):
        raise ValueError("a secret of this node")

    world.nodes["b"].announced = announced

    async def work():
        async with world.running("a", "b") as (a, _):
            with pytest.raises(UnreachableError, match="ValueError") as caught:
                await a.announce("b", world.announcement, LIMIT)
            assert "secret" not in str(caught.value)
            assert "the answer to Announce of a failed" in caplog.text
            await a.hello("b", world.said(), LIMIT)

    run(work())


def test_nobody_is_there(world):
    async def work():
        async with world.running("a") as (a,):
            for call in (
                a.hello("b", world.said(), LIMIT),
                a.announce("b", world.announcement, LIMIT),
                a.fetch("b", world.request, LIMIT),
            ):
                with pytest.raises(UnreachableError, match="'b'"):
                    await call

    run(work())


def test_a_node_that_says_nothing_is_given_up_at_the_limit(world):
    async def serve(self, sender, kind, data):
        await asyncio.Event().wait()
        yield b""

    async def work():
        async with world.running("a", world.make("b", serve=serve)) as (a, _):
            started = time.monotonic()
            with pytest.raises(UnreachableError, match="'b' did not answer"):
                await a.hello("b", world.said(), 0.3)
            assert 0.2 < time.monotonic() - started < 10

    run(work())


def test_a_node_that_comes_back_is_reached_again(world, tools):
    async def work():
        async with world.running("a") as (a,):
            async with world.running("b"):
                await a.hello("b", world.said(), LIMIT)
            with pytest.raises(UnreachableError):
                await a.hello("b", world.said(), LIMIT)
            async with world.running("b"):
                started = time.monotonic()
                await tools["eventually"](lambda: a.hello("b", world.said(), LIMIT))
                assert time.monotonic() - started < 10

    run(work())


def test_a_call_that_is_given_up_leaves_no_trace(world, tools):
    """Its place is free again, and whoever gave up is told that it was cancelled, and not that the neighbour failed."""
    begun = asyncio.Event()

    async def serve(self, sender, kind, data):
        begun.set()
        await asyncio.Event().wait()
        yield b""

    async def work():
        async with world.running("a", world.make("b", serve=serve)) as (a, b):
            task = asyncio.create_task(a.fetch("b", world.request, LIMIT))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await tools["eventually"](lambda: vacant(b))

    async def vacant(b):
        assert sum(b._under_way.values()) == 0

    run(work())


# ---- who is refused


def test_who_is_no_neighbour_is_refused(world):
    async def work():
        async with world.running("a", "c") as (a, c):
            with pytest.raises(RejectedError, match="not a neighbour"):
                await c.hello("a", world.said(), LIMIT)
            assert a.refused == {"not a neighbour": 1}
            assert world.nodes["a"].heard == []

    run(work())


def test_another_manifest_is_refused_but_is_no_rubbish(world, caplog):
    other = replace(world.manifest, classes=11)

    async def work():
        async with world.running("a", world.make("b", manifest=other)) as (a, b):
            for _ in range(6):
                with pytest.raises(RejectedError, match="another manifest"):
                    await b.hello("a", world.said(), LIMIT)
            assert a.refused == {"agreement": 6}
            assert not a.muted("b")
            assert (
                caplog.text.count("refused (agreement) from b") == 1
            )  # the rest within the same ten seconds
            assert world.nodes["a"].heard == []

    run(work())


def test_a_third_fetch_at_once_is_refused_and_others_are_not(world):
    gate = asyncio.Event()

    async def work():
        lazy = world.make("b", _answer=waiting(gate))
        async with world.running("a", lazy, "c") as (a, b, c):
            fetches = [asyncio.create_task(a.fetch("b", world.request, LIMIT)) for _ in range(3)]
            done, _ = await asyncio.wait(fetches, return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(RejectedError, match="busy: 2 of its calls are under way already"):
                done.pop().result()
            other = asyncio.create_task(c.fetch("b", world.request, LIMIT))
            gate.set()
            results = await asyncio.gather(*fetches, other, return_exceptions=True)
            assert sum(isinstance(result, Offer) for result in results) == 3
            assert b.refused == {"busy": 1}

    run(work())


def waiting(gate):
    async def answer(self, sender, kind, data):
        await gate.wait()
        async for frame in super(type(self), self)._answer(sender, kind, data):
            yield frame

    return answer


# ---- the weather of the memory transport


def test_messages_in_memory_can_be_late_and_lost(tmp_path, tools):
    world, seen = tools["World"]("memory", tmp_path / "plant", tools["CONFIG"]), []

    async def weather(sender, receiver, kind):
        seen.append((sender, receiver, kind))
        if kind == "Announce":
            raise UnreachableError("lost")
        if kind == "Fetch":
            await asyncio.Event().wait()

    async def work():
        async with world.running("a", "b") as (a, _):
            a.weather = weather
            await a.hello("b", world.said(), LIMIT)
            with pytest.raises(UnreachableError, match="lost"):
                await a.announce("b", world.announcement, LIMIT)
            with pytest.raises(UnreachableError, match=r"'b' did not answer within 0\.1 seconds"):
                await a.fetch("b", world.request, 0.1)
            assert seen == [("a", "b", "Hello"), ("a", "b", "Announce"), ("a", "b", "Fetch")]

    run(work())
