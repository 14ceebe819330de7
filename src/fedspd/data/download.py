"""Official datasets into the data folder: from their official places, or from files that a user has.

What is checked by what: a file that is downloaded by itself, by the SHA-256 of its content (after gunzip, so that a mirror may
compress it anew); an archive, by its own SHA-256, before anything is taken out of it. A user's own files are really read; where
their content differs from the official one (CIFAR-100 in another order, say), that is remarked and not refused. The sums of MNIST,
Fashion-MNIST and CIFAR-10 files were computed from the files and agree with published ones; those of the three archives and of the
CIFAR-100 files are published ones. No sum of the single EMNIST files is known here.
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
from fedspd.data.sources import OFFICIAL, Official, find, home, lookup, read, refuse_pickles

Progress = Callable[
    [str, int, int | None], None
]  # a file's name, the bytes that are here, the bytes in all where known

TIMEOUT_SECONDS = 30
PARTIAL_CONTENT = 206
NOTHING_LEFT_TO_SEND = 416


@dataclass(frozen=True)
class DownloadSource:
    """An address that ends with "/" has the files one by one; any other is an archive of them all."""

    address: str
    sha256: Mapping[str, str]  # of an archive, or of a file's content, by name

    @property
    def archive(self) -> str:
        return self.address.rpartition("/")[2]


DOWNLOAD_SOURCES: dict[str, DownloadSource] = {
    "mnist": DownloadSource(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    ),
    "fashion-mnist": DownloadSource(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {
            "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
    ),
    "emnist": DownloadSource(
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        {"gzip.zip": "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e"},
    ),
    "cifar10": DownloadSource(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        {
            "cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            "cifar-10-batches-bin/data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "cifar-10-batches-bin/data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "cifar-10-batches-bin/data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "cifar-10-batches-bin/data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "cifar-10-batches-bin/data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "cifar-10-batches-bin/test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
    ),
    "cifar100": DownloadSource(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        {
            "cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            "cifar-100-binary/train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
            "cifar-100-binary/test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
        },
    ),
}


def silent(file: str, done: int, total: int | None) -> None:
    """The progress of nobody who watches."""


def get(
    name: str,
    folder: Path | None = None,
    from_folder: Path | None = None,
    progress: Progress = silent,
    places: Mapping[str, DownloadSource] = DOWNLOAD_SOURCES,
) -> list[str]:
    """Bring a dataset's files into the data folder and read them once; the answer is what a person should be told."""
    official, base = lookup(name), home(name, folder)
    if not official.files:
        return [f"'{name}' is part of scikit-learn: there is nothing to get."]
    place = places[official.folder]
    try:
        base.mkdir(parents=True, exist_ok=True)
        if from_folder is not None:
            return _take(name, from_folder, base, place)
        _download(official, base, place, progress)
    except OSError as error:
        raise DataError(
            f"{error.filename or base} cannot be read or written: {error.strerror or error}."
        ) from error
    read(name, base)
    return []


def _download(official: Official, base: Path, place: DownloadSource, progress: Progress) -> None:
    missing = [file for file in official.files if not find(base, file)]
    if missing and place.archive:
        archive = base / place.archive
        _fetch(place.address, archive, place.sha256[place.archive], _file_sha256, progress)
        with _staged(base) as stage:
            _unpack(archive, official.folder, stage)
        archive.unlink()
        return
    for file in missing:
        _fetch(place.address + file, base / file, place.sha256[file], content_sha256, progress)


def _fetch(
    url: str, target: Path, sha256: str, digest: Callable[[Path], str], progress: Progress
) -> None:
    """Download to NAME.part, continuing what an earlier attempt left; only what has the right sum gets its name."""
    part = target.with_name(target.name + ".part")
    if target.exists():  # an archive that an earlier attempt did not live to unpack
        os.replace(target, part)
    _transfer(url, part, progress)
    try:
        found = digest(part)
    except DataError:
        found = "none, for it is a broken gzip stream"
    if found != sha256:
        part.unlink()
        raise DataError(
            f"{url} sent a file that is not the official one: its SHA-256 is {found}, expected {sha256}; try again later."
        )
    os.replace(part, target)


