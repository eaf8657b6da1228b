"""BatchEnsemble layers beside plain layers of the weights ``W * (s_i r_i^T)``."""

import torch
from torch import nn
from torch.func import functional_call

import ensemblayers as el

LINEARS = [{}, {"bias": False}]
CONVS = [
    {},
    {"stride": 2},
    {"stride": (2, 1, 3)},
    {"padding": 1},
    {"padding": (2, 0, 1)},
    {"padding": "same"},
    {"padding": "same", "dilation": (2, 1, 2)},
    {"padding": "valid", "dilation": 2},
    {"groups": 2},
    {"groups": 4, "out_channels": 8},
    {"bias": False},
    {"padding_mode": "circular", "padding": 1},
    {"padding_mode": "circular", "padding": "same", "dilation": 2},
    {"padding_mode": "reflect", "padding": (1, 2, 1)},
    {"padding_mode": "replicate", "padding": 2, "stride": 2, "groups": 2, "bias": False},
]


def conv_pair(space, options, n, **kwargs):
    """A BatchEnsemble convolution, and a function that makes the plain one of the same options."""
    options = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options}
    options = {k: v[:space] if isinstance(v, tuple) else v for k, v in options.items()}
    kind = getattr(nn, f"Conv{space}d")
    layer = getattr(el, f"BatchEnsembleConv{space}d")(**options, n=n, dtype=torch.float64, **kwargs)
    return layer, lambda: kind(**options, dtype=torch.float64)


def linear_pair(options, n, **kwargs):
    layer = el.BatchEnsembleLinear(5, 4, **options, n=n, dtype=torch.float64, **kwargs)
    return layer, lambda: nn.Linear(5, 4, **options, dtype=torch.float64)


def leaves(layer):
    return {k: p.detach().clone().requires_grad_() for k, p in layer.named_parameters()}


def explicit(make, own, x):
    """A folded batch through n plain layers of the weights W * (s_i r_i^T), one at a time."""
    weight, r, s = own["weight"], own["r"], own["s"]
    outputs, share = weight.shape[:2]
    groups = r.shape[1] // share
    channels = [
        [o // (outputs // groups) * share + j for j in range(share)] for o in range(outputs)
    ]
    y = []
    for i, rows in enumerate(x.chunk(len(r))):
        scale = s[i][:, None] * r[i][torch.tensor(channels)]
        tensors = {"weight": weight * scale.reshape(scale.shape + (1,) * (weight.dim() - 2))}
        if "bias" in own:
            tensors["bias"] = own["bias"][i]
        y.append(functional_call(make(), tensors, rows))
    return torch.cat(y)


def assert_explicit(layer, make, x):
    """Output and every gradient are those of the plain layers."""
    own = leaves(layer)
    x, x_ = x.requires_grad_(), x.detach().clone().requires_grad_()
    y, z = layer(x), explicit(make, own, x_)
    torch.testing.assert_close(y, z)
    g = torch.randn_like(z)
    names = [k for k, _ in layer.named_parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(y, [x, *layer.parameters()], g),
        torch.autograd.grad(z, [x_, *(own[k] for k in names)], g),
    )
