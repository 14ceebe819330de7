"""What the TLS front costs: calls and models through it, and through gRPC's own TLS.

    python benchmarks/tls_front.py

Server and client are two processes of this machine. Both ways alternate, and the best of each
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
from fedspd.node.identity.credentials import Credentials
from fedspd.node.identity.manifest import Manifest
from fedspd.node.wire.grpc_transport import GrpcTransport
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


class DirectTransport(GrpcTransport):
    """The transport without the front, as it was before: gRPC terminates TLS."""

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


def serve(bundle: Path, is_direct: bool, pipe: Connection) -> None:
    """Run node a until the pipe says something; send the processor seconds that it took."""

    async def live() -> None:
        kind = DirectTransport if is_direct else GrpcTransport
        manifest = Manifest.load(bundle / "manifest.json")
        transport = kind(manifest, bundle, bundle.name)
        transport.bundle = bundle
        await transport.start(Node(manifest))
        started = time.process_time()
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        pipe.send(time.process_time() - started)
        await transport.stop()

    torch.set_num_threads(1)
    asyncio.run(live())


async def measure(bundle: Path) -> tuple[float, float]:
    """Return the median seconds of a hello, and the best bytes per second of a fetch."""
    manifest = Manifest.load(bundle / "manifest.json")
    transport = GrpcTransport(manifest, bundle, bundle.name)
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
    return statistics.median(seconds[1:]), max(fetches)


def play(network: Path, is_direct: bool) -> tuple[float, float, float]:
    """Return the latency, the throughput and the server's processor seconds."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(network / "nodes" / "a", is_direct, there))
    server.start()
    here.recv()
    latency, throughput = asyncio.run(measure(network / "nodes" / "b"))
    here.send("stop")
    seconds = here.recv()
    server.join()
    return latency, throughput, seconds


def main() -> None:
    """Print both ways and their ratio."""
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        ports = [each.getsockname()[1] for each in (a, b)]
    tree = {"clients": 2, "method": "fedavg", "clusters": 1, "topology": {"kind": "complete"}}
    config = validate({**tree, "model": {"name": "mlp", "hidden": HIDDEN}})
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip("ab", ports, strict=True)}
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder) / "plant"
        create(config, network, addresses=addresses, example=((1, 28, 28), 10))
        runs = [(play(network, True), play(network, False)) for _ in range(REPEATS)]
    direct, front = zip(*runs, strict=True)
    for i, (what, unit, best) in enumerate(
        (("hello", 1e3, min), ("model", 1e-6, max), ("processor of the server", 1.0, min))
    ):
        old, new = (unit * best(run[i] for run in side) for side in (direct, front))
        print(f"{what}: gRPC {old:.2f}, front {new:.2f}, ratio {new / old:.2f}")


if __name__ == "__main__":
    main()
