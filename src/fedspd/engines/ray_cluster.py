"""Every client of the network on a Ray cluster, in shards, one actor per shard.

A shard fetches the models of its clients' neighbours from the shards that hold them, machine to machine. This process,
the driver, sees headers and references; at a checkpoint the state of every shard comes to it, because what a machine
keeps dies with the machine. Examples lie in Ray's shared memory, once on every machine that trains on them.

Shapes: N clients, K models offered by each, T models in a parcel.
"""

import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from fedspd.core.errors import ConfigError, FedspdError, WorkerError
from fedspd.core.exchange import Exchange
from fedspd.core.graph import Graph
from fedspd.core.machine import CORES
from fedspd.engines.engine import BlockLostError, Engine
from fedspd.engines.ray_shard import Ints, PlanPayload, Reference, Shard, own_sources, versions
from fedspd.engines.simulator import balanced
from fedspd.runtime.announcements import Announcements
from fedspd.runtime.plan import Plan
from fedspd.storage.checkpoint import read_rows, write_part

LOST = (RayActorError, ObjectLostError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)
REACHABLE = 5.0  # seconds for a first connection
START = 120.0  # seconds for all actors to start


class RayCluster(Engine):
    """workers: shards, at most one per CPU of the cluster that this process has joined; None: as many as that."""

    def __init__(self, plan: Plan, workers: int | None = None) -> None:
        super().__init__(plan)
        if plan.learner.device.type != "cpu":
            raise ConfigError(
                f"device = '{plan.learner.device}': engine = 'ray' trains on CPUs only. Use "
                "device = 'cpu' or engine = 'processes'."
            )
        self.workers = workers
        self.shards: list[Any] = []
        self.blocks: list[range] = []
        self.graph: tuple[Graph, Reference] | None = None

    def begin(self) -> None:
        self._start()
        super().begin()

    def load(self, folder: Path) -> None:
        """One shard after the other, so that the driver need not hold them all."""
        self.begin()  # gives every state its type
        names = self._all("names")[0]
        for shard, clients in zip(self.shards, self.blocks, strict=True):
            rows = read_rows(folder, clients.start, clients.stop, names)
            self._take(
                [shard.do.remote("restore", {name: table.numpy() for name, table in rows.items()})]
            )

    def save(self, folder: Path) -> None:
        waiting = [shard.do.remote("tables") for shard in self.shards]
        for clients in self.blocks:
            (tables,) = self._take([waiting.pop(0)])
            write_part(
                folder, list(clients), {name: torch.tensor(table) for name, table in tables.items()}
            )

    def shared(self) -> Exchange:
        headers, models = zip(*self._all("shared"), strict=True)
        return Announcements.joined(list(headers)).with_models(
            torch.from_numpy(np.concatenate(models))
        )

    def close(self) -> None:
        for shard in self.shards:
            ray.kill(shard)
        self.shards = []

    # ---- an exchange

    def _exchange(self, graph: Graph, header: Announcements) -> list[Announcements | None]:
        parcels = pack(graph, header, self.blocks)
        offered = [
            [(p.client_T - self.blocks[a].start, p.k_T) for p in parcels if p.sender == a]
            for a in range(len(self.shards))
        ]
        references = iter(
            [
                reference
                for sent in self._each("offer", [(own,) for own in offered])
                for reference in sent
            ]
        )
        arriving = [(parcel, next(references)) for parcel in parcels]
        return self._each(
            "hear", [self._told(graph, header, b, arriving) for b in range(len(self.shards))]
        )

    def _told(
        self,
        graph: Graph,
        header: Announcements,
        b: int,
        arriving: Sequence[tuple["ShardTransfer", Reference]],
    ) -> tuple[Any, ...]:
        """What shard b must know to hear its neighbourhood, and of nobody else."""
        ids = np.unique(np.concatenate([graph.closed(i) for i in self.blocks[b]]))
        own = [
            (np.searchsorted(ids, p.client_T), p.k_T, reference)
            for p, reference in arriving
            if p.hearer == b
        ]
        return self._graph(graph), ids, header.rows(ids), own

    def _graph(self, graph: Graph) -> Reference:
        """A graph that stays the same goes to every machine once."""
        if self.graph is None or self.graph[0] is not graph:
            self.graph = graph, ray.put(graph)
        return self.graph[1]

    # ---- actors

    def _start(self) -> None:
        """New actors on what machines there are now."""
        self.graph = None
        while not self._actors_started():
            pass  # a machine has gone since they were counted
        sources = ray.put(own_sources(Path.cwd()))
        self._each(
            "open",
            [
                (sources, [ray.put(PlanPayload.of(self.plan.part(clients)))])
                for clients in self.blocks
            ],
        )

    def _actors_started(self) -> bool:
        """Whether every actor has started; false if the cluster has become too small for them."""
        self.close()
        count = min(self.workers or cpus(), cpus())
        self.blocks = balanced([len(y) for y in self.plan.train.y], count)
        actor: Any = ray.remote(num_cpus=1)(Shard)
        self.shards = [actor.remote() for _ in self.blocks]
        waiting, end = [shard.about.remote() for shard in self.shards], time.monotonic() + START
        started: list[Reference] = []
        while len(started) < len(waiting):
            started, _ = ray.wait(waiting, num_returns=len(waiting), timeout=1)
            for about in self._take(started):
                check_versions(about)
            if cpus() < len(waiting):
                return False
            if time.monotonic() > end:
                raise WorkerError(
                    f"workers = {len(waiting)}: only {len(started)} actors started within "
                    f"{START:.0f} s; the other CPUs of the cluster are busy, or its memory is full. "
                    "Use fewer workers."
                )
        return True

    def _all(self, command: str, *arguments: Any) -> list[Any]:
        return self._each(command, [arguments] * len(self.shards))

    def _each(self, command: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Arguments of its own for every shard."""
        return self._take(
            [
                shard.do.remote(command, *own)
                for shard, own in zip(self.shards, arguments, strict=True)
            ]
        )

    def _take(self, references: list[Reference]) -> list[Any]:
        try:
            return list(ray.get(references))
        except RayError as error:
            raise translated(error) from None


def translated(error: RayError) -> FedspdError:
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, FedspdError):
        return cause
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    if isinstance(cause, RayActorError) and cause.actor_init_failed:
        return WorkerError(
            f"An actor could not start ({lines[-1]}). Install the same fedspd and Python on every "
            "machine of the cluster."
        )
    if isinstance(cause, LOST):
        said = (
            "an actor does not answer"
            if isinstance(cause, ActorUnavailableError)
            else lines[0].rstrip(".")
        )
        return BlockLostError(f"A part of the cluster was lost ({said})")
    return WorkerError(
        f"Ray failed with {type(cause).__name__}: {lines[0]} The last checkpoint is complete."
    )


def check_versions(theirs: dict[str, str]) -> None:
    for name, ours in versions().items():
        if theirs[name] != ours:
            raise WorkerError(
                f"A machine of the cluster has {name} {theirs[name]}, this one has {ours}. Install the "
                "same version everywhere: results depend on it."
            )


# ---- who needs what


@dataclass(frozen=True)
class ShardTransfer:
    """The models that go from one shard to another: whose, and the how-manieth of its offer."""

    sender: int
    hearer: int
    client_T: Ints
    k_T: Ints


def pack(graph: Graph, header: Announcements, blocks: Sequence[range]) -> list[ShardTransfer]:
    """Between shards goes each model that a neighbour over there wants, once; ordered by sender, hearer, client."""
    shards, N, K = len(blocks), *header.cluster_CK.shape
    shard_N = np.repeat(np.arange(shards), [len(clients) for clients in blocks])
    hearer, sender = graph.pairs(range(N))
    abroad = shard_N[sender] != shard_N[hearer]
    sender, hearer = sender[abroad], hearer[abroad]
    t, k = np.nonzero(
        (header.cluster_CK[sender][:, :, None] == header.want_CM[hearer][:, None, :]).any(2)
    )
    way = shard_N[sender[t]] * shards + shard_N[hearer[t]]
    wanted_T = np.unique(
        (way * N + sender[t]) * K + k
    )  # one number each: many times faster to sort than rows
    way_T, client_T, k_T = wanted_T // (N * K), wanted_T // K % N, wanted_T % K
    cuts = np.flatnonzero(np.diff(way_T)) + 1
    pieces = zip(*(np.split(numbers, cuts) for numbers in (way_T, client_T, k_T)), strict=True)
    return [
        ShardTransfer(*divmod(int(way[0]), shards), client, k)
        for way, client, k in pieces
        if len(way)
    ]


# ---- the cluster


def cpus() -> int:
    found = int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
    if not found:
        raise WorkerError(
            "The Ray cluster has no CPU to offer. Start another machine with "
            "'ray start --address=HOST:PORT'."
        )
    return found


@contextmanager
def joined(address: str | None, workers: int | None) -> Iterator[None]:
    """In the cluster at the address, or in one of our own on this machine; a process that has joined one stays in that."""
    if ray.is_initialized():
        yield
        return
    _join(address, workers)
    try:
        yield
    finally:
        ray.shutdown()


def _join(address: str | None, workers: int | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address is None:
        options |= {"num_cpus": workers or CORES, "include_dashboard": False}
    else:
        _check_reachable(address)
    try:
        with _own_signals():
            ray.init(address=address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"address = {address!r}: {said}. Start a cluster with 'ray start --head', or leave the "
            "address out."
        ) from None


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"address = '{address}': expected auto, or HOST:PORT of a cluster's head (usually port "
            "6379)."
        )
    try:
        socket.create_connection((host, int(port)), REACHABLE).close()
    except OSError as error:
        raise ConfigError(
            f"address = '{address}': no answer ({error}). Start a cluster there with "
            "'ray start --head'."
        ) from None


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts a handler of its own on SIGTERM; ours ends a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
