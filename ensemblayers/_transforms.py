"""What surrounds a call or a backward pass, and forbids what only plain eager mode allows."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

transformed = torch._C._are_functorch_transforms_active  # Whether one of torch.func is at work.


def has_tangents() -> bool:
    """Whether forward-mode differentiation is at work."""
    return forward_ad._current_level >= 0


def is_recorded(*grads: Tensor | None) -> bool:
    """Whether a backward pass of these gradients is itself differentiated or mapped.

    Then it must not write into memory that it did not make. ``is_grads_batched`` maps by a vmap
    older than torch.func's.
    """
    if torch.is_grad_enabled() or transformed() or has_tangents():
        return True
    for g in grads:
        if g is not None and torch._C._functorch.is_legacy_batchedtensor(g):
            return True
    return False
