"""Hostile neighbours and strangers against a node on loopback, over gRPC and mutual TLS.

The node must go on serving its honest neighbours.
"""

import asyncio
import os
import socket
import ssl
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
import torch

from fedspd.core.errors import MalformedError, RejectedError, TransportError, UnreachableError
from fedspd.core.keys import Key
from fedspd.node.identity.certificates import host_name
from fedspd.node.identity.credentials import Credentials
from fedspd.node.wire.codec import (
    CHUNK_BYTES,
    MAX_FRAME_BYTES,
    WireLimits,
    encode,
    encode_frames,
    encode_offer,
)
from fedspd.node.wire.grpc_transport import SERVICE
from fedspd.node.wire.messages import Offer

TIMEOUT = 200.0  # seconds: far more than any of these calls needs
PROMPT = 1.0  # seconds for a hello under any attack


def run(work):
    return asyncio.run(work)


def megabytes():
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def check_prompt(world, honest, to="a"):
    """Check that an honest neighbour is answered at once, in one of many calls on a busy machine.

    One that an attack holds up is late every time.
    """
    seconds = []
    while len(seconds) < 30 and min(seconds, default=PROMPT) >= PROMPT:
        started = time.monotonic()
        await honest.hello(to, world.hello(), TIMEOUT)
        seconds.append(time.monotonic() - started)
    assert min(seconds) < PROMPT


# ---- a neighbour that answers too much


@pytest.mark.parametrize("endless", ["chunks", "empty frames", "headers", "noise"])
def test_fetch_cuts_off_an_endless_answer(secure, tools, endless):
    limits, size = WireLimits.from_manifest(secure.manifest), secure.manifest.size
    offer = encode_offer(Offer((0, 2), torch.zeros(2, size)))
    good = list(encode_frames(limits, "b", secure.request, offer))
    start, then = {
        "chunks": (good, good[1]),
        "empty frames": (good[:1], b""),
        "headers": (good[:1], good[0]),
        "noise": ([], b"\xff" * CHUNK_BYTES),
    }[endless]
    hostile = secure.transport("b", serve=tools["fixed_answer"](*start, then=then))

    async def work():
        async with secure.running("a", hostile, "d") as (a, b, d):
            before, started = megabytes(), time.monotonic()
            for _ in range(3):
                with pytest.raises(MalformedError):
                    await a.fetch("b", secure.request, TIMEOUT)
            assert time.monotonic() - started < TIMEOUT
            assert a.received["b"] <= 3 * (
                limits.offer_bytes(2, secure.request) + 2 * MAX_FRAME_BYTES
            )
            assert megabytes() - before < 50
            await tools["eventually"](lambda: check_idle(b))  # the call has ended there, too
            await check_prompt(secure, d)

    run(work())


async def check_idle(transport):
    assert sum(transport._active_calls.values()) == 0


def test_hello_cuts_off_an_endless_answer(secure, tools):
    hello = encode(WireLimits.from_manifest(secure.manifest), "b", secure.hello())
    hostile = secure.transport("b", serve=tools["fixed_answer"](then=hello))

    async def work():
        async with secure.running("a", hostile) as (a, _):
            with pytest.raises(MalformedError, match="a second frame"):
                await a.hello("b", secure.hello(), TIMEOUT)
            assert a.received["b"] == 2 * len(hello)

    run(work())


def test_fetch_rejects_a_huge_frame(secure, tools):
    hostile = secure.transport("b", serve=tools["fixed_answer"](b"\0" * 20 * 2**20))

    async def work():
        async with secure.running("a", hostile) as (a, _):
            with pytest.raises(MalformedError, match="more than"):
                await a.fetch("b", secure.request, TIMEOUT)
            assert (a.rejected, a.malformed, a.received["b"]) == ({"size": 1}, {"b": 1}, 0)

    run(work())


def test_fetch_ends_at_its_timeout_after_the_header(secure):
    limits, size = WireLimits.from_manifest(secure.manifest), secure.manifest.size
    offer = encode_offer(Offer((0, 2), torch.zeros(2, size)))
    header = next(encode_frames(limits, "b", secure.request, offer))

    async def serve(self, sender, method, data):
        yield header
        await asyncio.Event().wait()

    async def work():
        async with secure.running("a", secure.transport("b", serve=serve)) as (a, _):
            with pytest.raises(UnreachableError, match="did not answer in time"):
                await a.fetch("b", secure.request, 0.5)

    run(work())


