"""The config of an experiment: its schema, its files and overrides, and its error messages."""

from fedspd.config.files import (
    DEFAULT,
    as_dict,
    as_toml,
    changes,
    given_dict,
    load,
    parse_override,
    set_key,
    split_arguments,
)
from fedspd.config.schema import METHOD_TABLES, ExperimentConfig
from fedspd.config.validation import (
    check_used,
    clusters_of,
    method_class,
    method_options,
    validate,
    without_other_methods,
)

__all__ = [
    "DEFAULT",
    "METHOD_TABLES",
    "ExperimentConfig",
    "as_dict",
    "as_toml",
    "changes",
    "check_used",
    "clusters_of",
    "given_dict",
    "load",
    "method_class",
    "method_options",
    "parse_override",
    "set_key",
    "split_arguments",
    "validate",
    "without_other_methods",
]
