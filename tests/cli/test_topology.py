"""fedspd topology show."""

import json

import pytest
from typer.testing import CliRunner

from fedspd.cli.topology import app
from fedspd.core.errors import ConfigError, TopologyError

RING = ["topology.kind=ring", "topology.weights=metropolis", "clients=4", "clusters=1"]


def show(*words: str) -> str:
    result = CliRunner().invoke(app, ["show", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_show_prints_one_line_of_json():
    output = show(*RING, "--json")
    facts = json.loads(output)
    assert output.count("\n") == 1
    assert (facts["kind"], facts["clients"], facts["edges"], facts["diameter"]) == ("ring", 4, 4, 2)
    assert facts["spectral_gap"] == pytest.approx(2 / 3)
    assert facts["consensus_rate"] == pytest.approx(8 / 9)


def test_show_prints_facts_and_degrees():
    output = show(*RING)
    assert "Topology 'ring', weights 'metropolis'" in output
    assert "2, 2, 2" in output
    assert "0.6667" in output
    assert output.count("█") == 30


def test_show_groups_a_long_tail_of_degrees():
    output = show("topology.kind=ba", "clients=300")
    assert "3 to " in output
    assert len(output.splitlines()) < 40


def test_show_reads_a_config_file_and_overrides(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('clients = 9\n[topology]\nkind = "grid"\n', encoding="utf-8")
    assert json.loads(show(str(config), "--json"))["edges"] == 12
    assert json.loads(show(str(config), "clients=4", "--json"))["edges"] == 4


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_show_draws_the_graph(tmp_path, ending):
    file = tmp_path / f"ring.{ending}"
    show(*RING, "--figure", str(file))
    begin = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[ending]
    assert file.read_bytes().startswith(begin)


def test_show_rejects_an_impossible_figure(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown ending; expected one of \.png, \.pdf, \.svg"):
        show(*RING, "--figure", "ring.doc")
    with pytest.raises(ConfigError, match="too many to see"):
        show("topology.kind=complete", "clients=200", "--figure", "all.png")
    with pytest.raises(ConfigError, match="cannot be written"):
        show(*RING, "--figure", str(tmp_path / "none" / "ring.png"))


def test_show_rejects_two_configs_and_an_impossible_graph():
    with pytest.raises(
        ConfigError, match=r"'b\.toml': neither an override nor the only config file"
    ):
        show("a.toml", "b.toml")
    with pytest.raises(TopologyError, match=r"topology\.degree = 25: too large for clients = 20"):
        show("topology.degree=25", "clients=20")
