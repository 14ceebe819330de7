"""Who is let in over the wire, by which certificate, and over which TLS."""

import asyncio
import socket
import ssl
import subprocess
import sys
from datetime import timedelta

import grpc
import pytest

from fedspd.core.errors import ConfigError, NodeError, RejectedError, UnreachableError
from fedspd.node.host.provisioning import add, revoke
from fedspd.node.identity.certificates import host_name, now
from fedspd.node.identity.credentials import Authority, Credentials
from fedspd.node.identity.manifest import Manifest
from fedspd.node.wire.codec import WireLimits, encode
from fedspd.node.wire.grpc_transport import SERVICE, GrpcTransport, TlsContext

LIMIT = 20.0


def run(work):
    return asyncio.run(asyncio.wait_for(work, 120))


async def hello(world, own, to="a", server=None):
    """With these credentials; what gRPC says to it."""
    credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
    target = ("grpc.ssl_target_name_override", host_name(server or world.manifest.network, to))
    async with grpc.aio.secure_channel(
        world.manifest.member(to).address, credentials, options=[target]
    ) as channel:
        return await channel.unary_unary(f"/{SERVICE}/Hello")(
            encode(WireLimits.of(world.manifest), "b", world.said()), timeout=LIMIT
        )


# ---- certificates


def test_a_foreign_authority_is_refused_by_both_and_the_log_says_why(secure, capfd):
    """Somebody who has the network's ca.crt, but no certificate of it."""
    own = secure.folder / "nodes" / "b"
    foreign = Authority.create()
    forged = foreign.issue("b", 1, ["a"], "127.0.0.1:1")
    ca = (own / "ca.crt").read_bytes()

    async def work():
        async with secure.running("a", "d") as (_, d):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await hello(secure, Credentials(ca, forged.certificate, forged.key))
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError):
                await hello(secure, forged)  # does not believe a either
            await d.hello("a", secure.said(), LIMIT)
            assert [sender for sender, _ in secure.nodes["a"].heard] == ["d"]

    run(work())
    assert "certificate" in capfd.readouterr().err  # gRPC's own log: our code is never reached


def test_an_expired_certificate_is_refused_and_the_log_says_why(secure, capfd, monkeypatch):
    authority = Authority.load(secure.folder)
    monkeypatch.setattr("fedspd.node.identity.certificates.now", lambda: now() - timedelta(days=3))
    expired = authority.issue("b", 1, ["a"], "127.0.0.1:1", days=1)

    async def work():
        async with secure.running("a"):
            with pytest.raises(grpc.aio.AioRpcError):
                await hello(secure, expired)
            assert secure.nodes["a"].heard == []

    run(work())
    assert "certificate has expired" in capfd.readouterr().err


def test_an_impostor_at_a_neighbours_address_is_not_spoken_to(secure):
    """c, with its own good certificate, sits where b should be."""
    address = secure.manifest.member("b").address

    async def work():
        impostor = GrpcTransport(
            secure.manifest, secure.folder / "nodes" / "c", "c", address=address
        )
        async with secure.running("a", impostor) as (a, _):
            with pytest.raises(
                UnreachableError, match=r"'b' cannot be reached .*Hostname Verification"
            ):
                await a.hello("b", secure.said(), LIMIT)
            assert secure.nodes["c"].heard == []

    run(work())


def test_a_node_without_a_certificate_is_not_let_in(secure):
    ca = (secure.folder / "ca.crt").read_bytes()

    async def work():
        async with secure.running("a"):
            with pytest.raises(grpc.aio.AioRpcError):
                await hello(secure, Credentials(ca, None, None))
            assert secure.nodes["a"].heard == []

    run(work())


def test_whoever_is_revoked_is_refused_from_then_on_and_not_called(secure, caplog):
    async def work():
        async with secure.running("a", "b", "d") as (a, b, d):
            await b.hello("a", secure.said(), LIMIT)
            revoke(secure.folder, "b")
            with pytest.raises(RejectedError, match="revoked"):
                await b.hello("a", secure.said(), LIMIT)  # over the connection that it has
            with pytest.raises(
                RejectedError, match=r"'b' is not called: its certificate is in revoked\.crl"
            ):
                await a.hello("b", secure.said(), LIMIT)
            await d.hello("a", secure.said(), LIMIT)
            assert a.refused == {"revoked": 1}  # what b asked; what a does not ask is no refusal
            assert "refused (revoked)" in caplog.text
            assert not a.muted("b")

    run(work())


def test_a_certificate_is_checked_again_when_its_time_is_over(secure):
    door = TlsContext(secure.manifest, secure.folder / "nodes" / "a", "a")
    context = {
        "ssl_tls_version": [b"TLSv1.3"],
        "x509_pem_cert": [(secure.folder / "nodes/b/node.crt").read_bytes()],
    }
    assert door.caller(context).name == "b"
    door.clock = door.gate._clock = lambda: now() + timedelta(days=400)
    with pytest.raises(RejectedError, match=r"^expired: "):
        door.caller(context)


