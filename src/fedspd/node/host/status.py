"""A node's health, status and metrics, over HTTP and only on this machine."""

import asyncio
import http.client
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedspd.core.errors import NodeError, StorageError
from fedspd.core.scores import OTHER_SCORES, RMSE
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

if TYPE_CHECKING:  # these import torch, which 'fedspd node status' does not need
    from fedspd.node.peer.peer import Peer
    from fedspd.node.wire.grpc_transport import GrpcTransport

HOST = "127.0.0.1"
MAX_REQUEST_BYTES = 4096
TIMEOUT_SECONDS = 5.0


class Sample(NamedTuple):
    """One value of a Prometheus metric."""

    name: str
    kind: str
    labels: dict[str, str]
    value: float


class StatusServer:
    """A server of /health, /status (JSON) and /metrics (Prometheus).

    It writes its port to status.json in the node's folder.
    """

    def __init__(self, status: Callable[[], Json], folder: Path, port: int = 0) -> None:
        self.status, self.folder, self.port = status, folder, port
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on the port, or on any free one if it is 0."""
        try:
            self._server = await asyncio.start_server(
                self._answer, HOST, self.port, limit=MAX_REQUEST_BYTES
            )
        except OSError as error:
            raise NodeError(
                f"--status-port {self.port}: cannot be used ({error.strerror}); "
                "expected a free port. Give another one."
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]
        RunFolder(self.folder).write("status.json", {"port": self.port})

    async def stop(self) -> None:
        """Stop listening and remove status.json."""
        if self._server is not None:
            self._server.close()
            (self.folder / "status.json").unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_SECONDS)
            code, kind, body = self._page(request.decode("latin-1").split())
            lines = [
                f"HTTP/1.0 {code}",
                f"Content-Type: {kind}",
                f"Content-Length: {len(body)}",
                "Connection: close",
            ]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            await asyncio.wait_for(writer.drain(), TIMEOUT_SECONDS)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client has gone, or does not speak HTTP
        finally:
            writer.close()

    def _page(self, words: list[str]) -> tuple[str, str, bytes]:
        path = words[1] if len(words) > 1 and words[0] == "GET" else ""
        status = self.status()
        if path == "/status":
            return "200 OK", "application/json", json.dumps(status).encode()
        if path == "/health" and status["healthy"]:
            return "200 OK", "text/plain", b"ok\n"
        if path == "/health":
            return "503 Service Unavailable", "text/plain", b"no neighbour is alive\n"
        if path == "/metrics":
            return "200 OK", "text/plain; version=0.0.4", format_samples(samples(status)).encode()
        return "404 Not Found", "text/plain", b"there is /health, /status and /metrics\n"


def node_status(
    peer: "Peer", transport: "GrpcTransport", valid_until: datetime | None = None
) -> Json:
    """Return the status of a running node, whose certificate is valid until then."""
    detector, protocol, last = peer.detector, peer.protocol, peer.journal.last
    neighbours = {
        name: {
            "alive": detector.is_alive(name),
            "round": neighbour.round,
            "seen_seconds_ago": None
            if neighbour.last_seen is None
            else round(detector.clock() - neighbour.last_seen, 1),
            "malformed": transport.malformed[name],
            "muted": transport.is_muted(name),
            "revoked": transport.tls is not None and transport.tls.is_revoked(name),
            "refused_models": protocol.refused[name],
            "waited_seconds": round(neighbour.waited_seconds, 3),
            "last_error": protocol.last_errors.get(name),
        }
        for name, neighbour in detector.neighbours.items()
    }
    return {
        "node": peer.context.name,
        "running": True,
        "healthy": not neighbours or any(each["alive"] for each in neighbours.values()),
        "round": protocol.current.round,
        "rounds": peer.context.rounds,
        "certificate_until": valid_until and valid_until.isoformat(),
        "done": last.get("event") == "final",
        "neighbours": neighbours,
        "mixture": last.get("mixture"),
        "accuracy": last.get("accuracy"),
        "scores": {s.name: last[s.name] for s in (RMSE, *OTHER_SCORES) if s.name in last},
        "deadline": detector.deadline(),
        "bytes": {"sent": dict(transport.sent), "received": dict(transport.received)},
        "refused": dict(transport.rejected),
        "refused_means": peer.refused_means,
        "privacy": None if peer.privacy is None else peer.privacy.report(),
        "last_round": last,
    }


def samples(status: Json) -> Iterator[Sample]:
    """Yield the samples of every metric; those of one name are consecutive, as the format asks."""
    yield Sample("fedspd_round", "gauge", {}, status["round"])
    yield Sample("fedspd_rounds", "gauge", {}, status["rounds"])
    yield Sample("fedspd_deadline_seconds", "gauge", {}, status["deadline"])
    if until := status["certificate_until"]:
        expiry = datetime.fromisoformat(until).timestamp()
        yield Sample("fedspd_certificate_expiry_timestamp_seconds", "gauge", {}, expiry)
    for metric, kind, field in (
        ("fedspd_neighbour_alive", "gauge", "alive"),
        ("fedspd_neighbour_round", "gauge", "round"),
        ("fedspd_neighbour_malformed_total", "counter", "malformed"),
        ("fedspd_neighbour_refused_models_total", "counter", "refused_models"),
        ("fedspd_neighbour_waited_seconds_total", "counter", "waited_seconds"),
    ):
        for name, neighbour in status["neighbours"].items():
            yield Sample(metric, kind, {"neighbour": name}, float(neighbour[field]))
    for metric, direction in (
        ("fedspd_sent_bytes_total", "sent"),
        ("fedspd_received_bytes_total", "received"),
    ):
        for name, count in status["bytes"][direction].items():
            yield Sample(metric, "counter", {"neighbour": name}, count)
    for reason, count in status["refused"].items():
        yield Sample("fedspd_refused_total", "counter", {"reason": reason}, count)
    yield Sample("fedspd_refused_means_total", "counter", {}, status["refused_means"])
    if status["privacy"] is not None:
        yield Sample("fedspd_privacy_epsilon", "gauge", {}, status["privacy"]["epsilon"])
        yield Sample("fedspd_privacy_silent", "gauge", {}, float(status["privacy"]["silent"]))
    if status["accuracy"] is not None:
        yield Sample("fedspd_accuracy", "gauge", {}, status["accuracy"])
    for name, value in status["scores"].items():
        if value is not None:
            yield Sample(f"fedspd_{name}", "gauge", {}, value)
    for s, share in enumerate(status["mixture"] or ()):
        yield Sample("fedspd_mixture", "gauge", {"cluster": str(s)}, share)


def format_samples(found: Iterable[Sample]) -> str:
    """Return the samples in Prometheus' text format."""
    lines, declared = [], set()
    for name, kind, labels, value in found:
        if name not in declared:
            lines.append(f"# TYPE {name} {kind}")
            declared.add(name)
        pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def ask_status(folder: Path) -> Json | None:
    """Return the status of the node that runs in this folder, or None if none answers."""
    try:
        port = RunFolder(folder).read("status.json")["port"]
        with closing(http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_SECONDS)) as connection:
            connection.request("GET", "/status")
            answer = json.load(connection.getresponse())
    except (OSError, ValueError, KeyError, StorageError, http.client.HTTPException):
        return None
    return answer if isinstance(answer, dict) else None  # another service may have the port now
