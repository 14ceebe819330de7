"""Build the wheel and the sdist, and try the wheel where the checkout cannot help: `make release`.

Nothing is uploaded. The distributions are built from a copy of the tracked files, whose README has
links that work on an index page; they end up in dist/ only once every check has passed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.metadata import InvalidMetadata, Metadata

ROOT = Path(__file__).parent.parent
TIMEOUT_SECONDS = 1800.0
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(```.*?```)", re.DOTALL)
SECTION = re.compile(
    r"^## \[(?:Unreleased\](?:: (?P<next>\S+))?|(?P<version>[^\]]+)\] - \d{4}-\d\d-\d\d)$",
    re.MULTILINE,
)
HIDDEN = ("PYTHON", "VIRTUAL_ENV", "FEDSPD_")  # variables that could lead back to the checkout
TWO_NODES = """\
clients = 2
rounds = 2

[data]
name = "digits"
examples = 20
test_examples = 10

[topology]
kind = "complete"
"""


class ReleaseError(Exception):
    """A check that failed, as a sentence."""


def main() -> int:
    """Release the checkout and return the exit code."""
    try:
        with TemporaryDirectory(prefix="fedspd-release-") as folder:
            release(ROOT, Path(folder))
    except (ReleaseError, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def release(root: Path, scratch: Path) -> None:
    """Check, build, install and try; then keep the distributions in dist/."""
    with step("check the versions"):
        version = check_versions(root)
    with step("build the wheel and the sdist"):
        source = export(root, scratch / "source")
        tracked = files_below(source)
        prepare_readme(source, version)
        wheel, sdist = build(source, scratch / "dist")
    with step("check what they hold"):
        check_wheel(wheel, tracked)
        check_sdist(sdist, tracked)
        check_metadata(wheel, version)
    with step("install the wheel into an empty environment"):
        scripts = install(wheel, root / "constraints.txt", scratch / "venv")
    try_installed(scripts, version, scratch / "empty")
    shutil.rmtree(root / "dist", ignore_errors=True)
    shutil.copytree(scratch / "dist", root / "dist")
    print(f"release: {version} works; {wheel.name} and {sdist.name} are in dist/")
    for note in before_upload(root):
        print(f"release: before you upload, {note}")


@contextmanager
def step(name: str) -> Iterator[None]:
    """Say what is being done, and how long it took."""
    print(f"release: {name} ...", end=" ", flush=True)
    start = time.monotonic()
    try:
        yield
    except BaseException:
        print("failed")
        raise
    print(f"{time.monotonic() - start:.0f} s")


# ---- versions


def project_table(root: Path) -> dict[str, Any]:
    """Return the table [project] of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return table


def check_versions(root: Path) -> str:
    """Return the version that pyproject.toml, CHANGELOG.md and CITATION.cff agree on."""
    version = str(project_table(root)["version"])
    others = {"CHANGELOG.md": changelog_version(root), "CITATION.cff": citation_version(root)}
    for name, other in others.items():
        if other != version:
            raise ReleaseError(
                f"pyproject.toml has version {version}, but {name} has {other}: "
                "give all three files the version that you release."
            )
    return version


def changelog_version(root: Path) -> str:
    """Return the version of the topmost section, whether it is released or not."""
    section = topmost_section(root)
    return section["version"] or section["next"] or "none"


def topmost_section(root: Path) -> re.Match[str]:
    """Return the first heading of the form `## [1.2.3] - DATE` or `## [Unreleased]: 1.2.3`."""
    found = SECTION.search((root / "CHANGELOG.md").read_text())
    if found is None:
        raise ReleaseError("CHANGELOG.md has no section '## [VERSION] - DATE': write one on top.")
    return found


