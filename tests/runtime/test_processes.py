"""Forked children: what their parent receives from them, and how they end."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection

import pytest
import torch

from fedspd.core.errors import ConfigError, WorkerError
from fedspd.runtime import processes
from fedspd.runtime.processes import (
    MEGABYTE,
    Child,
    MemoryKeeper,
    MemoryMeter,
    keep_memory,
    resident_bytes,
)


def received(work: Callable[[Connection], None]) -> object:
    with closing(Child("A test", work, hint="Try again.")) as child:
        return child.receive()


def test_child_sends_its_messages_and_none_at_the_end():
    def echo(connection: Connection) -> None:
        connection.send(2 * connection.recv())

    with closing(Child("A test", echo)) as child:
        child.send(21)
        assert child.receive() == 42
        assert child.receive() is None


def test_child_has_one_torch_thread():
    assert received(lambda connection: connection.send(torch.get_num_threads())) == 1


def test_child_ignores_ctrl_c():
    def interrupt(connection: Connection) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        connection.send("alive")

    assert received(interrupt) == "alive"


def test_error_of_a_child_is_raised_in_its_parent():
    def refuse(connection: Connection) -> None:
        raise ConfigError("rounds = 0: expected at least 1.")

    with pytest.raises(ConfigError, match=r"^rounds = 0: expected at least 1\.$"):
        received(refuse)


def test_exception_of_a_child_arrives_with_its_traceback():
    def fail(connection: Connection) -> None:
        raise KeyError("missing")

    with pytest.raises(WorkerError, match=r"(?s)^A test failed:\nTraceback .* in fail\n.*missing"):
        received(fail)


@pytest.mark.parametrize(
    ("end", "code"),
    [(lambda _: sys.exit(3), 3), (lambda _: os.kill(os.getpid(), signal.SIGKILL), -9)],
)
def test_unexpected_end_of_a_child_becomes_one_sentence(end, code):
    with pytest.raises(WorkerError) as caught:
        received(end)
    assert str(caught.value) == (
        f"A test ended with exit code {code} (a negative code is the signal that killed it; "
        "-9 often means that memory ran out). Try again."
    )


def test_message_to_a_child_that_was_killed_is_refused():
    with closing(Child("A test", lambda _: os.kill(os.getpid(), signal.SIGKILL))) as child:
        for exchange in (child.receive, lambda: child.send("hello")):
            with pytest.raises(WorkerError, match=r"^A test ended with exit code -9 "):
                exchange()


def test_close_ends_a_child_in_the_middle_of_its_work():
    def work(connection: Connection) -> None:
        connection.send("begun")
        time.sleep(600)

    child = Child("A test", work)
    assert child.receive() == "begun"
    child.close()
    assert child._process.exitcode == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="waits until a child is suspended")
def test_close_ends_a_child_that_is_suspended(monkeypatch):
    """It takes no SIGTERM until it goes on."""
    monkeypatch.setattr(processes, "JOIN_SECONDS", 0.1)
    child = Child("A test", lambda _: time.sleep(600))
    pid = child._process.pid
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    child.close()
    assert child._process.exitcode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux")
def test_memory_keeper_gives_back_much_and_keeps_a_little():
    def grow_and_free(megabytes: int) -> None:
        pieces = [torch.ones(MEGABYTE // 4) for _ in range(megabytes)]
        pieces.append(torch.ones(1))  # so that the end of the heap stays in use
        del pieces[:-1]
        held.extend(pieces)

    def work(connection: Connection) -> None:
        keep_memory()
        heap, large = MemoryKeeper(), torch.ones(300 * MEGABYTE // 4)
        heap.give_back()
        del large  # from here on, growth counts from below
        heap.give_back()
        before = resident_bytes()
        for megabytes in (20, 200):  # far above the bounds: some fits into gaps of the heap
            grow_and_free(megabytes)
            grown = resident_bytes()
            heap.give_back()
            connection.send((grown - before, resident_bytes() - before))

    held: list[torch.Tensor] = []
    with closing(Child("A test", work)) as child:
        (grown, kept), (much, rest) = child.receive(), child.receive()
    assert kept == grown > 15 * MEGABYTE
    assert much > 90 * MEGABYTE
    assert rest < 15 * MEGABYTE


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what processes share")


@LINUX
def test_meter_counts_the_memory_of_the_parent_that_a_child_writes_to():
    table = torch.ones(32 * MEGABYTE, dtype=torch.uint8)

    def write_half(connection: Connection) -> None:
        meter = MemoryMeter()
        table[: 16 * MEGABYTE] = 2
        connection.send((meter.copied_bytes() / MEGABYTE, meter.added_bytes() / MEGABYTE))

    copied, added = received(write_half)
    assert copied == pytest.approx(16, abs=2)
    assert added < 2  # the pages counted as its own before, too


@LINUX
def test_collector_of_a_child_copies_nothing_of_its_parent():
    made = [[number] for number in range(500_000)]  # at least 28 MB that a collector writes to

    def collect(connection: Connection) -> None:
        meter = MemoryMeter()
        gc.collect()
        connection.send(meter.copied_bytes() / MEGABYTE)

    assert received(collect) < 10
    assert len(made) == 500_000


def test_signal_that_another_thread_takes_during_a_fork_is_handled_after_it():
    def take() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        taken.set()

    def hook() -> None:
        threading.Thread(target=take).start()
        taken.wait()  # an exception in a hook would be lost

    def work(connection: Connection) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.register_at_fork(before=hook)
        try:
            Child("A child", lambda _: time.sleep(600))
        except KeyboardInterrupt:
            connection.send(multiprocessing.active_children())

    taken = threading.Event()
    with closing(Child("A test", work, has_children=True)) as child:
        assert child.receive() == []
