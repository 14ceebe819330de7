"""The choice of engine: processes of this machine, or actors of a Ray cluster."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from fedspd.core.errors import ConfigError, MissingExtraError, nearest
from fedspd.engines.engine import Engine
from fedspd.engines.simulator import Simulator
from fedspd.runtime.plan import Plan
from fedspd.runtime.processes import require_fork

EngineFactory = Callable[[Plan], Engine]
ENGINES = ("processes", "ray")
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}  # keeps Ray quiet


@contextmanager
def engine_factory(
    name: str, workers: int | None = None, address: str | None = None
) -> Iterator[EngineFactory]:
    """Yield the function that makes the engine of a plan.

    A cluster is joined first, so that a run on an unreachable one is refused before it begins.

    name      one of ENGINES
    workers   default: 1 for processes, one per CPU for Ray
    address   of a Ray cluster; default: one that is started on this machine
    """
    if name not in ENGINES:
        raise ConfigError(f"engine = '{name}': unknown engine; {nearest(name, ENGINES)}")
    if workers is not None and not (isinstance(workers, int) and workers >= 1):
        raise ConfigError(f"workers = {workers!r}: expected an integer of at least 1.")
    if name == "ray":
        with _ray_factory(workers, address) as make:
            yield make
        return
    if address is not None:
        raise ConfigError(
            f"address = '{address}': only engine = 'ray' has an address. Choose that engine, or "
            "leave the address out."
        )
    if workers is not None and workers > 1:
        require_fork(f"workers = {workers}: more than one worker")
    yield partial(Simulator, workers=workers or 1)


@contextmanager
def _ray_factory(workers: int | None, address: str | None) -> Iterator[EngineFactory]:
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # before the import, in which Ray reads some of them
    try:
        from fedspd.engines.ray_cluster import RayCluster, joined_cluster
    except ImportError:
        raise MissingExtraError.of("engine = 'ray'", "ray") from None
    with joined_cluster(address, workers):
        yield partial(RayCluster, workers=workers)
