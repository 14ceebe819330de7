"""A node's health, status and metrics, over HTTP on this machine alone."""

import asyncio
import http.client
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

from fedspd.core.errors import NodeError, StorageError
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

HOST = "127.0.0.1"
REQUEST = 4096  # bytes are enough for a request
ANSWER_LIMIT = 5.0  # seconds
Metric = tuple[str, str, dict[str, str], float]  # name, kind, labels, value


class StatusServer:
    """/health, /status (JSON) and /metrics (Prometheus); the port stands in the node's folder."""

    def __init__(self, status: Callable[[], Json], folder: Path, port: int = 0) -> None:
        self.status, self.folder, self.port = status, folder, port
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        try:
            self._server = await asyncio.start_server(self._answer, HOST, self.port, limit=REQUEST)
        except OSError as error:
            raise NodeError(
                f"--status-port {self.port} cannot be used ({error.strerror}): give another one."
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]
        RunFolder(self.folder).write("status.json", {"port": self.port})

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            (self.folder / "status.json").unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), ANSWER_LIMIT)
            code, kind, body = self._page(request.decode("latin-1").split())
            head = f"HTTP/1.0 {code}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            await asyncio.wait_for(writer.drain(), ANSWER_LIMIT)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked has gone, or speaks no HTTP
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
            return "200 OK", "text/plain; version=0.0.4", exposition(metrics(status)).encode()
        return "404 Not Found", "text/plain", b"there is /health, /status and /metrics\n"


def metrics(status: Json) -> Iterator[Metric]:
    """The samples of one name follow each other, as the format wants it."""
    yield "fedspd_round", "gauge", {}, status["round"]
    yield "fedspd_rounds", "gauge", {}, status["rounds"]
    yield "fedspd_deadline_seconds", "gauge", {}, status["deadline"]
    for name, known in status["neighbours"].items():
        yield "fedspd_neighbour_alive", "gauge", {"neighbour": name}, int(known["alive"])
    for name, known in status["neighbours"].items():
        yield "fedspd_neighbour_round", "gauge", {"neighbour": name}, known["round"]
    for name, known in status["neighbours"].items():
        yield "fedspd_neighbour_malformed_total", "counter", {"neighbour": name}, known["malformed"]
    for kind in ("sent", "received"):
        for name, count in status["bytes"][kind].items():
            yield f"fedspd_{kind}_bytes_total", "counter", {"neighbour": name}, count
    for reason, count in status["refused"].items():
        yield "fedspd_refused_total", "counter", {"reason": reason}, count
    if status["accuracy"] is not None:
        yield "fedspd_accuracy", "gauge", {}, status["accuracy"]
    for s, share in enumerate(status["mixture"] or ()):
        yield "fedspd_mixture", "gauge", {"cluster": str(s)}, share


def exposition(found: Iterable[Metric]) -> str:
    """Prometheus' text format, which is ten lines of code."""
    lines, told = [], set()
    for name, kind, labels, value in found:
        if name not in told:
            lines.append(f"# TYPE {name} {kind}")
            told.add(name)
        marks = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{marks}}} {value}" if marks else f"{name} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def ask(folder: Path) -> Json | None:
    """The status of the node that runs in this folder; None where none does."""
    try:
        connection = http.client.HTTPConnection(
            HOST, RunFolder(folder).read("status.json")["port"], timeout=ANSWER_LIMIT
        )
        with closing(connection):
            connection.request("GET", "/status")
            found = json.load(connection.getresponse())
            return (
                found if isinstance(found, dict) else None
            )  # the port may have gone to another service
    except (OSError, ValueError, KeyError, StorageError, http.client.HTTPException):
        return None