def test_old_tls_is_refused_even_if_grpc_took_it(secure):
    door = TlsContext(secure.manifest, secure.folder / "nodes" / "a", "a")
    certificate = (secure.folder / "nodes/b/node.crt").read_bytes()
    for version in ({"ssl_tls_version": [b"TLSv1.2"]}, {}):
        with pytest.raises(RejectedError, match=r"^old TLS: "):
            door.caller({"x509_pem_cert": [certificate], **version})


def test_many_certificates_take_no_memory(secure):
    """A neighbour that gets a new certificate every day."""
    authority = Authority.load(secure.folder)
    door = TlsContext(secure.manifest, secure.folder / "nodes" / "a", "a")
    for number in range(300):
        own = authority.issue("b", 1, ["a"], f"127.0.0.1:{number + 1}")
        door.caller({"ssl_tls_version": [b"TLSv1.3"], "x509_pem_cert": [own.certificate]})
    assert len(door._checked) <= 256
    assert door.met["b"].address == "127.0.0.1:300"


def test_a_newcomer_is_heard_and_called_by_nodes_that_were_never_told_of_it(secure, tools):
    async def work():
        async with secure.running("a") as (a,):
            (port,) = tools["free_ports"](1)
            add(secure.folder, "new", ["a"], f"127.0.0.1:{port}")
            bundle = secure.folder / "nodes" / "new"
            async with secure.running(
                GrpcTransport(Manifest.load(bundle / "manifest.json"), bundle, "new")
            ) as (new,):
                await new.hello("a", secure.said(), LIMIT)
                assert [sender for sender, _ in secure.nodes["a"].heard] == ["new"]
                assert a.client("new") == 4
                assert (await a.hello("new", secure.said(), LIMIT)).round == 7

    run(work())


# ---- TLS


NODE = """
import asyncio, sys
from pathlib import Path
from fedspd.node.wire.grpc_transport import GrpcTransport
from fedspd.node.identity.manifest import Manifest

async def live():
    bundle = Path(sys.argv[1])
    transport = GrpcTransport(Manifest.load(bundle / "manifest.json"), bundle, bundle.name)
    await transport.start(None)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.stop()

asyncio.run(live())
"""


def test_only_tls_1_3_is_spoken(secure):
    """In a process of its own: gRPC reads its ciphers when it is first imported."""
    with subprocess.Popen(
        [sys.executable, "-c", NODE, str(secure.folder / "nodes" / "a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as node:
        assert node.stdout.readline() == "ready\n"
        assert handshake(secure, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        with pytest.raises((ssl.SSLError, ConnectionError)):
            handshake(secure, ssl.TLSVersion.TLSv1_2)
        node.stdin.close()
        assert node.wait(60) == 0


def handshake(world, version):
    context = ssl.create_default_context(cafile=world.folder / "ca.crt")
    context.load_cert_chain(world.folder / "nodes/b/node.crt", world.folder / "nodes/b/node.key")
    context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")  # whatever a client may offer
    context.set_alpn_protocols(["h2"])
    host, port = world.manifest.member("a").address.split(":")
    name = host_name(world.manifest.network, "a")
    with (
        socket.create_connection((host, int(port)), timeout=LIMIT) as raw,
        context.wrap_socket(raw, server_hostname=name) as wrapped,
    ):
        return wrapped.version()


# ---- starting


def test_a_taken_address_is_a_clear_error(secure):
    address = secure.manifest.member("a").address

    async def work():
        async with secure.running("a"):
            other = secure.make("a")
            with pytest.raises(
                NodeError,
                match=f"The address '{address}' cannot be listened on: another process has it",
            ):
                await other.start(secure.nodes["a"])
            await other.stop()

    run(work())


def test_a_node_can_listen_elsewhere_than_where_it_is_called(secure, tools):
    (port,) = tools["free_ports"](1)
    assert (
        GrpcTransport(
            secure.manifest, secure.folder / "nodes" / "a", "a", address=f"0.0.0.0:{port}"
        ).address
        == f"0.0.0.0:{port}"
    )


def test_the_bundle_of_another_node_is_refused(secure):
    with pytest.raises(
        NodeError,
        match="is the bundle of the node 'b', or of another network: expected that of 'a'",
    ):
        GrpcTransport(secure.manifest, secure.folder / "nodes" / "b", "a")


def test_plaintext_needs_the_network_and_the_flag(secure, tmp_path, tools):
    plain = tools["World"]("plaintext", tmp_path / "plain", tools["CONFIG"])
    with pytest.raises(ConfigError, match="--insecure-plaintext: this network was created secure"):
        GrpcTransport(secure.manifest, secure.folder / "nodes" / "a", "a", insecure_plaintext=True)
    with pytest.raises(ConfigError, match="run its nodes with --insecure-plaintext"):
        GrpcTransport(plain.manifest, plain.folder / "nodes" / "a", "a")


def test_plaintext_warns_at_every_start(tmp_path, tools, caplog):
    plain = tools["World"]("plaintext", tmp_path / "plain", tools["CONFIG"])

    async def work():
        for _ in range(2):
            async with plain.running("a"):
                pass

    run(work())
    assert caplog.text.count("INSECURE: this node speaks plaintext") == 2
