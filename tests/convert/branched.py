"""A network of several branches, for conversion to BatchEnsemble."""

import torch
from torch import nn

import ensemblayers as el

OWN = (el.BatchEnsembleLinear, el.BatchEnsembleConv1d, el.BatchEnsembleConv2d)


class Net(nn.Module):
    """Nested, with a list, a dict, and a layer that is used twice; batchnorm is a choice."""

    def __init__(self, norm=True):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular")
        self.norm = nn.BatchNorm2d(4) if norm else nn.GroupNorm(2, 4)
        self.blocks = nn.ModuleList([nn.Conv2d(4, 4, 3, stride=2, groups=2, bias=False)])
        self.twice = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)})

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        for block in self.blocks:
            x = block(x).tanh()
        x = self.twice(self.twice(x.mean((2, 3))).tanh())
        return torch.cat([head(x) for head in self.heads.values()], -1)


def images(rows=6):
    return torch.randn(rows, 3, 7, 7, dtype=torch.float64)


def plain(**options):
    net = Net(**options).double()
    with torch.no_grad():
        for b in net.buffers():
            if b.is_floating_point():
                b.uniform_(0.5, 2)
    return net