@pytest.mark.parametrize(
    "status", ["CANCELLED", "RESOURCE_EXHAUSTED", "INTERNAL", "OK", "UNAUTHENTICATED"]
)
def test_hello_raises_transport_error_for_any_status(secure, status):
    def rpc_handler(self, method):
        async def handle(requests, context):
            context.set_code(getattr(grpc.StatusCode, status))
            context.set_details("x" * 2000 + "\n\0é")
            return
            yield

        return handle

    async def work():
        async with secure.running("a", secure.transport("b", _rpc_handler=rpc_handler)) as (a, _):
            with pytest.raises(TransportError) as caught:
                await a.hello("b", secure.hello(), TIMEOUT)
            assert len(str(caught.value)) < 500
            assert "\n" not in str(caught.value)
            assert asyncio.current_task().cancelling() == 0

    run(work())


# ---- a neighbour that asks too much


@asynccontextmanager
async def certified(world, name, to="a", options=()):
    """Open a bare channel with a node's valid certificate."""
    own = Credentials.load(world.folder / "nodes" / name)
    credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
    target = ("grpc.ssl_target_name_override", host_name(world.manifest.network, to))
    address = world.manifest.member(to).address
    async with grpc.aio.secure_channel(address, credentials, [target, *options]) as channel:
        yield channel


def test_node_does_not_decompress_a_request(secure):
    """A megabyte of zeros is a kilobyte on the wire."""

    async def work():
        async with secure.running("a", "d") as (a, d), certified(secure, "b") as channel:
            call = channel.unary_unary(f"/{SERVICE}/Hello")
            with pytest.raises(grpc.aio.AioRpcError, match="expected at most"):
                await call(b"\0" * 1_000_000, timeout=TIMEOUT, compression=grpc.Compression.Gzip)
            assert (a.rejected, a.malformed) == ({"size": 1}, {"b": 1})
            assert 0 < a.received["b"] < 1200
            await check_prompt(secure, d)

    run(work())


def test_fetch_does_not_decompress_an_answer(secure):
    """50 MB of zeros fit into one frame."""

    def rpc_handler(self, method):
        async def handle(requests, context):
            context.set_compression(grpc.Compression.Gzip)
            yield b"\0" * 50 * 2**20

        return handle

    async def work():
        async with secure.running("a", secure.transport("b", _rpc_handler=rpc_handler)) as (a, _):
            with pytest.raises(MalformedError, match="expected at most"):
                await a.fetch("b", secure.request, TIMEOUT)
            assert 0 < a.received["b"] < MAX_FRAME_BYTES

    run(work())


def test_node_rejects_a_huge_request(secure):
    async def work():
        async with secure.running("a", "d") as (a, d), certified(secure, "b") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/Announce")(
                    b"\0" * 3_000_000, timeout=TIMEOUT
                )
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert a.received["b"] == 0
            await check_prompt(secure, d)

    run(work())


def test_node_rejects_large_metadata(secure):
    hello = encode(WireLimits.from_manifest(secure.manifest), "b", secure.hello())

    async def work():
        async with secure.running("a", "d") as (_, d), certified(secure, "b") as channel:
            call = channel.unary_unary(f"/{SERVICE}/Hello")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(hello, timeout=TIMEOUT, metadata=[("x", "y" * 100_000)])
            assert secure.nodes["a"].received == []
            await check_prompt(secure, d)

    run(work())


