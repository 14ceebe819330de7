"""Data with clients of their own: in every form, with one partition document."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import fedspd
from fedspd.core.errors import ConfigError, DataError
from fedspd.core.keys import Key
from fedspd.data.arrays import Reading
from fedspd.data.custom import load_source
from fedspd.data.options import DataOptions
from fedspd.data.partitioning import federate

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 3)).astype(np.float32)
Y = np.arange(60) % 2
OWNER = np.array(["ann", "bob", "cy"])[np.arange(60) % 3]
TABLE = pd.DataFrame(X, columns=["a", "b", "c"]).assign(label=Y, client=OWNER)
CONFIG = {"rounds": 1, "method": "fedavg"}


def by_client(source):
    """Return the rows of each client, training and test together, as sets of first inputs."""
    owners = source.owners
    parts = ((owners.train, source.train), (owners.test, source.test))
    return {
        name: {float(np.float32(x)) for owner, part in parts for x in part.x[owner == i, 0]}
        for i, name in enumerate(owners.names)
    }


EXPECTED = {name: {float(x) for x in X[name == OWNER, 0]} for name in ("ann", "bob", "cy")}


def write(folder, kind):
    if kind == "npz":
        np.savez(folder / "a.npz", x=X, y=Y, client=OWNER)
    elif kind == "csv":
        TABLE.to_csv(folder / "a.csv", index=False, float_format="%.9g")
    elif kind == "parquet":
        TABLE.to_parquet(folder / "a.parquet")
    return folder / f"a.{kind}"


@pytest.mark.parametrize("kind", ["npz", "csv", "parquet"])
def test_file_with_a_client_column_has_these_clients(kind, tmp_path):
    source = load_source(write(tmp_path, kind))
    assert by_client(source) == EXPECTED
    assert np.bincount(source.owners.test).tolist() == [4, 4, 4]  # a fifth of each


def own(name):
    return X[name == OWNER], Y[name == OWNER]


def as_dataset(name):
    return TensorDataset(*map(torch.from_numpy, own(name)))


class Partitioner:
    num_partitions = 3

    def load_partition(self, number):
        return as_dataset(["ann", "bob", "cy"][number])


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({name: own(name) for name in EXPECTED}, ("ann", "bob", "cy")),
        ({name: as_dataset(name) for name in reversed(EXPECTED)}, ("cy", "bob", "ann")),
        ({name: TABLE[name == OWNER].drop(columns="client") for name in EXPECTED}, tuple(EXPECTED)),
        ([own(name) for name in EXPECTED], ("0", "1", "2")),
        ([as_dataset(name) for name in EXPECTED], ("0", "1", "2")),
        (Partitioner(), ("0", "1", "2")),
        (TABLE, ("ann", "bob", "cy")),
    ],
)
def test_object_with_clients_has_these_clients(data, names):
    source = load_source(data)
    assert source.owners.names == names
    found = by_client(source)
    order = ["cy", "bob", "ann"] if names[0] == "cy" else ["ann", "bob", "cy"]
    assert [found[name] for name in names] == [EXPECTED[name] for name in order]


@pytest.mark.parametrize("is_nested", [True, False])
def test_folder_with_a_file_per_client(tmp_path, is_nested):
    for name in EXPECTED:
        folder = tmp_path / name if is_nested else tmp_path
        folder.mkdir(exist_ok=True)
        x, y = own(name)
        np.savez(folder / f"{name}.npz", x=x, y=y)
    assert by_client(load_source(tmp_path)) == EXPECTED
    assert load_source(tmp_path, reading=Reading(task="regression")).classes == 0


def test_folder_of_images_per_client_and_class(tmp_path):
    for client, classes in (("ann", "xy"), ("bob", "yz")):
        for label in classes:
            (tmp_path / client / label).mkdir(parents=True)
            for i in range(3):
                Image.new("L", (4, 4), i).save(tmp_path / client / label / f"{i}.png")
    source = load_source(tmp_path)
    assert (source.classes, source.class_names) == (3, ("x", "y", "z"))
    assert source.owners.names == ("ann", "bob")
    labels = [set(source.train.y[source.owners.train == i]) for i in (0, 1)]
    assert (labels[0] <= {0, 1}, labels[1] <= {1, 2}) == (True, True)


def test_own_test_parts_stay():
    data = {name: (*own(name), X[:2], Y[:2]) for name in EXPECTED}
    source = load_source(data)
    assert len(source.train.y) == 60
    assert np.bincount(source.owners.test).tolist() == [2, 2, 2]


def test_split_column_makes_the_test_part(tmp_path):
    table = TABLE.assign(split=np.where(np.arange(60) < 45, "train", "test"))
    table.to_csv(tmp_path / "a.csv", index=False)
    source = load_source(tmp_path / "a.csv")
    assert (len(source.train.y), len(source.test.y), source.shape) == (45, 15, (3,))


def test_run_has_the_clients_of_its_data_and_records_them(tmp_path):
    result = fedspd.run(CONFIG, data=TABLE, out=tmp_path / "a")
    partition = result.experiment.federation.description
    assert [client["name"] for client in partition["clients"]] == ["ann", "bob", "cy"]
    assert partition["options"]["mixture"] == "given"
    assert [sum(client["train"]["counts"]) for client in partition["clients"]] == [16, 16, 16]
    assert result.experiment.config.clients == len(result.accuracy) == 3
    assert fedspd.run(CONFIG, data=TABLE, out=tmp_path / "a", resume=True).summary == result.summary
    names = {"hash", "sources", "options", "seed", "distributions", "clients"}
    again = fedspd.run(CONFIG | {"clients": 3, "data": {"mixture": "iid"}}, data=TABLE)
    assert set(partition) == set(again.experiment.federation.description) == names


def test_fewer_clients_are_a_seeded_choice_and_newcomers_are_others():
    def names(seed, **settings):
        result = fedspd.run(CONFIG | {"seed": seed} | settings, data=TABLE)
        return [c["name"] for c in result.experiment.federation.description["clients"]]

    assert names(0, clients=2) == names(0, clients=2)
    assert len({tuple(names(seed, clients=2)) for seed in range(4)}) > 1
    joined = [names(seed, holdout_clients=1) for seed in range(6)]
    for all_names in joined:
        assert sorted(all_names) == ["ann", "bob", "cy"]
        assert all_names[:2] == sorted(all_names[:2])
    assert len({last for _, _, last in joined}) > 1


def test_mixture_partitions_the_examples_again():
    result = fedspd.run(CONFIG | {"clients": 5, "data": {"mixture": "iid"}}, data=TABLE)
    assert len(result.accuracy) == 5


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"clients": 4}, "^clients . holdout_clients = 4: 'custom' has 3 clients of its own; exp"),
        ({"holdout_clients": 3}, "^holdout_clients = 3: 'custom' has 3 clients; expected fewer"),
        ({"data": {"examples": 5}}, "^data.examples = 5: the data have clients of their own"),
        ({"data": {"imbalance": 2.0}}, "^data.imbalance = 2.0: the data have clients of their"),
        ({"data": {"shares": "pure"}}, "^data.shares = 'pure': data.mixture = 'given' has only"),
    ],
)
def test_settings_that_given_clients_do_not_have_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        fedspd.run(CONFIG | settings, data=TABLE)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "no clients; expected at least one"),
        ({"a": own("ann"), "b": (*own("bob"), X, Y)}, "client 'a' has no test part, and others"),
        ({"a": (X[:2], Y[:2])}, "client 'a': 1 training examples; expected at least 2 to train"),
        ({"a": own("ann"), "b": (X[:, :2], Y)}, r"clients have examples of shape \(3,\) and \(2,"),
        (TABLE.assign(client=[None] * 60), "values of the column 'client' are missing, 60 of 60"),
        (TABLE.assign(client=["a"] * 59 + ["b"]), "client 'b': 0 training examples; expected at"),
    ],
)
def test_impossible_clients_are_refused(data, sentence):
    with pytest.raises(DataError, match=sentence):
        load_source(data)


def test_npz_with_clients_in_one_part_only_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=X, y_train=Y, client_train=OWNER, x_test=X, y_test=Y)
    with pytest.raises(DataError, match=r"the arrays client_train, x_test.* with clients also"):
        load_source(tmp_path / "a.npz")
    unknown = np.where(OWNER == "ann", "zoe", OWNER)
    parts = {"x_test": X, "y_test": Y, "client_test": unknown}
    np.savez(tmp_path / "b.npz", x_train=X, y_train=Y, client_train=OWNER, **parts)
    with pytest.raises(DataError, match=r"client_test: the client 'zoe' has no training examples"):
        load_source(tmp_path / "b.npz")


def test_given_needs_clients():
    with pytest.raises(DataError, match=r"data.mixture = 'given': 'custom' has no clients of its"):
        federate(load_source((X, Y)), DataOptions(mixture="given"), 3, Key(0))


def test_scale_is_that_of_each_clients_training_examples():
    table = TABLE.assign(a=TABLE.a * 1000 + 7, b=5.0)
    result = fedspd.run(CONFIG | {"data": {"scale": "standard"}}, data=table)
    federation = result.experiment.federation
    for client in range(3):
        x = federation.train.x[slice(*federation.train.start[client : client + 2])].double()
        assert torch.allclose(x.mean(0), torch.zeros(3).double(), atol=1e-5)
        assert torch.allclose(x.std(0, correction=0), torch.tensor([1, 0, 1]).double(), atol=1e-4)
        scale = federation.description["clients"][client]["scale"]
        own_a = table.a.to_numpy()[["ann", "bob", "cy"][client] == OWNER]
        assert own_a.min() < scale["mean"][0] < own_a.max()
    raw = table[["a", "b", "c"]].to_numpy()[OWNER == "ann"]
    scale = federation.description["clients"][0]["scale"]
    scaled = (raw - scale["mean"]) / scale["std"]
    expected = result.model(0)(torch.from_numpy(scaled).float()).detach()
    assert torch.allclose(result.predict(0, raw), expected, atol=1e-5)


def test_scale_of_images_is_refused():
    with pytest.raises(DataError, match=r"data.scale = 'standard': 'digits' has images"):
        fedspd.run(CONFIG | {"data": {"scale": "standard"}})


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"a": own("ann"), "b": (X[:0], Y[:0])}, "client 'b': no examples. Give it some, or"),
        ({"a": own("ann"), "b": (X, Y[:9])}, "client 'b': 60 examples and 9 targets; expected"),
        (pd.concat([TABLE, TABLE[["a"]]], axis=1), "data: two columns are called 'a'; expected"),
    ],
)
def test_mistakes_name_their_client_or_column(data, sentence):
    with pytest.raises(DataError, match=sentence):
        load_source(data)
