"""The Ray engine on clusters that it joins or starts: a machine that dies, wrong options."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fedspd
from fedspd.cli.main import execute
from fedspd.core.errors import MissingExtraError

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
from ray.cluster_utils import Cluster  # noqa: E402

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


@pytest.fixture(scope="module")
def whole():
    return fedspd.run(fedspd.load(overrides=SETTINGS))


@pytest.fixture
def two_machines():
    """Two machines with one CPU each; a lost one is noticed within a second."""
    impatient = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 200,
        "health_check_failure_threshold": 3,
    }
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": impatient},
    )
    cluster.second = cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.mark.long
def test_run_survives_a_machine_that_is_killed(lab, two_machines, whole):
    heard = []

    class RemoveSecondMachine(fedspd.Callback):
        def on_start(self, event):
            machines = sum(node["Alive"] for node in ray.nodes())
            heard.append((event["event"], event["round"], machines))

        on_final = on_start

        def on_round(self, event):
            if event["round"] == 2 and two_machines.second is not None:
                two_machines.remove_node(two_machines.second, allow_graceful=False)
                two_machines.second = None

    result = fedspd.run(
        fedspd.load(overrides=SETTINGS),
        engine="ray",
        address=two_machines.address,
        callbacks=[RemoveSecondMachine()],
    )
    assert result.summary["hash"] == whole.summary["hash"]
    assert lab.timeless(result.folder) == lab.timeless(whole.folder)
    assert heard[0] == ("start", 0, 2)
    assert [(event, machines) for event, _, machines in heard[1:]] == [("start", 1), ("final", 1)]
    assert not ray.is_initialized()


# ---- the command line, and what is refused


@pytest.mark.long
def test_installed_program_prints_only_json_on_its_output(tmp_path, whole):
    found = subprocess.run(
        [*program(tmp_path / "run"), "rounds=4", "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert json.loads(found.stdout)["hash"] == whole.summary["hash"]
    assert [line for line in found.stderr.splitlines() if "ray" in line.lower()] == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_installed_program_stops_on_a_signal(lab, tmp_path, number):
    started = subprocess.Popen(
        [*program(tmp_path / "run"), "rounds=2000"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=tmp_path,
    )
    lab.until(lambda: lab.rounds(tmp_path / "run") >= 2 or started.poll() is not None, seconds=240)
    os.killpg(started.pid, number) if number == signal.SIGINT else started.send_signal(number)
    _, stderr = started.communicate()
    assert started.returncode == 130
    assert "Traceback" not in stderr
    assert stderr.endswith(
        f"\nfedspd: Continue with: fedspd run --resume {tmp_path / 'run'}\nfedspd: Stopped.\n"
    )
    assert 2 <= lab.rounds(tmp_path / "run") < 2000


def program(out: Path) -> list[str]:
    return [
        str(Path(sys.executable).with_name("fedspd")),
        "run",
        *SETTINGS[:-1],
        "--out",
        str(out),
        "--engine",
        "ray",
        "--workers",
        "2",
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--engine", "rya"], "engine = 'rya': unknown engine; did you mean 'ray'?"),
        (
            ["--address", "auto"],
            "address = 'auto': only engine = 'ray' has an address. Choose that engine, or leave ",
        ),
        (
            ["--engine", "ray", "--address", "nowhere"],
            "address = 'nowhere': expected auto, or HOST:PORT of a cluster's head "
            "(usually port 6379).",
        ),
        (
            ["--engine", "ray", "--address", "127.0.0.1:1"],
            "address = '127.0.0.1:1': no answer (",
        ),
    ],
)
def test_command_refuses_a_wrong_engine_or_address(tmp_path, capsys, options, sentence):
    assert execute(["run", *SETTINGS, "--out", str(tmp_path / "run"), *options]) == 2
    assert capsys.readouterr().err.startswith(f"fedspd: {sentence}")
    assert not (tmp_path / "run").exists()


def test_engine_without_ray_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fedspd.engines.ray_cluster", None)
    with pytest.raises(
        MissingExtraError,
        match=r"^engine = 'ray' needs the extra 'ray', which is not installed: "
        r"pip install 'fedspd\[ray\]'\.$",
    ):
        fedspd.run(fedspd.load(overrides=SETTINGS), engine="ray", out=tmp_path / "run")
