"""A Ray cluster gives the same bits.

Its actors take seconds to start, so most methods wait for the long tests.
"""

from dataclasses import replace

import pytest

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytestmark = pytest.mark.long

from fedspd.algorithms import METHODS  # noqa: E402
from fedspd.core.graph import Graph  # noqa: E402
from fedspd.engines.ray_cluster import RayCluster  # noqa: E402
from fedspd.engines.simulator import Simulator  # noqa: E402
from fedspd.privacy.mechanisms import DPSGD  # noqa: E402
from fedspd.testing import Subject  # noqa: E402
from fedspd.testing.subject import path_graph, run, run_rounds  # noqa: E402


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


@pytest.fixture(autouse=True)
def _few_exchanges():
    """Leave the exchanges as they are: a patch does not reach actors, which are processes."""


@pytest.fixture
def subject(subject):
    """Return the subject without the reference that other tests have made with few exchanges."""
    return replace(subject)


@pytest.mark.parametrize("method", [*METHODS, "ditto"])
def test_actors_and_their_checkpoint_give_the_reference(subject, tmp_path):
    cluster = RayCluster(subject.plan(), workers=2)
    try:
        run_rounds(cluster, path_graph(), 1, 2).save(tmp_path)
        assert run(cluster, path_graph(), first=3) == subject.reference()
    finally:
        cluster.close()
    simulator = Simulator(subject.plan())
    simulator.load(tmp_path)
    assert run(simulator, path_graph(), first=3) == subject.reference()


@pytest.mark.parametrize("name", ["fedspd", "fedspd-split"])
def test_private_actors_give_the_reference_and_its_releases(name, subjects):
    mechanism = DPSGD.of(noise=0.7, clip=1.0, rate=0.5, epochs=2)
    needed = {option: value for option, (value, _) in METHODS[name].PRIVATE_OPTIONS.items()}
    subject = Subject(METHODS[name], 2, {**subjects[name].options, **needed}, mechanism)
    cluster, simulator = RayCluster(subject.plan(), workers=2), Simulator(subject.plan())
    try:
        for engine in (cluster, simulator):
            engine.begin()
        for t in range(1, 4):
            reports = [engine.round(t, path_graph()) for engine in (cluster, simulator)]
            assert reports[0].releases == reports[1].releases
            assert sorted(reports[0].releases) == [*range(5)]
        assert cluster.digests() == simulator.digests()
    finally:
        cluster.close()


def test_float64_and_a_server_equal_the_simulation(subjects):
    edges = [(i, j) for i in range(5) for j in range(i)]
    star = Graph.from_edges(5, edges, "examples", server=True)
    plan = subjects["fedem"].plan("regression")
    cluster, simulator = RayCluster(plan, workers=2), Simulator(plan)
    try:
        reports = [run_rounds(e, star, 1, 2).round(3, star) for e in (cluster, simulator)]
        assert cluster.digests() == simulator.digests()
        assert reports[0].traffic[0].as_json() == reports[1].traffic[0].as_json()
        assert reports[0].steps == reports[1].steps
    finally:
        cluster.close()
