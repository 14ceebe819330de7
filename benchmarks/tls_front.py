"""What a node's own sockets cost: calls and models through its TLS front and its outlets.

They stand beside gRPC's own TLS.

    python benchmarks/tls_front.py

Server and client are two processes of this machine. The ways alternate, and the best of each
counts, so that other work on the machine disturbs the ratio less.
"""

import asyncio
import multiprocessing
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import torch

from fedspd.config import validate
from fedspd.node.host.provisioning import create
from fedspd.node.identity.certificates import host_name
from fedspd.node.identity.credentials import Credentials
from fedspd.node.identity.manifest import Manifest
from fedspd.node.wire.grpc_transport import CLIENT_OPTIONS, GrpcTransport
from fedspd.node.wire.messages import Announcement, Hello, Offer, Request

REPEATS, HELLOS, FETCHES = 3, 200, 6
HIDDEN = 4000  # 13 MB a model


class Node:
    """A handler that answers at once."""

    def __init__(self, manifest: Manifest) -> None:
        self.agreement, self.model_KP = manifest.agreement, torch.randn(1, manifest.size)

    def handle_hello(self, sender: str, hello: Hello) -> Hello:
        return Hello(self.agreement, 1, "host:1")

    def handle_announcement(self, sender: str, announcement: Announcement) -> None: ...

    def handle_request(self, sender: str, request: Request) -> Offer:
        return Offer((0,), self.model_KP)

    def handle_mute(self, neighbour: str) -> None: ...


class FrontTransport(GrpcTransport):
    """The transport without outlets: gRPC calls the neighbour's address itself."""

    async def _open_channel(self, neighbour: str, address: str) -> Any:
        name = host_name(self.manifest.network, neighbour)
        options = [*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", name)]
        return grpc.aio.secure_channel(address, self.tls.channel_credentials, options=options)


class DirectTransport(FrontTransport):
    """The transport without the front, too: gRPC terminates TLS."""

    def _bind(self) -> None:
        own = Credentials.load(self.bundle)
        credentials = grpc.ssl_server_credentials(
            [(own.key, own.certificate)], own.ca, require_client_auth=True
        )
        self._server.add_secure_port(self.address, credentials)

    async def _handle(self, method: Any, requests: Any, context: Any) -> Any:
        async for request in requests:
            async for frame in self.serve("b", method, request):
                yield frame


WAYS = {"gRPC": DirectTransport, "front": FrontTransport, "front and outlets": GrpcTransport}


def serve(bundle: Path, way: str, pipe: Connection) -> None:
    """Run node a until the pipe says something; send the processor seconds that it took."""

    async def live() -> None:
        manifest = Manifest.load(bundle / "manifest.json")
        transport = WAYS[way](manifest, bundle, bundle.name)
        transport.bundle = bundle
        await transport.start(Node(manifest))
        started = time.process_time()
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        pipe.send(time.process_time() - started)
        await transport.stop()

    torch.set_num_threads(1)
    asyncio.run(live())


async def measure(bundle: Path, way: str) -> tuple[float, float, float]:
    """Return the median seconds of a hello, the best bytes per second of a fetch, the caller's CPU.

    The last is processor seconds of all calls.
    """
    manifest = Manifest.load(bundle / "manifest.json")
    transport, began = WAYS[way](manifest, bundle, bundle.name), time.process_time()
    hello, seconds = Hello(manifest.agreement, 1, "host:1"), []
    for _ in range(HELLOS):
        started = time.perf_counter()
        await transport.hello("a", hello, 60)
        seconds.append(time.perf_counter() - started)
    fetches = []
    for _ in range(FETCHES):
        started = time.perf_counter()
        await transport.fetch("a", Request(1, 0, (0,), manifest.size, True), 60)
        fetches.append(4 * manifest.size / (time.perf_counter() - started))
    await transport.stop()
    return statistics.median(seconds[1:]), max(fetches), time.process_time() - began


def play(network: Path, way: str) -> tuple[float, float, float, float]:
    """Return the latency, the throughput and the processor seconds of caller and server."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(network / "nodes" / "a", way, there))
    server.start()
    here.recv()
    found = asyncio.run(measure(network / "nodes" / "b", way))
    here.send("stop")
    seconds = here.recv()
    server.join()
    return *found, seconds


def main() -> None:
    """Print all ways, and their ratio to gRPC."""
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        ports = [each.getsockname()[1] for each in (a, b)]
    tree = {"clients": 2, "method": "fedavg", "clusters": 1, "topology": {"kind": "complete"}}
    config = validate({**tree, "model": {"name": "mlp", "hidden": HIDDEN}})
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip("ab", ports, strict=True)}
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder) / "plant"
        create(config, network, addresses=addresses, example=((1, 28, 28), 10))
        runs = [[play(network, way) for way in WAYS] for _ in range(REPEATS)]
    for i, (what, unit, best) in enumerate(
        (
            ("hello (ms)", 1e3, min),
            ("model (MB/s)", 1e-6, max),
            ("processor of the caller (s)", 1.0, min),
            ("processor of the server (s)", 1.0, min),
        )
    ):
        found = [unit * best(run[w][i] for run in runs) for w in range(len(WAYS))]
        cells = [
            f"{way} {value:.2f} ({value / found[0]:.2f})"
            for way, value in zip(WAYS, found, strict=True)
        ]
        print(f"{what}: {', '.join(cells)}")


if __name__ == "__main__":
    main()
