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
from fedspd.data.download import DOWNLOAD_SOURCES, DownloadSource, content_sha256, get_dataset
from fedspd.data.sources import DATASETS, load_dataset

REAL = os.environ.get("FEDSPD_DATA")


class Server(ThreadingHTTPServer):
    """A server of `files` with ranges, which stops after `break_after` bytes of a file.

    `requests` has the name and the Range of every request.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.break_after: int | None = None
        self.ranges = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name, wanted = self.path[1:], self.headers["Range"]
        self.server.requests.append((name, wanted))
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
    """Return two images with the labels 1 and 2 for each part.

    The images are noise, so that they stay large when compressed.
    """
    images = np.random.default_rng(0).integers(0, 256, (2, 28, 28))
    return {
        name: gzip.compress(idx_bytes(images if "images" in name else np.array([1, 2])), mtime=0)
        for name in names
    }


MNIST = idx_files(DATASETS["mnist"].files)
MNIST_SHA256 = {
    name: hashlib.sha256(gzip.decompress(content)).hexdigest() for name, content in MNIST.items()
}
CIFAR = {file: bytes([1, 42]) + bytes(3072) for file in DATASETS["cifar100"].files}
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


def mnist_source(server: Server) -> dict[str, DownloadSource]:
    server.files = dict(MNIST)
    return {"mnist": DownloadSource(server.address, MNIST_SHA256)}


def archive_source(
    server: Server, folder: str, name: str, content: bytes
) -> dict[str, DownloadSource]:
    server.files = {name: content}
    sha256 = hashlib.sha256(content).hexdigest()
    return {folder: DownloadSource(server.address + name, {}, sha256)}


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_get_dataset_downloads_verifies_and_reads_files(tmp_path, server):
    seen: dict[str, tuple[int, int | None]] = {}

    def on_progress(file: str, received: int, total: int | None) -> None:
        seen[file] = received, total

    remarks = get_dataset("mnist", tmp_path, None, on_progress, mnist_source(server))
    assert remarks == []
    assert names_in(tmp_path) == sorted(f"mnist/{name}" for name in MNIST)
    assert seen == {name: (len(content), len(content)) for name, content in MNIST.items()}
    assert load_dataset("mnist", tmp_path).train.y.tolist() == [1, 2]


def test_get_dataset_downloads_only_missing_files(tmp_path, server):
    sources = mnist_source(server)
    get_dataset("mnist", tmp_path, download_sources=sources)
    (tmp_path / "mnist" / IMAGES).unlink()
    server.requests.clear()
    get_dataset("mnist", tmp_path, download_sources=sources)
    assert server.requests == [(IMAGES, None)]


def test_get_dataset_continues_a_partial_file(tmp_path, server):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{IMAGES}.part").write_bytes(MNIST[IMAGES][:700])
    get_dataset("mnist", tmp_path, download_sources=mnist_source(server))
    assert server.requests[0] == (IMAGES, "bytes=700-")
    assert (tmp_path / "mnist" / IMAGES).read_bytes() == MNIST[IMAGES]


def test_get_dataset_restarts_where_a_server_has_no_ranges(tmp_path, server):
    server.ranges = False
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{IMAGES}.part").write_bytes(MNIST[IMAGES][:700])
    get_dataset("mnist", tmp_path, download_sources=mnist_source(server))
    assert (tmp_path / "mnist" / IMAGES).read_bytes() == MNIST[IMAGES]


def test_get_dataset_renames_a_complete_part(tmp_path, server):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{IMAGES}.part").write_bytes(MNIST[IMAGES])
    get_dataset("mnist", tmp_path, download_sources=mnist_source(server))
    assert (tmp_path / "mnist" / IMAGES).read_bytes() == MNIST[IMAGES]


def test_get_dataset_continues_after_an_interruption(tmp_path, server):
    sources = mnist_source(server)
    server.break_after = 500
    with pytest.raises(
        DataError,
        match=rf"{IMAGES}: the download failed: interrupted after 500 of {len(MNIST[IMAGES])} byte",
    ):
        get_dataset("mnist", tmp_path, download_sources=sources)
    assert names_in(tmp_path) == [f"mnist/{IMAGES}.part"]
    server.break_after = None
    get_dataset("mnist", tmp_path, download_sources=sources)
    assert (IMAGES, "bytes=500-") in server.requests
    assert names_in(tmp_path) == sorted(f"mnist/{name}" for name in MNIST)


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"another content", mtime=0), b"<html>log in first</html>", MNIST[IMAGES][:-20]],
)
def test_get_dataset_discards_a_file_with_a_wrong_checksum(tmp_path, server, content):
    sources = mnist_source(server)
    server.files[IMAGES] = content
    problem = f"{IMAGES}: not the official file, its SHA-256 is .*; "
    with pytest.raises(DataError, match=f"{problem}expected {MNIST_SHA256[IMAGES]}"):
        get_dataset("mnist", tmp_path, download_sources=sources)
    assert names_in(tmp_path) == []


def test_get_dataset_accepts_the_same_content_compressed_differently(tmp_path, server):
    sources = mnist_source(server)
    server.files[IMAGES] = gzip.compress(gzip.decompress(MNIST[IMAGES]), compresslevel=1)
    get_dataset("mnist", tmp_path, download_sources=sources)
    assert load_dataset("mnist", tmp_path).test.y.tolist() == [1, 2]


def test_get_dataset_names_the_url_and_the_reason_of_a_failure(tmp_path, server):
    sources = mnist_source(server)
    server.files.clear()
    with pytest.raises(DataError, match=r"HTTP Error 404.*fedspd data get NAME --from DIR"):
        get_dataset("mnist", tmp_path, download_sources=sources)
    absent = {"mnist": DownloadSource("http://127.0.0.1:1/", MNIST_SHA256)}
    with pytest.raises(DataError, match=r"^http://127\.0\.0\.1:1/train-images.*Connection refused"):
        get_dataset("mnist", tmp_path, download_sources=absent)


def test_get_dataset_extracts_only_official_members(tmp_path, server):
    crowded = {**CIFAR, "../escaped.bin": b"bad", "cifar-100-binary/readme.html": b"no"}
    get_dataset(
        "cifar100",
        tmp_path,
        download_sources=archive_source(server, "cifar100", "cifar.tar.gz", tar_of(crowded)),
    )
    assert names_in(tmp_path) == sorted(f"cifar100/{file}" for file in CIFAR)
    assert load_dataset("cifar100", tmp_path).test.y.tolist() == [42]


def test_get_dataset_ignores_the_paths_in_an_archive(tmp_path, server):
    evil = {
        "../../outside/train.bin": CIFAR["cifar-100-binary/train.bin"],
        "/test.bin": CIFAR["cifar-100-binary/test.bin"],
    }
    get_dataset(
        "cifar100",
        tmp_path / "data",
        download_sources=archive_source(server, "cifar100", "cifar.tar.gz", tar_of(evil)),
    )
    assert names_in(tmp_path) == sorted(f"data/cifar100/{file}" for file in CIFAR)


def test_get_dataset_downloads_one_archive_for_all_emnist_splits(tmp_path, server):
    splits = {
        **idx_files(DATASETS["emnist-letters"].files),
        **idx_files(DATASETS["emnist-digits"].files),
    }
    archive = zip_of(
        {
            "gzip/": b"",
            "gzip/notes.txt": b"no",
            **{f"gzip/{name}": content for name, content in splits.items()},
        }
    )
    sources = archive_source(server, "emnist", "gzip.zip", archive)
    get_dataset("emnist", tmp_path, download_sources=sources)
    get_dataset("emnist-digits", tmp_path, download_sources=sources)
    assert len(server.requests) == 1
    assert names_in(tmp_path) == sorted(f"emnist/{name}" for name in splits)
    assert load_dataset("emnist", tmp_path).train.y.tolist() == [0, 1]


def test_get_dataset_does_not_open_an_archive_with_a_wrong_checksum(tmp_path, server):
    sources = archive_source(server, "cifar100", "cifar.tar.gz", tar_of(CIFAR))
    server.files["cifar.tar.gz"] = tar_of({**CIFAR, "more": b""})
    with pytest.raises(DataError, match="not the official file"):
        get_dataset("cifar100", tmp_path, download_sources=sources)
    assert names_in(tmp_path) == []


def test_get_dataset_verifies_and_unpacks_an_archive_of_an_earlier_attempt(tmp_path, server):
    archive = tar_of(CIFAR)
    (tmp_path / "cifar100").mkdir()
    (tmp_path / "cifar100" / "cifar.tar.gz").write_bytes(archive)
    get_dataset(
        "cifar100",
        tmp_path,
        download_sources=archive_source(server, "cifar100", "cifar.tar.gz", archive),
    )
    assert server.requests == [("cifar.tar.gz", f"bytes={len(archive)}-")]
    assert names_in(tmp_path) == sorted(f"cifar100/{file}" for file in CIFAR)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("subfolder", ["", "mnist"])
def test_get_dataset_copies_a_users_files_and_reports_other_content(tmp_path, subfolder):
    mine = write(tmp_path / "mine" / subfolder, MNIST)
    known = {"mnist": DownloadSource("http://unused/", {**MNIST_SHA256, IMAGES: "0" * 64})}
    remarks = get_dataset("mnist", tmp_path / "data", tmp_path / "mine", download_sources=known)
    assert len(remarks) == 1
    assert remarks[0].startswith(
        f"'{IMAGES}': readable, but by its SHA-256 not the official content"
    )
    assert names_in(tmp_path / "data" / "mnist") == names_in(mine)


def test_get_dataset_copies_uncompressed_files_to_their_official_names(tmp_path):
    write(
        tmp_path / "mine",
        {name.removesuffix(".gz"): gzip.decompress(content) for name, content in MNIST.items()},
    )
    sources = {"mnist": DownloadSource("http://unused/", MNIST_SHA256)}
    assert (
        get_dataset("mnist", tmp_path / "data", tmp_path / "mine", download_sources=sources) == []
    )
    assert names_in(tmp_path / "data") == sorted(f"mnist/{name}" for name in MNIST)
    assert content_sha256(tmp_path / "data" / "mnist" / IMAGES) == MNIST_SHA256[IMAGES]


def test_get_dataset_unpacks_a_users_archive(tmp_path):
    write(tmp_path / "mine", {"cifar-100-binary.tar.gz": tar_of(CIFAR)})
    remarks = get_dataset("cifar100", tmp_path / "data", tmp_path / "mine")
    assert [remark.split("'")[1] for remark in remarks] == list(CIFAR)
    assert names_in(tmp_path / "data") == sorted(f"cifar100/{file}" for file in CIFAR)


def test_get_dataset_keeps_files_if_the_users_cannot_be_read(tmp_path):
    sources = {"mnist": DownloadSource("http://unused/", MNIST_SHA256)}
    write(tmp_path / "data" / "mnist", MNIST)
    write(tmp_path / "mine", {**MNIST, IMAGES: b"malformed"})
    with pytest.raises(DataError, match=f"mine/{IMAGES}': damaged"):
        get_dataset("mnist", tmp_path / "data", tmp_path / "mine", download_sources=sources)
    assert (tmp_path / "data" / "mnist" / IMAGES).read_bytes() == MNIST[IMAGES]
    assert names_in(tmp_path / "data") == sorted(f"mnist/{name}" for name in MNIST)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no file cifar-100-binary/train\.bin.* or the archive cifar-100-binary\.tar\.gz"),
        ({"cifar100/cifar-100-binary/train.bin": b"any"}, r"no file cifar-100-binary/test\.bin"),
        ({"cifar-100-python/train": b""}, "pickles are never loaded"),
        (
            {"cifar-100-binary.tar.gz": b"malformed"},
            "damaged .*; expected an archive that can be unpacked",
        ),
        (
            {"cifar-100-binary.tar.gz": tar_of(CIFAR)[:50]},
            "damaged .*; expected an archive that can be unpacked",
        ),
    ],
)
def test_get_dataset_rejects_a_folder_without_the_files(tmp_path, files, message):
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine", files)
    with pytest.raises(DataError, match=message):
        get_dataset("cifar100", tmp_path / "data", tmp_path / "mine")
    assert names_in(tmp_path / "data") == []


def test_get_dataset_names_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="file/mnist': cannot be read or written"):
        get_dataset("mnist", tmp_path / "file")


def test_get_dataset_has_nothing_to_do_for_digits():
    assert get_dataset("digits") == [
        "'digits' is part of scikit-learn: there is nothing to download."
    ]


def test_download_sources_have_checksums():
    for name, spec in DATASETS.items():
        if spec.files:
            source = DOWNLOAD_SOURCES[spec.folder]
            files = [source.sha256[file] for file in spec.files if not source.archive]
            for sha256 in files or [source.archive_sha256]:
                assert re.fullmatch("[0-9a-f]{64}", sha256), name


@pytest.mark.skipif(not REAL, reason="needs the real files: set FEDSPD_DATA to their folder")
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_real_files_have_the_known_checksums(name):
    for file in DATASETS[name].files:
        assert content_sha256(Path(REAL) / name / file) == DOWNLOAD_SOURCES[name].sha256[file]
