"""The TLS front of a node on loopback: who gets in, and what one caller can take."""

import asyncio
import socket
import ssl
from contextlib import suppress

import grpc
import pytest

from chaos import callers
from chaos.callers import SETTINGS, frame, send_endless_headers
from fedspd.core.errors import RejectedError, UnreachableError
from fedspd.node.host.provisioning import revoke
from fedspd.node.wire import front as fronts
from fedspd.node.wire.codec import WireLimits, encode
from fedspd.node.wire.frames import PREFACE, FrameGuard, TokenBucket
from fedspd.node.wire.front import host_of, literal
from fedspd.node.wire.grpc_transport import SERVICE

TIMEOUT = 20.0


def run(work):
    return asyncio.run(work)


def open_tls(world, name, to="a", alpn=("h2",)):
    """Open a bare TLS connection with a node's certificate."""
    manifest, bundle = world.manifest, world.folder / "nodes" / name
    return callers.open_tls(bundle, manifest.network, to, manifest.member(to).address, alpn)


def read_to_the_end(connection):
    """Return what the node sends until it closes the connection."""
    with connection, suppress(OSError):
        found = b""
        while data := connection.recv(65536):
            found += data
        return found
    return b""


# ---- frames


def test_node_cuts_off_headers_that_never_end(secure):
    """gRPC itself reads on: 200 MB of them took six seconds of processor time."""

    async def work():
        async with secure.running("a", "d") as (a, d):
            bare = await asyncio.to_thread(open_tls, secure, "b")
            sent = await asyncio.to_thread(send_endless_headers, bare, 50_000_000)
            assert sent < 10_000_000  # the buffers of both sockets
            assert a.rejected == {"frames": 1}
            await d.hello("a", secure.hello(), TIMEOUT)

    run(work())


def test_revoked_node_is_not_read_at_all(secure):
    """It fails at the handshake, so gRPC never sees its headers."""

    async def work():
        async with secure.running("a", "d") as (a, d):
            revoke(secure.folder, "b")
            bare = await asyncio.to_thread(open_tls, secure, "b")
            await asyncio.to_thread(send_endless_headers, bare, 50_000_000)
            assert a.rejected == {"revoked": 1}
            assert a._front._callers == {}
            await d.hello("a", secure.hello(), TIMEOUT)

    run(work())


def test_open_connection_ends_when_its_certificate_is_revoked(secure, monkeypatch):
    monkeypatch.setattr(fronts, "CHECK_SECONDS", 0.01)

    async def work():
        async with secure.running("a") as (a,):
            bare = await asyncio.to_thread(open_tls, secure, "b")
            await asyncio.to_thread(bare.sendall, PREFACE + SETTINGS)
            revoke(secure.folder, "b")
            await asyncio.to_thread(read_to_the_end, bare)
            assert (set(a.rejected), a._front._callers) == ({"revoked"}, {})

    run(work())


@pytest.mark.parametrize("size", [1, 5, 9, 24, 1000])
def test_frame_guard_follows_frames_in_pieces_of_any_size(size):
    data = PREFACE + SETTINGS + frame(1, 4, b"h" * 70) + frame(0, 1, b"d" * 300)
    data += frame(1, 0, b"h" * 10) + frame(9, 0) + frame(9, 4, b"h") + frame(8, 0, b"1234")
    guard, found = FrameGuard(), [0, 0]
    for start in range(0, len(data), size):
        units, calls = guard.feed(data[start : start + size])
        found = [found[0] + units, found[1] + calls]
    assert found == [2 * 10 + 5, 2]


@pytest.mark.parametrize(
    "block",
    [[frame(1, 0)] + 16 * [frame(9, 0)], [frame(1, 0, b"h" * 30_000), frame(9, 4, b"h" * 3_000)]],
)
def test_frame_guard_rejects_headers_of_many_frames_or_bytes(block):
    guard = FrameGuard()
    guard.feed(PREFACE)
    with pytest.raises(RejectedError, match="expected at most 32768 in 16"):
        guard.feed(b"".join(block))


