"""A Ray cluster gives the same bits. Its actors take seconds to start, so most methods wait for the long tests."""

import sys

import pytest

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytestmark = pytest.mark.xdist_group("ray")  # one cluster at a time

from fedspd.algorithms import METHODS  # noqa: E402
from fedspd.engines.ray_cluster import RayCluster  # noqa: E402
from fedspd.engines.simulator import Simulator  # noqa: E402

QUICK = ("ditto",)  # a class that no actor can import


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="CRITICAL",
    )
    yield
    ray.shutdown()


def marked(method: str):
    return pytest.param(method, marks=() if method in QUICK else pytest.mark.long)


@pytest.mark.parametrize("method", [marked(method) for method in [*METHODS, "ditto"]])
def test_every_method_by_two_actors_and_its_checkpoint_in_one_process(lab, method, tmp_path):
    ray.cloudpickle.register_pickle_by_value(
        sys.modules[lab.__module__]
    )  # actors cannot import a conftest
    used = RayCluster(lab.plan(method), workers=2)
    try:
        lab.run(used, lab.path(), 2).save(tmp_path)
        lab.run(used, lab.path(), 4, first=3).finish(5)
        assert tuple(used.digests()) == lab.reference(method, "classes")
    finally:
        used.close()
    here = Simulator(lab.plan(method))
    here.load(tmp_path)
    lab.run(here, lab.path(), 4, first=3).finish(5)
    assert tuple(here.digests()) == lab.reference(method, "classes")


@pytest.mark.long
def test_float64_and_a_server_equal_the_simulation(lab):
    ray.cloudpickle.register_pickle_by_value(sys.modules[lab.__module__])
    used, here = (
        RayCluster(lab.plan("fedem", "regression"), workers=2),
        Simulator(lab.plan("fedem", "regression")),
    )
    try:
        reports = [
            lab.run(engine, lab.everyone(server=True), 2).round(3, lab.everyone(server=True))
            for engine in (used, here)
        ]
        assert used.digests() == here.digests()
        assert reports[0].traffic[0].as_json() == reports[1].traffic[0].as_json()
        assert reports[0].steps == reports[1].steps
    finally:
        used.close()
