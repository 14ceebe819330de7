"""What stands in deploy/ and in its page can be done."""

import configparser
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from fedspd.cli.main import execute
from fedspd.config import validate
from fedspd.node.identity.manifest import check_address, check_name

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/deploy.md").read_text()
UNIT = (ROOT / "deploy/fedspd-node@.service").read_text()
CONTAINER = (ROOT / "deploy/Containerfile").read_text()
GROUPS = ("node", "network")


def command_lines() -> list[list[str]]:
    """Every call of fedspd in the page, the unit and the container, from its first word on."""
    blocks = re.findall(r"```(?:toml)?\n(.*?)```", PAGE.replace("\\\n", ""), re.DOTALL)
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


def test_systemd_unit_restarts_after_a_failure_and_not_after_a_refusal():
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT)
    service = parser["Service"]
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert service["StateDirectory"] == "fedspd/%i"
    assert "--state /var/lib/fedspd/%i " in service["ExecStart"]


def test_deploy_page_lists_the_metrics_of_a_node():
    source = (ROOT / "src/fedspd/node/host/status.py").read_text()
    named = set(re.findall(r"`(fedspd_\w+)", PAGE))
    assert named == set(re.findall(r"fedspd_\w+", source))
