"""Every client of the network on one machine, in blocks, one block per worker process.

A worker is a fork of this process: it reads the data where they are, without a copy, and runs one torch thread. Offered
models meet in memory that all workers share. The result does not depend on the number of workers.
"""

import math
import mmap
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspd.core.errors import ConfigError, FedspdError, WorkerError
from fedspd.core.exchange import Exchange
from fedspd.core.graph import Graph
from fedspd.core.learner import one_thread
from fedspd.engines.engine import Engine, failure
from fedspd.runtime.announcements import Announcements
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.plan import Plan
from fedspd.runtime.processes import Child, give_memory_back, keep_memory


class Simulator(Engine):
    def __init__(self, plan: Plan, workers: int = 1) -> None:
        super().__init__(plan)
        keep_memory()
        workers = (
            workers if plan.learner.device.type == "cpu" else 1
        )  # a fork cannot use a GPU that its parent has used
        self.memory = _shared_tensor(plan) if workers > 1 else None
        blocks = balanced([len(y) for y in plan.train.y], workers)
        parts = [plan.part(clients) for clients in blocks]
        self.workers: Sequence[Worker | InProcess] = (
            [Worker(part, self.memory) for part in parts]
            if len(parts) > 1
            else [InProcess(parts[0])]
        )

    def shared(self) -> Exchange:
        header = Announcements.joined(self._all("share"))
        self._all("offer", header.cluster_CK.shape[1], header.size)
        first = self.workers[0]
        if isinstance(first, InProcess):
            return header.with_models(first.desk.buffer_NKP)
        assert self.memory is not None
        shape = (*header.cluster_CK.shape, header.size)
        return header.with_models(self.memory[: math.prod(shape)].view(shape))

    def save(self, folder: Path) -> None:
        self._all("save", folder)

    def load(self, folder: Path) -> None:
        self._all("load", folder)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def _all(self, command: str, *arguments: Any) -> list[Any]:
        for worker in self.workers:
            worker.post(command, arguments)
        return [worker.take() for worker in self.workers]

    def _exchange(self, graph: Graph, header: Announcements) -> list[Announcements | None]:
        self._all("offer", header.cluster_CK.shape[1], header.size)
        return self._all("hear", graph, header)


class CommandHandler:
    """What a worker does with a command, in its own process or in this one."""

    def __init__(self, plan: Plan, memory: Tensor | None) -> None:
        self.runner, self.memory = BlockRunner(plan), memory
        self.buffer_NKP = torch.empty(0)

    def do(self, command: str, arguments: tuple[Any, ...]) -> Any:
        if command == "offer":
            return self.offer(*arguments)
        if command == "hear":
            graph, header = arguments
            buffer_NKP, self.buffer_NKP = self.buffer_NKP, torch.empty(0)
            return self.runner.hear(graph, header, buffer_NKP)
        answer = getattr(self.runner, command)(*arguments)
        if command in ("begin", "measure", "finish"):
            give_memory_back()
        return answer

    def offer(self, K: int, P: int) -> None:
        plan = self.runner.plan
        shape = (plan.train.network_size, K, P)
        if self.memory is None:
            self.buffer_NKP = (
                self.runner.request.model_CKP
            )  # the only block: what it offers is all that there is
            return
        if math.prod(shape) > len(self.memory):
            raise ConfigError(
                f"clusters = {plan.algorithm.clusters}: the method offers {K} models; expected at most "
                "one per cluster."
            )
        self.buffer_NKP = self.memory[: math.prod(shape)].view(shape)
        self.runner.offer(self.buffer_NKP)


class InProcess:
    """The only worker: no second process, easy to debug, and safe in a notebook."""

    def __init__(self, plan: Plan) -> None:
        self.desk, self.result = CommandHandler(plan, None), None

    def post(self, command: str, arguments: tuple[Any, ...]) -> None:
        with one_thread():  # as in a worker process
            self.result = self.desk.do(command, arguments)

    def take(self) -> Any:
        return self.result

    def close(self) -> None:
        pass


class Worker:
    """A forked process that executes commands on its block."""

    def __init__(self, plan: Plan, memory: Tensor | None) -> None:
        self._child = Child(
            "A worker process",
            partial(_serve, plan, memory),
            hint="Use fewer workers; the last checkpoint is complete.",
        )

    def post(self, command: str, arguments: tuple[Any, ...]) -> None:
        self._child.send((command, arguments))

    def take(self) -> Any:
        return self._child.receive()

    def close(self) -> None:
        self._child.close()


def _serve(plan: Plan, memory: Tensor | None, connection: Connection) -> None:
    """Execute commands until this process is ended."""
    desk = CommandHandler(plan, memory)
    while True:
        command, arguments = connection.recv()
        try:
            answer = desk.do(command, arguments)
        except FedspdError:
            raise
        except Exception as error:
            raise WorkerError(failure(error, "workers = 1")) from None
        connection.send(answer)


def balanced(counts: Sequence[int], workers: int) -> list[range]:
    """Consecutive blocks of clients with about the same number of examples, at most one per client."""
    workers = max(1, min(workers, len(counts)))
    ends = np.cumsum(counts)
    cuts = [0]
    for w in range(1, workers):
        cut = int(np.searchsorted(ends, ends[-1] * w / workers, side="left")) + 1
        cuts.append(min(max(cut, cuts[-1] + 1), len(counts) - (workers - w)))
    return [range(low, high) for low, high in zip(cuts, [*cuts[1:], len(counts)], strict=True)]


def _shared_tensor(plan: Plan) -> Tensor:
    """Room for one model per client and cluster; pages that are never written cost nothing."""
    numbers = plan.clients * max(1, plan.algorithm.clusters) * plan.learner.size
    memory = mmap.mmap(-1, max(1, numbers) * (torch.finfo(plan.learner.dtype).bits // 8))
    return torch.frombuffer(memory, dtype=plan.learner.dtype)