def citation_version(root: Path) -> str:
    """Return the version of the software in CITATION.cff."""
    found = re.search(r"^version: (\S+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    if found is None:
        raise ReleaseError("CITATION.cff has no line 'version: VERSION': add it.")
    return found[1]


def before_upload(root: Path) -> Iterator[str]:
    """Yield what an upload still needs and a build does not."""
    if topmost_section(root)["version"] is None:
        yield "replace 'Unreleased' in CHANGELOG.md by the version and its date."
    if "Repository" not in project_table(root).get("urls", {}):
        yield "add Repository to [project.urls]: without it the README's links are plain text."
    if git(root, "status", "--porcelain"):
        yield "commit your changes: the distributions hold files that differ from the last commit."


# ---- build


def git(root: Path, *arguments: str) -> str:
    """Return what a git command prints."""
    try:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise ReleaseError(
            f"'git {arguments[0]}' failed in '{root}': release from a git checkout."
        ) from None


def export(root: Path, target: Path) -> Path:
    """Copy the tracked files as they are, so that leftovers of other builds cannot get in."""
    for name in git(root, "ls-files", "-z").split("\0"):
        if name and (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    return target


def prepare_readme(source: Path, version: str) -> None:
    """Give the README of a copied tree links that work on an index page."""
    path = source / "README.md"
    repository = project_table(source).get("urls", {}).get("Repository")
    path.write_text(absolute_links(path.read_text(), repository, version))


def absolute_links(text: str, repository: str | None, version: str) -> str:
    """Return the text with relative links led to the repository, or without them if it has none."""

    def replace(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        if not is_relative(target):
            return link[0]
        if repository is None:
            return "" if image else label
        base = f"{repository.rstrip('/')}/{'raw' if image else 'blob'}/v{version}"
        return f"{image}[{label}]({base}/{target})"

    pieces = FENCE.split(text)
    return "".join(p if p.startswith("```") else LINK.sub(replace, p) for p in pieces)


def is_relative(target: str) -> bool:
    """Return whether a link needs the files around it."""
    return not re.match(r"[a-z]+:|#", target)


def relative_links(text: str) -> list[str]:
    """Return the targets of all relative links outside code blocks."""
    prose = "".join(piece for piece in FENCE.split(text) if not piece.startswith("```"))
    return [target for _, _, target in LINK.findall(prose) if is_relative(target)]


def build(source: Path, target: Path) -> tuple[Path, Path]:
    """Build the sdist and, from it, the wheel."""
    call([sys.executable, "-m", "build", "--outdir", str(target), str(source)], "The build")
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, sdist


# ---- contents


def files_below(folder: Path) -> set[str]:
    """Return the paths of all files, relative to the folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def check_wheel(wheel: Path, tracked: Set[str]) -> None:
    """Refuse a wheel that lacks a file of the package, or holds anything else."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    if missing := sorted(package - names):
        raise ReleaseError(
            f"{wheel.name} lacks {', '.join(missing)}: "
            "name such files in [tool.setuptools.package-data] of pyproject.toml."
        )
    if strange := sorted(name for name in names if not name.startswith(("fedspd/", "fedspd-"))):
        raise ReleaseError(f"{wheel.name} holds {strange[0]}, which is not part of the package.")


def check_sdist(sdist: Path, tracked: Set[str]) -> None:
    """Refuse an sdist that lacks a tracked file."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := sorted(tracked - names):
        raise ReleaseError(f"{sdist.name} lacks {', '.join(missing)}: name them in MANIFEST.in.")


def check_metadata(wheel: Path, version: str) -> None:
    """Refuse metadata that an index would refuse, another version, and links that lead nowhere."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        raw = archive.read(name)
    try:
        metadata = Metadata.from_email(raw, validate=True)
    except (InvalidMetadata, ExceptionGroup) as error:
        reasons = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        raise ReleaseError(f"{wheel.name} has invalid metadata: {reasons[0]}") from None
    if str(metadata.version) != version:
        raise ReleaseError(f"{wheel.name} has version {metadata.version}; expected {version}.")
    if links := relative_links(metadata.description or ""):
        raise ReleaseError(f"The README links to {links[0]}, which leads nowhere on an index page.")


# ---- trial


def install(wheel: Path, constraints: Path, target: Path) -> Path:
    """Install the wheel with the extra `node`; return the folder with the environment's scripts."""
    venv.create(target, with_pip=True)
    scripts = target / ("Scripts" if os.name == "nt" else "bin")
    pip = [str(scripts / "python"), "-m", "pip", "install", "--constraint", str(constraints)]
    call([*pip, f"fedspd[node] @ {wheel.as_uri()}"], "The installation of the wheel", cwd=target)
    return scripts


def try_installed(scripts: Path, version: str, empty: Path) -> None:
    """Use the installed package from an empty folder."""
    empty.mkdir()
    with step("try fedspd --version"):
        try_version(scripts, version, empty)
    with step("try fedspd demo"):
        try_demo(scripts, empty)
    with step("try fedspd up with two nodes"):
        try_up(scripts, empty)


def try_version(scripts: Path, version: str, empty: Path) -> None:
    """Check where the package lies, and which version it says it is."""
    where = "import fedspd; print(fedspd.__file__)"
    place = call([str(scripts / "python"), "-c", where], "The import of fedspd", cwd=empty)
    if not Path(place.strip()).is_relative_to(scripts.parent):
        raise ReleaseError(
            f"The trial imported '{place.strip()}' instead of the installed package."
        )
    said = call([str(scripts / "fedspd"), "--version"], "'fedspd --version'", cwd=empty)
    if said.split()[-1:] != [version]:
        raise ReleaseError(f"'fedspd --version' printed '{said.strip()}'; expected {version}.")


def try_demo(scripts: Path, empty: Path) -> None:
    """Run the demo, and check what it found."""
    check_demo(call_json([str(scripts / "fedspd"), "demo", "--json"], "'fedspd demo'", empty))


def check_demo(found: Any) -> None:
    """Check that FedSPD-Split is ahead of every other method, as the README says."""
    means = {row["name"]: row["accuracy"]["mean"] for row in found["rows"]}
    if any(mean >= means["fedspd-split"] for name, mean in means.items() if name != "fedspd-split"):
        raise ReleaseError(f"'fedspd demo' ended with {means}; expected fedspd-split to be ahead.")


def try_up(scripts: Path, empty: Path) -> None:
    """Run a network of two real nodes to its end."""
    (empty / "two.toml").write_text(TWO_NODES)
    found = call_json([str(scripts / "fedspd"), "up", "two.toml", "--json"], "'fedspd up'", empty)
    if len(found["nodes"]) != 2 or found["accuracy"] is None:
        raise ReleaseError(
            f"'fedspd up' ended with {found}; expected two nodes and their accuracy."
        )


def call_json(command: Sequence[str], what: str, cwd: Path) -> Any:
    """Return the last line of JSON that a command prints."""
    printed = call(command, what, cwd).splitlines()
    try:
        return json.loads(printed[-1])
    except (IndexError, ValueError):
        raise ReleaseError(f"{what} printed no JSON at its end.") from None


def call(command: Sequence[str], what: str, cwd: Path | None = None) -> str:
    """Return what a command prints; its failure becomes a sentence, below all that it said."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env=environment,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ReleaseError(f"{what} took more than {TIMEOUT_SECONDS:.0f} seconds.") from None
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise ReleaseError(f"{what} failed with exit code {done.returncode}; its output is above.")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
