"""The package without fork, flock and their like: this hides what Windows lacks."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedspd.node.host import start
from fedspd.node.identity import certificates
from fedspd.node.wire import grpc_transport
from fedspd.storage import atomic

HIDE = """
import os, signal, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource"):
            raise ImportError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Hidden())
for name in ("fcntl", "resource"):
    sys.modules.pop(name, None)
for name in ("fork", "forkpty", "sched_getaffinity"):
    delattr(os, name)
del signal.pthread_sigmask
"""
RUN_ALL = """
import contextlib, importlib, io, json, pathlib, pkgutil, fedspd
for module in pkgutil.walk_packages(fedspd.__path__, "fedspd."):
    if "__main__" not in module.name and "engines.ray_" not in module.name:
        importlib.import_module(module.name)

from fedspd.cli.main import execute

def run(arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = execute(arguments)
    return code, out.getvalue(), err.getvalue(), sorted(p.name for p in pathlib.Path().iterdir())

print(json.dumps([run(arguments) for arguments in json.load(sys.stdin)]))
"""
SMALL = ["clients=3", "rounds=2", "data.examples=20", "data.test_examples=5", "topology.kind=ring"]
COMMANDS = {
    "two workers": ["run", *SMALL, "--workers", "2", "--out", "a"],
    "two runs at a time": ["compare", *SMALL, "--workers", "2", "--out", "a"],
    "dry run": ["run", *SMALL, "--dry-run"],
    "bench": ["bench", "--quick"],
    "run": ["run", *SMALL, "--out", "a", "--json"],
    "in use": ["run", *SMALL, "--out", "b"],
    "create": ["network", "create", "a/config.toml", "--out", "plant"],
    "revoke": ["network", "revoke", "node-1", "--network", "plant"],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, SimpleNamespace]:
    """Import every module, then run all commands in one process; `b` is a folder in use."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "b").mkdir()
    for name in (".lock", ".lock.held"):
        (folder / "b" / name).touch()
    done = subprocess.run(
        [sys.executable, "-c", HIDE + RUN_ALL],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        input=json.dumps(list(COMMANDS.values())),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answered = json.loads(done.stdout)
    found = (SimpleNamespace(code=c, out=o, err=e, files=f) for c, o, e, f in answered)
    return dict(zip(COMMANDS, found, strict=True))


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("two workers", "workers = 2: more than one worker"),
        ("two runs at a time", "workers = 2: more than one worker"),
        ("dry run", "The estimate of a run's memory"),
        ("bench", "The benchmark"),
    ],
)
def test_command_that_forks_is_refused_before_it_writes(command, refused, answers):
    found = answers[command]
    sentence = f"{refused} needs a system that can fork a process, such as Linux or macOS."
    assert (found.code, found.err) == (2, f"fedspd: {sentence}\n")
    assert found.files == ["b"]


def test_run_trains_with_one_worker_by_default(answers):
    found = answers["run"]
    assert found.code == 0, found.err
    assert json.loads(found.out.splitlines()[-1])["rounds"] == 2
    assert found.files == ["a", "b"]


def test_folder_in_use_names_the_file_to_delete_without_flock(answers):
    found = answers["in use"]
    assert found.code == 2
    assert found.err.startswith(
        "fedspd: The run folder 'b' is in use by another process: wait for it, or stop it. "
        "If there is none, delete '/"
    )
    assert found.err.endswith("/b/.lock.held'.\n")


def test_network_is_created_and_changed_without_flock(answers):
    assert (answers["create"].code, answers["revoke"].code) == (0, 0)
    assert answers["revoke"].files == ["a", "b", "plant"]


def test_node_leaves_on_a_signal_where_the_event_loop_takes_no_handlers(monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def takes_no_handlers(*arguments):
        raise NotImplementedError

    async def live() -> None:
        loop, left = asyncio.get_running_loop(), asyncio.Event()
        monkeypatch.setattr(loop, "add_signal_handler", takes_no_handlers)
        start._leave_on_signals(SimpleNamespace(leave=left.set))
        signal.raise_signal(signal.SIGTERM)
        await left.wait()

    try:
        asyncio.run(live())
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


def test_connections_are_bounded_where_the_system_sets_no_limit(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert grpc_transport._max_connections() == 4_096


def test_key_file_is_read_where_modes_mean_nothing(monkeypatch, tmp_path):
    path = tmp_path / "node.key"
    path.write_text("no key")
    path.chmod(0o644)
    with pytest.raises(certificates.StorageError, match="mode = 0644 gives other users access"):
        certificates.read_key(path)
    monkeypatch.setattr(certificates, "IS_POSIX", False)
    with pytest.raises(certificates.StorageError, match="a private key as PEM"):
        certificates.read_key(path)


def test_file_is_written_where_folders_cannot_be_synced(monkeypatch, tmp_path):
    monkeypatch.setattr(atomic, "IS_POSIX", False)
    opened = []
    monkeypatch.setattr(atomic.os, "open", lambda path, flags: opened.append(path))
    atomic.write_atomically(tmp_path / "a.txt", "text")
    assert (tmp_path / "a.txt").read_text() == "text"
    assert opened == []
