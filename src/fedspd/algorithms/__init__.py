"""The methods, one file each. METHODS maps their names in a config to their classes."""

from fedspd.algorithms.facade import FACADE
from fedspd.algorithms.fedavg import FedAvg
from fedspd.algorithms.fedem import FedEM
from fedspd.algorithms.fedper import FedPer
from fedspd.algorithms.fedrep import FedRep
from fedspd.algorithms.fedsoft import FedSoft
from fedspd.algorithms.fedspd import FedSPD
from fedspd.algorithms.fedspd_split import FedSPDSplit
from fedspd.algorithms.ifca import IFCA
from fedspd.algorithms.local import Local
from fedspd.algorithms.pfedme import PFedMe
from fedspd.core.algorithm import AnyAlgorithm

METHODS: dict[str, type[AnyAlgorithm]] = {
    "fedspd-split": FedSPDSplit,
    "fedspd": FedSPD,
    "fedavg": FedAvg,
    "fedem": FedEM,
    "fedsoft": FedSoft,
    "ifca": IFCA,
    "facade": FACADE,
    "fedper": FedPer,
    "fedrep": FedRep,
    "pfedme": PFedMe,
    "local": Local,
}
