"""The Ray engine inside a cluster gives the simulator's results, whichever actor dies."""

import os
import re
import shutil
import signal
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedspd
from fedspd.core.errors import ConfigError, WorkerError
from fedspd.core.graph import Graph
from fedspd.core.ledger import NO_CLUSTER
from fedspd.engines.engine import split_clients
from fedspd.experiment.build import build_experiment
from fedspd.runtime.announcements import Announcements
from fedspd.runtime.block_runner import BlockRunner

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
from ray.exceptions import RayActorError  # noqa: E402

from fedspd.engines import ray_cluster  # noqa: E402
from fedspd.engines.ray_cluster import (  # noqa: E402
    RayCluster,
    check_versions,
    plan_transfers,
    translate,
)
from fedspd.engines.ray_shard import (  # noqa: E402
    PlanPayload,
    Shard,
    StackedBlock,
    UserModules,
    installed_versions,
    read_user_modules,
)

SETTINGS = [
    "clients=6",
    "data.examples=24",
    "topology.degree=2",
    "training.epochs=1",
    "training.batch=8",
    "method=fedspd",
    "fedspd.final_epochs=1",
    "rounds=4",
]
CONFIG = fedspd.load(overrides=SETTINGS)
QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": "CRITICAL"}


@pytest.fixture(scope="module")
def local_ray():
    """A cluster of two CPUs in which this process already is, as in a notebook."""
    ray.init(address="local", num_cpus=2, **QUIET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_cluster, "START_SECONDS", 900.0)  # actors start late on a busy machine
        yield
    ray.shutdown()


def check_same(lab, result, whole):
    assert result.summary["hash"] == whole.summary["hash"]
    assert lab.timeless(result.folder) == lab.timeless(whole.folder)


# ---- who needs what

LINE = Graph.from_edges(4, [(0, 1), (1, 2), (2, 3)])


def announcements(cluster_CK, want_CM) -> Announcements:
    cluster, want = np.array(cluster_CK), np.array(want_CM)
    return Announcements(
        cluster, np.ones(cluster.shape), want, np.zeros(len(want), np.int64), 3, True
    )


def listed(graph, cluster_CK, want_CM, blocks) -> list[tuple[int, int, list[int], list[int]]]:
    """The transfers as sender, receiver, clients and models."""
    transfers = plan_transfers(graph, announcements(cluster_CK, want_CM), blocks)
    return [(t.sender, t.receiver, t.client_T.tolist(), t.k_T.tolist()) for t in transfers]


def test_plan_transfers_takes_only_models_that_a_neighbour_in_the_other_shard_wants():
    halves, all_0 = [range(2), range(2, 4)], [[0]] * 4
    assert listed(LINE, all_0, all_0, halves) == [(0, 1, [1], [0]), (1, 0, [2], [0])]
    without_2 = [[0], [0], [1], [0]]
    assert listed(LINE, without_2, without_2, halves) == []
    wanted = [[0], [1], [0], [0]]
    assert listed(LINE, [[0, 1]] * 4, wanted, halves) == [(0, 1, [1], [0]), (1, 0, [2], [1])]


def test_plan_transfers_sends_a_model_to_a_shard_once():
    star, all_0 = Graph.from_edges(4, [(0, 1), (0, 2), (0, 3)]), [[0]] * 4
    assert listed(star, all_0, all_0, [range(1), range(1, 4)]) == [
        (0, 1, [0], [0]),
        (1, 0, [1, 2, 3], [0, 0, 0]),
    ]


@given(st.data())
def test_plan_transfers_agrees_with_its_definition(data):
    n, shards = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    edges = data.draw(
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=12)
    )
    offered = data.draw(
        st.lists(
            st.lists(st.integers(NO_CLUSTER, 2), min_size=2, max_size=2), min_size=n, max_size=n
        )
    )
    wanted = data.draw(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=1), min_size=n, max_size=n)
    )
    graph, blocks = Graph.from_edges(n, edges), split_clients([1] * n, shards)
    packed = [
        (t.receiver, int(i), int(k))
        for t in plan_transfers(graph, announcements(offered, wanted), blocks)
        for i, k in zip(t.client_T, t.k_T, strict=True)
    ]
    home = {i: b for b, clients in enumerate(blocks) for i in clients}
    assert len(packed) == len(set(packed))
    assert set(packed) == {
        (home[j], int(i), k)
        for j in range(n)
        for i in graph.closed(j)
        for k in (0, 1)
        if home[i] != home[j] and offered[i][k] in wanted[j]
    }


