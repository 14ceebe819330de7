"""One suite over every transport: memory, gRPC with mutual TLS, and plaintext gRPC."""

import asyncio
import time
from dataclasses import replace

import pytest
import torch

from fedspd.core.errors import RejectedError, TransportError, UnreachableError
from fedspd.node.wire.codec import CHUNK_BYTES
from fedspd.node.wire.messages import JOINING, Offer, Request

TIMEOUT = 200.0  # seconds: far more than any of these calls needs


def run(work):
    return asyncio.run(work)


# ---- calls that succeed


def test_hello_returns_the_neighbours_hello(world):
    async def work():
        async with world.running("a", "b") as (a, _):
            answer = await a.hello("b", world.hello(round=4), TIMEOUT)
            assert (answer.agreement, answer.round) == (world.manifest.agreement, 7)
            assert answer.address == "node:1"
            assert world.nodes["b"].received == [("a", world.hello(round=4))]

    run(work())


def test_announce_delivers_the_announcement(world):
    async def work():
        async with world.running("a", "b") as (a, _):
            await a.announce("b", world.announcement, TIMEOUT)
            assert world.nodes["b"].received == [("a", world.announcement)]

    run(work())


def test_fetch_returns_models_of_several_chunks_to_the_bit(world):
    async def work():
        async with world.running("a", "b") as (a, _):
            offer = await a.fetch("b", world.request, TIMEOUT)
            assert offer.clusters == (0, 2)
            assert torch.equal(offer.model_KP, world.nodes["b"].model_KP[[0, 2]])
            assert offer.model_KP.numel() * 4 > 10 * CHUNK_BYTES
            assert world.nodes["b"].received == [("a", world.request)]

    run(work())


def test_fetch_returns_a_few_numbers_to_a_newcomer(world):
    async def work():
        async with world.running("a", "b") as (a, _):
            offer = await a.fetch("b", Request(0, JOINING, (0, 1, 2), 4), TIMEOUT)
            assert offer.model_KP.tolist() == world.nodes["b"].model_KP[:, :4].tolist()

    run(work())


def test_fetch_keeps_float64(tmp_path, tools):
    world = tools["World"]("memory", tmp_path / "plant", {**tools["CONFIG"], "dtype": "float64"})

    async def work():
        async with world.running("a", "b") as (a, _):
            offer = await a.fetch("b", world.request, TIMEOUT)
            assert offer.model_KP.dtype == torch.float64
            assert torch.equal(offer.model_KP, world.nodes["b"].model_KP[[0, 2]])

    run(work())


def test_transports_count_the_same_bytes_on_both_sides(world):
    async def work():
        async with world.running("a", "b") as (a, b):
            await a.announce("b", world.announcement, TIMEOUT)
            await a.fetch("b", world.request, TIMEOUT)
            assert a.sent["b"] == b.received["a"]
            assert a.received["b"] == b.sent["a"]
            models = 2 * world.manifest.size * 4
            assert models < a.received["b"] < 1.002 * models
            assert 0 < a.sent["b"] < 250

    run(work())


def test_transport_keeps_simultaneous_calls_apart(world):
    async def work():
        async with world.running("a", "b", "d") as (a, b, d):
            await asyncio.gather(
                a.fetch("b", world.request, TIMEOUT),
                a.fetch("d", world.request, TIMEOUT),
                b.fetch("a", world.request, TIMEOUT),
                d.hello("a", world.hello(), TIMEOUT),
                a.announce("d", world.announcement, TIMEOUT),
            )
            assert sorted(sender for sender, _ in world.nodes["a"].received) == ["b", "d"]

    run(work())


def test_transport_knows_client_numbers(world):
    assert world.transport("a").client_of("b") == 1
    assert world.transport("a").client_of("d") == 3


# ---- calls that fail


def test_rejection_arrives_with_its_sentence(world):
    sentence = "round = 3: no offer; this node is in round 9."

    def handle_request(sender, request):
        raise RejectedError(sentence)

    world.nodes["b"].handle_request = handle_request

    async def work():
        async with world.running("a", "b") as (a, b):
            with pytest.raises(RejectedError) as caught:
                await a.fetch("b", world.request, TIMEOUT)
            assert str(caught.value) == sentence
            assert b.rejected == {}  # only the transport's own rejections count

    run(work())


def test_fetch_of_an_empty_offer_is_rejected(world):
    def handle_request(sender, request):
        return Offer((), torch.zeros(0, request.size))

    world.nodes["b"].handle_request = handle_request

    async def work():
        async with world.running("a", "b") as (a, _):
            with pytest.raises(RejectedError, match=r"none of the clusters \[2, 0\]"):
                await a.fetch("b", world.request, TIMEOUT)

    run(work())


def test_node_that_fails_to_answer_logs_it_and_goes_on(world, caplog):
    def handle_announcement(sender, announcement):
        raise ValueError("a secret of this node")

    world.nodes["b"].handle_announcement = handle_announcement

    async def work():
        async with world.running("a", "b") as (a, _):
            with pytest.raises(UnreachableError, match="ValueError") as caught:
                await a.announce("b", world.announcement, TIMEOUT)
            assert "secret" not in str(caught.value)
            assert "answer failed: node=a method=Announce" in caplog.messages
            await a.hello("b", world.hello(), TIMEOUT)

    run(work())


