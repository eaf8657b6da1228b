"""A-GEM: no step may raise the loss on examples of the earlier tasks, to first order.

Chaudhry et al. 2019, https://arxiv.org/abs/1812.00420.
"""

import torch
from torch import Tensor

from .method import Method


class AGEM(Method):
    ensemble = False

    def step(self, x: Tensor, y: Tensor) -> None:
        self.backward(x, y)
        if len(self.memory):
            grads = [p.grad for p in self.model.parameters()]
            past = self.loss(*self.memory.sample(self.settings.replay))
            project_(grads, torch.autograd.grad(past, list(self.model.parameters())))
        self.optimizer.step()


def project_(grads: list[Tensor], reference: tuple[Tensor, ...]) -> None:
    """Take the part against a reference gradient out of a gradient, in place."""
    pairs = list(zip(grads, reference, strict=True))
    along = sum(torch.dot(g.flatten(), r.flatten()) for g, r in pairs)
    square = sum(torch.dot(r.flatten(), r.flatten()) for r in reference)
    # No branch: a device need not be waited for. A reference of zeros is left alone.
    share = along.clamp(max=0) / square.clamp(min=torch.finfo(square.dtype).tiny)
    for g, r in pairs:
        g.addcmul_(r, share, value=-1)
