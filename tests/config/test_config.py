"""Configs: files and overrides, validation and its messages, and text."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspd.algorithms import METHODS
from fedspd.config import (
    as_dict,
    as_toml,
    changes,
    check_used,
    clusters_of,
    load,
    split_arguments,
    validate,
)
from fedspd.core.errors import ConfigError
from fedspd.core.imports import SHARED_TABLES


def rejection(*overrides, tree=None):
    with pytest.raises(ConfigError) as caught:
        load(overrides=overrides) if tree is None else validate(tree)
    return str(caught.value)


# --- files and overrides


def test_load_without_arguments_returns_the_defaults():
    config = load()
    assert (config.method, config.clients, config.rounds) == ("fedspd-split", 20, 30)
    assert config.clusters is None
    assert config == validate({})
    training = config.training
    assert (training.first_rate, training.momentum, training.batch) == (0.05, 0.5, 50)
    assert (training.decay, training.decay_every) == (0.8, 5)


def test_load_lets_overrides_take_precedence_over_the_file(tmp_path):
    path = tmp_path / "mnist.toml"
    path.write_text('rounds = 7\n[data]\nname = "digits"\n[topology]\ndegree = 4\n', "utf-8")
    config = load(
        path,
        [
            "rounds=30",
            "topology.kind=ba",
            "training.lr=1e-3",
            "model.small = true",
            'data.name="a=b.npz"',
        ],
    )
    assert (config.rounds, config.topology.kind, config.topology.degree) == (30, "ba", 4)
    assert (config.training.lr, config.model.small, config.data.name) == (0.001, True, "a=b.npz")


def test_load_accepts_an_integer_for_a_number_but_not_the_reverse():
    assert load(overrides=["topology.degree=6"]).topology.degree == 6
    assert rejection("rounds=6.0") == "rounds = 6.0: expected an integer."


def test_every_table_is_shared_or_that_of_a_method():
    tables = {key for key, value in as_dict(load()).items() if isinstance(value, dict)}
    assert tables == {*SHARED_TABLES, *METHODS, "options"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (None, [])),
        (["mnist.toml"], (Path("mnist.toml"), [])),
        (["rounds=3", "seed=1"], (None, ["rounds=3", "seed=1"])),
        (["rounds=3", "mnist.toml", "seed=1"], (Path("mnist.toml"), ["rounds=3", "seed=1"])),
    ],
)
def test_split_arguments_separates_the_config_file_from_overrides(arguments, expected):
    assert split_arguments(arguments) == expected


def test_split_arguments_takes_a_file_whose_path_has_an_equals_sign(tmp_path, monkeypatch):
    """The run folders of a comparison are called so: fedavg,seed=0."""
    monkeypatch.chdir(tmp_path)
    stored = Path("rounds=3,fedavg,seed=0") / "config.toml"
    stored.parent.mkdir()
    stored.touch()
    assert split_arguments([str(stored), "seed=1"]) == (stored, ["seed=1"])
    missing = Path("runs") / "fedavg,seed=0" / "config.toml"
    assert split_arguments([str(missing)]) == (missing, [])
    assert split_arguments(["topology.file=a/b.txt"]) == (None, ["topology.file=a/b.txt"])


def test_split_arguments_rejects_a_second_config_file():
    with pytest.raises(ConfigError) as caught:
        split_arguments(["a.toml", "rounds=3", "b.toml"])
    assert str(caught.value).startswith(
        "'b.toml': neither an override nor the only config file, which is 'a.toml'; expected "
    )


# --- errors


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("clints=4", "clints: unknown key; did you mean 'clients'?"),
        ("topology.degre=4", "topology.degre: unknown key; did you mean 'degree'?"),
        ("fedspd.warmpu=4", "fedspd.warmpu: unknown key; did you mean 'warmup'?"),
        (
            "fedspd-split.clusters=4",
            "fedspd-split.clusters: unknown key; did you mean 'clusters', outside the table?",
        ),
        ("data.clients=4", "data.clients: unknown key; did you mean 'clients', outside the table?"),
        ("training.learning=4", "training.learning: unknown key; expected one of: "),
        ("topolgy.degree=4", "topolgy: unknown key; did you mean 'topology'?"),
        ("training.learning_rate=1", "training.learning_rate: unknown key; did you mean 'lr'?"),
        ("batch_size=4", "batch_size: unknown key; did you mean 'training.batch'?"),
        ("alpha=0.1", "alpha: unknown key; did you mean 'data.alpha'?"),
        ("dataset=mnist", "dataset: unknown key; did you mean 'data.name'?"),
        ("algorithm=fedavg", "algorithm: unknown key; did you mean 'method'?"),
        ("method=FedAvg", "method = 'FedAvg': unknown method; did you mean 'fedavg'?"),
        ("method=fedsdp", "method = 'fedsdp': unknown method; did you mean 'fedspd'?"),
        ("rounds=ten", 'rounds = "ten": expected an integer.'),
        ("rounds=true", "rounds = true: expected an integer."),
        ("rounds=0", "rounds = 0: expected a number greater than or equal to 1."),
        ("seed=-1", "seed = -1: expected a number greater than or equal to 0."),
        ("dtype=float16", "dtype = \"float16\": unknown value; expected 'float32' or 'float64'."),
        ("dtype=16", "dtype = 16: unknown value; expected 'float32' or 'float64'."),
        ("training.momentum=1", "training.momentum = 1: expected a number less than 1."),
        ("training.lr=0", "training.lr = 0: expected a number greater than 0."),
        ("training.lr=fast", 'training.lr = "fast": expected a number.'),
        ("training.lr=inf", "training.lr = Infinity: expected a finite number."),
        ("training.lr=nan", "training.lr = NaN: expected a finite number."),
        (
            "topology.kind=rign",
            "topology.kind = \"rign\": unknown value; expected 'er', 'ba', 'rgg', ",
        ),
        (
            "topology.weights=metropolitan",
            "topology.weights = \"metropolitan\": unknown value; expected 'uniform', ",
        ),
        ("topology.degree=0", "topology.degree = 0: expected a number greater than 0."),
        ("topology.degree=nan", "topology.degree = NaN: expected a finite number."),
        ("topology.degree=inf", "topology.degree = Infinity: expected a finite number."),
        (
            "topology.probability=1.5",
            "topology.probability = 1.5: expected a number less than or equal to 1.",
        ),
        (
            "topology.probability=-0.1",
            "topology.probability = -0.1: expected a number greater than or equal to 0.",
        ),
        ("topology.radius=0", "topology.radius = 0: expected a number greater than 0."),
        (
            "topology.remove=1.1",
            "topology.remove = 1.1: expected a number less than or equal to 1.",
        ),
        ("model.small=yes", 'model.small = "yes": expected true or false.'),
        ("model.hidden=0", "model.hidden = 0: expected a number greater than or equal to 1."),
        ("data.name=3", "data.name = 3: expected a string."),
        (
            "data.mixture=rotatoin",
            "data.mixture = \"rotatoin\": unknown value; expected 'rotation', 'parity', ",
        ),
        (
            "data.shares=step",
            "data.shares = \"step\": unknown value; expected 'uniform', 'steps', 'pure' or "
            "'dirichlet'.",
        ),
        ("data.examples=1", "data.examples = 1: expected a number greater than or equal to 2."),
        (
            "data.test_examples=0",
            "data.test_examples = 0: expected a number greater than or equal to 1.",
        ),
        (
            "data.imbalance=0.5",
            "data.imbalance = 0.5: expected a number greater than or equal to 1.",
        ),
        ("data.alpha=0.0", "data.alpha = 0.0: expected a number greater than 0."),
        ("data.alpha=nan", "data.alpha = NaN: expected a finite number."),
        (
            "rounds",
            "'rounds': not an override; expected KEY=VALUE, for example rounds=30 or "
            "topology.degree=6.",
        ),
        ("=3", "'=3': not an override; expected KEY=VALUE"),
        ("rounds.x=3", 'rounds = {"x": 3}: expected an integer.'),
        ("data=mnist", 'data = "mnist": expected a table with the keys name, inputs, target, '),
        (
            "model=mlp",
            'model = "mlp": expected a table with the keys name, small, norm, hidden, head.',
        ),
    ],
)
def test_error_names_key_value_and_expectation(override, message):
    assert rejection(override).startswith(message)


def test_load_rejects_a_key_below_a_value():
    assert (
        rejection("rounds=3", "rounds.x=3")
        == "rounds.x = 3: 'rounds' is a value; expected a table."
    )


def test_error_counts_further_wrong_keys():
    assert rejection("rounds=0", "seed=-1").endswith(". (1 more key is wrong.)")
    assert rejection("rounds=0", "seed=-1", "clients=0").endswith(". (2 more keys are wrong.)")


def test_validate_rejects_keys_that_are_not_strings():
    assert "1: unknown key; " in rejection(tree={1: 2})


@pytest.mark.parametrize("content", [b"rounds = ", b"rounds = 3\nrounds = 4", b"\xff\xfe"])
def test_load_names_a_file_that_is_not_toml(tmp_path, content):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"^config = '.*broken\.toml': (not valid TOML|the file cannot be read)"
    ):
        load(path)


def test_load_names_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"^config = '.*none\.toml': no such file"):
        load(tmp_path / "none.toml")


# --- text


def test_config_as_toml_loads_as_the_same_config(tmp_path):
    config = load(
        overrides=[
            "rounds=3",
            "method=pfedme",
            "topology.probability=0.4",
            'data.name="Grüße 😀/\\"x\\".npz"',
            "pfedme.lambda=7",
        ]
    )
    path = tmp_path / "config.toml"
    path.write_text(as_toml(config), "utf-8")
    again = load(path)
    assert again == config
    assert as_toml(again) == as_toml(config)


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1)
POSITIVE = st.floats(min_value=1e-300, max_value=1e300)


@given(
    TEXTS,
    POSITIVE,
    st.integers(min_value=0, max_value=2**80),
    st.none() | POSITIVE,
)
def test_config_survives_toml(name, lr, seed, degree):
    config = validate(
        {
            "seed": seed,
            "data": {"name": name},
            "training": {"lr": lr},
            "topology": {"degree": degree},
        }
    )
    assert validate(tomllib.loads(as_toml(config))) == config


def test_changes_are_those_of_values_and_not_of_their_spelling():
    assert changes(load(), load(overrides=["rounds=30"])) == {}
    assert changes(load(), load(overrides=["rounds=31"])) == {"rounds": (30, 31)}
    integer, number = load(overrides=["training.lr=1"]), load(overrides=["training.lr=1.0"])
    assert changes(integer, number) == {}
    assert changes(load(), number) == {"training.lr": (None, 1.0)}


def test_changes_of_another_method_are_none():
    assert changes(load(), load(overrides=["fedavg.mu=1"])) == {}


# ---- the number of clusters


@pytest.mark.parametrize(
    ("tree", "clusters"),
    [
        ({}, 0),
        ({"clusters": "auto"}, 0),
        ({"clusters": 3}, 3),
        ({"method": "fedspd"}, 2),
        ({"method": "fedavg", "clusters": 1}, 1),
    ],
)
def test_clusters_are_found_by_split_and_two_by_default_elsewhere(tree, clusters):
    assert clusters_of(validate(tree)) == clusters


def test_clusters_are_found_by_no_other_method():
    with pytest.raises(ConfigError) as caught:
        validate({"method": "fedem", "clusters": "auto"})
    assert str(caught.value) == (
        "clusters = 'auto': method = 'fedem' does not find the number of clusters; expected an "
        "integer from 1."
    )


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "many"])
def test_clusters_that_are_no_number_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"expected an integer from 1, or auto\.$"):
        validate({"clusters": wrong})


def test_validate_takes_the_numbers_of_numpy():
    tree = {"rounds": np.int64(2), "clients": np.int32(3), "training": {"lr": np.float32(0.5)}}
    config = validate({**tree, "data": {"populations": np.array([1, 2]), "shares": "pure"}})
    assert (config.rounds, config.clients, config.training.lr) == (2, 3, 0.5)
    assert config.data.populations == [1, 2]
    assert tomllib.loads(as_toml(config))["rounds"] == 2


@pytest.mark.parametrize("key", ["clients", "model.hidden", "rounds"])
def test_integer_that_toml_cannot_hold_is_refused(key):
    sentence = f"{key} = 99999999999999999999: expected a number of at most 9223372036854775807."
    assert rejection(f"{key}=99999999999999999999") == sentence


def test_load_reads_a_file_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbfrounds = 7\n")
    assert load(path).rounds == load(str(path)).rounds == 7


def test_default_unsets_a_key_of_the_file(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("rounds = 7\n[topology]\ndegree = 4\n")
    config = load(path, ["rounds=default", "topology.degree=default", "model.hidden=default"])
    assert config == load()


def test_config_as_toml_has_the_options_of_its_method_alone():
    """The default of another method's option may change in a later version."""
    tables = tomllib.loads(as_toml(load(overrides=["method=fedavg", "fedavg.mu=0.1"])))
    assert tables["fedavg"]["mu"] == 0.1
    assert tables.keys() & {"fedspd", "fedspd-split", "pfedme", "options"} == set()


