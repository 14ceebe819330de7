"""The commands, options and metrics of deploy/ and docs/deploy.md exist."""

import configparser
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from fedspd.cli.main import STOPPED, execute
from fedspd.config import validate
from fedspd.core.scores import OTHER_SCORES, RMSE
from fedspd.node.identity.manifest import check_address, check_name

ROOT = Path(__file__).parents[1]


def read(path: str) -> str:
    """Return a file of the checkout, with continued lines joined."""
    return (ROOT / path).read_text().replace("\\\n", "")


PAGE = read("docs/deploy.md")
UNIT = read("deploy/fedspd-node@.service")
CONTAINER = read("deploy/Containerfile")
GROUPS = ("node", "network")


def command_lines() -> list[list[str]]:
    """Return the arguments of every call of fedspd in the page, the unit and the container."""
    blocks = re.findall(r"```(?:toml)?\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()] + UNIT.splitlines()
    calls = [
        re.search(r"(?:^|/bin/|exec \S+ |  )fedspd ((?:node|network|up) .*)", line)
        for line in lines
        if not line.startswith("#")
    ]
    (container,) = re.findall(r"^CMD \[(.*)\]$", CONTAINER, re.MULTILINE)
    return [shlex.split(found[1]) for found in calls if found] + [
        shlex.split(container.replace(",", " "))
    ]


@pytest.mark.parametrize("words", command_lines(), ids=lambda words: " ".join(words[:2]))
def test_deploy_page_names_only_options_that_exist(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    command = words[:2] if words[0] in GROUPS else words[:1]
    assert execute([*command, "--help"]) == 0
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {word for word in words if word.startswith("--")} - known == set()


def test_deploy_page_has_many_commands():
    assert {tuple(words[:2]) for words in command_lines()} >= {
        *(("network", verb) for verb in ("create", "show", "add", "join", "revoke")),
        *(("node", verb) for verb in ("run", "status", "export", "predict")),
    }


def test_deploy_page_config_and_addresses_fit_each_other():
    plant, addresses = (
        tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    )
    assert validate(plant).clients == len(addresses) == 8
    assert [check_address(address) for address in addresses.values()] == list(addresses.values())
    assert [check_name(name) for name in addresses] == list(addresses)


def test_systemd_unit_restarts_after_a_failure_and_not_after_a_refusal_or_a_stop():
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT)
    service = parser["Service"]
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert service["SuccessExitStatus"] == str(STOPPED)
    assert service["StateDirectory"] == "fedspd/%i"
    assert "--state /var/lib/fedspd/%i " in service["ExecStart"]


def first_column(head: str) -> list[str]:
    """Return the code in the first column of the table of the page with that head."""
    (table,) = re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    cells = [line.split(" | ")[0] for line in table.splitlines()]
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]


def literals(*folders: str) -> str:
    """Return the source of packages, with adjacent string literals joined."""
    paths = [path for folder in folders for path in (ROOT / "src/fedspd" / folder).rglob("*.py")]
    source = "\n".join(path.read_text() for path in paths)
    return re.sub(r"[\"']\n +f?[\"']", "", source)


def test_deploy_page_explains_every_event_that_nodes_log():
    logged = r"\.(?:info|warning|error|exception)\(\s*[\"']([^:,\"']+)"
    events = set(re.findall(logged, literals("node") + read("src/fedspd/cli/node.py")))
    assert {re.split("[:,]", event)[0] for event in first_column("event")} == events


def test_deploy_page_quotes_errors_that_nodes_report():
    source, errors = literals("node", "storage", "core"), first_column("message or symptom")
    assert len(errors) >= 18
    assert [error for error in errors if error.partition(" (")[0] not in source] == []


def test_deploy_page_lists_the_metrics_of_a_node():
    source = (ROOT / "src/fedspd/node/host/status.py").read_text()
    scores = {f"fedspd_{score.name}" for score in (RMSE, *OTHER_SCORES)}
    named = set(re.findall(r"`(fedspd_\w+)", PAGE))
    assert named == set(re.findall(r"fedspd_\w+", source)) | scores
