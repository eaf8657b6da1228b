"""The operations behind the layers and optimizers, one file each; nothing is built on import."""

from . import batch_ensemble_linear, member_scale, mix, stacked_linear, subspace_linear

__all__ = ["batch_ensemble_linear", "member_scale", "mix", "stacked_linear", "subspace_linear"]
