"""The methods, one file each. A method's name in a config is its key here."""

from typing import Any

from fedspd.algorithms.fedavg import FedAvg
from fedspd.algorithms.fedspd import FedSPD
from fedspd.algorithms.local import Local

METHODS: dict[str, type[Any]] = {"fedspd": FedSPD, "fedavg": FedAvg, "local": Local}
