"""Custom data in every supported form."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import TensorDataset

from fedspd.core.errors import DataError
from fedspd.data.arrays import RawPart, Reading, from_parts
from fedspd.data.custom import load_source
from fedspd.data.files import from_folder
from fedspd.data.sources import Examples, Source, fingerprint

X = np.arange(40, dtype=np.float32).reshape(10, 4)
Y = np.arange(10) % 3


def test_arrays_keep_a_given_test_part():
    source = load_source((X, Y, X[:3] + 1, Y[:3]))
    assert (source.name, source.classes, source.shape) == ("custom", 3, (4,))
    np.testing.assert_array_equal(source.train.x, X)
    assert source.train.y.dtype == np.int64
    assert source.test.x[0].tolist() == [1, 2, 3, 4]


@given(n=st.integers(2, 60))
def test_arrays_without_a_test_part_give_the_same_fifth_to_it(n):
    x = np.arange(n, dtype=np.float32)[:, None]
    source = load_source((x, np.zeros(n, int)))
    assert len(source.test.y) == max(1, n // 5)
    assert sorted(np.concatenate([source.train.x, source.test.x]).ravel().tolist()) == list(
        range(n)
    )
    assert fingerprint(source) == fingerprint(load_source((x, np.zeros(n, int))))


@pytest.mark.parametrize(
    ("x", "shape", "dtype"),
    [
        (np.zeros((5, 6, 7), np.uint8), (1, 6, 7), np.uint8),
        (np.zeros((5, 3, 6, 7), np.uint8), (3, 6, 7), np.uint8),
        (np.zeros((5, 6, 7), np.float32), (6, 7), np.float32),
        (np.zeros((5, 6)), (6,), np.float64),
        (np.zeros((5, 6), np.int64), (6,), np.float32),
        (np.zeros((5, 6), np.uint8), (6,), np.float32),
        (torch.zeros(5, 3, 6, 7, dtype=torch.uint8), (3, 6, 7), np.uint8),
        (torch.zeros(5, 2, dtype=torch.bfloat16, requires_grad=True), (2,), np.float32),
    ],
)
def test_arrays_are_converted_in_shape_and_type(x, shape, dtype):
    source = load_source((x, np.zeros(5, int)))
    assert source.shape == shape
    assert source.train.x.dtype == source.test.x.dtype == dtype


@pytest.mark.parametrize(
    "y", [np.linspace(0, 1, 10), np.zeros((10, 2), np.float32), torch.zeros(10)]
)
def test_floating_point_targets_are_a_regression(y):
    source = load_source((X, y))
    assert source.classes == 0
    assert source.train.y.dtype in (np.float32, np.float64)
    assert source.train.y.shape[1:] == tuple(y.shape[1:])


NOT_FINITE = X.copy()
NOT_FINITE[4, 1] = np.nan


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((X, Y[:9]), "x_train, y_train: 10 examples and 9 targets; expected as many"),
        ((X[:1], Y[:1]), "x_train: 1 examples; expected at least 2"),
        ((X, Y, X[:0], Y[:0]), "x_test: 0 examples; expected at least 1"),
        (
            (X, np.zeros((10, 1, 1))),
            r"y_train: shape \(10, 1, 1\); expected regression targets",
        ),
        ((NOT_FINITE, Y), "x_train: a value of example 4, in column 1, is not finite"),
        ((np.zeros((30, 1)), np.arange(30)), "y: 30 different labels among 30 examples; expected"),
        ((X, np.zeros((10, 2), int)), r"y: shape \(10, 2\); expected one class label"),
        (([[1.0], [1.0, 2.0]], [0, 1]), "x_train: rows of several lengths"),
        ((X, [None, *Y[1:]]), "y_train: a value of example 0 is not finite"),
        ((np.array([[10**400]] * 10, object), Y), "x_train: a value '1000.*of type int; expected"),
        ((X, NOT_FINITE[:, 1]), "y_train: a value of example 4 is not finite"),
        ((X[:, 0], Y), r"x_train: shape \(10,\); expected \[n, \.\.\.\]"),
        ((np.zeros((10, 32, 32, 3), np.uint8), Y), "seems to have the channels last"),
        ((np.array([["a"]] * 10), Y), "x_train: strings, such as 'a'; expected numbers"),
        ((X, Y, X[:, :2], Y), r"x_test: examples of shape \(2,\) .*; expected \(4,\)"),
        ((X, Y, X.astype(np.float64), Y), "x_test: .* float64; expected .* float32"),
        ((X, Y, X), r"a value of type tuple \(ndarray, ndarray, ndarray\); expected"),
    ],
)
def test_impossible_arrays_are_rejected(arrays, message):
    with pytest.raises(DataError, match=message):
        load_source(arrays)


def test_from_npz_reads_files_with_and_without_a_test_part(tmp_path):
    np.savez(tmp_path / "four.npz", x_train=X, y_train=Y, x_test=X[:2], y_test=Y[:2])
    np.savez_compressed(tmp_path / "two.npz", x=X, y=Y)
    four, two = load_source(tmp_path / "four.npz"), load_source(tmp_path / "two.npz")
    assert (four.name, len(four.train.y), len(four.test.y)) == ("four", 10, 2)
    assert (two.name, len(two.train.y), len(two.test.y)) == ("two", 8, 2)


class Trap:
    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


def test_error_names_the_key_and_the_file_that_has_the_fault(tmp_path):
    path = tmp_path / "sensors.npz"
    np.savez(path, x=NOT_FINITE, y=Y)
    for key in ("data.name", "data.second"):
        with pytest.raises(DataError) as caught:
            load_source(str(path), key=key)
        assert str(caught.value).startswith(f"{key} = '{path}': x_train: a value of example 4")
    with pytest.raises(DataError, match=r"^data\.second = 'nowhere': not a dataset"):
        load_source("nowhere", key="data.second")
    with pytest.raises(DataError, match=r"^x_train: a value of example 4"):
        load_source((NOT_FINITE, Y))


def test_column_that_is_not_numbers_shows_a_value_that_is_none(tmp_path):
    path = tmp_path / "ages.csv"
    path.write_text("age,label\n31,0\n?,1\n")
    with pytest.raises(
        DataError, match=r"column 'age' has values such as '\?' in row 1, .*; expected"
    ):
        load_source(str(path))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "the file is empty; expected a line of column names, then one for each example."),
        (b"a,label\n1,0\n1,2,3\n", "line 3 has 3 values; expected 2, as the lines above have."),
        (b"a,label\n\xe9,0\n", "not text in UTF-8. Save it with this encoding."),
        (b"a;label\n1;0\n2;1\n", "one column only, 'a;label'; expected columns that are separated"),
        (b"a,label\n", "no rows; expected one for each example."),
    ],
)
def test_csv_that_cannot_be_read_is_refused_in_words_of_its_own(tmp_path, content, sentence):
    path = tmp_path / "plant.csv"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_source(str(path))
    assert str(caught.value).startswith(f"data.name = '{path}': {sentence}")


def test_file_of_another_format_is_told_from_a_name_that_is_unknown(tmp_path):
    path = tmp_path / "plant.xlsx"
    path.write_bytes(b"PK")
    with pytest.raises(DataError, match=r"not a format that is read; expected .* \.npz, \.csv, "):
        load_source(str(path))


def test_from_npz_rejects_invalid_files(tmp_path):
    np.savez(tmp_path / "objects.npz", x=np.array([Trap()] * 2, dtype=object), y=Y[:2])
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(Trap()))
    np.savez(tmp_path / "names.npz", features=X, y=Y)
    np.savez(tmp_path / "complete.npz", x=X, y=Y)
    (tmp_path / "half.npz").write_bytes((tmp_path / "complete.npz").read_bytes()[:300])
    with (tmp_path / "single.npz").open("wb") as file:
        np.save(file, X)
    (tmp_path / "empty.npz").write_bytes(b"")
    for name in ("pickle", "half", "single", "empty"):
        with pytest.raises(DataError, match=f"{name}.npz': damaged or not an .npz file"):
            load_source(tmp_path / f"{name}.npz")
    with pytest.raises(
        DataError,
        match=r"objects\.npz': an array cannot be read .* pickles, which are never loaded",
    ):
        load_source(tmp_path / "objects.npz")
    damaged = bytearray((tmp_path / "complete.npz").read_bytes())
    damaged[200] ^= 255  # inside the values of x, where the checksum of the zip sees it
    (tmp_path / "damaged.npz").write_bytes(damaged)
    with pytest.raises(DataError, match=r"damaged\.npz': an array cannot be read \(Bad CRC"):
        load_source(tmp_path / "damaged.npz")
    with pytest.raises(DataError, match="the arrays features, y; expected x_train"):
        load_source(tmp_path / "names.npz")
    with pytest.raises(DataError, match=r"nowhere\.npz': cannot be read: No such file"):
        load_source(tmp_path / "nowhere.npz")


def write_image(
    path: Path, colour: int | tuple[int, int, int], size: tuple[int, int] = (5, 4)
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


def test_from_image_folder_splits_grey_images(tmp_path):
    for label, name in enumerate(["ant", "bee"]):
        for number in range(5):
            write_image(tmp_path / name / f"{number}.png", 100 * label + number)
    (tmp_path / "ant" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    source = from_folder(tmp_path, Reading())
    assert (source.name, source.classes, source.shape) == (tmp_path.name, 2, (1, 4, 5))
    assert source.train.x.dtype == np.uint8
    assert (len(source.train.y), len(source.test.y)) == (8, 2)
    np.testing.assert_array_equal(source.train.x[:, 0, 0, 0] >= 100, source.train.y == 1)


def test_from_image_folder_converts_all_to_colour_if_one_image_is(tmp_path):
    write_image(tmp_path / "train" / "ant" / "1.png", 7)
    write_image(tmp_path / "train" / "bee" / "1.png", (10, 20, 30))
    write_image(tmp_path / "test" / "bee" / "1.png", 9)
    source = from_folder(tmp_path, Reading())
    assert source.shape == (3, 4, 5)
    assert source.train.x[:, :, 0, 0].tolist() == [[7, 7, 7], [10, 20, 30]]
    assert (source.test.x[0, :, 0, 0].tolist(), source.test.y.tolist()) == ([9, 9, 9], [1])


def test_parts_are_not_read_as_clients_of_these_names(tmp_path):
    """Folders train and val, or files train.csv and test.csv, were two clients each."""
    for part in ("train", "val"):
        write_image(tmp_path / "images" / part / "ant" / "1.png", 7)
    for part in ("train", "test"):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / f"{part}.csv").write_text("a,label\n1,0\n2,1\n")
        (tmp_path / "folders" / part).mkdir(parents=True)
        np.savez(tmp_path / "folders" / part / "data.npz", x=X, y=Y)
    for name in ("images", "files", "folders"):
        with pytest.raises(DataError, match="train is the name of a part; expected one for each"):
            load_source(tmp_path / name)


def test_from_image_folder_rejects_invalid_folders(tmp_path):
    write_image(tmp_path / "sizes" / "ant" / "1.png", 7)
    write_image(tmp_path / "sizes" / "bee" / "2.png", 7, size=(6, 4))
    with pytest.raises(
        DataError,
        match=r"bee/2\.png': 6 x 4 pixels; expected 5 x 4 pixels, as '.*ant/1\.png' has",
    ):
        from_folder(tmp_path / "sizes", Reading())
    write_image(tmp_path / "broken" / "ant" / "1.png", 7)
    (tmp_path / "broken" / "ant" / "2.png").write_bytes(b"malformed")
    with pytest.raises(DataError, match=r"2\.png': cannot be read as an image"):
        from_folder(tmp_path / "broken", Reading())
    (tmp_path / "empty" / "ant").mkdir(parents=True)
    with pytest.raises(DataError, match="ant': no images"):
        from_folder(tmp_path / "empty", Reading())
    with pytest.raises(DataError, match="ant': no subfolders; expected one for each class"):
        from_folder(tmp_path / "empty" / "ant", Reading())
    with pytest.raises(DataError, match="nowhere': not a folder"):
        from_folder(tmp_path / "nowhere", Reading())
    write_image(tmp_path / "more" / "train" / "ant" / "1.png", 7)
    (tmp_path / "more" / "test").mkdir()
    with pytest.raises(DataError, match="test': no subfolders"):
        from_folder(tmp_path / "more", Reading())
    write_image(tmp_path / "more" / "test" / "cow" / "1.png", 7)
    with pytest.raises(
        DataError, match="cow': a class that the training part does not have; expected one of ant"
    ):
        from_folder(tmp_path / "more", Reading())
    (tmp_path / "wide" / "ant").mkdir(parents=True)
    Image.new("I;16", (5, 4)).save(tmp_path / "wide" / "ant" / "1.png")
    with pytest.raises(DataError, match=r"1\.png': an image of mode I;16; expected 8 bits"):
        from_folder(tmp_path / "wide", Reading())


class Items:
    """A map-style dataset without a base class."""

    def __init__(self, *items: object) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        return self.items[index]


def test_from_torch_dataset_reads_tensors_arrays_and_images():
    tensors = load_source(
        (
            TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
            TensorDataset(torch.ones(2, 4), torch.tensor([0, 2])),
        )
    )
    assert (tensors.classes, len(tensors.train.y), tensors.test.y.tolist()) == (3, 10, [0, 2])
    arrays = load_source(Items(*((X[i], float(i)) for i in range(10))))
    assert (arrays.classes, len(arrays.train.y), len(arrays.test.y)) == (0, 8, 2)
    images = load_source(
        Items(*((Image.new("RGB", (5, 4), (1, 2, 3)), label) for label in range(3)))
    )
    assert (images.shape, images.classes) == ((3, 4, 5), 3)
    assert images.train.x[0, :, 0, 0].tolist() == [1, 2, 3]
    grey = load_source(Items(*((Image.new("L", (5, 4), 6), label) for label in range(3))))
    assert (grey.shape, grey.train.x.dtype) == ((1, 4, 5), np.uint8)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"x": 1}], r"data\[0\]: a value of type dict; expected a pair"),
        ([(X[0], 0), (X[0, :2], 0)], r"data\[1\]: shape \(2,\); expected \(4,\), as item 0"),
        ([], "data: no items"),
        ([(Image.new("F", (2, 2)), 0)], r"data\[0\]: an image of mode F"),
    ],
)
def test_from_torch_dataset_rejects_invalid_items(items, message):
    with pytest.raises(DataError, match=message):
        load_source(Items(*items))


FUNCTIONS = """
import numpy as np, torch
from torch.utils.data import TensorDataset
from fedspd.data.arrays import RawPart, from_parts