def _transfer(url: str, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "fedspd", **({"Range": f"bytes={have}-"} if have else {})}
    try:
        with urlopen(Request(url, headers=headers), timeout=TIMEOUT_SECONDS) as response:
            _receive(response, part, have if response.status == PARTIAL_CONTENT else 0, progress)
    except HTTPError as error:
        if not (
            have and error.code == NOTHING_LEFT_TO_SEND
        ):  # then it is complete already, and its sum will show it
            raise _unreachable(url, error) from error
    except (OSError, HTTPException) as error:
        raise _unreachable(url, error) from error


def _receive(response: HTTPResponse, part: Path, start: int, progress: Progress) -> None:
    length = response.headers["Content-Length"]
    done, total = start, start + int(length) if length else None
    with part.open("ab" if start else "wb") as file:
        while chunk := response.read(formats.CHUNK):
            file.write(chunk)
            done += len(chunk)
            progress(part.stem, done, total)
    if total is not None and done < total:
        raise ConnectionError(
            f"it broke off after {done} of {total} bytes, which are kept: the same command continues from there"
        )


def _unreachable(url: str, error: Exception) -> DataError:
    reason = error if isinstance(error, HTTPError) else getattr(error, "reason", error)
    return DataError(
        f"{url} could not be downloaded ({reason}); without a network, add `--from DIR` to take files that you have."
    )


def _take(name: str, from_folder: Path, base: Path, place: DownloadSource) -> list[str]:
    """Copy a user's files, or unpack the user's archive of them, after all could be read."""
    files = lookup(name).files
    with _staged(base) as stage:
        origin = _origin(name, from_folder, stage, place)
        read(name, origin)
        for file in files:
            if origin != stage and (found := find(origin, file)):
                _copy(found, stage / file)
        return [
            f"{file} is readable, but its content is not the official one (by SHA-256): it may be in another order, or changed."
            for file in files
            if file in place.sha256 and place.sha256[file] != content_sha256(stage / file)
        ]


def _origin(name: str, from_folder: Path, stage: Path, place: DownloadSource) -> Path:
    """The folder that has all files of a dataset; `stage`, if they came out of an archive."""
    official = lookup(name)
    gaps = []
    for folder in (from_folder / official.folder, from_folder):
        if place.archive and (folder / place.archive).is_file():
            _unpack(folder / place.archive, official.folder, stage)
        for origin in (folder, stage):
            gaps.append([file for file in official.files if not find(origin, file)])
            if not gaps[-1]:
                return origin
    refuse_pickles(name, from_folder)
    archive = f", or the archive {place.archive}" if place.archive else ""
    missing = min(gaps, key=len)[0]
    raise DataError(
        f"--from {from_folder} has no {missing}, which the dataset '{name}' needs: expected this file{archive}."
    )


def _copy(found: Path, target: Path) -> None:
    """Under its official name, and so compressed where the name says it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with found.open("rb") as source:
        packed = source.read(2) == formats.GZIP_MAGIC
        source.seek(0)
        with (
            target.open("wb")
            if packed or target.suffix != ".gz"
            else gzip.open(target, "wb", compresslevel=1) as copy
        ):
            shutil.copyfileobj(source, copy)


@contextmanager
def _staged(base: Path) -> Iterator[Path]:
    """A folder whose files move into `base`, each at once, if all went well."""
    with tempfile.TemporaryDirectory(prefix=".incoming-", dir=base) as name:
        stage = Path(name)
        yield stage
        for path in [path for path in stage.rglob("*") if path.is_file()]:
            target = base / path.relative_to(stage)
            target.parent.mkdir(exist_ok=True)
            os.replace(path, target)


def _unpack(archive: Path, folder: str, stage: Path) -> None:
    """Take out only the official files (of all datasets in this folder); the archive has no say in where they go."""
    wanted = {
        Path(file).name: file
        for official in OFFICIAL.values()
        if official.folder == folder
        for file in official.files
    }
    try:
        for member, content in _members(archive):
            if file := wanted.get(Path(member).name):
                (stage / file).parent.mkdir(parents=True, exist_ok=True)
                with (stage / file).open("wb") as copy:
                    shutil.copyfileobj(content, copy)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(
            f"{archive} is damaged: expected an archive that can be unpacked, found {error}."
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
    with formats.opened(path) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]  # any readable does


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
