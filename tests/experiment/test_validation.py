"""Validation examples, the best round, early stopping, and runs that get more rounds."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedspd
from fedspd.cli.main import execute
from fedspd.config import validate
from fedspd.core.block import Block
from fedspd.core.errors import ConfigError, StorageError
from fedspd.core.keys import Key
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import build_experiment
from fedspd.experiment.callbacks import Callback, StopRun
from fedspd.experiment.validation import split_validation
from fedspd.runtime.block_runner import BlockRunner

TINY = {
    "method": "fedspd",
    "clients": 4,
    "rounds": 4,
    "data": {"examples": 24},
    "topology": {"degree": 2},
    "training": {"epochs": 1, "batch": 8},
}
SPLIT = TINY | {"data": {"examples": 24, "validation": 0.25}}


def test_every_client_sets_its_share_aside_and_keeps_one_example():
    counts = [8, 2, 1, 10]
    x = [torch.arange(n)[:, None] for n in counts]
    block = Block(range(4), 4, x, [own[:, 0] for own in x], 10)
    truth = [np.arange(n) for n in counts]
    train, aside, known = split_validation(block, truth, 0.25, Key(0))
    assert [len(y) for y in aside.y] == [2, 1, 0, 2]
    for c, n in enumerate(counts):
        assert sorted([*train.y[c].tolist(), *aside.y[c].tolist()]) == list(range(n))
        assert train.y[c].tolist() == known[c].tolist() == train.x[c][:, 0].tolist()
    assert train.width == 8
    alone, _, _ = split_validation(block.select([3]), truth[3:], 0.25, Key(0))
    assert torch.equal(alone.y[0], train.y[3])


def test_final_phase_starts_from_the_best_round(tmp_path):
    """A rate that ruins the later rounds: the best one is an early one, and it is what counts."""
    config = SPLIT | {"method": "fedavg", "training": {"lr": 0.5, "epochs": 1, "decay": 1.0}}
    config |= {"rounds": 6, "loss": "cross_entropy"}
    result = fedspd.run(config, out=tmp_path / "run")
    rounds = [event for event in result.events() if event["event"] == "round"]
    losses = [np.mean(event["validation_loss"]) for event in rounds]
    best = int(np.argmin(losses)) + 1
    assert result.summary["best_round"] == best
    final = result.events()[-1]
    assert final["validation_loss"] == rounds[best - 1]["validation_loss"]
    assert final["accuracy"] == rounds[best - 1]["accuracy"]
    assert result.summary["validation"]["loss"] == pytest.approx(min(losses))


@pytest.mark.parametrize("workers", [2, 3])
def test_best_round_does_not_depend_on_workers_nor_interruptions(tmp_path, workers):
    class Interrupt(Callback):
        def on_round(self, event):
            if event["round"] == 3:
                raise RuntimeError("power cut")

    whole = fedspd.run(SPLIT, workers=workers)
    with pytest.raises(RuntimeError, match="power cut"):
        fedspd.run(SPLIT, out=tmp_path / "run", callbacks=[Interrupt()])
    resumed = fedspd.run(out=tmp_path / "run", resume=True)
    for name in ("hash", "best_round", "validation"):
        assert resumed.summary[name] == whole.summary[name]


def test_validation_loss_of_a_diverged_client_is_infinite_so_that_its_round_is_never_best():
    engine = Simulator(build_experiment(validate(SPLIT | {"method": "fedavg"})).plan)
    engine.begin()
    runner = engine.block
    model_CP = runner.state.model_CP.clone()
    model_CP[1] = torch.nan
    runner.state = replace(runner.state, model_CP=model_CP)
    loss_C = engine.measure().validation_C["loss"]
    assert np.isinf(loss_C).tolist() == [c == 1 for c in range(len(loss_C))]


def test_run_stops_when_the_validation_loss_has_not_improved(monkeypatch):
    measure = BlockRunner.measure

    def worse_from_round_2(self):
        measures = measure(self)
        measures.validation_C["loss"] += next(penalty)
        return measures

    penalty = iter([0.0, 5.0, 5.0, 5.0, 5.0, 5.0])
    monkeypatch.setattr(BlockRunner, "measure", worse_from_round_2)
    result = fedspd.run(SPLIT | {"rounds": 50, "patience": 2})
    assert result.summary["rounds"] == 3
    assert result.summary["best_round"] == 1
    assert result.summary["stopped"] == (
        "after round 3: the validation loss has not improved since round 1 (patience = 2)"
    )


def test_patience_needs_validation_examples():
    with pytest.raises(ConfigError, match=r"patience = 3: there are no validation examples"):
        fedspd.run(TINY | {"patience": 3})
    with pytest.raises(ConfigError, match="expected at least evaluate_every = 5"):
        fedspd.run(SPLIT | {"patience": 3, "evaluate_every": 5})


def test_metrics_by_name_are_in_events_and_result():
    result = fedspd.run(TINY | {"rounds": 1, "metrics": ["macro_f1", "auc"]})
    for name in ("macro_f1", "auc"):
        assert len(result.events()[0][name]) == 4
        scores = result.summary["clients"][name]
        assert result.summary["metrics"][name]["mean"] == pytest.approx(np.mean(scores))
    with pytest.raises(ConfigError, match=r"metrics = 'r2': not a score of data with classes"):
        fedspd.run(TINY | {"metrics": "auc,r2"})


@pytest.mark.parametrize("workers", [1, 2])
def test_training_accuracy_is_measured_on_the_training_examples_and_changes_no_run(workers):
    """Where the test examples are those of training, both accuracies are the same."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(4, 20, 3)).astype(np.float32)
    own = [(own_x, own_y, own_x, own_y) for own_x, own_y in zip(x, x[:, :, 0] > 0, strict=True)]
    config = {key: value for key, value in TINY.items() if key != "data"}
    plain = fedspd.run(config, data=own, workers=workers)
    result = fedspd.run(config | {"metrics": "training_accuracy"}, data=own, workers=workers)
    for event in result.events():
        assert event["training_accuracy"] == event["accuracy"]
    assert "training_accuracy" not in plain.events()[0]
    assert result.summary["hash"] == plain.summary["hash"]
    assert result.summary["metrics"]["training_accuracy"] == result.summary["accuracy"]