# ---- places


def test_connections_of_a_neighbour_are_limited_and_others_have_their_own_places(secure):
    async def work():
        async with secure.running("a", "d") as (a, d):
            held = [await asyncio.to_thread(open_tls, secure, "b") for _ in range(4)]
            fifth = await asyncio.to_thread(open_tls, secure, "b")
            assert await asyncio.to_thread(read_to_the_end, fifth) == b""
            assert a.rejected == {"busy": 1}
            await d.hello("a", secure.hello(), TIMEOUT)
            for each in held:
                each.close()

    run(work())


def test_oldest_handshake_makes_room_for_a_new_one(secure, monkeypatch):
    monkeypatch.setattr(fronts, "MAX_PENDING", 8)

    async def work():
        async with secure.running("a", "d") as (a, d):
            host, port = secure.manifest.member("a").address.split(":")
            idle = [socket.create_connection((host, int(port)), TIMEOUT) for _ in range(30)]
            await d.hello("a", secure.hello(), TIMEOUT)
            assert len(a._front._pending) <= 8
            assert a.rejected["crowded"] >= 22
            for each in idle:
                each.close()

    run(work())


def test_stranger_that_keeps_failing_is_closed_without_a_handshake(secure, monkeypatch):
    """Its address is not that of a neighbour."""
    monkeypatch.setattr(fronts, "host_of", lambda address: "203.0.113.7")
    monkeypatch.setattr(fronts, "FAILURES", 3)
    monkeypatch.setattr(fronts, "FAILURES_PER_SECOND", 1e-6)
    monkeypatch.setattr(fronts, "literal", lambda address: None)

    async def work():
        async with secure.running("a") as (a,):
            host, port = secure.manifest.member("a").address.split(":")
            for _ in range(10):
                stranger = socket.create_connection((host, int(port)), TIMEOUT)
                with suppress(OSError):
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                await asyncio.to_thread(read_to_the_end, stranger)
            assert a.rejected == {"handshake": 3, "crowded": 7}

    run(work())


def test_handshakes_of_strangers_make_room_before_that_of_a_neighbour(secure, monkeypatch):
    monkeypatch.setattr(fronts, "MAX_PENDING_PER_HOST", 8)

    async def work():
        async with secure.running("a", "d") as (a, d):
            host, port = secure.manifest.member("a").address.split(":")
            slow = asyncio.create_task(asyncio.sleep(60))
            a._front._pending[slow] = fronts.Attempt("127.0.0.1", is_named=True)
            idle = [socket.create_connection((host, int(port)), TIMEOUT) for _ in range(30)]
            await d.hello("a", secure.hello(), TIMEOUT)
            assert a.rejected["crowded"] >= 22
            assert not slow.cancelling()
            for each in idle:
                each.close()
            slow.cancel()

    run(work())


def test_neighbour_that_reconnects_again_and_again_gets_few_handshakes(secure, monkeypatch):
    """Each of them costs milliseconds; the connections that others have stay open."""
    monkeypatch.setattr(fronts, "HANDSHAKES", 8)
    monkeypatch.setattr(fronts, "HANDSHAKES_PER_SECOND", 1e-6)

    async def work():
        async with secure.running("a", "d") as (a, d):
            await d.hello("a", secure.hello(), TIMEOUT)
            made, authenticate = [], a.tls.authenticate
            a.tls.authenticate = lambda found: (made.append(found), authenticate(found))[1]
            for _ in range(30):
                with suppress(OSError):
                    (await asyncio.to_thread(open_tls, secure, "b")).close()
            assert len(made) == 7
            assert a.rejected["crowded"] == 23
            await d.hello("a", secure.hello(), TIMEOUT)

    run(work())


