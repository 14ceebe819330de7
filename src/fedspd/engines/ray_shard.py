"""One block of clients in a Ray actor. The driver sends commands; other shards send models.

Shapes: C clients in the block, N clients that it receives from, K models offered by each,
P parameters of a model, T models in a transfer.
"""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray import ObjectRef
from ray.exceptions import RayError

from fedspd.core.algorithm import AnyAlgorithm
from fedspd.core.block import Block
from fedspd.core.exchange import ExchangeOptions, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.engines.engine import Answer, failures_as_sentences
from fedspd.privacy.accounts import Limit
from fedspd.runtime.announcements import Announcements
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.plan import GroundTruth, Plan
from fedspd.runtime.processes import keep_memory

Array = NDArray[Any]
Ints = NDArray[np.int64]
REPEAT_WITH = "engine = 'processes' and workers = 1"


class Shard:
    """The actor of one block. It has no block before `open`."""

    block: "RayBlock"

    def __init__(self) -> None:
        keep_memory()
        torch.set_num_threads(1)
        warnings.filterwarnings(  # arrays of Ray's shared memory are read-only, and only read
            "ignore", message="The given NumPy array is not writable"
        )

    def versions(self) -> dict[str, str]:
        return installed_versions()

    def open(self, sources: Mapping[str, str], payload: Sequence["ObjectRef[PlanPayload]"]) -> None:
        """Make the block of a plan.

        The payload is a list of one reference, which Ray does not resolve by itself: it can be
        read only once the sources are known.
        """
        with failures_as_sentences(REPEAT_WITH, RayError):
            sys.meta_path.append(UserModules(sources))
            self.block = RayBlock(ray.get(payload[0]).unpack())

    def execute(
        self, command: Callable[..., Answer], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Answer:
        """Return the answer of a command, which is a method of RayBlock."""
        with failures_as_sentences(REPEAT_WITH, RayError):
            return command(self.block, *args, **kwargs)


class RayBlock(BlockRunner):
    """A block that exchanges models with other shards through the memory of Ray's machines."""

    def offer(self, models: Sequence[tuple[Ints, Ints]]) -> list["ObjectRef[Array]"]:
        """Put models into this machine's memory, where other shards can fetch them.

        models   for each transfer row_T and k_T: the rows of clients, and which model of each
        """
        model_CKP = self.exchange.model_CKP.detach().to(self.plan.learner.dtype).numpy()
        return [ray.put(model_CKP[row_T, k_T]) for row_T, k_T in models]

    def receive(
        self,
        graph: "ObjectRef[Graph]",
        sender_ids: Ints,
        announcements: Announcements,
        transfers: Sequence[tuple[Ints, Ints, "ObjectRef[Array]"]],
    ) -> Announcements | None:
        """Fetch the transfers and answer the exchange; models that no client here wants are NaN.

        sender_ids      the clients that this block receives from, its own included
        announcements   of these clients
        transfers       row_T among these clients, k_T and the models
        """
        clients, dtype = self.plan.train.clients, self.plan.learner.dtype
        model_NKP = torch.full(announcements.model_shape, torch.nan, dtype=dtype)
        first = int(np.searchsorted(sender_ids, clients[0]))
        model_NKP[first : first + len(clients)] = self.exchange.model_CKP
        fetched = ray.get([reference for _, _, reference in transfers])
        for (row_T, k_T, _), model_TP in zip(transfers, fetched, strict=True):
            model_NKP[torch.from_numpy(row_T), torch.from_numpy(k_T)] = torch.from_numpy(model_TP)
        offers = announcements.with_models(model_NKP)
        return self.advance(Neighbourhood.of(ray.get(graph), clients, offers, sender_ids))

    def share_models(self) -> tuple[Announcements, Array]:
        """Return what the block's clients offer to newcomers."""
        announcements = self.share()
        return announcements, self.exchange.model_CKP.detach().numpy()

    def table_names(self) -> list[str]:
        """Return the names of the state's tables."""
        return list(self.tables())

    def arrays(self) -> dict[str, Array]:
        """Return the state's tables as arrays, which Ray hands over without a copy."""
        return {name: table.detach().numpy() for name, table in self.tables().items()}

    def restore_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Replace the state's tables."""
        self.restore({name: torch.tensor(array) for name, array in arrays.items()})


def installed_versions() -> dict[str, str]:
    """Return the versions that results depend on: they must be the same on every machine."""
    return {
        "Python": ".".join(map(str, sys.version_info[:2])),
        **{name: version(name) for name in ("fedspd", "torch", "numpy", "scipy")},
    }


# ---- a plan as it is sent


@dataclass(frozen=True)
class StackedBlock:
    """A Block whose examples are two arrays, which actors read in Ray's memory without a copy."""

    clients: Sequence[int]
    network_size: int
    counts: list[int]
    x: Array
    y: Array
    width: int
    server: bool
    rounds: int
    diameter: int

    @classmethod
    def of(cls, block: Block) -> "StackedBlock":
        x, y = (torch.cat(list(rows)).numpy() for rows in (block.x, block.y))
        counts = block.counts_C.tolist()
        about = block.width, block.server, block.rounds, block.diameter
        return cls(block.clients, block.network_size, counts, x, y, *about)

    def unpack(self) -> Block:
        x, y = (torch.split(torch.from_numpy(rows), self.counts) for rows in (self.x, self.y))
        about = self.width, self.server, self.rounds, self.diameter
        return Block(self.clients, self.network_size, x, y, *about)


@dataclass(frozen=True)
class PlanPayload:
    """A Plan as it is sent to an actor.

    The actor makes the learner: its module shares memory with a vector, which serialisation would
    separate.
    """

    algorithm: AnyAlgorithm
    make_learner: Callable[[], Learner]
    train: StackedBlock
    test: StackedBlock
    truth: GroundTruth
    distributions: int
    key: Key
    test_truth: GroundTruth | None
    exchange: ExchangeOptions
    validation: StackedBlock | None
    metrics: tuple[str, ...]
    limit: Limit | None

    @classmethod
    def of(cls, plan: Plan) -> "PlanPayload":
        old = plan.learner
        return cls(
            plan.algorithm,
            partial(
                Learner,
                old.factory,
                old.training,
                old.loss,
                old.device,
                old.dtype,
                old.head,
                old.precision,
                old.mechanism,
                old.augmentations,
            ),
            StackedBlock.of(plan.train),
            StackedBlock.of(plan.test),
            plan.truth,
            plan.distributions,
            plan.key,
            plan.test_truth,
            plan.exchange,
            None if plan.validation is None else StackedBlock.of(plan.validation),
            plan.metrics,
            plan.limit,
        )

    def unpack(self) -> Plan:
        learner, train, test = self.make_learner(), self.train.unpack(), self.test.unpack()
        truth = self.truth, self.distributions, self.key, self.test_truth
        validation = None if self.validation is None else self.validation.unpack()
        about = self.exchange, validation, self.metrics, self.limit
        return Plan(self.algorithm, learner, train, test, *truth, *about)


# ---- modules of the user


def read_user_modules(folder: Path) -> dict[str, str]:
    """Return the sources of the modules imported from the folder, which other machines lack."""
    sources = {}
    for name, module in list(sys.modules.items()):
        stem, file = folder.joinpath(*name.split(".")), getattr(module, "__file__", None)
        if file in (f"{stem}.py", f"{stem}/__init__.py"):
            sources[name] = Path(file).read_text("utf-8")
    return sources


class UserModules(MetaPathFinder, InspectLoader):
    """The importer of modules whose sources came from the driver."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = sources

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_package = any(other.startswith(f"{name}.") for other in self.sources)
        if is_package or name in self.sources:
            return spec_from_loader(name, self, is_package=is_package)
        return None

    def get_source(self, name: str) -> str:
        return self.sources.get(name, "")
