"""The methods, one file each. A method's name in a config is its key here."""

from fedspd.algorithms.fedavg import FedAvg
from fedspd.algorithms.fedem import FedEM
from fedspd.algorithms.fedsoft import FedSoft
from fedspd.algorithms.fedspd import FedSPD
from fedspd.algorithms.ifca import IFCA
from fedspd.algorithms.local import Local
from fedspd.algorithms.pfedme import PFedMe
from fedspd.core.algorithm import AnyAlgorithm

METHODS: dict[str, type[AnyAlgorithm]] = {
    "fedspd": FedSPD,
    "fedavg": FedAvg,
    "fedem": FedEM,
    "fedsoft": FedSoft,
    "ifca": IFCA,
    "pfedme": PFedMe,
    "local": Local,
}