x, y = np.zeros((10, 4), np.float32), np.arange(10) % 2
def arrays(): return x, y, x[:3], y[:3]
def dataset(): return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
def source(): return from_parts(RawPart(x, y), name="mine")
def text(): return "mnist"
def nothing(): return None
def broken(): return {}["key"]
"""


@pytest.fixture
def custom_modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "custom_functions.py").write_text(FUNCTIONS)
    (tmp_path / "custom_broken.py").write_text("import a_package_that_nobody_has")


@pytest.mark.parametrize(
    ("function", "name", "counts"),
    [("arrays", None, (10, 3)), ("dataset", None, (8, 2)), ("source", "mine", (8, 2))],
)
@pytest.mark.usefixtures("custom_modules")
def test_load_source_calls_a_function_in_the_current_folder(function, name, counts):
    import sys

    before = list(sys.path)
    source = load_source(f"custom_functions:{function}")
    assert source.name == (name or f"custom_functions:{function}")
    assert (len(source.train.y), len(source.test.y)) == counts
    assert sys.path == before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "custom_functions:array",
            "has no public function or class 'array'; did you mean 'arrays'",
        ),
        ("custom_functions:text", "the call returned 'mnist'; expected a Source"),
        ("custom_functions:nothing", "NoneType; expected"),
        ("custom_functions:broken", "the call failed with KeyError: 'key'"),
        ("custom_broken:any", "No module named 'a_package_that_nobody_has'"),
        ("no_such_module:any", "No module named 'no_such_module'"),
    ],
)
@pytest.mark.usefixtures("custom_modules")
def test_from_function_rejects_what_is_not_data(spec, message):
    with pytest.raises(DataError, match=message):
        load_source(spec)


def test_load_source_accepts_every_form(tmp_path):
    np.savez(tmp_path / "mine.npz", x=X, y=Y)
    for label in ("ant", "bee"):
        write_image(tmp_path / "images" / label / "1.png", 1)
    source = from_parts(RawPart(X, Y))
    assert load_source("digits").name == "digits"
    assert load_source(str(tmp_path / "mine.npz")).name == "mine"
    assert load_source(tmp_path / "images").name == "images"
    assert fingerprint(load_source(source)) == fingerprint(source)
    assert fingerprint(load_source((X, Y))) == fingerprint(source)
    assert len(load_source((X, Y, torch.from_numpy(X), torch.from_numpy(Y))).test.y) == 10
    assert load_source(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))).classes == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "mnst",
            r"data.name = 'mnst': not a dataset, a file \(.npz, .csv, .parquet\), a folder or "
            "'module:function'; did you mean 'mnist'",
        ),
        ("./nowhere", "data.name = './nowhere': not a dataset"),
        (None, "NoneType"),
        ((X,), r"^data: a value of type tuple \(ndarray\); expected"),
        ((iter(X), iter(Y)), r"^data: a value of type tuple \(.*iterator, .*iterator\); expected"),
        ([X, Y], r"data\[0\]: a value of type ndarray; expected a name, a path"),
        (
            Source("mine", Examples(X, Y), Examples(X, Y), 2),
            "y: the label 2; expected 0 to 1",
        ),
        (
            Source("mine", Examples(X, Y), Examples(X, Y), 0),
            "classes = 0, but y has labels",
        ),
        (
            Source("mine", Examples(X, X), Examples(X, X), 2),
            "y: type float32 and shape .*; expected one integer per example, from 0 to 1",
        ),
    ],
)
def test_load_source_rejects_what_is_not_data(spec, message):
    with pytest.raises(DataError, match=message):
        load_source(spec)


def test_load_source_accepts_more_classes_than_labels():
    assert load_source(Source("mine", Examples(X, Y), Examples(X, Y), 7)).classes == 7


def test_whole_numbers_of_pixels_that_are_not_images_are_noted():
    """As scikit-learn has MNIST: float64 from 0 to 255, which trains far worse than images."""
    pixels = np.arange(256.0).reshape(4, 64).repeat(3, axis=0)
    label = np.arange(12) % 2
    (note,) = load_source((pixels, label)).notes
    assert note.startswith(
        "x: whole numbers from 0 to 255 are used as they are. If they are pixels"
    )
    images = pixels.reshape(12, 8, 8).astype(np.uint8)
    for other in (images, pixels / 255, pixels - 128, pixels + 0.5, pixels % 200):
        assert load_source((other, label)).notes == ()


def test_mixed_labels_name_both_types():
    label = np.array(["a", 1] * 6, dtype=object)
    sentence = r"^y_train: a value 'a' of type str among those of type int; expected numbers or str"
    with pytest.raises(DataError, match=sentence):
        load_source((np.zeros((12, 2)), label))
