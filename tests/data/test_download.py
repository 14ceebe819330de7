"""Downloads from a real server on this machine, and from files that a user has."""

import gzip
import hashlib
import io
import os
import re
import struct
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedspd.core.errors import DataError
from fedspd.data.download import DOWNLOAD_SOURCES, DownloadSource, content_sha256, get
from fedspd.data.sources import OFFICIAL, load

REAL = os.environ.get("FEDSPD_DATA")


class Server(ThreadingHTTPServer):
    """Serves `files`, with Range; breaks off after `break_after` bytes of a file; `asked` has the Range of every request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.break_after: int | None = None
        self.ranges = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name, wanted = self.path[1:], self.headers["Range"]
        self.server.asked.append((name, wanted))
        if name not in self.server.files:
            return self.send_error(404)
        content, start = self.server.files[name], 0
        if wanted and self.server.ranges:
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
            if start >= len(content):
                return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = None if self.server.break_after is None else start + self.server.break_after
        self.wfile.write(content[start:end])
        return None

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def idx_bytes(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def idx_files(names: tuple[str, ...]) -> dict[str, bytes]:
    """Two noisy images (so that gzip leaves some kilobytes) with the labels 1 and 2 for each part."""
    images = np.random.default_rng(0).integers(0, 256, (2, 28, 28))
    return {
        name: gzip.compress(idx_bytes(images if "images" in name else np.array([1, 2])), mtime=0)
        for name in names
    }


MNIST = idx_files(OFFICIAL["mnist"].files)
MNIST_SUMS = {
    name: hashlib.sha256(gzip.decompress(content)).hexdigest() for name, content in MNIST.items()
}
CIFAR = {file: bytes([1, 42]) + bytes(3072) for file in OFFICIAL["cifar100"].files}
IMAGES = "train-images-idx3-ubyte.gz"


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return buffer.getvalue()


def mnist_place(server: Server) -> dict[str, DownloadSource]:
    server.files = dict(MNIST)
    return {"mnist": DownloadSource(server.address, MNIST_SUMS)}


def archive_place(
    server: Server, folder: str, name: str, content: bytes
) -> dict[str, DownloadSource]:
    server.files = {name: content}
    return {
        folder: DownloadSource(server.address + name, {name: hashlib.sha256(content).hexdigest()})
    }


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_four_files_are_downloaded_checked_and_read(tmp_path, server):
    seen: dict[str, tuple[int, int | None]] = {}
    remarks = get(
        "mnist",
        tmp_path,
        None,
        lambda file, done, total: seen.update({file: (done, total)}),
        mnist_place(server),
    )
    assert remarks == []
    assert names_in(tmp_path) == sorted(f"mnist/{name}" for name in MNIST)
    assert seen == {name: (len(content), len(content)) for name, content in MNIST.items()}
    assert load("mnist", tmp_path).train.y.tolist() == [1, 2]


def test_what_is_here_is_not_downloaded_again(tmp_path, server):
    places = mnist_place(server)
    get("mnist", tmp_path, places=places)
    (tmp_path / "mnist" / IMAGES).unlink()
    server.asked.clear()
    get("mnist", tmp_path, places=places)
    assert server.asked == [(IMAGES, None)]


def test_half_a_file_is_continued(tmp_path, server):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{IMAGES}.part").write_bytes(MNIST[IMAGES][:700])
    get("mnist", tmp_path, places=mnist_place(server))
    assert server.asked[0] == (IMAGES, "bytes=700-")
    assert (tmp_path / "mnist" / IMAGES).read_bytes() == MNIST[IMAGES]


def test_a_server_without_range_starts_from_the_beginning(tmp_path, server):
    server.ranges = False
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{IMAGES}.part").write_bytes(MNIST[IMAGES][:700])
    get("mnist", tmp_path, places=mnist_place(server))
    assert (tmp_path / "mnist" / IMAGES).read_bytes() == MNIST[IMAGES]


def test_a_part_that_is_complete_already_only_gets_its_name(tmp_path, server):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{IMAGES}.part").write_bytes(MNIST[IMAGES])
    get("mnist", tmp_path, places=mnist_place(server))
    assert (tmp_path / "mnist" / IMAGES).read_bytes() == MNIST[IMAGES]


def test_a_server_that_breaks_off_leaves_a_part_that_is_continued(tmp_path, server):
    places = mnist_place(server)
    server.break_after = 500
    with pytest.raises(
        DataError,
        match=rf"{IMAGES} could not be downloaded \(it broke off after 500 of {len(MNIST[IMAGES])} bytes",
    ):
        get("mnist", tmp_path, places=places)
    assert names_in(tmp_path) == [f"mnist/{IMAGES}.part"]
    server.break_after = None
    get("mnist", tmp_path, places=places)
    assert (IMAGES, "bytes=500-") in server.asked
    assert names_in(tmp_path) == sorted(f"mnist/{name}" for name in MNIST)


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"another content", mtime=0), b"<html>log in first</html>", MNIST[IMAGES][:-20]],
)
def test_a_wrong_checksum_leaves_nothing(tmp_path, server, content):
    places = mnist_place(server)
    server.files[IMAGES] = content
    with pytest.raises(
        DataError,
        match=f"{IMAGES} sent a file that is not the official one: its SHA-256 is .*expected {MNIST_SUMS[IMAGES]}",
    ):
        get("mnist", tmp_path, places=places)
    assert names_in(tmp_path) == []


def test_a_mirror_may_compress_anew(tmp_path, server):
    places = mnist_place(server)
    server.files[IMAGES] = gzip.compress(gzip.decompress(MNIST[IMAGES]), compresslevel=1)
    get("mnist", tmp_path, places=places)
    assert load("mnist", tmp_path).test.y.tolist() == [1, 2]


def test_a_file_that_is_not_there_and_a_server_that_is_not_there(tmp_path, server):
    places = mnist_place(server)
    server.files.clear()
    with pytest.raises(DataError, match=r"HTTP Error 404.*add `--from DIR`"):
        get("mnist", tmp_path, places=places)
    nobody = {"mnist": DownloadSource("http://127.0.0.1:1/", MNIST_SUMS)}
    with pytest.raises(
        DataError, match=r"http://127\.0\.0\.1:1/train-images.*Connection refused.*add `--from DIR`"
    ):
        get("mnist", tmp_path, places=nobody)


def test_only_the_expected_members_of_a_tar_are_taken(tmp_path, server):
    crowded = {**CIFAR, "../escaped.bin": b"bad", "cifar-100-binary/readme.html": b"no"}
    get(
        "cifar100",
        tmp_path,
        places=archive_place(server, "cifar100", "cifar.tar.gz", tar_of(crowded)),
    )
    assert names_in(tmp_path) == sorted(f"cifar100/{file}" for file in CIFAR)
    assert load("cifar100", tmp_path).test.y.tolist() == [42]


def test_an_archive_cannot_choose_where_a_member_goes(tmp_path, server):
    evil = {
        "../../outside/train.bin": CIFAR["cifar-100-binary/train.bin"],
        "/test.bin": CIFAR["cifar-100-binary/test.bin"],
    }
    get(
        "cifar100",
        tmp_path / "data",
        places=archive_place(server, "cifar100", "cifar.tar.gz", tar_of(evil)),
    )
    assert names_in(tmp_path) == sorted(f"data/cifar100/{file}" for file in CIFAR)


def test_one_archive_serves_all_emnist_splits(tmp_path, server):
    splits = {
        **idx_files(OFFICIAL["emnist-letters"].files),
        **idx_files(OFFICIAL["emnist-digits"].files),
    }
    archive = zip_of(
        {
            "gzip/": b"",
            "gzip/notes.txt": b"no",
            **{f"gzip/{name}": content for name, content in splits.items()},
        }
    )
    places = archive_place(server, "emnist", "gzip.zip", archive)
    get("emnist", tmp_path, places=places)
    get("emnist-digits", tmp_path, places=places)
    assert len(server.asked) == 1
    assert names_in(tmp_path) == sorted(f"emnist/{name}" for name in splits)
    assert load("emnist", tmp_path).train.y.tolist() == [0, 1]


def test_an_archive_with_a_wrong_checksum_is_not_opened(tmp_path, server):
    places = archive_place(server, "cifar100", "cifar.tar.gz", tar_of(CIFAR))
    server.files["cifar.tar.gz"] = tar_of({**CIFAR, "more": b""})
    with pytest.raises(DataError, match="not the official one"):
        get("cifar100", tmp_path, places=places)
    assert names_in(tmp_path) == []


def test_an_archive_that_was_not_unpacked_is_checked_but_not_fetched_again(tmp_path, server):
    archive = tar_of(CIFAR)
    (tmp_path / "cifar100").mkdir()
    (tmp_path / "cifar100" / "cifar.tar.gz").write_bytes(archive)
    get("cifar100", tmp_path, places=archive_place(server, "cifar100", "cifar.tar.gz", archive))
    assert server.asked == [("cifar.tar.gz", f"bytes={len(archive)}-")]
    assert names_in(tmp_path) == sorted(f"cifar100/{file}" for file in CIFAR)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("inside", ["", "mnist"])
def test_a_users_own_files_are_taken_and_compared_with_the_official_ones(tmp_path, inside):
    mine = write(tmp_path / "mine" / inside, MNIST)
    known = {"mnist": DownloadSource("http://unused/", {**MNIST_SUMS, IMAGES: "0" * 64})}
    remarks = get("mnist", tmp_path / "data", tmp_path / "mine", places=known)
    assert len(remarks) == 1
    assert remarks[0].startswith(f"{IMAGES} is readable, but its content is not the official one")
    assert names_in(tmp_path / "data" / "mnist") == names_in(mine)


def test_uncompressed_files_are_taken_under_their_official_names(tmp_path):
    write(
        tmp_path / "mine",
        {name.removesuffix(".gz"): gzip.decompress(content) for name, content in MNIST.items()},
    )
    assert (
        get(
            "mnist",
            tmp_path / "data",
            tmp_path / "mine",
            places={"mnist": DownloadSource("http://unused/", MNIST_SUMS)},
        )
        == []
    )
    assert names_in(tmp_path / "data") == sorted(f"mnist/{name}" for name in MNIST)
    assert content_sha256(tmp_path / "data" / "mnist" / IMAGES) == MNIST_SUMS[IMAGES]


def test_a_users_archive_is_taken(tmp_path):
    write(tmp_path / "mine", {"cifar-100-binary.tar.gz": tar_of(CIFAR)})
    remarks = get("cifar100", tmp_path / "data", tmp_path / "mine")
    assert [remark.split(" ")[0] for remark in remarks] == list(CIFAR)
    assert names_in(tmp_path / "data") == sorted(f"cifar100/{file}" for file in CIFAR)


def test_a_users_files_that_cannot_be_read_replace_nothing(tmp_path):
    places = {"mnist": DownloadSource("http://unused/", MNIST_SUMS)}
    write(tmp_path / "data" / "mnist", MNIST)
    write(tmp_path / "mine", {**MNIST, IMAGES: b"rubbish"})
    with pytest.raises(DataError, match=f"mine/{IMAGES} is damaged"):
        get("mnist", tmp_path / "data", tmp_path / "mine", places=places)
    assert (tmp_path / "data" / "mnist" / IMAGES).read_bytes() == MNIST[IMAGES]
    assert names_in(tmp_path / "data") == sorted(f"mnist/{name}" for name in MNIST)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, r"has no cifar-100-binary/train\.bin.* or the archive cifar-100-binary\.tar\.gz"),
        ({"cifar100/cifar-100-binary/train.bin": b"any"}, r"has no cifar-100-binary/test\.bin"),
        ({"cifar-100-python/train": b""}, "pickles are never loaded"),
        (
            {"cifar-100-binary.tar.gz": b"rubbish"},
            "is damaged: expected an archive that can be unpacked",
        ),
        (
            {"cifar-100-binary.tar.gz": tar_of(CIFAR)[:50]},
            "is damaged: expected an archive that can be unpacked",
        ),
    ],
)
def test_a_folder_without_the_files_is_refused(tmp_path, files, sentence):
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine", files)
    with pytest.raises(DataError, match=sentence):
        get("cifar100", tmp_path / "data", tmp_path / "mine")
    assert names_in(tmp_path / "data") == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="file/mnist cannot be read or written"):
        get("mnist", tmp_path / "file")


def test_digits_need_no_download():
    assert get("digits") == ["'digits' is part of scikit-learn: there is nothing to get."]


def test_every_download_has_a_checksum():
    for name, official in OFFICIAL.items():
        if official.files:
            place = DOWNLOAD_SOURCES[official.folder]
            checked = [place.archive] if place.archive else official.files
            assert all(re.fullmatch("[0-9a-f]{64}", place.sha256[file]) for file in checked), name


@pytest.mark.skipif(not REAL, reason="needs the real files: set FEDSPD_DATA to their folder")
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_the_real_files_have_the_known_checksums(name):
    for file in OFFICIAL[name].files:
        assert content_sha256(Path(REAL) / name / file) == DOWNLOAD_SOURCES[name].sha256[file]
