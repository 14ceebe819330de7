"""The command `fedspd privacy`, before, during and after a run."""

import json

import pytest
from typer.testing import CliRunner

import fedspd
from fedspd.cli.main import app
from fedspd.config import load
from fedspd.core.errors import ConfigError, StorageError
from fedspd.experiment.callbacks import Callback

SETTINGS = [
    "method=fedspd", "rounds=4", "clients=4", "topology.kind=ring", "data.examples=40",
    "training.epochs=1", "training.batch=20", "privacy.noise=2.0", "fedspd.final_epochs=0",
]  # fmt: skip


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_privacy_of_a_config_is_what_its_run_spends(tmp_path):
    planned = json.loads(call("privacy", *SETTINGS, "--json"))
    assert [t for t, _ in planned["rounds"]] == [1, 2, 3, 4]
    assert planned["rounds"][0][1] < planned["rounds"][3][1] == planned["all"][0]
    folder = tmp_path / "run"
    call("run", *SETTINGS, "--out", str(folder), "--workers", "1", "--json")
    spent = json.loads(call("privacy", str(folder), "--json"))
    by_round = dict(map(tuple, planned["rounds"]))
    assert spent["rounds"][-1][1] == pytest.approx(by_round[4], abs=1e-5)
    assert spent["neighbours"]
    for sender, receiver, cost in spent["neighbours"]:
        assert abs(sender - receiver) in (1, 3)  # of the ring
        assert any(cost == pytest.approx(known, abs=1e-5) for known in by_round.values())
        assert cost <= spent["all"][sender] + 1e-6
    shown = call("privacy", str(folder))
    assert "Per neighbour" in shown
    assert "Budget by round" in shown
    with pytest.raises(ConfigError, match="rounds=3: not with a run or a node"):
        call("privacy", str(folder), "rounds=3")
    with pytest.raises(ConfigError, match="neither a run nor a node"):
        call("privacy", str(tmp_path))
    with pytest.raises(ConfigError, match="no such file or folder; expected a folder with run"):
        call("privacy", str(tmp_path / "nowhere"))


def test_privacy_of_a_run_without_any_or_with_an_older_ledger_is_a_sentence(tmp_path):
    plain = tmp_path / "plain"
    settings = [own for own in SETTINGS if not own.startswith("privacy")]
    call("run", *settings, "rounds=1", "--out", str(plain), "--workers", "1", "--json")
    with pytest.raises(ConfigError, match="this run is not private"):
        call("privacy", str(plain))
    private = tmp_path / "private"
    call("run", *SETTINGS, "rounds=1", "--out", str(private), "--workers", "1", "--json")
    events = private / "events.jsonl"
    events.write_text(events.read_text().replace('"received"', '"receivers"'))
    with pytest.raises(StorageError, match=r"events.jsonl: .*'received'.*an older version"):
        call("privacy", str(private))


def test_privacy_of_a_run_that_is_under_way_has_the_rounds_that_are_over(tmp_path):
    class Look(Callback):
        def on_round(self, event):
            found = json.loads(call("privacy", str(tmp_path / "run"), "--json"))
            assert [t for t, _ in found["rounds"]] == [*range(1, event["round"] + 1)]
            assert found["all"][0] == pytest.approx(event["privacy"]["epsilon"][0])

    fedspd.run(load(None, SETTINGS), out=tmp_path / "run", callbacks=[Look()], workers=1)


def test_privacy_of_nbafl_shows_the_nominal_and_the_true_cost():
    shown = call("privacy", "method=fedspd", "rounds=150", "clients=50", "data.examples=1000",
                 "privacy.mechanism=nbafl", "privacy.epsilon=10", "privacy.delta=0.01")  # fmt: skip
    assert "nominal epsilon = 10 for one upload" in " ".join(shown.split())


def test_privacy_of_a_config_without_any_is_refused():
    with pytest.raises(ConfigError, match="nothing is private"):
        CliRunner().invoke(app, ["privacy", "rounds=3"], catch_exceptions=False)


def test_privacy_of_a_config_warns_of_a_delta_above_one_over_the_examples():
    shown = " ".join(call("privacy", *SETTINGS, "privacy.delta=0.1").split())
    assert "privacy.delta = 0.1 is above 1 / 40 = 0.025" in shown


def test_run_of_local_training_says_that_its_noise_protects_nothing_that_is_sent(tmp_path):
    settings = ["method=local", "rounds=1", "clients=2", "topology.kind=ring", "data.examples=20",
                "training.epochs=1", "privacy.noise=2.0"]  # fmt: skip
    call("run", *settings, "--out", str(tmp_path / "run"), "--workers", "1")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert "sends nothing" in " ".join(result["alarms"])
    assert result["epsilon"] == 0
