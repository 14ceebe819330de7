"""Targets become classes with the names that they had, or regression targets."""

import numpy as np
import pytest

import fedspd
from fedspd.core.errors import DataError
from fedspd.data.arrays import RawPart, Reading, from_parts
from fedspd.data.custom import load_source

X = np.random.default_rng(0).normal(size=(12, 3))
CODES = np.arange(12) % 3
CLASSES_READ = "y: the numbers 0, 1, 2 were read as classes. If they are regression targets, set "


@pytest.mark.parametrize(
    ("y", "names", "notes"),
    [
        (CODES, (), 0),
        (CODES + 1, ("1", "2", "3"), 0),
        (CODES - 1, ("-1", "0", "1"), 0),
        (CODES * 1000, ("0", "1000", "2000"), 0),
        (np.array(["ant", "bee", "cow"])[CODES], ("ant", "bee", "cow"), 0),
        ([["ant", "bee", "cow"][c] for c in CODES], ("ant", "bee", "cow"), 0),
        (CODES[:, None], (), 0),
        (CODES.astype(float), (), 1),
        (np.eye(3)[CODES], (), 1),
        (np.eye(3, dtype=int)[CODES], (), 1),
    ],
)
def test_labels_become_classes_with_their_names(y, names, notes):
    source = load_source((X, y, X, y))
    assert (source.classes, source.class_names, len(source.notes)) == (3, names, notes)
    assert source.train.y.tolist() == source.test.y.tolist() == CODES.tolist()


def test_booleans_are_two_classes():
    assert load_source((X, CODES == 1)).class_names == ("False", "True")


def test_loss_decides_what_targets_are():
    assert load_source((X, CODES), reading=Reading(task="regression")).classes == 0
    assert load_source((X, X[:, 0].round()), reading=Reading(task="classes")).classes > 1
    with pytest.raises(DataError, match=r"^y: type <U1; expected numbers, since the loss is sq"):
        load_source((X, ["a"] * 12), reading=Reading(task="regression"))


def test_guess_is_an_alarm_of_the_run():
    config = {"clients": 2, "rounds": 1, "method": "local"}
    result = fedspd.run(config, data=(X, CODES.astype(float)))
    assert result.summary["alarms"] == [CLASSES_READ + "loss = 'squared_error'."]
    assert result.classes == ["0", "1", "2"]
    told = fedspd.run(config | {"loss": "squared_error"}, data=(X, CODES.astype(float)))
    assert (told.summary["alarms"], told.classes) == ([], [])


def test_names_of_classes_are_recorded():
    y = np.array(["ant", "bee", "cow"])[CODES]
    result = fedspd.run({"clients": 2, "rounds": 1, "method": "local"}, data=(X, y))
    assert result.classes == ["ant", "bee", "cow"]
    description = result.experiment.federation.description
    assert description["sources"][0]["classes"] == ["ant", "bee", "cow"]


def test_labels_of_a_device_stay_the_networks_numbers(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=CODES * 2)
    device = load_source(tmp_path / "a.npz", reading=Reading(is_numbered=True))
    assert (device.classes, sorted(set(device.train.y))) == (5, [0, 2, 4])
    with pytest.raises(DataError, match=r"^y: labels are strings; expected the numbers of the net"):
        load_source((X, ["a"] * 12), reading=Reading(is_numbered=True))


def test_known_classes_refuse_other_labels():
    with pytest.raises(DataError, match=r"^y: the label -1; expected 0 to 1.$"):
        from_parts(RawPart(X, CODES - 1, classes=("no", "yes")))
