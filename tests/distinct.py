"""BatchEnsemble layers whose members are told apart by their outputs."""

import torch

import ensemblayers as el


def telltale(n):
    """A layer whose member i adds 100 * i to its input."""
    layer = el.BatchEnsembleLinear(1, 1, n=n, init="ones")
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.copy_(100 * torch.arange(n)[:, None])
    return layer


def of_rank(layer):
    with torch.no_grad():
        for fast in (layer.r, layer.s):
            fast.normal_()
    return layer
