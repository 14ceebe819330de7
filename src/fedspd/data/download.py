"""Official datasets into the data folder: downloaded, or copied from files that a user has.

A file that is downloaded by itself is verified by the SHA-256 of its content after gunzip, so a
mirror may compress it differently. An archive is verified by its own SHA-256 before it is unpacked.
A user's files are read completely; if their content differs from the official one (CIFAR-100 in
another order, for example), that is reported but not an error.

The checksums of the MNIST, Fashion-MNIST and CIFAR-10 files were computed from the files and agree
with published ones. Those of the three archives and of the CIFAR-100 files are published ones. No
checksums of the single EMNIST files are known.
"""

import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedspd.core.errors import DataError
from fedspd.data import formats
from fedspd.data.sources import (
    DATASETS,
    DatasetSpec,
    dataset_folder,
    dataset_spec,
    find_file,
    read_dataset,
    reject_pickles,
)

# Called with a file's name, the bytes received and the bytes in all, if known.
OnProgress = Callable[[str, int, int | None], None]

TIMEOUT_SECONDS = 30
PARTIAL_CONTENT = 206
RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True)
class DownloadSource:
    """Where a dataset is downloaded from, and its checksums.

    A URL that ends with "/" has the files one by one; any other is an archive of all of them.

    sha256           SHA-256 of the content of the files, by name
    archive_sha256   SHA-256 of the archive, if there is one
    """

    url: str
    sha256: Mapping[str, str]
    archive_sha256: str = ""

    @property
    def archive(self) -> str:
        """The name of the archive; empty if there is none."""
        return self.url.rpartition("/")[2]


def _checksums(name: str, *sha256: str) -> dict[str, str]:
    """Return the checksums of a dataset's files, in the order of its specification, by name."""
    return dict(zip(DATASETS[name].files, sha256, strict=True))


