"""Every client of the network on one machine, in blocks, one per worker process.

A worker is a fork of this process: it reads the data in place, without a copy, and has one torch
thread. Offered models meet in memory that all workers share. The result does not depend on the
number of workers.

Shapes: N clients, K models offered by each, P parameters of a model.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Concatenate

import torch
from torch import Tensor

from fedspd.core.errors import MethodError
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.learner import one_thread
from fedspd.engines.engine import (
    Answer,
    Arguments,
    Engine,
    failures_as_sentences,
    split_clients,
)
from fedspd.runtime.announcements import Announcements
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.plan import Plan
from fedspd.runtime.processes import Child, give_memory_back, keep_memory


class Simulator(Engine):
    """All clients in processes of this machine, or in this process for one worker."""

    def __init__(self, plan: Plan, workers: int = 1) -> None:
        super().__init__(plan)
        keep_memory()
        if plan.learner.device.type != "cpu":
            workers = 1  # a fork cannot use a GPU that its parent has used
        blocks = split_clients([len(y) for y in plan.train.y], workers)
        self.memory = _shared_tensor(plan) if len(blocks) > 1 else None
        parts = [plan.select_clients(clients) for clients in blocks]
        self.workers: Sequence[Worker | InProcessWorker] = (
            [InProcessWorker(plan)]
            if self.memory is None
            else [Worker(part, self.memory) for part in parts]
        )

    @property
    def block(self) -> "SharedMemoryBlock":
        """The only block, where there is one worker."""
        (worker,) = self.workers
        assert isinstance(worker, InProcessWorker)
        return worker.block

    def share(self) -> Exchange:
        announcements = Announcements.merge(self._all(BlockRunner.share))
        self._all(SharedMemoryBlock.offer, *announcements.model_shape)
        if self.memory is None:
            return announcements.with_models(self.block.offered_NKP)
        return announcements.with_models(_view(self.memory, announcements.model_shape))

    def save(self, folder: Path) -> None:
        self._all(BlockRunner.save, folder)

    def load(self, folder: Path) -> None:
        self._all(BlockRunner.load, folder)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def _all(
        self,
        command: Callable[Concatenate["SharedMemoryBlock", Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Answer]:
        answers = [worker.post(command, *args, **kwargs) for worker in self.workers]
        return [take() for take in answers]

    def _exchange(self, graph: Graph, announcements: Announcements) -> list[Announcements | None]:
        self._all(SharedMemoryBlock.offer, *announcements.model_shape)
        return self._all(SharedMemoryBlock.receive, graph, announcements)


class SharedMemoryBlock(BlockRunner):
    """A block whose models meet those of the other blocks in shared memory.

    memory   the shared memory; None: this is the only block
    """

    def __init__(self, plan: Plan, memory: Tensor | None) -> None:
        super().__init__(plan)
        self.memory = memory
        self.offered_NKP = torch.empty(0)

    def offer(self, N: int, K: int, P: int) -> None:
        """Put the offered models where every block can read them."""
        if self.memory is None:
            self.offered_NKP = self.exchange.model_CKP
            return
        if len(self.memory) < N * K * P:
            algorithm = self.plan.algorithm
            raise MethodError(
                f"{type(algorithm).__name__}.round yielded an Exchange with K = {K}; expected at "
                f"most {algorithm.offer_limit}, the method's offer_limit."
            )
        self.offered_NKP = _view(self.memory, (N, K, P))
        clients = self.plan.train.clients
        self.offered_NKP[clients[0] : clients[-1] + 1] = self.exchange.model_CKP
        self._exchange = None  # frees the memory of the models

    def receive(self, graph: Graph, announcements: Announcements) -> Announcements | None:
        """Answer the exchange with what all blocks offered."""
        offers = announcements.with_models(self.offered_NKP)
        self.offered_NKP = torch.empty(0)
        return self.advance(Neighbourhood.of(graph, self.plan.train.clients, offers))


RELEASING_COMMANDS = (BlockRunner.begin, BlockRunner.measure, BlockRunner.finish)


def _execute(
    block: SharedMemoryBlock,
    command: Callable[Concatenate[SharedMemoryBlock, Arguments], Answer],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Answer:
    answer = command(block, *args, **kwargs)
    if command in RELEASING_COMMANDS:
        give_memory_back()
    return answer


class InProcessWorker:
    """The only worker: without a second process, it is easy to debug and safe in a notebook."""

    def __init__(self, plan: Plan) -> None:
        self.block = SharedMemoryBlock(plan, None)

    def post(
        self,
        command: Callable[Concatenate[SharedMemoryBlock, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Callable[[], Answer]:
        """Execute the command and return the function that gives its answer."""
        with one_thread():  # as in a worker process
            answer = _execute(self.block, command, *args, **kwargs)
        return lambda: answer

    def close(self) -> None:
        pass


class Worker:
    """A forked process that executes commands on its block."""

    def __init__(self, plan: Plan, memory: Tensor) -> None:
        self._child = Child(
            "A worker process",
            partial(_serve, plan, memory),
            hint="Use fewer workers; the last checkpoint is complete.",
        )

    def post(
        self,
        command: Callable[Concatenate[SharedMemoryBlock, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Callable[[], Answer]:
        """Send the command and return the function that waits for its answer."""
        self._child.send((command, args, kwargs))
        return self._child.receive

    def close(self) -> None:
        self._child.close()


def _serve(plan: Plan, memory: Tensor, connection: Connection) -> None:
    """Execute commands until this process is ended."""
    block = SharedMemoryBlock(plan, memory)
    while True:
        command, args, kwargs = connection.recv()
        with failures_as_sentences("workers = 1"):
            answer = _execute(block, command, *args, **kwargs)
        connection.send(answer)


def _shared_tensor(plan: Plan) -> Tensor:
    """Return memory for one model per client and cluster; pages that stay unused cost nothing."""
    elements = plan.clients * max(1, plan.algorithm.offer_limit) * plan.learner.size
    memory = mmap.mmap(-1, max(1, elements) * plan.learner.dtype.itemsize)
    return torch.frombuffer(memory, dtype=plan.learner.dtype)


def _view(memory: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return memory[: math.prod(shape)].view(shape)
