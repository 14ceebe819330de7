"""Every client of the network on a Ray cluster, in shards: one block of clients per actor.

A shard fetches the models of its clients' neighbours from the shards that hold them, machine to
machine. This process, the driver, handles announcements and references only. For a checkpoint it
receives the state of every shard, because a machine's memory is lost with the machine. Examples
are in Ray's shared memory, once on every machine that trains on them.

Shapes: N clients, K models offered by each, T models in a transfer.
"""

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate

import numpy as np
import ray
import torch
from ray import ObjectRef
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
from fedspd.engines.engine import Answer, Arguments, BlockLostError, Engine, split_clients
from fedspd.engines.ray_shard import (
    Array,
    Ints,
    PlanPayload,
    RayBlock,
    Shard,
    installed_versions,
    read_user_modules,
)
from fedspd.runtime.announcements import Announcements
from fedspd.runtime.plan import Plan
from fedspd.storage.checkpoint import read_rows, write_part

Actor = Any  # Ray's handle of a Shard
LOST = (RayActorError, ObjectLostError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)
CONNECT_SECONDS = 5.0
START_SECONDS = 120.0  # for all actors


class RayCluster(Engine):
    """All clients in actors of the Ray cluster that this process has joined.

    workers   the number of shards, at most one per CPU of the cluster; None: one per CPU
    """

    def __init__(self, plan: Plan, workers: int | None = None) -> None:
        super().__init__(plan)
        if plan.learner.device.type != "cpu":
            raise ConfigError(
                f"device = '{plan.learner.device}': engine = 'ray' trains on CPUs only. Use "
                "device = 'cpu' or engine = 'processes'."
            )
        self.workers = workers
        self.shards: list[Actor] = []
        self.blocks: list[range] = []
        self.graph: tuple[Graph, ObjectRef[Graph]] | None = None

    def begin(self) -> None:
        self._start()
        super().begin()

    def load(self, folder: Path) -> None:
        """Read a checkpoint, one shard after the other: the driver never holds them all."""
        self.begin()  # gives every state its type
        names = self._all(RayBlock.table_names)[0]
        for shard, clients in zip(self.shards, self.blocks, strict=True):
            rows = read_rows(folder, clients.start, clients.stop, names)
            arrays = {name: table.numpy() for name, table in rows.items()}
            self._take([self._post(shard, RayBlock.restore_arrays, arrays)])

    def save(self, folder: Path) -> None:
        waiting = [self._post(shard, RayBlock.arrays) for shard in self.shards]
        for clients in self.blocks:
            (arrays,) = self._take([waiting.pop(0)])
            tables = {name: torch.tensor(array) for name, array in arrays.items()}
            write_part(folder, list(clients), tables)

    def share(self) -> Exchange:
        announcements, models = zip(*self._all(RayBlock.share_models), strict=True)
        model_NKP = torch.from_numpy(np.concatenate(models))
        return Announcements.merge(announcements).with_models(model_NKP)

    def close(self) -> None:
        for shard in self.shards:
            ray.kill(shard)
        self.shards = []

    # ---- an exchange

    def _exchange(self, graph: Graph, announcements: Announcements) -> list[Announcements | None]:
        transfers = plan_transfers(graph, announcements, self.blocks)
        arriving = list(zip(transfers, self._offer(transfers), strict=True))
        graph_reference = self._put_graph(graph)
        waiting = []
        for b, shard in enumerate(self.shards):
            ids = np.unique(np.concatenate([graph.closed(i) for i in self.blocks[b]]))
            own = [
                (np.searchsorted(ids, transfer.client_T), transfer.k_T, reference)
                for transfer, reference in arriving
                if transfer.receiver == b
            ]
            known = announcements.select_clients(ids)
            waiting.append(self._post(shard, RayBlock.receive, graph_reference, ids, known, own))
        return self._take(waiting)

    def _offer(self, transfers: Sequence["ShardTransfer"]) -> list["ObjectRef[Array]"]:
        """Let every shard offer its models; return a reference for every transfer, in order."""
        waiting = []
        for a, (shard, clients) in enumerate(zip(self.shards, self.blocks, strict=True)):
            own = [(t.client_T - clients.start, t.k_T) for t in transfers if t.sender == a]
            waiting.append(self._post(shard, RayBlock.offer, own))
        return [reference for offered in self._take(waiting) for reference in offered]

    def _put_graph(self, graph: Graph) -> "ObjectRef[Graph]":
        """Return a reference; a graph that stays the same goes to every machine once."""
        if self.graph is None or self.graph[0] is not graph:
            self.graph = graph, ray.put(graph)
        return self.graph[1]

    # ---- actors

    def _start(self) -> None:
        """Start new actors on the machines that are there now."""
        self.graph = None
        while not self._try_to_start():
            pass  # a machine was lost after its CPUs were counted
        sources = ray.put(read_user_modules(Path.cwd()))
        waiting = []
        for shard, clients in zip(self.shards, self.blocks, strict=True):
            payload = ray.put(PlanPayload.of(self.plan.select_clients(clients)))
            waiting.append(shard.open.remote(sources, [payload]))
        self._take(waiting)

    def _try_to_start(self) -> bool:
        """Return whether every actor started; false: the cluster has become too small."""
        self.close()
        count = min(self.workers or count_cpus(), count_cpus())
        self.blocks = split_clients([len(y) for y in self.plan.train.y], count)
        actor: Any = ray.remote(num_cpus=1)(Shard)
        self.shards = [actor.remote() for _ in self.blocks]
        waiting = [shard.versions.remote() for shard in self.shards]
        end = time.monotonic() + START_SECONDS
        started: list[Any] = []
        while len(started) < len(waiting):
            started, _ = ray.wait(waiting, num_returns=len(waiting), timeout=1)
            for versions in self._take(started):
                check_versions(versions)
            if count_cpus() < len(waiting):
                return False
            if time.monotonic() > end:
                raise WorkerError(
                    f"workers = {len(waiting)}: only {len(started)} actors started within "
                    f"{START_SECONDS:.0f} s; the other CPUs of the cluster are busy, or its memory "
                    "is full. Use fewer workers."
                )
        return True

    def _all(
        self,
        command: Callable[Concatenate[RayBlock, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Answer]:
        return self._take([self._post(shard, command, *args, **kwargs) for shard in self.shards])

    def _post(
        self,
        shard: Actor,
        command: Callable[Concatenate[RayBlock, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> "ObjectRef[Answer]":
        """Send the command to a shard and return a reference to its answer."""
        reference: ObjectRef[Answer] = shard.execute.remote(command, args, kwargs)
        return reference

    def _take(self, references: Sequence["ObjectRef[Answer]"]) -> list[Answer]:
        try:
            return list(ray.get(references))
        except RayError as error:
            raise translate(error) from None


def translate(error: RayError) -> FedspdError:
    """Return the error that a person can act on."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, FedspdError):
        return cause
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    if isinstance(cause, RayActorError) and cause.actor_init_failed:
        return WorkerError(
            f"An actor could not start ({lines[-1]}). Install the same fedspd and Python on every "
            "machine of the cluster."
        )
    if isinstance(cause, ActorUnavailableError):
        return BlockLostError("A part of the cluster was lost (an actor does not answer)")
    if isinstance(cause, LOST):
        return BlockLostError(f"A part of the cluster was lost ({lines[0].rstrip('.')})")
    return WorkerError(
        f"Ray failed with {type(cause).__name__}: {lines[0]} The last checkpoint is complete."
    )


def check_versions(theirs: dict[str, str]) -> None:
    for name, ours in installed_versions().items():
        if theirs[name] != ours:
            raise WorkerError(
                f"A machine of the cluster has {name} {theirs[name]}, this one has {ours}. Install "
                "the same version everywhere: results depend on it."
            )


# ---- which models go where


@dataclass(frozen=True)
class ShardTransfer:
    """The models that go from one shard to another.

    client_T   the client of each model
    k_T        which of the client's K offered models it is
    """

    sender: int
    receiver: int
    client_T: Ints
    k_T: Ints


def plan_transfers(
    graph: Graph, announcements: Announcements, blocks: Sequence[range]
) -> list[ShardTransfer]:
    """Return all transfers of an exchange, ordered by sender, receiver and client.

    A model goes to a shard if a neighbour there wants it, and it goes once.
    """
    shards, (N, K) = len(blocks), announcements.cluster_CK.shape
    shard_N = np.repeat(np.arange(shards), [len(clients) for clients in blocks])
    receiver, sender = graph.pairs(range(N))
    crosses = shard_N[sender] != shard_N[receiver]
    sender, receiver = sender[crosses], receiver[crosses]
    offered, wanted = announcements.cluster_CK[sender], announcements.want_CM[receiver]
    t, k = np.nonzero((offered[:, :, None] == wanted[:, None, :]).any(2))
    route = shard_N[sender[t]] * shards + shard_N[receiver[t]]
    code_T = np.unique((route * N + sender[t]) * K + k)  # one integer sorts faster than a row
    route_T, client_T, k_T = code_T // (N * K), code_T // K % N, code_T % K
    cuts = np.flatnonzero(np.diff(route_T)) + 1
    pieces = zip(*(np.split(table, cuts) for table in (route_T, client_T, k_T)), strict=True)
    return [
        ShardTransfer(*divmod(int(route[0]), shards), clients, ks)
        for route, clients, ks in pieces
        if len(route)
    ]


# ---- the cluster


def count_cpus() -> int:
    cluster_resources: Callable[[], dict[str, float]] = ray.cluster_resources
    cpus = int(cluster_resources().get("CPU", 0))
    if not cpus:
        raise WorkerError(
            "The Ray cluster has no CPU to offer. Start another machine with "
            "'ray start --address=HOST:PORT'."
        )
    return cpus


@contextmanager
def joined_cluster(address: str | None, workers: int | None) -> Iterator[None]:
    """Join the cluster at the address, or start one on this machine, and leave it at the end.

    A process that is already in a cluster stays in it.
    """
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
        with _sigterm_handler_kept():
            ray.init(address=address or "local", **options)
    except Exception as error:  # a time-out of Ray's start is a plain one
        message = " ".join(str(error).split()).rstrip(".")
        if address is None:
            raise ConfigError(f"Ray did not start on this machine: {message}.") from None
        raise ConfigError(
            f"address = '{address}': {message}. Start a cluster with 'ray start --head', or leave "
            "the address out."
        ) from None


def _check_reachable(address: str) -> None:
    """Refuse an address where nothing listens: Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"address = '{address}': expected auto, or HOST:PORT of a cluster's head (usually port "
            "6379)."
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"address = '{address}': no answer ({error}). Start a cluster there with "
            "'ray start --head'."
        ) from None


@contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    """Restore the handler that Ray replaces: SIGTERM must end a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