DOWNLOAD_SOURCES: dict[str, DownloadSource] = {
    "mnist": DownloadSource(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        _checksums(
            "mnist",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    "fashion-mnist": DownloadSource(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        _checksums(
            "fashion-mnist",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    "emnist": DownloadSource(
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        {},
        "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
    ),
    "cifar10": DownloadSource(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        _checksums(
            "cifar10",
            "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        ),
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    "cifar100": DownloadSource(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        _checksums(
            "cifar100",
            "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
            "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
        ),
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
}


def ignore_progress(file: str, received: int, total: int | None) -> None:
    """Do nothing: the default of on_progress."""


def get_dataset(
    name: str,
    folder: Path | None = None,
    from_folder: Path | None = None,
    on_progress: OnProgress = ignore_progress,
    download_sources: Mapping[str, DownloadSource] = DOWNLOAD_SOURCES,
) -> list[str]:
    """Bring a dataset's files into the data folder, read them once, and return remarks on them."""
    spec, target = dataset_spec(name), dataset_folder(name, folder)
    if not spec.files:
        return [f"'{name}' is part of scikit-learn: there is nothing to download."]
    source = download_sources[spec.folder]
    try:
        target.mkdir(parents=True, exist_ok=True)
        if from_folder is not None:
            return _copy_from(name, from_folder, target, source)
        _download(spec, target, source, on_progress)
    except OSError as error:
        raise DataError(
            f"'{error.filename or target}': cannot be read or written: {error.strerror or error}."
        ) from error
    read_dataset(name, target)
    return []


def _download(
    spec: DatasetSpec, folder: Path, source: DownloadSource, on_progress: OnProgress
) -> None:
    missing = [file for file in spec.files if not find_file(folder, file)]
    if missing and source.archive:
        archive = folder / source.archive
        _fetch(source.url, archive, source.archive_sha256, _file_sha256, on_progress)
        with _staged(folder) as stage:
            _unpack(archive, spec.folder, stage)
        archive.unlink()
        return
    for file in missing:
        url, sha256 = source.url + file, source.sha256[file]
        _fetch(url, folder / file, sha256, content_sha256, on_progress)


def _fetch(
    url: str, target: Path, sha256: str, digest: Callable[[Path], str], on_progress: OnProgress
) -> None:
    """Download to NAME.part, from where an earlier attempt stopped; rename it once verified."""
    part = target.with_name(target.name + ".part")
    if target.exists():  # an archive that an earlier attempt downloaded but did not unpack
        os.replace(target, part)
    _transfer(url, part, on_progress)
    try:
        found = digest(part)
    except DataError:
        found = "unknown, since the gzip stream is broken"
    if found != sha256:
        part.unlink()
        raise DataError(
            f"{url}: not the official file, its SHA-256 is {found}; expected {sha256}. "
            "Try again later."
        )
    os.replace(part, target)


def _transfer(url: str, part: Path, on_progress: OnProgress) -> None:
    size = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "fedspd", **({"Range": f"bytes={size}-"} if size else {})}
    try:
        with urlopen(Request(url, headers=headers), timeout=TIMEOUT_SECONDS) as response:
            start = size if response.status == PARTIAL_CONTENT else 0
            _receive(response, part, start, on_progress)
    except HTTPError as error:
        # This code means that the part is complete already; its checksum will show it.
        if not (size and error.code == RANGE_NOT_SATISFIABLE):
            raise _download_error(url, error) from error
    except (OSError, HTTPException) as error:
        raise _download_error(url, error) from error


def _receive(response: HTTPResponse, part: Path, start: int, on_progress: OnProgress) -> None:
    length = response.headers["Content-Length"]
    received, total = start, start + int(length) if length else None
    with part.open("ab" if start else "wb") as file:
        while chunk := response.read(formats.CHUNK_BYTES):
            file.write(chunk)
            received += len(chunk)
            on_progress(part.stem, received, total)
    if total is not None and received < total:
        raise ConnectionError(
            f"interrupted after {received} of {total} bytes; the same command continues from there"
        )


def _download_error(url: str, error: Exception) -> DataError:
    reason = error if isinstance(error, HTTPError) else getattr(error, "reason", error)
    return DataError(
        f"{url}: the download failed: {reason}. Without a network, copy files that you have with "
        "'fedspd data get NAME --from DIR'."
    )


def _copy_from(name: str, folder: Path, target: Path, source: DownloadSource) -> list[str]:
    """Copy a user's files, or unpack the user's archive of them, once all could be read."""
    files = dataset_spec(name).files
    with _staged(target) as stage:
        origin = _find_origin(name, folder, stage, source)
        read_dataset(name, origin)
        for file in files:
            if origin != stage and (found := find_file(origin, file)):
                _copy(found, stage / file)
        return [
            f"'{file}': readable, but by its SHA-256 not the official content; it may be in "
            "another order, or changed."
            for file in files
            if file in source.sha256 and source.sha256[file] != content_sha256(stage / file)
        ]


def _find_origin(name: str, from_folder: Path, stage: Path, source: DownloadSource) -> Path:
    """Return the folder that has all files of a dataset; `stage` if they were in an archive."""
    spec, missing = dataset_spec(name), []
    for folder in (from_folder / spec.folder, from_folder):
        if source.archive and (folder / source.archive).is_file():
            _unpack(folder / source.archive, spec.folder, stage)
        for origin in (folder, stage):
            missing.append([file for file in spec.files if not find_file(origin, file)])
            if not missing[-1]:
                return origin
    reject_pickles(name, from_folder)
    file = min(missing, key=len)[0]
    archive = f", or the archive {source.archive}" if source.archive else ""
    raise DataError(
        f"'{from_folder}': no file {file} of the dataset '{name}'; expected this file{archive}."
    )


def _copy(found: Path, target: Path) -> None:
    """Copy a file to its official name, compressed if that ends with .gz."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with found.open("rb") as source:
        is_compressed = source.read(2) == formats.GZIP_MAGIC
        source.seek(0)
        as_it_is = is_compressed or target.suffix != ".gz"
        with target.open("wb") if as_it_is else gzip.open(target, "wb", compresslevel=1) as copy:
            shutil.copyfileobj(source, copy)


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """Yield a folder whose files move into `folder`, each atomically, if there was no error."""
    with tempfile.TemporaryDirectory(prefix=".incoming-", dir=folder) as name:
        stage = Path(name)
        yield stage
        for path in [path for path in stage.rglob("*") if path.is_file()]:
            target = folder / path.relative_to(stage)
            target.parent.mkdir(exist_ok=True)
            os.replace(path, target)


def _unpack(archive: Path, folder: str, stage: Path) -> None:
    """Extract only the official files of this folder's datasets, each to its official place."""
    wanted = {
        Path(file).name: file
        for spec in DATASETS.values()
        if spec.folder == folder
        for file in spec.files
    }
    try:
        for member, content in _members(archive):
            if file := wanted.get(Path(member).name):
                (stage / file).parent.mkdir(parents=True, exist_ok=True)
                with (stage / file).open("wb") as copy:
                    shutil.copyfileobj(content, copy)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(
            f"'{archive}': damaged ({error}); expected an archive that can be unpacked."
        ) from error


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            for name in packed.namelist():
                with packed.open(name) as content:
                    yield name, content
        return
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.isfile() and (file := tar.extractfile(member)):
                yield member.name, file


def content_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, after gunzip."""
    digest = hashlib.sha256()
    with formats.open_content(path) as content:
        while chunk := content.read(formats.CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
