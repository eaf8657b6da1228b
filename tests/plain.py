"""The independent route: plain networks of torch.nn with explicitly summed weights."""

import copy

import torch
from torch.func import functional_call

import ensemblayers as el


def leaf(x):
    return x.detach().clone().requires_grad_(x.is_floating_point())


def scatter_(model, std=0.3):
    """Move all parameters by noise, so that the vertices have nothing in common but their scale."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(std * torch.randn_like(p))
    return model


def explicit(plain, stacked, alpha, *inputs, buffers=None):
    """The plain network with the weighted sum of the stacked weights, one point at a time."""
    if alpha.dim() == 2:
        rows = [
            explicit(plain, stacked, a, *(x[b : b + 1] for x in inputs), buffers=buffers)
            for b, a in enumerate(alpha)
        ]
        return torch.cat(rows)
    weights = {k: sum(a * v for a, v in zip(alpha, p, strict=True)) for k, p in stacked.items()}
    return functional_call(plain, weights | (buffers or {}), inputs)


def flat(output):
    """A module's output as one tensor."""
    if isinstance(output, torch.Tensor):
        return output
    return torch.cat([flat(o).flatten() for o in output if o is not None])


def assert_at(model, plain, alpha, *inputs):
    """Output, every gradient (alpha's too) and the buffers equal those of the plain network."""
    buffers = copy.deepcopy(dict(model.named_buffers()))
    stacked = {k: leaf(p) for k, p in model.named_parameters()}
    point, point_ = leaf(alpha), leaf(alpha)
    x, x_ = [leaf(i) for i in inputs], [leaf(i) for i in inputs]
    with el.at(model, point):
        y = flat(model(*x))
    z = flat(explicit(plain, stacked, point_, *x_, buffers=buffers))
    torch.testing.assert_close(y, z)
    g = torch.randn_like(z)
    wanted = [*model.parameters(), point, *(i for i in x if i.requires_grad)]
    wanted_ = [*stacked.values(), point_, *(i for i in x_ if i.requires_grad)]
    torch.testing.assert_close(
        torch.autograd.grad(y, wanted, g, materialize_grads=True),
        torch.autograd.grad(z, wanted_, g, materialize_grads=True),
    )
    torch.testing.assert_close(dict(model.named_buffers()), buffers)
