"""The processes that train: how they are forked, which signals reach them and how they end."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedspd.core.errors import ConfigError, FedspdError, WorkerError
from fedspd.core.machine import HAS_FORK

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from <malloc.h>
MEGABYTE = 1 << 20
MOST_KEPT_BYTES = 48 * MEGABYTE  # that a process may grow until it gives memory back
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
JOIN_SECONDS = 5


def require_fork(purpose: str) -> None:
    """Refuse what needs a child process on a system that cannot fork."""
    if not HAS_FORK:
        raise ConfigError(
            f"{purpose} needs a system that can fork a process, such as Linux or macOS."
        )


class Child:
    """A forked process that calls `work` with its end of a pipe to this process.

    It ignores Ctrl-C, which its parent handles, ends with its parent, and has one torch thread. An
    exception in `work` is raised by the parent's next `receive`.

    name          the subject of a sentence about the process
    hint          the sentence to add if it ends unexpectedly
    has_children  whether `work` may start processes; close such a child, or exit waits for it
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Connection], None],
        *,
        hint: str = "",
        has_children: bool = False,
    ) -> None:
        self.name, self.hint = name, hint
        context = multiprocessing.get_context("fork")
        self.connection, other_end = context.Pipe()
        self._process = context.Process(
            target=_run_child, args=(name, work, other_end), daemon=not has_children
        )
        try:
            with _stop_signals_deferred():
                self._process.start()
            other_end.close()
        except BaseException:  # a signal; nobody else knows the process yet
            if self._process.pid is not None:
                self.close()
            raise

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self._unexpected_end() from None

    def receive(self) -> Any:
        """Return the next message, or None once `work` has returned.

        An exception that ended `work`, and the end of the process itself, are raised as errors.
        """
        wait([self.connection, self._process.sentinel])
        try:
            if not self.connection.poll():
                raise EOFError
            message = self.connection.recv()
        except (EOFError, OSError):
            raise self._unexpected_end() from None
        if isinstance(message, FedspdError):
            raise message
        return message

    def close(self) -> None:
        """End the process, in the middle of its work if need be."""
        self._process.terminate()
        self._process.join(JOIN_SECONDS)
        if self._process.is_alive():  # suspended, or on a machine too busy to let it take a signal
            self._process.kill()
            self._process.join()
        self.connection.close()

    def _unexpected_end(self) -> WorkerError:
        self._process.join(JOIN_SECONDS)
        sentence = (
            f"{self.name} ended with exit code {self._process.exitcode} (a negative code is the "
            "signal that killed it; -9 often means that memory ran out)."
        )
        return WorkerError(f"{sentence} {self.hint}".rstrip())


def _run_child(name: str, work: Callable[[Connection], None], connection: Connection) -> None:
    gc.freeze()  # its collector would write to all that the parent made, and so copy its pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # a fork cannot use the threads that its parent had
    last_message: FedspdError | None = None
    try:
        work(connection)
    except FedspdError as error:
        last_message = error
    except Exception:
        last_message = WorkerError(f"{name} failed:\n{traceback.format_exc()}")
    with suppress(OSError):  # the parent may be gone
        connection.send(last_message)


@contextmanager
def _stop_signals_deferred() -> Iterator[None]:
    """Start a child in which no handler of its parent runs; handle the parent's signals after it.

    A signal that another thread takes reaches the handler all the same. An exception that it raises
    in a hook of the fork would be lost, and one that it raises later would lose the child.
    """
    arrived: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    taken = [n for n, handler in handlers.items() if is_main and handler is not None]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        for number in taken:
            signal.signal(number, lambda number, _: arrived.append(number))
        yield
    finally:
        for number in taken:
            signal.signal(number, handlers[number])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for one in arrived:
            signal.raise_signal(one)


def _end_with_parent() -> None:
    """End this process when its parent does.

    A parent that was killed cannot stop its children, which could compute for minutes more.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


# ---- memory


def keep_memory() -> None:
    """Tell the allocator to keep freed memory.

    A training step frees a few megabytes that the next one allocates. If the allocator returned
    them to the system each time, page faults would take a twentieth of the training time.
    """
    if (mallopt := _c_function("mallopt")) is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * MEGABYTE)
        mallopt(M_TRIM_THRESHOLD, 256 * MEGABYTE)


def give_memory_back() -> None:
    """Return all free memory that was kept to the system.

    A step that holds a model of every client for a moment leaves as much free memory behind.
    """
    if (malloc_trim := _c_function("malloc_trim")) is not None:
        malloc_trim(0)


class MemoryKeeper:
    """Gives free memory back once the process has grown, and not after every step.

    The next step needs the memory of the last one again. If the system had it in between, page
    faults would take a third of the time of a run with small models.
    """

    def __init__(self) -> None:
        self.resident = 0  # bytes since memory was last given back, at their lowest

    def give_back(self) -> None:
        """Give free memory back if the process has grown by more than `MOST_KEPT_BYTES`."""
        resident = resident_bytes()
        self.resident = min(self.resident, resident)
        if resident - self.resident > MOST_KEPT_BYTES:
            give_memory_back()
            self.resident = resident_bytes()


def resident_bytes() -> int:
    """Return the memory that this process holds, or its peak on a system that tells no more."""
    return _status_bytes("VmRSS") or peak_bytes()


def peak_bytes() -> int:
    """Return the most memory that this process has held."""
    import resource  # every system that can fork has it

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class MemoryMeter:
    """The memory that a fork adds at its peak to what it began with.

    A fork begins without the pages of libraries that its parent has read, and reads them again:
    they are no memory of its own.
    """

    def __init__(self) -> None:
        self.peak, self.files = peak_bytes(), _status_bytes("RssFile")
        self.shared = _shared_bytes()

    def added_bytes(self) -> int:
        """Return the bytes that were added at the peak so far."""
        return peak_bytes() - self.peak - (_status_bytes("RssFile") - self.files)

    def copied_bytes(self) -> int:
        """Return how much of its parent's memory the fork has copied so far, by writing to it.

        Python writes to each object that it looks at: the object's references are counted.
        """
        return max(0, self.shared - _shared_bytes())


def _shared_bytes() -> int:
    """Return the memory, without files, that this process shares with others."""
    return _status_bytes("Shared_Dirty", "smaps_rollup")


def _status_bytes(name: str, file_name: str = "status") -> int:
    """Return a size of this process that Linux knows; 0 on another system."""
    try:
        with open(f"/proc/self/{file_name}") as file:
            sizes = [line.split()[1] for line in file if line.startswith(f"{name}:")]
    except OSError:
        return 0
    return 1024 * int(sizes[0])


def _c_function(name: str) -> Any:
    """Return a function of the C library, or None where the library does not have it."""
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