def test_calls_to_a_stopped_node_raise_unreachable_error(world):
    async def work():
        async with world.running("a") as (a,):
            calls = [
                a.hello("b", world.hello(), TIMEOUT),
                a.announce("b", world.announcement, TIMEOUT),
                a.fetch("b", world.request, TIMEOUT),
            ]
            for call in calls:
                with pytest.raises(UnreachableError, match="'b'"):
                    await call

    run(work())


def test_call_ends_at_its_timeout(world):
    async def serve(self, sender, method, data):
        await asyncio.Event().wait()
        yield b""

    async def work():
        async with world.running("a", world.transport("b", serve=serve)) as (a, _):
            started = time.monotonic()
            with pytest.raises(UnreachableError, match="'b' did not answer"):
                await a.hello("b", world.hello(), 0.3)
            assert time.monotonic() - started > 0.2

    run(work())


def test_node_that_returns_is_reached_again(world, tools):
    async def work():
        async with world.running("a") as (a,):
            async with world.running("b"):
                await a.hello("b", world.hello(), TIMEOUT)
            with pytest.raises(UnreachableError):
                await a.hello("b", world.hello(), TIMEOUT)
            async with world.running("b"):
                await tools["eventually"](lambda: a.hello("b", world.hello(), TIMEOUT), 10)

    run(work())


def test_cancelled_call_frees_its_slot(world, tools):
    """The caller sees CancelledError, and not that the neighbour failed."""
    begun = asyncio.Event()

    async def serve(self, sender, method, data):
        begun.set()
        await asyncio.Event().wait()
        yield b""

    async def work():
        async with world.running("a", world.transport("b", serve=serve)) as (a, b):
            task = asyncio.create_task(a.fetch("b", world.request, TIMEOUT))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await tools["eventually"](lambda: check_idle(b))

    async def check_idle(b):
        assert sum(b._active_calls.values()) == 0

    run(work())


# ---- calls that are rejected


def test_transport_rejects_a_node_that_is_not_a_neighbour(world):
    async def work():
        async with world.running("a", "c") as (a, c):
            with pytest.raises(TransportError):  # with TLS, c fails at the handshake already
                await c.hello("a", world.hello(), TIMEOUT)
            assert set(a.rejected) == {"not a neighbour"}
            assert world.nodes["a"].received == []

    run(work())


def test_transport_rejects_another_manifest_without_counting_it_as_malformed(world, caplog):
    other = replace(world.manifest, classes=11)

    async def work():
        async with world.running("a", world.transport("b", manifest=other)) as (a, b):
            for _ in range(6):
                with pytest.raises(RejectedError, match="another manifest"):
                    await b.hello("a", world.hello(), TIMEOUT)
            assert a.rejected == {"agreement": 6}
            assert a.malformed == {}
            assert not a.is_muted("b")
            assert 'message rejected: sender=b reason="agreement"' in caplog.text
            assert world.nodes["a"].received == []

    run(work())


def test_transport_rejects_a_third_simultaneous_fetch_of_one_neighbour(world):
    gate = asyncio.Event()

    async def answer(self, sender, method, data):
        await gate.wait()
        async for frame in super(type(self), self)._answer(sender, method, data):
            yield frame

    async def work():
        waiting = world.transport("b", _answer=answer)
        async with world.running("a", waiting, "c") as (a, b, c):
            fetches = [asyncio.create_task(a.fetch("b", world.request, TIMEOUT)) for _ in range(3)]
            done, _ = await asyncio.wait(fetches, return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(RejectedError, match="busy: 2 of its calls are active already"):
                done.pop().result()
            other = asyncio.create_task(c.fetch("b", world.request, TIMEOUT))
            gate.set()
            results = await asyncio.gather(*fetches, other, return_exceptions=True)
            assert sum(isinstance(result, Offer) for result in results) == 3
            assert b.rejected == {"busy": 1}

    run(work())


# ---- the conditions of the network in memory


def test_memory_network_delays_and_loses_messages(tmp_path, tools):
    world, sent = tools["World"]("memory", tmp_path / "plant", tools["CONFIG"]), []

    async def conditions(sender, receiver, method):
        sent.append((sender, receiver, method))
        if method == "Announce":
            raise UnreachableError("lost")
        if method == "Fetch":
            await asyncio.Event().wait()

    async def work():
        async with world.running("a", "b") as (a, _):
            world.network.conditions = conditions
            await a.hello("b", world.hello(), TIMEOUT)
            with pytest.raises(UnreachableError, match="lost"):
                await a.announce("b", world.announcement, TIMEOUT)
            with pytest.raises(UnreachableError, match=r"'b' did not answer within 0\.1 seconds"):
                await a.fetch("b", world.request, 0.1)
            assert sent == [("a", "b", "Hello"), ("a", "b", "Announce"), ("a", "b", "Fetch")]

    run(work())


def test_memory_network_disconnects_a_node(tmp_path, tools):
    world = tools["World"]("memory", tmp_path / "plant", tools["CONFIG"])

    async def work():
        async with world.running("a", "b") as (a, _):
            world.network.disconnect("b")
            with pytest.raises(UnreachableError, match="'b' has not started, or has stopped"):
                await a.hello("b", world.hello(), TIMEOUT)

    run(work())