def test_stacked_block_restores_the_block():
    block = build_experiment(CONFIG).plan.select_clients(range(2, 5)).train
    again = StackedBlock.of(block).unpack()
    assert again.clients == range(2, 5)
    assert (again.network_size, again.width, again.server) == (
        block.network_size,
        block.width,
        block.server,
    )
    assert all(
        torch.equal(*pair)
        for pair in [*zip(again.x, block.x, strict=True), *zip(again.y, block.y, strict=True)]
    )


def test_user_modules_travel_as_text(tmp_path, monkeypatch):
    (tmp_path / "travelling").mkdir()
    (tmp_path / "travelling" / "inner.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import travelling.inner  # type: ignore[import-not-found]

    sources = read_user_modules(tmp_path)
    assert sources == {"travelling.inner": "answer = 42\n"}
    for name in ("travelling", "travelling.inner"):
        monkeypatch.delitem(sys.modules, name)
    shutil.rmtree(tmp_path / "travelling")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, UserModules(sources)])
    import travelling.inner  # noqa: F811

    assert travelling.inner.answer == 42


OWN = """
from torch import nn

def make(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


def test_shard_imports_a_model_whose_file_it_does_not_have(local_ray, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("travelling_model.py").write_text(OWN)
    plan = build_experiment(
        fedspd.load(overrides=[*SETTINGS, "model.name=travelling_model:make"])
    ).plan
    sources = read_user_modules(tmp_path)
    Path("travelling_model.py").unlink()
    shard = ray.remote(num_cpus=1)(Shard).remote()
    ray.get(shard.open.remote(sources, [ray.put(PlanPayload.of(plan))]))
    ray.get(shard.execute.remote(BlockRunner.begin, (), {}))
    here = BlockRunner(plan)
    here.begin()
    assert ray.get(shard.execute.remote(BlockRunner.digests, (), {})) == here.digests()
    ray.kill(shard)


# ---- runs


class Stop(Exception):
    pass


class StopAfterRound3(fedspd.Callback):
    def on_round(self, event):
        if event["round"] == 3:
            raise Stop


@pytest.mark.parametrize(
    ("first", "second"),
    [("processes", "ray"), pytest.param("ray", "processes", marks=pytest.mark.long)],
)
def test_run_with_newcomers_begun_by_one_engine_continues_on_the_other(
    lab, local_ray, tmp_path, first, second
):
    config = fedspd.load(overrides=[*SETTINGS, "holdout_clients=2", "evaluate_every=2"])
    out = tmp_path / "run"
    with pytest.raises(Stop):
        fedspd.run(config, engine=first, out=out, callbacks=[StopAfterRound3()])
    result = fedspd.run(out=out, resume=True, engine=second)
    check_same(lab, result, fedspd.run(config, workers=2))
    assert ray.is_initialized(), "a cluster that was there before is there afterwards"
    if second == "ray":
        parts = {path.name for path in (out / "checkpoints/round-000005").glob("part-*")}
        assert parts == {"part-000000-000003.safetensors", "part-000003-000006.safetensors"}


@pytest.mark.long
def test_modules_that_stay_at_home_stay_there_on_ray(lab, local_ray):
    def net(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, classes))

    config = fedspd.load(overrides=[*SETTINGS, "rounds=2", "exchange.only=1"])
    result = fedspd.run(config, model=net, engine="ray")
    check_same(lab, result, fedspd.run(config, model=net, workers=2))
    assert result.events()[0]["traffic"][0]["model_bytes"] == 4 * (64 * 4 + 4)


# ---- what dies


def dying_model(deaths: Path, count: int):
    """Return a factory of models that kill their process while they train, `count` times in all."""

    class Dying(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.layer = nn.Linear(64, classes)
            self.batches = 0

        def forward(self, x):
            self.batches += self.training
            if self.batches == 8 and claim(deaths, count):
                os.kill(os.getpid(), signal.SIGKILL)
            return self.layer(x.flatten(1))

    return lambda shape, classes: Dying(classes)


def claim(deaths: Path, count: int) -> bool:
    """Take one of `count` places. Creating a file is atomic: no two processes take the same."""
    for place in range(count):
        try:
            (deaths / str(place)).touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False


def test_run_survives_an_actor_that_is_killed_while_it_trains(lab, local_ray, tmp_path, event_log):
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    result = fedspd.run(
        CONFIG, model=dying_model(deaths, 1), engine="ray", workers=2, callbacks=[event_log]
    )
    assert len(list(deaths.iterdir())) == 1
    check_same(lab, result, fedspd.run(CONFIG, model=dying_model(deaths, 0)))
    _, restart = [event for event in event_log.events if event["event"] == "start"]
    assert event_log.alarms == [(restart["round"], alarm) for alarm in restart["alarms"]]
    ((_, alarm),) = event_log.alarms
    assert re.fullmatch(
        r"A part of the cluster was lost \(.*\): the run goes on from its last checkpoint\.", alarm
    )


@pytest.mark.long
def test_actors_that_always_die_end_the_run_with_a_sentence(lab, local_ray, tmp_path):
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    with pytest.raises(
        WorkerError,
        match=r"^A part of the cluster was lost \(.*\), 4 times without a checkpoint in between\. ",
    ):
        fedspd.run(CONFIG, model=dying_model(deaths, 100), engine="ray", workers=1)
    assert len(list(deaths.iterdir())) == 4


def test_exception_in_an_actor_arrives_as_a_sentence(local_ray):
    class Fails(nn.Linear):
        def forward(self, x):
            if self.training:
                raise ValueError("no training today\nsecond line")
            return super().forward(x.flatten(1))

    with pytest.raises(
        WorkerError,
        match=r"^A worker failed with ValueError: no training today second line "
        r"\(test_ray.py, line \d+\)\. Repeat with engine = ",
    ):
        fedspd.run(CONFIG, model=lambda shape, classes: Fails(64, classes), engine="ray", workers=1)


def test_machine_with_other_versions_is_refused():
    check_versions(installed_versions())
    with pytest.raises(
        WorkerError, match=r"^A machine of the cluster has torch 1\.0, this one has \d"
    ):
        check_versions({**installed_versions(), "torch": "1.0"})


def test_actor_that_cannot_start_names_the_missing_module(local_ray, monkeypatch):
    ghost = types.ModuleType("nowhere_else")
    exec("class Ghost:\n    def speak(self): pass", ghost.__dict__)
    monkeypatch.setitem(sys.modules, "nowhere_else", ghost)
    with pytest.raises(RayActorError) as caught:
        ray.get(ray.remote(ghost.Ghost).remote().speak.remote())
    assert str(translate(caught.value)) == (
        "An actor could not start (ModuleNotFoundError: No module named 'nowhere_else'). "
        "Install the same fedspd and Python on every machine of the cluster."
    )


def test_ray_that_does_not_start_in_time_ends_the_run_with_a_sentence(monkeypatch):
    def init(**options):
        raise Exception("The current node timed out during startup.\n")  # as ray.init does

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    with pytest.raises(ConfigError, match=r"did not start on this machine: The .* startup\.$"):
        ray_cluster._join(None, 1)


def test_ray_engine_refuses_a_gpu():
    plan = build_experiment(CONFIG).plan
    plan.learner.device = torch.device("cuda")
    with pytest.raises(
        ConfigError,
        match=r"^device = 'cuda': engine = 'ray' trains on CPUs only\. Use device = 'cpu' or ",
    ):
        RayCluster(plan)
