"""The release script refuses mistakes in a sentence, and the files around a release are true."""

import io
import json
import re
import shlex
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import release
from fedspd.cli.main import execute
from release import ReleaseError

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.11", "3.12", "3.13"]
FILES = {
    "pyproject.toml": '[project]\nversion = "1.2.3"\n',
    "CHANGELOG.md": "# Changelog\n\n## [1.2.3] - 2025-01-31\n\n## [1.2.2] - 2025-01-01\n",
    "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.3\n",
}


def project(folder: Path, **changed: str) -> Path:
    """Write the three files that carry a version, some of them changed."""
    for name, text in FILES.items():
        (folder / name).write_text(changed.get(name.partition(".")[0], text))
    return folder


# ---- versions


def test_versions_of_this_project_agree():
    assert release.check_versions(ROOT) == PROJECT["version"]


def test_versions_agree_once_they_are_the_same(tmp_path):
    assert release.check_versions(project(tmp_path)) == "1.2.3"


def test_changelog_may_name_the_version_that_comes_next(tmp_path):
    root = project(tmp_path, CHANGELOG="## [Unreleased]: 1.2.3\n\n## [1.2.2] - 2025-01-01\n")
    assert release.check_versions(root) == "1.2.3"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"CHANGELOG": "## [1.2.2] - 2025-01-31\n\n## [1.2.3] - 2025-01-01\n"},
            "pyproject.toml has version 1.2.3, but CHANGELOG.md has 1.2.2: "
            "give all three files the version that you release.",
        ),
        (
            {"CHANGELOG": "## [Unreleased]\n\n## [1.2.3] - 2025-01-01\n"},
            "pyproject.toml has version 1.2.3, but CHANGELOG.md has none: "
            "give all three files the version that you release.",
        ),
        (
            {"CITATION": "version: 1.2.0\n"},
            "pyproject.toml has version 1.2.3, but CITATION.cff has 1.2.0: "
            "give all three files the version that you release.",
        ),
        (
            {"CHANGELOG": "# Changelog\n\n## 1.2.3\n"},
            "CHANGELOG.md has no section '## [VERSION] - DATE': write one on top.",
        ),
        ({"CITATION": "title: x\n"}, "CITATION.cff has no line 'version: VERSION': add it."),
    ],
)
def test_versions_that_differ_are_refused(changed, sentence, tmp_path):
    with pytest.raises(ReleaseError) as refused:
        release.check_versions(project(tmp_path, **changed))
    assert str(refused.value) == sentence


# ---- links

TEXT = """![A](a/b.png) and [`c`](docs/c.md#d), [e](https://e.example/), [f](#f).

```python
g["h"](i)
[j](k)
```
"""


def test_links_lead_to_the_tag_in_the_repository():
    found = release.absolute_links(TEXT, "https://host.example/o/p/", "1.2.3")
    base = "https://host.example/o/p"
    assert found.startswith(
        f"![A]({base}/raw/v1.2.3/a/b.png) and [`c`]({base}/blob/v1.2.3/docs/c.md#d), "
        "[e](https://e.example/), [f](#f).\n"
    )
    assert found.endswith(TEXT[TEXT.index("```python") :])


def test_links_become_plain_text_without_a_repository():
    found = release.absolute_links(TEXT, None, "1.2.3")
    assert found.startswith(" and `c`, [e](https://e.example/), [f](#f).\n")


def test_relative_links_are_those_of_prose_that_need_files():
    assert release.relative_links(TEXT) == ["a/b.png", "docs/c.md#d"]


@pytest.mark.parametrize("repository", [None, "https://host.example/o/p"])
def test_readme_of_this_project_has_no_relative_links_on_an_index_page(repository):
    readme = (ROOT / "README.md").read_text()
    assert release.relative_links(release.absolute_links(readme, repository, "1.2.3")) == []


# ---- contents

METADATA = """\
Metadata-Version: 2.4
Name: fedspd
Version: 1.2.3
Description-Content-Type: text/markdown

# fedspd
"""


def wheel(folder: Path, **content: str) -> Path:
    path = folder / "fedspd-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in content.items():
            archive.writestr(name, text)
    return path


def test_wheel_must_hold_every_file_of_the_package(tmp_path):
    tracked = {"README.md", "src/fedspd/__init__.py", "src/fedspd/a.toml"}
    whole = {"fedspd/__init__.py": "", "fedspd/a.toml": "", "fedspd-1.2.3.dist-info/RECORD": ""}
    release.check_wheel(wheel(tmp_path, **whole), tracked)
    with pytest.raises(
        ReleaseError, match=r"^fedspd-1\S+ lacks fedspd/a\.toml: name such files in"
    ):
        release.check_wheel(wheel(tmp_path, **{"fedspd/__init__.py": ""}), tracked)
    with pytest.raises(ReleaseError, match=r" holds tests/a\.py, which is not part of the package"):
        release.check_wheel(wheel(tmp_path, **whole, **{"tests/a.py": ""}), tracked)


