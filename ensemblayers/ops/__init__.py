"""The operations behind the layers and optimizers, one file each; nothing is built on import."""

from . import mix, subspace_linear

__all__ = ["mix", "subspace_linear"]
