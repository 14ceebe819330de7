"""Authentication over the wire: certificates, TLS versions, and how a node starts."""

import asyncio
import socket
import ssl
import subprocess
import sys
import tempfile
from datetime import timedelta

import grpc
import pytest

from chaos.hosts import free_addresses
from fedspd.core.errors import (
    ConfigError,
    NodeError,
    RefusedError,
    RejectedError,
    TransportError,
    UnreachableError,
)
from fedspd.node.host.provisioning import add, revoke
from fedspd.node.identity.certificates import host_name, now
from fedspd.node.identity.credentials import Authority, Credentials
from fedspd.node.identity.manifest import Manifest
from fedspd.node.wire.codec import WireLimits, encode
from fedspd.node.wire.grpc_transport import SERVICE, GrpcTransport, TlsContext, _translate

TIMEOUT = 200.0  # seconds: far more than any of these calls needs


def run(work):
    return asyncio.run(work)


async def call_hello(world, own):
    """Send a hello of b to a with these credentials, and return or raise what gRPC does."""
    credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
    target = ("grpc.ssl_target_name_override", host_name(world.manifest.network, "a"))
    address = world.manifest.member("a").address
    message = encode(WireLimits.from_manifest(world.manifest), "b", world.hello())
    async with grpc.aio.secure_channel(address, credentials, [target]) as channel:
        return await channel.unary_unary(f"/{SERVICE}/Hello")(message, timeout=TIMEOUT)


def tls_of(world, name):
    return TlsContext(world.manifest, world.folder / "nodes" / name, name)


# ---- certificates


def test_node_refuses_a_foreign_authority_at_the_handshake(secure, capfd):
    """The caller has the network's ca.crt, which is public, but no certificate of it."""
    forged = Authority.create().issue("b", 1, ["a"], "127.0.0.1:1")
    ca = (secure.folder / "ca.crt").read_bytes()

    async def work():
        async with secure.running("a", "d") as (a, d):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call_hello(secure, Credentials(ca, forged.certificate, forged.key))
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError):
                await call_hello(secure, forged)  # nor does the caller trust a
            await d.hello("a", secure.hello(), TIMEOUT)
            assert [sender for sender, _ in secure.nodes["a"].received] == ["d"]
            assert set(a.rejected) == {"handshake"}

    run(work())
    assert capfd.readouterr().err == ""  # gRPC itself logs nothing


def test_node_refuses_an_expired_certificate_at_the_handshake(secure, caplog, monkeypatch):
    authority = Authority.load(secure.folder)
    monkeypatch.setattr("fedspd.node.identity.certificates.now", lambda: now() - timedelta(days=3))
    expired = authority.issue("b", 1, ["a"], "127.0.0.1:1", days=1)

    async def work():
        async with secure.running("a"):
            with pytest.raises(grpc.aio.AioRpcError):
                await call_hello(secure, expired)
            assert secure.nodes["a"].received == []

    run(work())
    assert "certificate: certificate has expired." in caplog.text


def test_transport_does_not_talk_to_another_node_at_a_neighbours_address(secure):
    """c, with its own valid certificate, listens at the address of b."""
    address = secure.manifest.member("b").address
    sentence = r"'b' cannot be reached \(127.0.0.1:\d+: .*Hostname Verification"

    async def work():
        bundle = secure.folder / "nodes" / "c"
        impostor = GrpcTransport(secure.manifest, bundle, "c", address=address)
        async with secure.running("a", impostor) as (a, _):
            with pytest.raises(UnreachableError, match=sentence):
                await a.hello("b", secure.hello(), TIMEOUT)
            assert secure.nodes["c"].received == []

    run(work())


def test_node_rejects_a_caller_without_a_certificate(secure):
    ca = (secure.folder / "ca.crt").read_bytes()

    async def work():
        async with secure.running("a"):
            with pytest.raises(grpc.aio.AioRpcError):
                await call_hello(secure, Credentials(ca, None, None))
            assert secure.nodes["a"].received == []

    run(work())


def test_transport_neither_answers_nor_calls_a_revoked_node(secure, caplog):
    async def work():
        async with secure.running("a", "b", "d") as (a, b, d):
            await b.hello("a", secure.hello(), TIMEOUT)
            revoke(secure.folder, "b")
            with pytest.raises(TransportError):  # over its open connection
                await b.hello("a", secure.hello(), TIMEOUT)
            with pytest.raises(grpc.aio.AioRpcError):  # at the handshake
                await call_hello(secure, Credentials.load(secure.folder / "nodes" / "b"))
            with pytest.raises(RejectedError, match="'b' is not called: its certificate is rev"):
                await a.hello("b", secure.hello(), TIMEOUT)
            await d.hello("a", secure.hello(), TIMEOUT)
            assert set(a.rejected) == {"revoked"}
            assert [sender for sender, _ in secure.nodes["a"].received] == ["b", "d"]
            assert 'reason="revoked"' in caplog.text
            assert not a.is_muted("b")

    run(work())


def test_revocation_ends_the_calls_to_a_node_too(secure):
    """A fetch may last for two minutes, and an open connection for ever."""

    async def serve(self, sender, method, data):
        await asyncio.Event().wait()
        yield

    async def work():
        async with secure.running("a", secure.transport("b", serve=serve)) as (a, b):
            fetch = asyncio.create_task(a.fetch("b", secure.request, TIMEOUT))
            while not sum(b._active_calls.values()):
                await asyncio.sleep(0.01)
            revoke(secure.folder, "b")
            with pytest.raises(RejectedError, match="its certificate is revoked"):
                await a.hello("b", secure.hello(), TIMEOUT)  # the next heartbeat
            async with asyncio.timeout(TIMEOUT / 10):
                with pytest.raises(TransportError):
                    await fetch
            assert (a._channels, a._outlets) == ({}, {})

    run(work())


