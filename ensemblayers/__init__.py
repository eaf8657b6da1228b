"""PyTorch layers and whole-model tools for efficient ensembles."""

from . import functional, optim
from .batch_ensemble import (
    BatchEnsemble,
    BatchEnsembleConv1d,
    BatchEnsembleConv2d,
    BatchEnsembleConv3d,
    BatchEnsembleLinear,
)
from .batch_ensemble_norm import BatchEnsembleNorm1d, BatchEnsembleNorm2d, BatchEnsembleNorm3d
from .convert import (
    collapse,
    member,
    param_groups,
    to_batch_ensemble,
    to_stacked,
    to_subspace,
)
from .fold import fold_norms
from .predict import combine, ensemble_loss, members, recalibrate, uncertainty
from .simplex import Point, at, sample_simplex, set_point, share_point
from .stacked import StackedEnsemble
from .subspace import (
    Subspace,
    SubspaceConv1d,
    SubspaceConv2d,
    SubspaceConv3d,
    SubspaceLinear,
)

__version__ = "0.1.0"

__all__ = [
    "BatchEnsemble",
    "BatchEnsembleConv1d",
    "BatchEnsembleConv2d",
    "BatchEnsembleConv3d",
    "BatchEnsembleLinear",
    "BatchEnsembleNorm1d",
    "BatchEnsembleNorm2d",
    "BatchEnsembleNorm3d",
    "Point",
    "StackedEnsemble",
    "Subspace",
    "SubspaceConv1d",
    "SubspaceConv2d",
    "SubspaceConv3d",
    "SubspaceLinear",
    "at",
    "collapse",
    "combine",
    "ensemble_loss",
    "fold_norms",
    "functional",
    "member",
    "members",
    "optim",
    "param_groups",
    "recalibrate",
    "sample_simplex",
    "set_point",
    "share_point",
    "to_batch_ensemble",
    "to_stacked",
    "to_subspace",
    "uncertainty",
]
