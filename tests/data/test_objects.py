"""Tables, Hugging Face datasets and sparse matrices, with the real packages."""

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from PIL import Image

import fedspd
from fedspd.core.errors import DataError
from fedspd.data.arrays import Reading
from fedspd.data.custom import load_source
from fedspd.data.partitioning import default_mixture

datasets = pytest.importorskip("datasets")

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = np.arange(20) % 2
TABLE = pd.DataFrame(X, columns=["a", "b", "c"]).assign(kind=np.array(["no", "yes"])[Y])
READ = Reading(target="kind")


def test_sparse_matrix_is_read_as_a_dense_one():
    for matrix in (scipy.sparse.csr_matrix(X), scipy.sparse.coo_array(X)):
        source = load_source((matrix, Y))
        assert source.train.x.dtype == np.float32
        assert set(source.train.x[:, 0]) <= set(X[:, 0])
    wide = scipy.sparse.csr_matrix((2_000_000, 1_000))
    with pytest.raises(DataError, match=r"x_train: 2000000 x 1000 numbers take 8 GB once they are"):
        load_source((wide, np.zeros(2_000_000, int)))


def test_table_has_its_columns_by_name():
    source = load_source(TABLE, reading=READ)
    assert (source.shape, source.class_names) == ((3,), ("no", "yes"))
    chosen = load_source(TABLE, reading=Reading(("c", "a"), "kind"))
    assert chosen.shape == (2,)
    assert set(chosen.train.x[:, 1]) <= set(X[:, 0])
    assert load_source((TABLE, TABLE[:5]), reading=READ).test.y.tolist() == [0, 1, 0, 1, 0]
    assert load_source((TABLE[["a", "b"]], TABLE["kind"])).shape == (2,)
    category = TABLE.assign(kind=TABLE.kind.astype("category"))
    assert load_source(category, reading=READ).class_names == ("no", "yes")


@pytest.mark.parametrize(
    ("table", "reading", "sentence"),
    [
        (TABLE, Reading(), "none of the columns a, b, c, kind is called label.* with data.target"),
        (TABLE, Reading(target="knd"), "data.target = 'knd': data has no such column; did you mea"),
        (TABLE, Reading(("d",), "kind"), "data.inputs = 'd': data has no such column; expected on"),
        (TABLE, Reading((), "kind", "who"), "data.client = 'who': data has no such column"),
        (TABLE, Reading(target="a"), "column 'kind' has values such as 'no' in row 0, counted"),
        (TABLE.assign(b=np.nan), READ, "column 'b' are missing, 20 of 20, the first in row 0,"),
        (TABLE[["kind"]], READ, "only the column 'kind'; expected columns of inputs"),
        (TABLE[:0], READ, "data: no rows; expected one for each example"),
    ],
)
def test_table_that_cannot_be_read_is_refused(table, reading, sentence):
    with pytest.raises(DataError, match=sentence):
        load_source(table, reading=reading)


def test_columns_are_refused_where_there_are_none(tmp_path):
    x, y = TABLE[["a", "b"]].to_numpy(), TABLE["kind"].to_numpy()
    np.savez(tmp_path / "a.npz", x=x, y=y.astype(str))
    for data in ((x, y), {"one": (x, y)}, tmp_path / "a.npz", "digits"):
        with pytest.raises(DataError, match=r"^data.client = 'who': '.*' has no columns; expected"):
            load_source(data, reading=Reading(client="who"))
    with pytest.raises(DataError, match=r"^data.inputs = a, b: 'custom' has no columns; expected"):
        load_source((x, y), reading=Reading(inputs=("a", "b")))
    load_source({"one": TABLE}, reading=READ)


def test_index_that_pandas_wrote_is_not_an_input(tmp_path):
    TABLE.to_csv(tmp_path / "a.csv")  # with the numbers of the rows
    TABLE.to_csv(tmp_path / "b.csv", index=False)
    indexed, plain = (load_source(tmp_path / name, reading=READ) for name in ("a.csv", "b.csv"))
    assert indexed.shape == (3,)
    assert np.array_equal(indexed.train.x, plain.train.x)


def test_damaged_tables_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    for name in ("a.csv", "a.parquet", "none.csv"):
        with pytest.raises(DataError, match=f"{name}': (the file is empty|not a|cannot be read)"):
            load_source(tmp_path / name)


FEATURES = {"img": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "owl"])}


def images():
    pictures = [Image.fromarray(np.full((4, 4), i, np.uint8)) for i in range(20)]
    columns = {"img": pictures, "kind": Y.tolist()}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(FEATURES))


def test_hugging_face_images_and_labels_are_found():
    source = load_source(images())
    assert (source.shape, source.train.x.dtype) == ((1, 4, 4), np.uint8)
    assert source.class_names == ("cat", "owl")
    np.testing.assert_array_equal(source.train.x[:, 0, 0, 0] % 2, source.train.y)
    split = load_source(images().train_test_split(0.25, seed=0))
    assert (len(split.train.y), len(split.test.y)) == (15, 5)
    by_client = load_source(images().add_column("who", [i % 4 for i in range(20)]))
    assert by_client.owners is None
    reading = Reading(client="who")
    added = load_source(images().add_column("who", [i % 4 for i in range(20)]), reading=reading)
    assert added.owners.names == ("0", "1", "2", "3")


def test_hugging_face_numbers_are_read():
    rows = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
    assert load_source(rows).shape == (3,)
    columns = datasets.Dataset.from_dict({"a": X[:, 0], "b": X[:, 1], "label": Y})
    assert load_source(columns).shape == (2,)
    text = datasets.Dataset.from_dict({"text": ["a", "b"] * 10, "label": Y})
    with pytest.raises(DataError, match=r"the column 'text' has values such as 'a' in row 0, coun"):
        load_source(text)


@pytest.mark.parametrize(
    ("data", "mixture"),
    [
        ("digits", "rotation"),
        ((X, Y), "dirichlet"),
        ((X, X[:, 0]), "iid"),
        (TABLE.assign(label=Y, client=Y).drop(columns="kind"), "given"),
    ],
)
def test_default_mixture_fits_the_data(data, mixture):
    assert default_mixture([load_source(data)]) == mixture


def test_mixture_that_does_not_fit_names_those_that_do():
    sentence = "expected square images. Other examples fit 'permutation', 'parity', 'dirichlet', "
    with pytest.raises(DataError, match=sentence):
        fedspd.run({"clients": 2, "data": {"mixture": "rotation"}}, data=(X, Y))
    with pytest.raises(DataError, match=r"square images. Other examples fit 'iid'"):
        fedspd.run({"clients": 2, "data": {"mixture": "rotation"}}, data=(X, X[:, 0]))


def test_targets_among_the_inputs_are_refused():
    with pytest.raises(DataError, match=r"data.inputs: 'kind' is the column of the targets"):
        load_source(TABLE, reading=Reading(("a", "kind"), "kind"))


def test_pair_of_pairs_is_training_and_test():
    source = load_source(((X, tuple(Y)), (X[:3], Y[:3])))
    assert (len(source.train.y), len(source.test.y)) == (20, 3)


def test_text_is_refused_with_a_way_to_encode_it():
    with pytest.raises(
        DataError, match=r"^x_train: strings, such as 'good'; expected numbers. Enc"
    ):
        load_source((["good", "bad"] * 10, Y))


def test_single_class_is_noted():
    assert load_source((X, np.ones(20, int))).notes == (
        "y: all labels are '1', so there is nothing to learn.",
    )
