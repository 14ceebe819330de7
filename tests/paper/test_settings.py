"""The settings of the experiments at scale paper: those of its text, and runnable ones."""

import re
from pathlib import Path

import numpy as np
import pytest

from fedspd.config import ExperimentConfig
from fedspd.core.errors import ConfigError
from fedspd.core.keys import Key
from fedspd.data.partitioning import federate
from fedspd.data.sources import Examples, Source, dataset_spec
from fedspd.paper.definition import (
    PaperExperiment,
    experiment_names,
    load_experiment,
    parse_experiment,
)

PAPER = Path(__file__).parents[3] / "shared/paper/fedspd-uai2025.tex.txt"
CIFAR = ("cifar10", "cifar100")
OWN_CLIENTS = {  # of experiments whose text names another number
    "fig-connectivity": 15,
    "fig-imbalance": 15,
    "table-mobilenet": 20,
    "table-privacy": 50,
    "table-topology": 50,
    "table-topology-emnist": 50,
}
PHRASES = (  # of the appendix: each is checked below
    "fixed at $N = 100$",
    "connecting probability $p=0.06$ and total number of clients $N=100$",
    "The initial learning rate was 5e-2, with a decay factor of 0.80.",
    "carried out over 150 global epochs",
    "averaged over five individual experiments",
    "set to $N = 25$",
    "connecting probability $p=0.20$ and total number of clients $N=25$",
    "initial learning rate was set to 5e-2, with a decay factor of 0.85",
    "conducted for 150 global epochs",
    "averaged over two independent runs",
    "slightly lower number of clients $N=15$",
)


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's text is not here")
def test_quoted_settings_are_in_the_paper():
    text = re.sub(r"\s+", " ", PAPER.read_text())
    assert [phrase for phrase in PHRASES if phrase not in text] == []
    assert text.count("local epochs was set to 5") == 2


@pytest.mark.parametrize("name", experiment_names())
def test_settings_at_scale_paper_are_those_of_its_text(name):
    for cell in load_experiment(name).cells("paper"):
        config = cell.configs[0]
        is_cifar = config.data.name in CIFAR
        if "for comparison" not in cell.row.name:  # which the paper does not have
            assert config.clients == OWN_CLIENTS.get(name, 25 if is_cifar else 100)
        assert config.rounds == (75 if name == "mnist-100" else 150)
        assert config.training.lr == 0.05
        assert config.training.decay == (0.85 if is_cifar else 0.8)
        assert config.training.epochs == (5 if "tau" not in cell.column.name else tau(cell))
        assert config.training.first_round_factor == 2
        if config.topology.kind == "er" and name not in OWN_CLIENTS:
            assert config.topology.probability == (0.2 if is_cifar else 0.06)
        if config.method == "fedspd" and name != "fig-final-phase":
            assert config.fedspd.final_epochs == (30 if is_cifar else 10)
        if name != "fig-clusters" and config.method != "fedspd-split":
            assert config.clusters == 2


def tau(cell) -> int:
    return int(cell.column.name.removeprefix("tau = "))


@pytest.mark.parametrize("name", ["table-cfl", "table-dfl", "table-local-epochs"])
def test_tables_of_cifar_have_two_seeds_and_the_others_five(name):
    for cell in load_experiment(name).cells("paper"):
        assert len(cell.configs) == (2 if cell.configs[0].data.name in CIFAR else 5)


def test_seeds_of_a_row_count_at_scale_paper_alone():
    text = """
title = "T"
source = "S"
says = "-"
[paper]
seeds = 5
[small]
seeds = 3
[[rows]]
name = "A"
seeds = 2
[[columns]]
name = "local"
config = { method = "local" }
"""
    experiment = parse_experiment("t", text)
    assert [len(experiment.cells(scale)[0].configs) for scale in ("paper", "small")] == [2, 3]
    with pytest.raises(ConfigError, match=r"columns\.0\.seeds: unknown key"):
        parse_experiment("t", text.replace('name = "local"', 'name = "local"\nseeds = 2'))


@pytest.mark.parametrize("name", experiment_names())
def test_data_suffice_at_scale_paper(name):
    """Every client gets its examples, though clients draw their proportions at random."""
    for config in distinct_partitions(load_experiment(name)):
        second = config.data.second and blank(config.data.second)
        key = Key(config.seed).of("data")
        found = federate(blank(config.data.name), config.data, config.clients, key, second)
        assert len(found.train.y) == config.clients * config.data.examples


def distinct_partitions(experiment: PaperExperiment) -> list[ExperimentConfig]:
    configs = [config for cell in experiment.cells("paper") for config in cell.configs]
    return list({(repr(c.data), c.clients, c.seed): c for c in configs}.values())


def blank(name: str) -> Source:
    """Return a dataset of this size with tiny black images."""
    spec = dataset_spec(name)

    def part(examples: int) -> Examples:
        x = np.zeros((examples, spec.shape[0], 2, 2), np.uint8)
        return Examples(x, np.arange(examples) % spec.classes)

    return Source(name, part(spec.train.examples), part(spec.test.examples), spec.classes)


def test_cells_for_small_machines_are_those_of_the_table():
    path = Path(__file__).parents[2] / "experiments/paper/er-50.toml"
    table = load_experiment("table-topology").cells("paper")
    named = {(cell.row.name, cell.column.name): cell for cell in table}
    for cell in load_experiment(str(path)).cells("paper"):
        other = named[cell.row.name, cell.column.name]
        assert cell.configs == other.configs[:1]
        assert cell.paper == other.paper