def test_node_limits_connections_and_open_calls_of_a_neighbour(secure):
    """A neighbour opens 300 calls over 30 connections and never sends a request."""

    async def work():
        async with secure.running("a", "d") as (a, d):
            open_calls, channels = [], []
            for number in range(30):
                own_connection = [("grpc.use_local_subchannel_pool", 1), ("number", number)]
                context = certified(secure, "b", options=own_connection)
                channel = await context.__aenter__()
                channels.append(context)
                open_calls += [channel.stream_stream(f"/{SERVICE}/Fetch")() for _ in range(10)]
            statuses = [asyncio.create_task(call.code()) for call in open_calls]
            await asyncio.wait(statuses, timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            await check_prompt(secure, d)
            assert sum(a._active_calls.values()) <= 4
            assert len(a._front._connections["b"]) <= 4
            for context in channels:
                await context.__aexit__(None, None, None)
            codes = Counter(await asyncio.gather(*statuses))
            assert codes[grpc.StatusCode.PERMISSION_DENIED] <= 4 * 10  # of four connections
            assert codes[grpc.StatusCode.UNAVAILABLE] >= 26 * 10 - 2 * 10
            assert set(a.rejected) == {"busy"}

    run(work())


def test_neighbour_that_never_reads_its_models_blocks_nobody_else(secure):
    async def work():
        async with secure.running("a", "d") as (_, d), certified(secure, "b") as channel:
            request = encode(WireLimits.from_manifest(secure.manifest), "b", secure.request)
            calls = [channel.unary_stream(f"/{SERVICE}/Fetch")(request) for _ in range(2)]
            for call in calls:
                assert len(await call.read()) > 0  # only the header
            offer = await d.fetch("a", secure.request, TIMEOUT)
            assert torch.equal(offer.model_KP, secure.nodes["a"].model_KP[[0, 2]])
            for call in calls:
                call.cancel()

    run(work())


def test_node_rejects_an_unknown_method(secure):
    async def work():
        async with secure.running("a", "d") as (_, d), certified(secure, "b") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/Shutdown")(b"", timeout=TIMEOUT)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
            await check_prompt(secure, d)

    run(work())


# ---- strangers


def test_node_serves_neighbours_beside_1000_idle_connections(secure):
    async def work():
        async with secure.running("a", "d") as (_, d):
            before = megabytes()
            strangers = await asyncio.to_thread(connect, secure, 1000)
            await check_prompt(secure, d)
            assert megabytes() - before < 50
            kept = [each for each in strangers if not await asyncio.to_thread(is_closed, each)]
            assert kept == []  # a handshake that never begins times out, too
            await check_prompt(secure, d)

    run(work())


def connect(world, count):
    host, port = world.manifest.member("a").address.split(":")
    return [socket.create_connection((host, int(port)), timeout=TIMEOUT) for _ in range(count)]


def is_closed(stranger):
    with stranger, suppress(ConnectionResetError):
        stranger.settimeout(TIMEOUT)
        return stranger.recv(1) == b""
    return True


def test_node_ignores_random_bytes_on_its_port(secure):
    noise = Key(0).of("noise").numpy()

    async def work():
        async with secure.running("a", "d") as (a, d):
            for stranger in await asyncio.to_thread(connect, secure, 200):
                with suppress(OSError):
                    stranger.sendall(noise.bytes(int(noise.integers(1, 5000))))
                stranger.close()
            await check_prompt(secure, d)
            assert set(a.rejected) <= {"handshake", "crowded"}
            assert sum(a.rejected.values()) > 0

    run(work())


def test_strangers_are_counted_and_share_a_line_of_the_log(secure, capfd, caplog):
    """Each failed handshake was a line of gRPC itself, in another format than the node's."""

    async def work():
        async with secure.running("a", "d") as (a, d):
            for stranger in await asyncio.to_thread(connect, secure, 30):
                with suppress(OSError):
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                await asyncio.to_thread(is_closed, stranger)
            await check_prompt(secure, d)
            assert a.rejected == {"handshake": 30}

    run(work())
    assert capfd.readouterr().err == ""
    assert caplog.text.count('connection refused: address=127.0.0.1 reason="handshake"') == 1
    assert "TLS: http request." in caplog.text


@pytest.mark.filterwarnings("error")
def test_host_name_that_is_not_ascii_fails_in_silence(secure, capfd):
    """Python cannot decode it, and prints that for each handshake."""
    host, port = secure.manifest.member("a").address.split(":")
    name = "a-name-of-sixteen"

    def call():
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context()
        tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
        with suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        greeting = outgoing.read().replace(name.encode(), b"\xff" * len(name))
        with socket.create_connection((host, int(port)), timeout=TIMEOUT) as stranger:
            stranger.sendall(greeting)
            while stranger.recv(4096):
                pass

    async def work():
        async with secure.running("a") as (a,):
            for _ in range(3):
                await asyncio.to_thread(call)
            assert a.rejected == {"handshake": 3}

    run(work())
    assert capfd.readouterr().err == ""


def test_node_rejects_a_plaintext_client(secure):
    async def work():
        async with secure.running("a"):
            async with grpc.aio.insecure_channel(secure.manifest.member("a").address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(f"/{SERVICE}/Hello")(b"", timeout=TIMEOUT)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert secure.nodes["a"].received == []

    run(work())


def test_node_rejects_a_message_replayed_by_another_neighbour(secure):
    """The message names b as its sender, and d's certificate does not."""
    replayed = encode(WireLimits.from_manifest(secure.manifest), "b", secure.announcement)

    async def work():
        async with secure.running("a", "d") as (a, d):
            with pytest.raises(RejectedError, match="sender 'b', but it came from 'd'"):
                async for _ in d.send("a", "Announce", replayed, TIMEOUT):
                    pass
            assert (a.rejected, secure.nodes["a"].received) == ({"sender": 1}, [])

    run(work())