def test_sdist_must_hold_every_tracked_file(tmp_path):
    path = tmp_path / "fedspd-1.2.3.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("fedspd-1.2.3/README.md"), io.BytesIO())
    release.check_sdist(path, {"README.md"})
    with pytest.raises(ReleaseError, match=r"lacks tests/a\.py: name them in MANIFEST\.in\.$"):
        release.check_sdist(path, {"README.md", "tests/a.py"})


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        (METADATA.replace("1.2.3", "1.2.4"), "has version 1.2.4; expected 1.2.3."),
        (METADATA.replace("1.2.3", "one"), "has invalid metadata: 'one' is invalid for 'version'"),
        (METADATA + "[a](docs/a.md)", "The README links to docs/a.md, which leads nowhere"),
    ],
)
def test_metadata_that_an_index_would_not_like_are_refused(metadata, sentence, tmp_path):
    name = "fedspd-1.2.3.dist-info/METADATA"
    release.check_metadata(wheel(tmp_path, **{name: METADATA}), "1.2.3")
    with pytest.raises(ReleaseError, match=re.escape(sentence)):
        release.check_metadata(wheel(tmp_path, **{name: metadata}), "1.2.3")


# ---- commands


def test_command_that_fails_becomes_a_sentence(capfd):
    with pytest.raises(ReleaseError, match=r"^The trial failed with exit code 3; its output is"):
        release.call(["sh", "-c", "echo because; exit 3"], "The trial")
    assert "because" in capfd.readouterr().err


def test_command_does_not_see_the_checkout(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("FEDSPD_DATA", "somewhere")
    printed = release.call(["env"], "The trial", cwd=tmp_path)
    assert not re.search(r"^(PYTHONPATH|FEDSPD_DATA)=", printed, re.MULTILINE)
    assert re.search(r"^PATH=", printed, re.MULTILINE)


def test_folder_without_git_is_refused(tmp_path):
    with pytest.raises(ReleaseError, match=r"^'git ls-files' failed in .*: release from a git"):
        release.export(tmp_path / "nowhere", tmp_path / "copy")


@pytest.mark.usefixtures("blank_figures")
def test_demo_must_end_with_fedspd_split_ahead(tmp_path, capsys, monkeypatch):
    """The document is that of a real comparison, whose accuracies are then exchanged."""
    monkeypatch.chdir(tmp_path)
    words = ["compare", "clients=4", "rounds=1", "data.examples=20", "topology.kind=ring", "--json"]
    assert execute([*words, "--methods", "fedspd-split,local", "--seeds", "1", "--out", "c"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    split, local = (row["accuracy"] for row in found["rows"])
    split["mean"], local["mean"] = 0.9, 0.8
    release.check_demo(found)
    split["mean"] = 0.8
    with pytest.raises(ReleaseError, match="expected fedspd-split to be ahead"):
        release.check_demo(found)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_release_builds_installs_and_runs(tmp_path, capsys):
    """pip fetches setuptools and the pinned packages from its index."""
    release.release(ROOT, tmp_path)
    assert f"release: {PROJECT['version']} works" in capsys.readouterr().out


# ---- the files around a release


def parsed(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


def test_citation_names_the_software_and_the_paper():
    citation = parsed("CITATION.cff")
    (paper,) = citation["references"]
    assert {"cff-version", "message", "title", "authors", "version"} <= citation.keys()
    assert (citation["title"], citation["license"]) == (PROJECT["name"], PROJECT["license"])
    assert [author["family-names"] for author in paper["authors"]] == ["Lin", "Yağan", "Joe-Wong"]
    assert paper["url"] == PROJECT["urls"]["Paper"]


def test_workflow_runs_the_tests_on_every_python_that_is_promised():
    jobs = parsed(".github/workflows/ci.yml")["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == PYTHONS
    steps = [step.get("run") for job in jobs.values() for step in job["steps"]]
    assert {"make test", "make release PYTHON=python"} <= set(steps)
    prefix = "Programming Language :: Python :: "
    versions = [name.removeprefix(prefix) for name in PROJECT["classifiers"] if prefix in name]
    assert [version for version in versions if "." in version] == PYTHONS


def test_hooks_before_a_commit_are_the_linters_of_make_test():
    (repository,) = parsed(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    for hook in repository["hooks"]:
        command = " ".join(word for word in shlex.split(hook["entry"]) if word != "--force-exclude")
        assert f"\t{command}\n" in makefile


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_template_is_a_form(name):
    form = parsed(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= form.keys()
    assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_library_sets_no_upper_bound():
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    entries = [entry for group in groups for entry in group]
    assert [entry for entry in entries if "<" in entry or "==" in entry] == []
