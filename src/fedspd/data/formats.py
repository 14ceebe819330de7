"""Readers of file formats: idx (MNIST, Fashion-MNIST, EMNIST), CIFAR's binary rows, and images.

Headers are not trusted: sizes are checked against the bytes that follow, and no file can make a
reader allocate more memory than the file has content.

Shapes: N examples, C channels, H height, W width, B bytes of a row.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedspd.core.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Content = BinaryIO | gzip.GzipFile

IDX_MAGIC = 0x0800  # unsigned bytes; the lowest byte is the number of dimensions
GZIP_MAGIC = b"\x1f\x8b"
MAX_BYTES = 1 << 30  # the largest official file (EMNIST byclass) has about half as many
CHUNK_BYTES = 1 << 20
CIFAR_SHAPE = (3, 32, 32)
GREY_MODES = {"1", "L"}  # in Pillow's words
WIDE_MODES = {"I", "F", "I;16", "I;16B", "I;16L", "I;16N"}  # more than 8 bits per channel


def idx(
    images: Path, labels: Path, *, classes: int, size: tuple[int, int] = (28, 28), first: int = 0
) -> tuple[Images, Labels]:
    """Return x_NCHW and y_N of a pair of idx files whose labels start at `first`."""
    x_NHW = _idx_array(images, dimensions=3)
    label_N = _idx_array(labels, dimensions=1)
    if x_NHW.shape[1:] != size:
        found = f"images of {x_NHW.shape[1]} x {x_NHW.shape[2]} pixels"
        raise _damaged(images, found, f"{size[0]} x {size[1]}")
    if len(x_NHW) != len(label_N):
        expected = f"{len(x_NHW)}, one for each image of {images.name}"
        raise _damaged(labels, f"{len(label_N)} labels", expected)
    _check_labels(labels, label_N, first, classes)
    return x_NHW[:, None], label_N.astype(np.int64) - first


def emnist(images: Path, labels: Path, *, classes: int, first: int = 0) -> tuple[Images, Labels]:
    """Return x_NCHW and y_N of a pair of EMNIST files, whose images are stored transposed."""
    x_NCWH, y_N = idx(images, labels, classes=classes, first=first)
    return np.ascontiguousarray(x_NCWH.swapaxes(2, 3)), y_N


def cifar(paths: Sequence[Path], label_ranges: Sequence[int]) -> tuple[Images, Labels]:
    """Return x_NCHW and y_N of files of rows: one label byte per range, then 3072 pixels.

    The class is the last label.
    """
    parts = [_cifar_rows(path, label_ranges) for path in paths]
    x_NP = np.concatenate([row_NB[:, len(label_ranges) :] for row_NB in parts])
    y_N = np.concatenate([row_NB[:, len(label_ranges) - 1] for row_NB in parts])
    return x_NP.reshape(-1, *CIFAR_SHAPE), y_N.astype(np.int64)


def image_size_and_mode(path: Path) -> tuple[tuple[int, int], str]:
    """Return width and height of an image, and Pillow's mode."""
    with _open_image(path) as picture:
        return picture.size, picture.mode


def read_image(path: Path, is_grey: bool) -> Images:
    """Return x_CHW of an image file."""
    with _open_image(path) as picture:
        return pixels(picture, is_grey, f"'{path}'")


def pixels(picture: "Image", is_grey: bool, name: str) -> Images:
    """Return x_CHW of an image."""
    if picture.mode in WIDE_MODES:
        raise DataError(
            f"{name}: an image of mode {picture.mode}; expected 8 bits per channel. Convert it, "
            "or pass the values as arrays."
        )
    x_HWC = np.atleast_3d(np.asarray(picture.convert("L" if is_grey else "RGB")))
    return np.ascontiguousarray(x_HWC.transpose(2, 0, 1))


@contextmanager
def _open_image(path: Path) -> Iterator["Image"]:
    import PIL.Image

    try:
        with PIL.Image.open(path) as picture:
            yield picture
    except (OSError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise DataError(f"'{path}': cannot be read as an image: {error}.") from error


@contextmanager
def open_content(path: Path) -> Iterator[Content]:
    """Open a file's content, gunzipped if its first bytes are gzip's."""
    try:
        with path.open("rb") as raw:
            is_compressed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            raw.seek(0)
            with gzip.open(raw) if is_compressed else raw as content:
                yield content
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, f"a broken gzip stream ({error})", "a complete one") from error
    except OSError as error:
        raise DataError(f"'{path}': cannot be read: {error.strerror or error}.") from error


def _idx_array(path: Path, dimensions: int) -> Images:
    with open_content(path) as content:
        magic = _integers(path, content, 1)[0]
        if magic != IDX_MAGIC + dimensions:
            expected = f"0x{IDX_MAGIC + dimensions:08x} (idx of bytes)"
            raise _damaged(path, f"the magic number 0x{magic:08x}", expected)
        shape = _integers(path, content, dimensions)
        length = math.prod(shape)
        if not 0 < length <= MAX_BYTES:
            raise _damaged(path, f"a header that announces {length} bytes", f"1 to {MAX_BYTES}")
        body = _read_at_most(content, length + 1)
    if len(body) != length:
        found = "more" if len(body) > length else f"only {len(body)}"
        expected = f"{length} ({' x '.join(map(str, shape))})"
        raise _damaged(path, f"{found} bytes after the header", expected)
    return np.frombuffer(body, np.uint8).reshape(shape)


def _integers(path: Path, content: Content, count: int) -> tuple[int, ...]:
    header = content.read(4 * count)
    if len(header) < 4 * count:
        raise _damaged(path, "the end of the file inside the header", f"{4 * count} more bytes")
    return struct.unpack(f">{count}I", header)


def _read_at_most(content: Content, limit: int) -> bytearray:
    body = bytearray()
    while len(body) < limit and (chunk := content.read(min(CHUNK_BYTES, limit - len(body)))):
        body += chunk
    return body


def _cifar_rows(path: Path, label_ranges: Sequence[int]) -> Images:
    width = len(label_ranges) + math.prod(CIFAR_SHAPE)
    with open_content(path) as content:
        body = _read_at_most(content, MAX_BYTES)
    if not body or len(body) % width:
        raise _damaged(path, f"{len(body)} bytes", f"complete rows of {width} bytes")
    row_NB = np.frombuffer(body, np.uint8).reshape(-1, width)
    for column, classes in enumerate(label_ranges):
        _check_labels(path, row_NB[:, column], 0, classes)
    return row_NB


def _check_labels(path: Path, label_N: NDArray[Any], first: int, classes: int) -> None:
    low, high = int(label_N.min()), int(label_N.max())
    if low < first or high >= first + classes:
        found = f"the label {low if low < first else high}"
        raise _damaged(path, found, f"labels from {first} to {first + classes - 1}")


def _damaged(path: Path, found: str, expected: str) -> DataError:
    return DataError(
        f"'{path}': damaged or of another format, with {found}; expected {expected}. "
        "Delete the file and get it again."
    )
