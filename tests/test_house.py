"""The documents are true: config reference, recorded fields, links, commands and pins."""

import os
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import config_reference
import fedspd
from fedspd.cli.main import execute
from fedspd.config import ExperimentConfig, validate
from fedspd.node.wire import wire_pb2

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_config_reference_is_up_to_date():
    assert (ROOT / "docs/config.md").read_text() == config_reference.reference(), "run `make docs`"


def test_list_of_methods_is_up_to_date():
    listed = config_reference.METHODS_FILE.read_text()
    assert listed == config_reference.methods_list(), "run `make docs`"


def test_config_reference_describes_every_key():
    tables = [("", ExperimentConfig), *config_reference.tables()]
    silent = [
        f"{name}.{key}"
        for name, table in tables
        for key, field in config_reference.keys(table)
        if not field.description
    ]
    assert silent == []


@pytest.mark.parametrize("document", ["events", "result"])
def test_concepts_explain_every_recorded_field(document, tmp_path):
    config = {
        "clients": 3,
        "rounds": 1,
        "topology": {"kind": "ring"},
        "data": {"examples": 20, "test_examples": 5},
    }
    result = fedspd.run(config, out=tmp_path / "run")
    explained = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs/concepts.md").read_text()))
    recorded = set(names(result.events() if document == "events" else result.summary))
    assert len(recorded) > 10
    assert recorded - explained == set()


def names(content: Any) -> Iterator[str]:
    """Every key of a JSON document, at any depth."""
    if isinstance(content, dict):
        yield from content
    if isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from names(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_existing_files(page):
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    missing = [
        target for target in targets if "://" not in target and not (page.parent / target).exists()
    ]
    assert missing == []


def sections(page: Path) -> set[str]:
    """Return the anchors of a page: its headings as a host of repositories names them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = [re.sub(r"<[^>]+>", "", head) for head in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)]
    slugs = {re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads}
    return slugs | set(re.findall(r'<a id="([^"]+)">', prose))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_existing_sections(page):
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
    targets = [((page.parent / name).resolve() if name else page, anchor) for name, anchor in links]
    pages = [(target, anchor) for target, anchor in targets if target.suffix == ".md"]
    missing = [anchor for target, anchor in pages if anchor not in sections(target)]
    assert missing == []


def test_concepts_quote_the_code_as_it_is():
    page = (ROOT / "docs/concepts.md").read_text()
    quotes = re.findall(r"from `(src/[\w/]+\.py)`:\n\n```python\n(.*?)```", page, re.DOTALL)
    assert len(quotes) == 1
    for name, code in quotes:
        assert textwrap.indent(code, "    ") in (ROOT / name).read_text()


def test_readme_shows_real_configs():
    blocks = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    assert tomllib.loads(blocks[0]) == tomllib.loads((ROOT / "examples/mnist.toml").read_text())
    assert [validate(tomllib.loads(block)).clients for block in blocks] == [20]


def documented_commands() -> list[list[str]]:
    """Return the arguments of every call of fedspd in a block of commands."""
    blocks = [
        block.replace("\\\n", "")
        for page in PAGES
        for language, block in re.findall(
            r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
        )
        if not language
    ]
    calls = [
        re.match(r"(?:\S*/)?fedspd ([a-z].*)", line) for b in blocks for line in b.splitlines()
    ]
    return [shlex.split(call[1], comments=True) for call in calls if call]


def test_documents_name_only_options_that_exist(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    options: dict[tuple[str, ...], set[str]] = {}
    for words in documented_commands():
        is_group = words[0] in ("data", "network", "node", "topology")
        command = tuple(words[: 1 + is_group])
        options.setdefault(command, set()).update(w for w in words if w.startswith("--"))
    assert len(options) > 15
    for command, named in options.items():
        assert execute([*command, "--help"]) == 0
        known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        assert named - known == set(), command


def test_documents_name_only_keys_that_exist():
    commands = [words for words in documented_commands() if words[0] in ("run", "compare", "up")]
    assert len(commands) > 15
    for words in commands:
        values = [word for word in words if re.match(r"[a-z_.]+=", word)]
        files = [ROOT / "examples" / Path(word).name for word in words if word.endswith(".toml")]
        fedspd.load(*[path for path in files if path.exists()], overrides=values)


def test_documents_name_only_make_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {
        target
        for page in PAGES
        for target in re.findall(
            r"^make ([a-z-]+)|`make ([a-z-]+)`", page.read_text(), re.MULTILINE
        )
    }
    targets = {first or second for first, second in named}
    assert {"demo", "test"} <= targets
    assert [
        target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)
    ] == []


def test_constraints_pin_every_dependency():
    pins = re.findall(r"^([\w.-]+)==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    extras = PROJECT["optional-dependencies"]
    tested = [
        entry
        for name in ("dev", "node", "onnx", "ray")
        for entry in extras[name]
        if not entry.startswith("fedspd[")
    ]
    wanted = [re.split(r"[<>=]", entry)[0] for entry in PROJECT["dependencies"] + tested]
    assert set(wanted) - {pin.replace("_", "-").lower() for pin in pins} == set()
    assert "torch==2.13.0\n" in (ROOT / "constraints.txt").read_text()


def test_ci_runs_the_tests():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert "make test\n" in script.read_text()


def test_pictures_of_the_documents_are_small():
    sizes = {path.name: path.stat().st_size for path in ROOT.glob("docs/images/*")}
    assert "mixtures.png" in sizes
    assert [name for name, size in sizes.items() if not 0 < size < 200_000] == []


def test_privacy_page_has_every_field_of_the_wire():
    page = (ROOT / "docs/privacy.md").read_text()
    table = page.partition("## Every field of the wire")[2].partition("\n## ")[0]
    explained: dict[str, set[str]] = {}
    for message, fields in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE):
        explained.setdefault(message, set()).update(re.findall(r"`(\w+)`", fields))
    messages = wire_pb2.DESCRIPTOR.message_types_by_name
    assert explained == {
        name: {field.name for field in message.fields} for name, message in messages.items()
    }