def test_table_without_options_says_so():
    assert rejection("ifca.foo=1") == "ifca.foo: unknown key; ifca has no options."


def test_options_of_a_method_that_does_not_take_part_are_refused(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('method = "fedavg"\n[fedspd]\nwarmup = 3\n')
    sentence = (
        r"^fedspd.warmup = 3: an option of 'fedspd' only, and method = 'fedavg'. Leave it out, or "
        r"unset it with fedspd.warmup=default\.$"
    )
    for config in (load(path), load(overrides=["method=fedavg", "fedspd.warmup=3"])):
        with pytest.raises(ConfigError, match=sentence):
            check_used(config, ["fedavg"])
        check_used(config, ["fedavg", "fedspd"])
    check_used(load(path, ["fedspd.warmup=default"]), ["fedavg"])
    check_used(load(path, ["method=fedspd"]), ["fedavg", "local"])


def test_all_options_of_other_methods_are_named_at_once():
    """So that one command unsets them, where a config of another run is used again."""
    config = load(overrides=["method=fedavg", "fedspd.warmup=3", "pfedme.lambda=2"])
    sentence = (
        r"^fedspd.warmup = 3, pfedme.lambda = 2.0: options of other methods, and "
        r"method = 'fedavg'. Leave them out, or unset them with fedspd.warmup=default "
        r"pfedme.lambda=default\.$"
    )
    with pytest.raises(ConfigError, match=sentence):
        check_used(config, ["fedavg"])


def test_dotted_key_of_a_dictionary_is_explained():
    sentence = "training.lr: unknown key; expected a table, {'training': {'lr': ...}}."
    assert rejection(tree={"training.lr": 0.1}) == sentence


def test_options_that_follow_from_privacy_are_nobodys_choice():
    check_used(load(overrides=["method=fedavg", "privacy.epsilon=8"]), ["fedavg"])


@pytest.mark.parametrize(
    ("option", "key", "owner", "other"),
    [
        ("momentum", "optimizer", "sgd", "adamw"),
        ("decay", "schedule", "step", "cosine"),
        ("decay_every", "schedule", "step", "constant"),
    ],
)
def test_option_of_another_optimizer_or_schedule_is_refused(option, key, owner, other):
    value = 9 if option == "decay_every" else 0.9
    assert rejection(f"training.{option}={value}", f"training.{key}={other}") == (
        f"training.{option} = {value}: an option of training.{key} = '{owner}' only, and "
        f"training.{key} = '{other}'. Leave it out."
    )
    default = getattr(load().training, option)
    load(overrides=[f"training.{option}={default}", f"training.{key}={other}"])


def test_lists_of_names_come_from_the_command_line():
    overrides = ["exchange.only=0,2.norm", "data.augment=crop,flip", "data.inputs=a"]
    config = load(overrides=overrides)
    assert config.exchange.only == ["0", "2.norm"]
    assert config.data.augment == ["crop", "flip"]
    assert config.data.inputs == ["a"]
    assert load(overrides=["exchange.only=2"]).exchange.only == ["2"]
    with pytest.raises(ConfigError, match=r"exchange\.only"):
        validate({"exchange": {"only": []}})