@pytest.mark.parametrize("name", [None, "a", "a.0123.fedspd"])
def test_stranger_that_does_not_know_the_network_gets_no_certificate(secure, name):
    """Its handshake ends before a signature, which is what a handshake costs."""
    context = ssl.create_default_context(cafile=secure.folder / "ca.crt")
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    host, port = secure.manifest.member("a").address.split(":")

    def call():
        raw = socket.create_connection((host, int(port)), timeout=TIMEOUT)
        with raw, suppress(OSError), context.wrap_socket(raw, server_hostname=name) as end:
            return end.getpeercert()

    async def work():
        async with secure.running("a") as (a,):
            assert await asyncio.to_thread(call) is None
            assert a.rejected == {"handshake": 1}
            assert a._front._handshakes == {}

    run(work())


def test_strangers_at_the_address_of_a_neighbour_do_not_keep_it_out(secure, monkeypatch):
    """They may share it behind a router; the neighbour connects for the first time."""
    monkeypatch.setattr(fronts, "HANDSHAKES", 1)
    monkeypatch.setattr(fronts, "HANDSHAKES_PER_SECOND", 1e-6)

    async def work():
        async with secure.running("a", "d") as (a, d):
            host, port = secure.manifest.member("a").address.split(":")
            for _ in range(100):
                stranger = socket.create_connection((host, int(port)), TIMEOUT)
                with suppress(OSError):
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                await asyncio.to_thread(read_to_the_end, stranger)
            await d.hello("a", secure.hello(), TIMEOUT)
            assert a.rejected == {"handshake": 100}

    run(work())


def test_caller_that_ends_its_connection_early_fills_no_log(secure, capfd, caplog):
    """gRPC still answers its calls; asyncio has a line for each write."""

    async def work():
        async with secure.running("a") as (a,):
            bare = await asyncio.to_thread(open_tls, secure, "b")
            await asyncio.to_thread(bare.sendall, PREFACE + SETTINGS)
            while not a._front._callers:
                await asyncio.sleep(0.01)
            (connection,) = a._front._callers.values()
            connection.abort()
            for _ in range(100):
                connection.answer(b"late")
            bare.close()

    run(work())
    assert (caplog.text, capfd.readouterr().err) == ("", "")


def test_caller_without_http_2_is_refused(secure):
    async def work():
        async with secure.running("a") as (a,):
            bare = await asyncio.to_thread(open_tls, secure, "b", alpn=())
            assert await asyncio.to_thread(read_to_the_end, bare) == b""
            assert a.rejected == {"handshake": 1}

    run(work())


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_host_of_groups_addresses_of_one_network(address, host):
    assert host_of(address) == host


def test_literal_is_none_for_a_name():
    assert (literal("10.0.0.7:1"), literal("[::1]:1"), literal("host:1")) == (
        "10.0.0.7",
        "::/64",
        None,
    )


# ---- identity


def test_call_that_bypasses_the_front_is_rejected(secure):
    """Whoever opens gRPC's socket has the node's own rights, and still no neighbour's name."""
    message = encode(WireLimits.from_manifest(secure.manifest), "b", secure.hello())

    async def work():
        async with secure.running("a") as (a,):
            assert a._front._folder.stat().st_mode & 0o777 == 0o700
            async with grpc.aio.insecure_channel(a._front.target) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="did not come through the TLS"):
                    await channel.unary_unary(f"/{SERVICE}/Hello")(message, timeout=TIMEOUT)
            assert secure.nodes["a"].received == []
            folder = a._front._folder
        assert not folder.exists()

    run(work())


def test_call_that_comes_after_its_connection_is_not_counted_as_a_stranger(secure):
    """gRPC may hand it over late; an alert on rejections would wake the operator for nothing."""

    async def work():
        async with secure.running("a", "b") as (a, b):
            await b.hello("a", secure.hello(), TIMEOUT)
            (label,) = a._front._callers
            a._front._callers[label].abort()
            with pytest.raises(UnreachableError, match="has ended"):
                a._front.identify(f"unix:/folder/{label}")
            assert a.rejected == {}

    run(work())


