"""The continual-learning methods, one small file each."""

from .a_gem import AGEM
from .batch_ensemble import BatchEnsembleMethod
from .connectivity import MCSGD, SubspaceConnectivity
from .distillation import SubspaceDistillation
from .ensemble_mc_sgd import Bagging, EnsembleMCSGD
from .er_reservoir import ReservoirReplay
from .ewc import EWC
from .method import Method
from .multitask import Multitask
from .naive import Naive
from .stable_sgd import StableSGD
from .subspace import SubspaceMethod, SubspaceReplay
from .vanilla_ensemble import VanillaEnsemble

METHODS: dict[str, type[Method]] = {
    "naive": Naive,
    "ewc": EWC,
    "a-gem": AGEM,
    "er-reservoir": ReservoirReplay,
    "stable-sgd": StableSGD,
    "mc-sgd": MCSGD,
    "ensemble-mc-sgd": EnsembleMCSGD,
    "ensemble-mc-sgd-bagging": Bagging,
    "subspace": SubspaceMethod,
    "subspace-er": SubspaceReplay,
    "subspace-connectivity": SubspaceConnectivity,
    "subspace-distillation": SubspaceDistillation,
    "batch-ensemble": BatchEnsembleMethod,
    "vanilla-ensemble": VanillaEnsemble,
    "multitask": Multitask,
}

__all__ = ["METHODS", "Method"]
