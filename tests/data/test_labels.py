"""Targets become classes with the names that they had, or regression targets."""

import numpy as np
import pytest
from PIL import Image

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


def test_folders_of_a_device_are_the_networks_numbers(tmp_path):
    """A class of which the device has no image must not renumber the others."""
    for name in ("0", "2", "10"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("L", (4, 4), i).save(tmp_path / "images" / name / f"{i}.png")
    reading = Reading(is_numbered=True)
    device = load_source(tmp_path / "images", reading=reading)
    labels = {*device.train.y.tolist(), *device.test.y.tolist()}
    assert (device.classes, labels) == (11, {0, 2, 10})
    (tmp_path / "images" / "2").rename(tmp_path / "images" / "cat")
    with pytest.raises(DataError, match=r"folder 'cat'; expected the numbers of the network's cl"):
        load_source(tmp_path / "images", reading=reading)


def test_part_of_a_private_device_s_example_follows_from_it_alone():
    """One example more, and all others stay in their part: else the budget would be for many."""
    reading = Reading(is_numbered=True, splits_alone=True)
    x = np.random.default_rng(0).normal(size=(300, 4))
    y = np.arange(300) % 3
    without = np.arange(300) != 100
    all_of_them, fewer = (
        load_source(data, reading=reading) for data in ((x, y), (x[without], y[without]))
    )
    for part in ("train", "test"):
        kept = {row.tobytes() for row in getattr(fewer, part).x}
        more = {row.tobytes() for row in getattr(all_of_them, part).x}
        assert kept <= more
    assert len(fewer.train.y) + len(fewer.test.y) == 299
    assert 40 < len(all_of_them.test.y) < 80  # about a fifth
    alike = np.ones((300, 4)), np.zeros(300, int)
    with pytest.raises(DataError, match=r"all 300 examples fell into one part.* Give a test part"):
        load_source(alike, reading=reading)


def test_known_classes_refuse_other_labels():
    with pytest.raises(DataError, match=r"^y: the label -1; expected 0 to 1.$"):
        from_parts(RawPart(X, CODES - 1, classes=("no", "yes")))