def test_authenticate_verifies_again_when_a_certificate_expires(secure):
    tls, certificate = tls_of(secure, "a"), (secure.folder / "nodes/b/node.crt").read_bytes()
    identity = tls.authenticate(certificate)
    assert identity.name == "b"
    tls.clock = tls.verifier._clock = lambda: now() + timedelta(days=400)
    with pytest.raises(RejectedError, match=r"^expired: "):
        tls.authenticate(certificate)
    with pytest.raises(RejectedError, match=r"^expired: "):
        tls.check(identity)


def test_authenticate_remembers_a_bounded_number_of_certificates(secure):
    authority, tls = Authority.load(secure.folder), tls_of(secure, "a")
    for number in range(300):
        own = authority.issue("b", 1, ["a"], f"127.0.0.1:{number + 1}")
        tls.authenticate(own.certificate)
    assert len(tls._verified) <= 256
    assert tls.identities["b"].address == "127.0.0.1:300"


def test_transport_talks_to_a_newcomer_that_its_manifest_lacks(secure):
    async def work():
        async with secure.running("a") as (a,):
            add(secure.folder, "new", ["a"], *free_addresses(1))
            bundle = secure.folder / "nodes" / "new"
            newcomer = GrpcTransport(Manifest.load(bundle / "manifest.json"), bundle, "new")
            async with secure.running(newcomer) as (new,):
                await new.hello("a", secure.hello(), TIMEOUT)
                assert [sender for sender, _ in secure.nodes["a"].received] == ["new"]
                assert a.client_of("new") == 4
                assert (await a.hello("new", secure.hello(), TIMEOUT)).round == 7

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


def test_node_accepts_tls_1_3_only(secure):
    """The node is a separate process, because gRPC reads its ciphers at import."""
    command = [sys.executable, "-c", NODE, str(secure.folder / "nodes" / "a")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as node:
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
    context.set_ciphers("ALL:@SECLEVEL=0")  # everything that a client can offer
    context.set_alpn_protocols(["h2"])
    host, port = world.manifest.member("a").address.split(":")
    name = host_name(world.manifest.network, "a")
    with (
        socket.create_connection((host, int(port)), timeout=TIMEOUT) as raw,
        context.wrap_socket(raw, server_hostname=name) as wrapped,
    ):
        return wrapped.version()


# ---- start


def test_transport_names_an_address_in_use(secure, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sentence = f"address = '{secure.manifest.member('a').address}': cannot listen there"

    async def work():
        async with secure.running("a") as (a,):
            other = secure.transport("a")
            with pytest.raises(NodeError, match=sentence):
                await other.start(secure.nodes["a"])
            assert list(tmp_path.glob("fedspd-*")) == [a._front._folder]
            await other.stop()

    run(work())


def test_transport_listens_at_another_address_than_its_members(secure):
    port = free_addresses(1)[0].rpartition(":")[2]
    bundle = secure.folder / "nodes" / "a"
    transport = GrpcTransport(secure.manifest, bundle, "a", address=f"0.0.0.0:{port}")
    assert transport.address == f"0.0.0.0:{port}"


def test_transport_rejects_the_bundle_of_another_node(secure):
    sentence = "the bundle of the node 'b' or of another network; expected the bundle of 'a'"
    with pytest.raises(NodeError, match=sentence):
        GrpcTransport(secure.manifest, secure.folder / "nodes" / "b", "a")


def test_plaintext_needs_the_network_and_the_option(secure, tmp_path, tools):
    plain = tools["World"]("plaintext", tmp_path / "plain", tools["CONFIG"])
    with pytest.raises(ConfigError, match="--insecure-plaintext: this network was created with T"):
        GrpcTransport(secure.manifest, secure.folder / "nodes" / "a", "a", insecure_plaintext=True)
    with pytest.raises(
        ConfigError, match=r"secure = false: .* expected the option --insecure-plai"
    ):
        GrpcTransport(plain.manifest, plain.folder / "nodes" / "a", "a")


def test_plaintext_is_logged_at_every_start(tmp_path, tools, caplog):
    plain = tools["World"]("plaintext", tmp_path / "plain", tools["CONFIG"])

    async def work():
        for _ in range(2):
            async with plain.running("a"):
                pass

    run(work())
    assert caplog.text.count("insecure plaintext enabled") == 2


# ---- neighbours that cannot be reached


def test_call_of_a_node_that_does_not_listen_is_refused_at_once(secure):
    """The neighbour is down at once: nobody waits ten seconds for it to be silent."""

    async def work():
        async with secure.running("a") as (a,):
            with pytest.raises(RefusedError, match=r"'b' .* .connection refused: 127.0.0.1:"):
                await a.hello("b", secure.hello(), TIMEOUT)

    run(work())


def test_name_that_does_not_resolve_is_refused(secure):
    """gRPC says so in these words; a real lookup would need a network."""
    details = "DNS resolution failed for b.plant.example:7700: Domain name not found"
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details)
    assert isinstance(_translate("b", error), RefusedError)
    closed = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "Socket closed")
    assert not isinstance(_translate("b", closed), RefusedError)


@pytest.mark.parametrize("days", [-400, 400])
def test_node_whose_clock_is_400_days_off_does_not_start(secure, days):
    """So its neighbours find nobody at its address, and go on at once."""
    with pytest.raises(NodeError, match=r"(expired|not yet valid): .* Set this device's clock"):
        Credentials.load(secure.folder / "nodes" / "b", lambda: now() + timedelta(days=days))
