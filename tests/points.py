"""Random points and inputs in double precision."""

import torch

import ensemblayers as el


def simplex(*size):
    *batch, n = size
    return el.sample_simplex(n, *batch, dtype=torch.float64)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)
