"""A node's status for people, programs and Prometheus."""

import asyncio
import http.client
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedspd.cli.node_status import print_status, read_status
from fedspd.core.errors import StorageError
from fedspd.node.host import status
from fedspd.node.host.status import StatusServer
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

STATUS: Json = {
    "node": "a",
    "running": True,
    "healthy": True,
    "round": 12,
    "rounds": 30,
    "certificate_until": "2030-01-01T00:00:00+00:00",
    "done": False,
    "neighbours": {
        "b": {
            "alive": True,
            "round": 12,
            "seen_seconds_ago": 0.3,
            "malformed": 0,
            "refused_models": 0,
            "waited_seconds": 0.5,
            "muted": False,
            "revoked": False,
            "last_error": None,
        },
        "c": {
            "alive": False,
            "round": 9,
            "seen_seconds_ago": None,
            "malformed": 7,
            "refused_models": 2,
            "waited_seconds": 61.0,
            "muted": False,
            "revoked": False,
            "last_error": "'c' did not answer in time.",
        },
    },
    "mixture": [0.25, 0.75],
    "accuracy": 0.875,
    "scores": {"macro_f1": 0.5, "auc": None},
    "deadline": 10.0,
    "bytes": {"sent": {"b": 123_456_789}, "received": {"b": 1000, "c": 2000}},
    "refused_means": 3,
    "privacy": {"delta": 1e-5, "budget": 8.0, "epsilon": 7.25, "neighbours": {}, "silent": True},
    "refused": {"size": 2, 'so-called "reason"\\': 1},
    "last_round": {
        "event": "round",
        "round": 11,
        "accuracy": 0.875,
        "mixture": [0.25, 0.75],
        "loss": 1.5,
    },
}


def serve(content: Any, folder: Path, ask: Callable[[int], Any]) -> Any:
    """Return the answer of `ask`, called with the port of a server of this status."""

    async def work() -> Any:
        server = StatusServer(lambda: content, folder)
        await server.start()
        try:
            return await asyncio.to_thread(ask, server.port)
        finally:
            await server.stop()

    return asyncio.run(work())


def get(path: str, method: str = "GET") -> Callable[[int], tuple[int, str]]:
    def ask(port: int) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    return ask


def test_health_is_ok_while_a_neighbour_is_alive(tmp_path: Path) -> None:
    assert serve(STATUS, tmp_path, get("/health")) == (200, "ok\n")
    assert serve({**STATUS, "healthy": False}, tmp_path, get("/health")) == (
        503,
        "no neighbour is alive\n",
    )


def test_server_answers_status_as_json_and_nothing_else(tmp_path: Path) -> None:
    code, body = serve(STATUS, tmp_path, get("/status"))
    assert (code, json.loads(body)) == (200, STATUS)
    assert serve(STATUS, tmp_path, get("/"))[0] == 404
    assert serve(STATUS, tmp_path, get("/../../etc/passwd"))[0] == 404
    assert serve(STATUS, tmp_path, get("/status", "POST"))[0] == 404


def test_metrics_are_read_by_prometheus(tmp_path: Path) -> None:
    code, body = serve(STATUS, tmp_path, get("/metrics"))
    assert code == 200
    families = list(text_string_to_metric_families(body))
    # the samples of one family are consecutive
    assert len({family.name for family in families}) == len(families)
    found = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert found == {
        ("fedspd_round",): 12,
        ("fedspd_rounds",): 30,
        ("fedspd_deadline_seconds",): 10,
        ("fedspd_certificate_expiry_timestamp_seconds",): 1_893_456_000,  # 2030-01-01
        ("fedspd_neighbour_alive", "b"): 1,
        ("fedspd_neighbour_alive", "c"): 0,
        ("fedspd_neighbour_round", "b"): 12,
        ("fedspd_neighbour_round", "c"): 9,
        ("fedspd_neighbour_malformed_total", "b"): 0,
        ("fedspd_neighbour_malformed_total", "c"): 7,
        ("fedspd_neighbour_refused_models_total", "b"): 0,
        ("fedspd_neighbour_refused_models_total", "c"): 2,
        ("fedspd_neighbour_waited_seconds_total", "b"): 0.5,
        ("fedspd_neighbour_waited_seconds_total", "c"): 61,
        ("fedspd_sent_bytes_total", "b"): 123_456_789,
        ("fedspd_received_bytes_total", "b"): 1000,
        ("fedspd_received_bytes_total", "c"): 2000,
        ("fedspd_refused_total", "size"): 2,
        ("fedspd_refused_total", 'so-called "reason"\\'): 1,
        ("fedspd_refused_means_total",): 3,
        ("fedspd_privacy_epsilon",): 7.25,
        ("fedspd_privacy_silent",): 1,
        ("fedspd_accuracy",): 0.875,
        ("fedspd_macro_f1",): 0.5,
        ("fedspd_mixture", "0"): 0.25,
        ("fedspd_mixture", "1"): 0.75,
    }


