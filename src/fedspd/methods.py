"""The names that a method is written with; docs/api.md describes them.

from fedspd.methods import Algorithm, Block, Exchange, Key, Learner, Round
"""

from fedspd.core.algorithm import Algorithm, Observation, Round
from fedspd.core.block import Block
from fedspd.core.errors import ConfigError, MethodError
from fedspd.core.exchange import Exchange, Mean, Neighbourhood, ReceivedModel
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.core.ledger import NO_CLUSTER

__all__ = [
    "NO_CLUSTER",
    "Algorithm",
    "Block",
    "ConfigError",
    "Exchange",
    "Key",
    "Learner",
    "Mean",
    "MethodError",
    "Neighbourhood",
    "Observation",
    "ReceivedModel",
    "Round",
    "TrainingOptions",
]
