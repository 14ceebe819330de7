"""One block of clients in a Ray actor. Commands come from the driver; models come from the other shards.

Shapes: C clients in the block, N clients that it hears, K models offered by each, P numbers in a model, T models in a parcel.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from ray.exceptions import RayError

from fedspd.core.algorithm import AnyAlgorithm
from fedspd.core.block import Block
from fedspd.core.errors import FedspdError, WorkerError
from fedspd.core.exchange import Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.engines.engine import failure
from fedspd.runtime.announcements import Announcements
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.plan import Plan, Truth
from fedspd.runtime.processes import keep_memory

Ints = NDArray[np.int64]
Reference = Any  # Ray's name of an object that lies in some machine's memory
AGAIN = "engine = 'processes' and workers = 1"


class Shard:
    def __init__(self) -> None:
        keep_memory()
        torch.set_num_threads(1)
        warnings.filterwarnings(
            "ignore", message="The given NumPy array is not writable"
        )  # what Ray hands out is not, nor need be

    def about(self) -> dict[str, str]:
        return versions()

    def do(self, command: str, *arguments: Any) -> Any:
        try:
            return getattr(self if hasattr(Shard, command) else self.runner, command)(*arguments)
        except (FedspdError, RayError):
            raise
        except Exception as error:
            raise WorkerError(failure(error, AGAIN)) from None

    def open(self, sources: dict[str, str], luggage: Sequence[Reference]) -> None:
        """The luggage comes as a reference: it can be unpacked only where the sources are known."""
        sys.meta_path.append(OwnModules(sources))
        (unpacked,) = ray.get(list(luggage))
        self.runner = BlockRunner(unpacked.plan())

    def offer(self, parcels: Sequence[tuple[Ints, Ints]]) -> list[Reference]:
        """Put what other shards want, by row and place, into this machine's memory, where they can fetch it."""
        plan = self.runner.plan
        model_CKP = self.runner.request.model_CKP.detach().to(plan.learner.dtype).numpy()
        return [ray.put(model_CKP[row_T, k_T]) for row_T, k_T in parcels]

    def hear(
        self,
        graph: Graph,
        ids: Ints,
        header: Announcements,
        parcels: Sequence[tuple[Ints, Ints, Reference]],
    ) -> Announcements | None:
        """Fetch the parcels; what nobody here asked for is not in them, and is NaN."""
        clients, learner = self.runner.plan.train.clients, self.runner.plan.learner
        model_NKP = torch.full(
            (*header.cluster_CK.shape, header.size), torch.nan, dtype=learner.dtype
        )
        first = int(np.searchsorted(ids, clients[0]))
        model_NKP[first : first + len(clients)] = self.runner.request.model_CKP
        fetched = ray.get([reference for _, _, reference in parcels])
        for (row_T, k_T, _), model_TP in zip(parcels, fetched, strict=True):
            model_NKP[torch.from_numpy(row_T), torch.from_numpy(k_T)] = torch.from_numpy(model_TP)
        return self.runner.answer(
            Neighbourhood.of(graph, clients, header.with_models(model_NKP), ids)
        )

    def shared(self) -> tuple[Announcements, NDArray[Any]]:
        header = self.runner.share()
        return header, self.runner.request.model_CKP.detach().numpy()

    def names(self) -> list[str]:
        """Of the tables."""
        return list(self.runner.tables())

    def tables(self) -> dict[str, NDArray[Any]]:
        return {name: table.detach().numpy() for name, table in self.runner.tables().items()}

    def restore(self, tables: dict[str, NDArray[Any]]) -> None:
        self.runner.restore({name: torch.tensor(table) for name, table in tables.items()})


def versions() -> dict[str, str]:
    """What must be the same on every machine, or results would not be."""
    return {
        "Python": ".".join(map(str, sys.version_info[:2])),
        **{name: version(name) for name in ("fedspd", "torch", "numpy", "scipy")},
    }


# ---- a plan on its way


@dataclass(frozen=True)
class StackedBlock:
    """A Block whose examples are two arrays, which actors read where Ray keeps them, without a copy."""

    clients: Sequence[int]
    network_size: int
    counts: list[int]
    x: NDArray[Any]
    y: NDArray[Any]
    width: int
    server: bool

    @classmethod
    def of(cls, block: Block) -> "StackedBlock":
        x, y = (torch.cat(list(rows)).numpy() for rows in (block.x, block.y))
        return cls(
            block.clients,
            block.network_size,
            block.counts_C.tolist(),
            x,
            y,
            block.width,
            block.server,
        )

    def block(self) -> Block:
        x, y = (torch.split(torch.from_numpy(rows), self.counts) for rows in (self.x, self.y))
        return Block(self.clients, self.network_size, x, y, self.width, self.server)


@dataclass(frozen=True)
class PlanPayload:
    """A Plan as it travels; its learner, whose module and vector are one memory, is made anew where it arrives."""

    algorithm: AnyAlgorithm
    learner: tuple[Any, ...]
    train: StackedBlock
    test: StackedBlock
    truth: Truth
    distributions: int
    key: Key

    @classmethod
    def of(cls, plan: Plan) -> "PlanPayload":
        old = plan.learner
        learner = (old.factory, old.training, old.loss, old.device, old.dtype)
        return cls(
            plan.algorithm,
            learner,
            StackedBlock.of(plan.train),
            StackedBlock.of(plan.test),
            plan.truth,
            plan.distributions,
            plan.key,
        )

    def plan(self) -> Plan:
        learner, train, test = Learner(*self.learner), self.train.block(), self.test.block()
        return Plan(self.algorithm, learner, train, test, self.truth, self.distributions, self.key)


# ---- a user's own modules


def own_sources(folder: Path) -> dict[str, str]:
    """The text of every module that was imported from the folder, where a user's own lie: other machines do not have it."""
    found = {}
    for name, module in list(sys.modules.items()):
        stem, file = folder.joinpath(*name.split(".")), getattr(module, "__file__", None)
        if file in (f"{stem}.py", f"{stem}/__init__.py"):
            found[name] = Path(file).read_text("utf-8")
    return found


class OwnModules(MetaPathFinder, InspectLoader):
    """Imports what the machine itself does not have, from texts that came along."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = sources

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = any(other.startswith(f"{name}.") for other in self.sources)
        return (
            spec_from_loader(name, self, is_package=package)
            if package or name in self.sources
            else None
        )

    def get_source(self, name: str) -> str:
        return self.sources.get(name, "")