def test_metrics_have_no_accuracy_before_the_first_round(tmp_path: Path) -> None:
    before = {**STATUS, "accuracy": None, "mixture": None, "privacy": None}
    _, body = serve(before, tmp_path, get("/metrics"))
    assert "fedspd_accuracy" not in body
    assert "fedspd_privacy" not in body
    assert "fedspd_mixture" not in body


def test_server_listens_on_loopback_alone(tmp_path: Path) -> None:
    """A server on all addresses would answer on 127.0.0.2, another one of every Linux machine."""

    def elsewhere(port: int) -> None:
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))

    serve(STATUS, tmp_path, elsewhere)


def test_server_closes_a_connection_with_an_oversized_request(tmp_path: Path) -> None:
    def shout(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(b"GET /status " + 3 * status.MAX_REQUEST_BYTES * b"x")
            try:
                return line.recv(100)
            except ConnectionResetError:
                return b""

    assert serve(STATUS, tmp_path, shout) == b""


def test_status_comes_from_the_running_node_or_from_its_journal(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no journal of a node; expected a folder"):
        read_status(tmp_path)
    with pytest.raises(StorageError, match=r"run\.json': cannot be read \(File name too long\)"):
        read_status(tmp_path / (300 * "a"))
    run_folder = RunFolder(tmp_path)
    run_folder.begin({"node": "a"})
    stopped = {
        "node": "a", "running": False, "locked": False, "round": 0, "done": False,
        "privacy": None, "last_round": {},
    }  # fmt: skip
    assert read_status(tmp_path) == stopped
    assert serve(STATUS, tmp_path, lambda port: read_status(tmp_path)) == STATUS
    run_folder.append({"event": "final", "round": 31})
    assert read_status(tmp_path) == {
        **stopped,
        "round": 31,
        "done": True,
        "last_round": {"event": "final", "round": 31},
    }


def test_status_tells_a_suspended_node_from_a_stopped_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = RunFolder(tmp_path)
    run_folder.begin({"node": "a"})
    run_folder.lock()  # as a process that starts, or got SIGSTOP
    print_status(read_status(tmp_path))
    run_folder.unlock()
    print_status(read_status(tmp_path))
    first, second = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a:")]
    assert first == "a: does not answer, starts, or is suspended, round 0"
    assert second == "a: not running, round 0"


@pytest.mark.parametrize("content", [STATUS, [], None, "node", 7])
def test_status_ignores_another_node_or_service_at_the_port(tmp_path: Path, content: Any) -> None:
    RunFolder(tmp_path).begin({"node": "z"})
    assert serve(content, tmp_path, lambda port: read_status(tmp_path))["running"] is False


def test_status_table_shows_the_neighbours_and_the_last_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    print_status(STATUS)
    printed = capsys.readouterr().out
    assert "a: running, round 12 of 30" in printed
    assert "mixture: [0.25, 0.75]" in printed
    assert "epsilon: 7.25 of 8 at delta = 1e-05: the budget is spent, this node sends" in printed
    assert [
        word
        for word in (
            "123,457",
            "certificate valid until: 2030-01-01",
            "'c' did not answer in time.",
            "never",
            "rejected: size: 2",
        )
        if word not in printed
    ] == []
    revoked = {**STATUS["neighbours"]["c"], "revoked": True}
    print_status({**STATUS, "neighbours": {"c": revoked}})
    assert "│ c         │ revoked │" in capsys.readouterr().out
    print_status(
        {
            "node": "a",
            "running": False,
            "round": 31,
            "done": True,
            "last_round": {"event": "final", "round": 31},
        }
    )
    assert "a: not running, every round is done" in capsys.readouterr().out


@pytest.mark.parametrize("sentence", ["no [/such] tag", "[red]alarm[/red]", ":smile:"])
def test_status_table_shows_the_words_of_a_neighbour_unchanged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sentence: str
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    known = {**STATUS["neighbours"]["c"], "last_error": sentence}
    print_status({**STATUS, "neighbours": {sentence: known}, "refused": {sentence: 1}})
    printed = capsys.readouterr().out
    assert f"{sentence}: {sentence}" in printed
    assert f"rejected: {sentence}: 1" in printed
    assert f"│ {sentence} " in printed