def test_a_regression_has_rmse_and_r2():
    x = np.random.default_rng(0).normal(size=(80, 3)).astype(np.float32)
    config = TINY | {"method": "local", "rounds": 1, "data": {"mixture": "iid"}}
    summary = fedspd.run(config, data=(x, x[:, 0])).summary
    rmse = summary["clients"]["rmse"]
    assert summary["metrics"]["rmse"]["mean"] == pytest.approx(np.mean(rmse))
    assert summary["metrics"]["rmse"]["worst"] == pytest.approx(max(rmse))
    assert summary["metrics"]["r2"]["worst"] == pytest.approx(min(summary["clients"]["r2"]))


# ---- stopping


class StopAt(Callback):
    def __init__(self, round, text=""):
        self.round, self.text, self.seen = round, text, []

    def on_round(self, event):
        self.seen.append(event["round"])
        if event["round"] == self.round:
            raise StopRun(self.text)


def test_callback_stops_a_run_and_its_result_is_complete():
    other = StopAt(99)
    result = fedspd.run(TINY | {"rounds": 9}, callbacks=[StopAt(2, "good enough"), other])
    assert other.seen == [1, 2]
    assert result.summary["rounds"] == 2
    assert result.summary["stopped"] == "after round 2: good enough"
    assert result.events()[-1]["event"] == "final"
    same = fedspd.run(TINY | {"rounds": 2})
    assert same.summary["hash"] == result.summary["hash"]
    assert result.model(0) is not None


# ---- more rounds


def test_finished_run_with_more_rounds_ends_as_one_that_had_them_from_the_start(tmp_path):
    out = tmp_path / "run"
    fedspd.run(TINY | {"rounds": 2}, out=out)
    longer = fedspd.run(TINY, out=out, resume=True)
    whole = fedspd.run(TINY)
    assert longer.summary["hash"] == whole.summary["hash"]
    assert [event["round"] for event in longer.events()] == [1, 2, 3, 4, 5]
    assert fedspd.load(out / "config.toml").rounds == 4
    again = fedspd.run(out=out, resume=True)
    assert again.summary["hash"] == whole.summary["hash"]


def test_run_that_was_interrupted_takes_more_rounds(tmp_path):
    class Fail(Callback):
        def on_round(self, event):
            if event["round"] == 3:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        fedspd.run(TINY, out=tmp_path / "run", callbacks=[Fail()])
    longer = fedspd.run(TINY | {"rounds": 5}, out=tmp_path / "run", resume=True)
    assert longer.summary["hash"] == fedspd.run(TINY | {"rounds": 5}).summary["hash"]


@pytest.mark.parametrize("bodies", [1, 2])
def test_split_run_with_more_rounds_warns_where_clusters_have_bodies_of_their_own(tmp_path, bodies):
    """Without a check each given cluster has one; a run that finds one cluster has one for all."""
    split = {"warmup": 1, "final_epochs": 0, "check": bodies == 1}
    config = {**TINY, "method": "fedspd-split", "fedspd-split": split}
    config |= {"clusters": 2} if bodies == 2 else {}
    fedspd.run(config | {"rounds": 5}, out=tmp_path / "run")
    longer = fedspd.run(config | {"rounds": 8}, out=tmp_path / "run", resume=True)
    assert longer.summary["bodies"] == bodies
    warned = [sentence.partition(",")[0] for sentence in longer.events()[-1]["alarms"]]
    assert warned == ["Rounds 3 to 4 averaged bodies by cluster"] * (bodies - 1)


def test_command_line_gives_a_run_more_rounds_and_refuses_other_changes(tmp_path, capsys):
    out = str(tmp_path / "run")
    fedspd.run(TINY | {"rounds": 1}, out=out)
    assert execute(["run", "--resume", out, "rounds=2", "--workers", "1"]) == 0
    assert fedspd.load(f"{out}/config.toml").rounds == 2
    for words in (["rounds=2"], ["rounds=1"], ["seed=3"], ["rounds=5", "clients=3"]):
        assert execute(["run", "--resume", out, *words]) == 2
    errors = capsys.readouterr().err
    assert "rounds = 2: not more than the run has; expected above 2." in errors
    assert "except rounds=NUMBER to continue with more" in errors


def test_a_stopped_run_goes_on_and_one_with_a_cosine_does_not(tmp_path):
    fedspd.run(TINY | {"rounds": 3}, out=tmp_path / "a", callbacks=[StopAt(1)])
    longer = fedspd.run(TINY, out=tmp_path / "a", resume=True)
    assert longer.summary["hash"] == fedspd.run(TINY).summary["hash"]
    assert longer.summary["stopped"] is None
    cosine = TINY | {"training": {"schedule": "cosine"}}
    fedspd.run(cosine | {"rounds": 1}, out=tmp_path / "b")
    with pytest.raises(StorageError, match="follows the number of rounds"):
        fedspd.run(cosine, out=tmp_path / "b", resume=True)
