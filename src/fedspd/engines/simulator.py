"""Every client of the network on one machine, in blocks, one per worker process.

A worker is a fork of this process: it reads the data in place, without a copy, and has one torch
thread. It takes its clients in slices, one after another: what a method holds of a client for a
moment, it holds of one slice. Offered models meet in memory that all slices and workers share. The
result does not depend on the number of workers or slices.

Shapes: N clients, K models offered by each, P parameters of a model.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate

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
from fedspd.runtime.processes import Child, MemoryKeeper, keep_memory

MAX_SLICES = 32  # of a worker: a round holds about six copies of the state of a slice
MIN_MOVED_BYTES = 1 << 20  # of a table of the state: smaller ones fill gaps of the heap
MIN_SLICE_BYTES = 4 << 20  # of the state: below, a slice has too few clients to train together


class Simulator(Engine):
    """All clients in processes of this machine, or in this process for one worker."""

    def __init__(self, plan: Plan, workers: int = 1) -> None:
        super().__init__(plan)
        keep_memory()
        if plan.learner.device.type != "cpu":
            workers = 1  # a fork cannot use a GPU that its parent has used
        blocks = split_clients([len(y) for y in plan.train.y], workers)
        slices = [_slices(plan, block) for block in blocks]
        self.memory = _shared_tensor(plan) if sum(map(len, slices)) > 1 else None
        parts = [[plan.select_clients(clients) for clients in own] for own in slices]
        self.workers: list[Worker | InProcessWorker] = []
        make = Worker if len(parts) > 1 else InProcessWorker
        try:
            for own in parts:
                self.workers.append(make(own, self.memory))
        except BaseException:  # a signal: the workers that have started end with it
            self.close()
            raise

    @property
    def block(self) -> "SharedMemoryBlock":
        """The only block, where there is one worker with one slice."""
        (worker,) = self.workers
        assert isinstance(worker, InProcessWorker)
        (block,) = worker.blocks
        return block

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
        return [answer for take in answers for answer in take()]

    def _exchange(self, graph: Graph, announcements: Announcements) -> list[Announcements | None]:
        self._all(SharedMemoryBlock.offer, *announcements.model_shape)
        return self._all(SharedMemoryBlock.receive, graph, announcements)


class SharedMemoryBlock(BlockRunner):
    """A slice of clients, whose models meet those of the others in shared memory.

    memory   the shared memory; None: this is the only slice
    """

    def __init__(self, plan: Plan, memory: Tensor | None) -> None:
        super().__init__(plan)
        self.memory = memory
        self.offered_NKP = torch.empty(0)

    def keep(self, state: Any) -> Any:
        """Move the large tables of a slice out of the heap.

        There they would stand between those that a step needs for a moment, whose gaps the next
        slice cannot always fill.
        """
        if self.memory is None:
            return super().keep(state)
        tables = {field.name: getattr(state, field.name) for field in fields(state)}
        before = () if self.state is None else self.tables().values()
        kept = {table.data_ptr() for table in before}
        moved = {
            name: _moved(table)
            for name, table in tables.items()
            if table.nbytes >= MIN_MOVED_BYTES and table.data_ptr() not in kept
        }
        return super().keep(replace(state, **moved))

    def place_first_offer(self, announced: Announcements) -> None:
        """Free the models of this slice before the next one trains."""
        if self.memory is not None:
            _, K, P = announced.model_shape
            self.offer(self.plan.train.network_size, K, P)

    def offer(self, N: int, K: int, P: int) -> None:
        """Put the offered models where every slice can read them, if they are not there yet."""
        if self._exchange is None:
            return
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
HEAP = MemoryKeeper()  # of this process; a fork goes on with a copy
STEPS_OF_A_ROUND = (BlockRunner.start_round, SharedMemoryBlock.receive)


def _execute(
    blocks: Sequence[SharedMemoryBlock],
    command: Callable[Concatenate[SharedMemoryBlock, Arguments], Answer],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> list[Answer]:
    """Execute the command on one slice after another.

    Each slice leaves free memory behind, which the next one cannot always use: it goes back when
    there is much of it.
    """
    answers = []
    is_sliced_step = len(blocks) > 1 and command in STEPS_OF_A_ROUND
    for block in blocks:
        answers.append(command(block, *args, **kwargs))
        if is_sliced_step or command in RELEASING_COMMANDS:
            HEAP.give_back()
    return answers


class InProcessWorker:
    """The only worker: without a second process, it is easy to debug and safe in a notebook."""

    def __init__(self, plans: Sequence[Plan], memory: Tensor | None) -> None:
        self.blocks = [SharedMemoryBlock(plan, memory) for plan in plans]

    def post(
        self,
        command: Callable[Concatenate[SharedMemoryBlock, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Callable[[], list[Answer]]:
        """Execute the command and return the function that gives its answers."""
        with one_thread():  # as in a worker process
            answers = _execute(self.blocks, command, *args, **kwargs)
        return lambda: answers

    def close(self) -> None:
        pass


class Worker:
    """A forked process that executes commands on its slices."""

    def __init__(self, plans: Sequence[Plan], memory: Tensor | None) -> None:
        self._child = Child(
            "A worker process",
            partial(_serve, plans, memory),
            hint="Use fewer workers; the last checkpoint is complete.",
        )

    def post(
        self,
        command: Callable[Concatenate[SharedMemoryBlock, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Callable[[], list[Answer]]:
        """Send the command and return the function that waits for its answers."""
        self._child.send((command, args, kwargs))
        return self._child.receive

    def close(self) -> None:
        self._child.close()


def _serve(plans: Sequence[Plan], memory: Tensor | None, connection: Connection) -> None:
    """Execute commands until this process is ended."""
    blocks = [SharedMemoryBlock(plan, memory) for plan in plans]
    while True:
        command, args, kwargs = connection.recv()
        with failures_as_sentences("workers = 1"):
            answers = _execute(blocks, command, *args, **kwargs)
        connection.send(answers)


def _slices(plan: Plan, clients: range) -> list[range]:
    """Split a worker's clients into slices; a GPU trains all of them at once."""
    if plan.learner.device.type != "cpu":
        return [clients]
    state = len(clients) * _elements(plan) * plan.learner.dtype.itemsize
    count = max(1, min(len(clients), MAX_SLICES, state // MIN_SLICE_BYTES))
    cuts = [clients.start + len(clients) * number // count for number in range(count + 1)]
    return [range(low, high) for low, high in pairwise(cuts)]


def _elements(plan: Plan) -> int:
    """Return the parameters of one model per cluster."""
    return int(max(1, plan.algorithm.offer_limit) * plan.learner.size)


def _shared_tensor(plan: Plan) -> Tensor:
    """Return memory for one model per client and cluster; pages that stay unused cost nothing."""
    elements = plan.clients * _elements(plan)
    memory = mmap.mmap(-1, max(1, elements) * plan.learner.dtype.itemsize)
    return torch.frombuffer(memory, dtype=plan.learner.dtype)


def _moved(table: Tensor) -> Tensor:
    """Return a copy in pages of its own, which go back to the system with it."""
    pages = mmap.mmap(-1, table.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=table.dtype).view(table.shape).copy_(table)


def _view(memory: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return memory[: math.prod(shape)].view(shape)
