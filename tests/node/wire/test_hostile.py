"""Hostile neighbours and strangers against a real node: gRPC over mutual TLS, on loopback. It must go on serving the good ones."""

import asyncio
import os
import socket
import time
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
import torch

from fedspd.core.errors import MalformedError, RejectedError, TransportError, UnreachableError
from fedspd.core.keys import Key
from fedspd.node.identity.certificates import host_name
from fedspd.node.identity.credentials import Credentials
from fedspd.node.wire.codec import CHUNK, CHUNK_FRAME, WireLimits, encode, frames, pack
from fedspd.node.wire.grpc_transport import SERVICE
from fedspd.node.wire.messages import Offer

LIMIT = 20.0
PROMPT = 1.0  # seconds for a hello, whatever else is going on


def run(work):
    return asyncio.run(asyncio.wait_for(work, 200))


def megabytes():
    """Of this process, in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def prompt(world, good, to="a"):
    """The best of three, for the machine may be busy: a good neighbour is answered at once."""
    best = LIMIT
    for _ in range(3):
        started = time.monotonic()
        await good.hello(to, world.said(), LIMIT)
        best = min(best, time.monotonic() - started)
    assert best < PROMPT


# ---- a neighbour that answers with more than anybody wants


@pytest.mark.parametrize("endless", ["chunks", "empty frames", "headers", "noise"])
def test_an_endless_answer_is_cut_off_at_once(secure, tools, endless):
    rules, size = WireLimits.of(secure.manifest), secure.manifest.size
    good = list(frames(rules, "b", secure.request, pack(Offer((0, 2), torch.zeros(2, size)))))
    start, then = {
        "chunks": (good, good[1]), "empty frames": (good[:1], b""), "headers": (good[:1], good[0]), "noise": ([], b"\xff" * CHUNK),
    }[endless]  # fmt: skip

    async def work():
        async with secure.running(
            "a", secure.make("b", serve=tools["lying"](*start, then=then)), "d"
        ) as (a, b, d):
            before, started = megabytes(), time.monotonic()
            for _ in range(3):
                with pytest.raises(MalformedError):
                    await a.fetch("b", secure.request, LIMIT)
            assert time.monotonic() - started < LIMIT
            assert a.received["b"] <= 3 * (rules.offer_bytes(2, size) + 2 * CHUNK_FRAME)
            assert megabytes() - before < 50
            await tools["eventually"](lambda: vacant(b))  # the call is over for the liar too
            await prompt(secure, d)

    run(work())


async def vacant(transport):
    assert sum(transport._under_way.values()) == 0


def test_an_endless_hello_is_cut_off(secure, tools):
    rules = WireLimits.of(secure.manifest)
    hello = encode(rules, "b", secure.said())

    async def work():
        async with secure.running("a", secure.make("b", serve=tools["lying"](then=hello))) as (
            a,
            _,
        ):
            with pytest.raises(MalformedError, match="a second frame"):
                await a.hello("b", secure.said(), LIMIT)
            assert a.received["b"] == 2 * len(hello)

    run(work())


def test_a_huge_frame_is_not_taken_in(secure, tools):
    async def work():
        async with secure.running(
            "a", secure.make("b", serve=tools["lying"](b"\0" * 20 * 2**20))
        ) as (a, _):
            with pytest.raises(MalformedError, match="more than"):
                await a.fetch("b", secure.request, LIMIT)
            assert (a.refused, a.rubbish, a.received["b"]) == ({"size": 1}, {"b": 1}, 0)

    run(work())


def test_a_drip_of_bytes_ends_at_the_limit(secure):
    rules, size = WireLimits.of(secure.manifest), secure.manifest.size
    header = next(frames(rules, "b", secure.request, pack(Offer((0, 2), torch.zeros(2, size)))))

    async def serve(self, sender, kind, data):
        yield header
        await asyncio.Event().wait()

    async def work():
        async with secure.running("a", secure.make("b", serve=serve)) as (a, _):
            with pytest.raises(UnreachableError, match="did not answer in time"):
                await a.fetch("b", secure.request, 0.5)

    run(work())


@pytest.mark.parametrize(
    "status", ["CANCELLED", "RESOURCE_EXHAUSTED", "INTERNAL", "OK", "UNAUTHENTICATED"]
)
def test_whatever_status_a_neighbour_sends_is_a_transport_error(secure, status):
    def handling(self, kind):
        async def handle(requests, context):
            context.set_code(getattr(grpc.StatusCode, status))
            context.set_details("x" * 2000 + "\n\0é")
            return
            yield

        return handle

    async def work():
        async with secure.running("a", secure.make("b", _handling=handling)) as (a, _):
            with pytest.raises(TransportError) as caught:
                await a.hello("b", secure.said(), LIMIT)
            assert len(str(caught.value)) < 500
            assert "\n" not in str(caught.value)
            assert asyncio.current_task().cancelling() == 0

    run(work())


# ---- a neighbour that asks for more than its share


@asynccontextmanager
async def certified(world, name, to="a", options=()):
    """A bare channel of a node with a good certificate and bad manners."""
    own = Credentials.load(world.folder / "nodes" / name)
    credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
    target = ("grpc.ssl_target_name_override", host_name(world.manifest.network, to))
    async with grpc.aio.secure_channel(
        world.manifest.member(to).address, credentials, options=[target, *options]
    ) as channel:
        yield channel


def test_a_bomb_of_compressed_zeros_is_not_unpacked(secure):
    """A megabyte of zeros is a kilobyte on the wire."""

    async def work():
        async with secure.running("a", "d") as (a, d), certified(secure, "b") as channel:
            call = channel.unary_unary(f"/{SERVICE}/Hello")
            with pytest.raises(grpc.aio.AioRpcError, match="expected at most"):
                await call(b"\0" * 1_000_000, timeout=LIMIT, compression=grpc.Compression.Gzip)
            assert (a.refused, a.rubbish) == ({"size": 1}, {"b": 1})
            assert 0 < a.received["b"] < 1200
            await prompt(secure, d)

    run(work())


def test_a_bomb_as_an_answer_is_not_unpacked(secure):
    """50 MB of zeros fit into one frame."""

    def handling(self, kind):
        async def handle(requests, context):
            context.set_compression(grpc.Compression.Gzip)
            yield b"\0" * 50 * 2**20

        return handle

    async def work():
        async with secure.running("a", secure.make("b", _handling=handling)) as (a, _):
            with pytest.raises(MalformedError, match="expected at most"):
                await a.fetch("b", secure.request, LIMIT)
            assert 0 < a.received["b"] < CHUNK_FRAME

    run(work())


def test_a_huge_request_is_not_taken_in(secure):
    async def work():
        async with secure.running("a", "d") as (a, d), certified(secure, "b") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/Announce")(b"\0" * 3_000_000, timeout=LIMIT)
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert a.received["b"] == 0
            await prompt(secure, d)

    run(work())


def test_headers_of_many_kilobytes_are_refused(secure):
    async def work():
        async with secure.running("a", "d") as (_, d), certified(secure, "b") as channel:
            call, said = (
                channel.unary_unary(f"/{SERVICE}/Hello"),
                encode(WireLimits.of(secure.manifest), "b", secure.said()),
            )
            with pytest.raises(grpc.aio.AioRpcError):
                await call(said, timeout=LIMIT, metadata=[("x", "y" * 100_000)])
            assert secure.nodes["a"].heard == []
            await prompt(secure, d)

    run(work())


def test_calls_that_are_opened_and_left_take_a_few_places_only(secure):
    """300 calls over 30 connections, none of which ever sends its request."""

    async def work():
        async with secure.running("a", "d") as (a, d):
            open_calls, channels = [], []
            for number in range(30):
                context = certified(
                    secure, "b", options=[("grpc.use_local_subchannel_pool", 1), ("number", number)]
                )
                channel = await context.__aenter__()
                channels.append(context)
                open_calls += [channel.stream_stream(f"/{SERVICE}/Fetch")() for _ in range(10)]
            statuses = [asyncio.create_task(call.code()) for call in open_calls]
            await asyncio.wait(statuses, timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
            await prompt(secure, d)
            assert sum(a._under_way.values()) <= 4
            for context in channels:
                await context.__aexit__(None, None, None)
            codes = await asyncio.gather(*statuses)
            assert codes.count(grpc.StatusCode.PERMISSION_DENIED) >= 290
            assert a.refused == {"busy": codes.count(grpc.StatusCode.PERMISSION_DENIED)}

    run(work())


def test_a_neighbour_that_never_reads_its_models_blocks_nobody_else(secure):
    async def work():
        async with secure.running("a", "d") as (_, d), certified(secure, "b") as channel:
            asked = encode(WireLimits.of(secure.manifest), "b", secure.request)
            calls = [channel.unary_stream(f"/{SERVICE}/Fetch")(asked) for _ in range(2)]
            for call in calls:
                assert len(await call.read()) > 0  # the header; and then no more
            offer = await d.fetch("a", secure.request, LIMIT)
            assert torch.equal(offer.model_KP, secure.nodes["a"].model_KP[[0, 2]])
            for call in calls:
                call.cancel()

    run(work())


def test_an_unknown_method_is_no_trouble(secure):
    async def work():
        async with secure.running("a", "d") as (_, d), certified(secure, "b") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/Shutdown")(b"", timeout=LIMIT)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
            await prompt(secure, d)

    run(work())


# ---- strangers


def test_a_thousand_idle_connections_do_not_matter(secure):
    async def work():
        async with secure.running("a", "d") as (_, d):
            before = megabytes()
            strangers = await asyncio.to_thread(connected, secure, 1000)
            await prompt(secure, d)
            assert megabytes() - before < 300
            kept = [each for each in strangers if not await asyncio.to_thread(hung_up, each)]
            assert kept == []  # a handshake that does not begin has a limit too
            await prompt(secure, d)

    run(work())


def connected(world, count):
    host, port = world.manifest.member("a").address.split(":")
    return [socket.create_connection((host, int(port)), timeout=LIMIT) for _ in range(count)]


def hung_up(stranger):
    with stranger, suppress(ConnectionResetError):
        stranger.settimeout(LIMIT)
        return stranger.recv(1) == b""
    return True


def test_random_bytes_on_the_port_do_not_matter(secure):
    noise = Key(0).of("noise").numpy()

    async def work():
        async with secure.running("a", "d") as (a, d):
            for stranger in await asyncio.to_thread(connected, secure, 200):
                with suppress(OSError):
                    stranger.sendall(noise.bytes(int(noise.integers(1, 5000))))
                stranger.close()
            await prompt(secure, d)
            assert a.refused == {}

    run(work())


def test_a_plaintext_client_gets_nowhere(secure):
    async def work():
        async with secure.running("a"):
            async with grpc.aio.insecure_channel(secure.manifest.member("a").address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(f"/{SERVICE}/Hello")(b"", timeout=LIMIT)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert secure.nodes["a"].heard == []

    run(work())


def test_messages_replayed_by_another_neighbour_are_refused(secure):
    """What b once said to a, d cannot say again: the message names b, and d's certificate does not."""
    asked = encode(WireLimits.of(secure.manifest), "b", secure.announcement)

    async def work():
        async with secure.running("a", "d") as (a, d):
            with pytest.raises(RejectedError, match="from 'b', but it came from 'd'"):
                async for _ in d.carry("a", "Announce", asked, LIMIT):
                    pass
            assert (a.refused, secure.nodes["a"].heard) == ({"sender": 1}, [])

    run(work())