@pytest.mark.parametrize("is_brief", [False, True])
def test_second_process_of_a_bundle_is_shut_out(secure, monkeypatch, caplog, tools, is_brief):
    """A brief one closes its connection again before the first process calls."""
    monkeypatch.setattr(fronts, "CLONE_SECONDS", 0.0)

    async def work():
        async with secure.running("a", "b", "d") as (a, b, d):
            await b.hello("a", secure.hello(), TIMEOUT)
            clone = secure.transport("b")
            await clone.hello("a", secure.hello(), TIMEOUT)
            assert a.rejected == {}
            if is_brief:
                await clone.stop()
                clone = secure.transport("b")
            await b.hello("a", secure.hello(), TIMEOUT)  # after its clone
            assert a.rejected == {"cloned bundle": 1}
            for _ in range(3):
                with pytest.raises(UnreachableError):
                    await clone.hello("a", secure.hello(), TIMEOUT)
                await b.hello("a", secure.hello(), TIMEOUT)
            await d.hello("a", secure.hello(), TIMEOUT)
            await b.stop()  # now nobody tells them apart
            await tools["eventually"](lambda: clone.hello("a", secure.hello(), TIMEOUT))
            await clone.stop()

    run(work())
    found = "bundle runs twice, revoke it: node=b refused_address=127.0.0.1"
    assert caplog.text.count(found) == 1


def test_restarted_neighbour_is_not_taken_for_a_clone(secure, monkeypatch):
    monkeypatch.setattr(fronts, "CLONE_SECONDS", 0.0)

    async def work():
        async with secure.running("a") as (a,):
            for _ in range(3):
                async with secure.running("b") as (b,):
                    for _ in range(2):
                        await b.hello("a", secure.hello(), TIMEOUT)
            assert a.rejected == {}

    run(work())


# ---- rate


def test_neighbour_that_calls_too_often_is_read_later(secure, monkeypatch):
    monkeypatch.setattr(fronts, "UNITS", 40)
    monkeypatch.setattr(fronts, "UNITS_PER_SECOND", 50.0)

    async def work():
        async with secure.running("a", "b", "d") as (a, b, d):
            await asyncio.gather(*(b.hello("a", secure.hello(), TIMEOUT) for _ in range(6)))
            assert a.rejected["rate"] > 0
            before = a.rejected["rate"]
            await d.hello("a", secure.hello(), TIMEOUT)
            assert a.rejected["rate"] == before
            assert len(secure.nodes["a"].received) == 7  # none was lost

    run(work())


def test_neighbour_that_asks_for_new_keys_again_and_again_is_read_later(secure, monkeypatch):
    """Its records have no data, so no frame is counted: 13,000 a second stopped a node."""
    monkeypatch.setattr(fronts, "TLS_SECONDS", 0.001)
    monkeypatch.setattr(fronts, "TLS_SECONDS_PER_SECOND", 1e-6)

    async def work():
        async with secure.running("a") as (a,):
            bare = await asyncio.to_thread(open_tls, secure, "b")
            await asyncio.to_thread(bare.sendall, PREFACE + SETTINGS)
            try:
                await asyncio.to_thread(callers.ask_for_new_keys, bare, 2_000)
            except AttributeError:
                pytest.skip("this Python hides its library of TLS")
            async with asyncio.timeout(TIMEOUT):
                while not a.rejected:
                    await asyncio.sleep(0.01)
            assert set(a.rejected) == {"rate"}
            with suppress(OSError):  # from now on it is not read
                await asyncio.to_thread(bare.settimeout, 0.1)
                await asyncio.to_thread(bare.sendall, b"\0" * 8 * 2**20)
                pytest.fail("all of it was read")

    run(work())


def test_token_bucket_refills_with_time():
    now = [0.0]
    bucket = TokenBucket(10, 2.0, clock=lambda: now[0])
    assert bucket.take(10) == 0.0
    assert bucket.is_empty()
    assert bucket.take(4) == 2.0
    now[0] += 3.0
    assert not bucket.is_empty()
    now[0] += 100.0
    assert bucket.take(10) == 0.0
