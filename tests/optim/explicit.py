"""What the subspace optimizers are compared with: n explicit copies of a network."""

import copy

import torch
from torch import nn
from torch.func import functional_call

from ensemblayers.optim import SubspaceAdamW, SubspaceSGD

SGD = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.05},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    {"weight_decay": 0.05},
    {"momentum": 0.5, "maximize": True},
]


RULES = [(SubspaceSGD, torch.optim.SGD, options) for options in SGD] + [
    (SubspaceAdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    (SubspaceAdamW, torch.optim.AdamW, {"betas": (0.5, 0.7), "eps": 1e-3, "maximize": True}),
]


def net(dtype=torch.float64):
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def backward(model, dtype=torch.float64):
    x = torch.randn(4, 5, dtype=dtype)
    model(x).square().mean().backward()
    return x


def close(a, b, **tolerance):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


class Explicit:
    """n explicit copies of a network, trained by autograd and torch's own optimizer."""

    def __init__(self, model, opt, rule, **options):
        self.plain = copy.deepcopy(model)
        self.copies = [v.detach().clone().requires_grad_() for v in opt.vertices()]
        self.opt = rule(self.copies, **options)

    def weights(self, alpha, anchors=()):
        names = [name for name, _ in self.plain.named_parameters()]
        n = len(self.copies[0])
        mixed = [sum(alpha[i] * v[i] for i in range(n)) for v in self.copies]
        for a, anchor in zip(alpha[n:], anchors, strict=True):
            mixed = [m + a * w for m, w in zip(mixed, anchor, strict=True)]
        return dict(zip(names, mixed, strict=True))

    def backward(self, alpha, x, anchors=()):
        functional_call(self.plain, self.weights(alpha, anchors), x).square().mean().backward()

    def step(self):
        self.opt.step()
        self.opt.zero_grad()
