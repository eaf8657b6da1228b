"""The networks that stacked ensembles are tested with, and what compares them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

QUIET = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:strategy='vmap' runs as a loop"),
]


STRATEGIES = ["auto", "loop", "vmap"]


each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def dense():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def conv():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(100, 3)
    ).double()


def images(*batch):
    return torch.randn(*batch, 3, 5, 5, dtype=torch.float64)


def vectors(*batch):
    return torch.randn(*batch, 4, dtype=torch.float64)


def batchnorm(**options):
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6, **options), nn.ReLU(), nn.Linear(6, 3)
    ).double()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(self.cell(x[:, None].expand(-1, 3, -1))[0][:, -1])


class Branch(nn.Module):
    """The branch depends on the member's own weights."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        y = self.layer(x)
        return y * 2 if self.layer.bias.sum() > 0 else y - 1


class PlainTensor(nn.Module):
    """A tensor that is neither a parameter nor a buffer, another one in each member."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = torch.randn(3, dtype=torch.float64)

    def forward(self, x):
        return self.layer(x) * self.scale


class InPlace(nn.Module):
    """A plain tensor that is equal in all members and updated in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.total = torch.zeros(1, dtype=torch.float64)

    def forward(self, x):
        y = self.layer(x)
        self.total.add_(y.detach().mean())
        return y * self.total


class AssignedBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        y = self.layer(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


class Counter(nn.Module):
    """Python state that changes in the forward pass: a number, a list, a dict."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.steps, self.seen, self.table = 0, [], {}

    def forward(self, x):
        self.steps += 1
        self.seen.append(self.steps)
        self.table["last"] = self.steps
        return self.layer(x) * (self.steps + len(self.seen) + self.table["last"])


class Diary(nn.Module):
    """A list that grows in the forward pass, and no attribute that is assigned."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen = []

    def forward(self, x):
        self.seen.append(1)
        return self.layer(x) * len(self.seen)


class Hidden(nn.Module):
    """A hidden state that appears in the first forward pass, and in some members only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.state = None

    def forward(self, x):
        y = self.layer(x)
        if self.state is not None:
            y = y + self.state
        if self.layer.bias[0] > 0:
            self.state = y.detach().mean(0)
        return y


class LateBuffer(nn.Module):
    """A buffer that the first forward pass makes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("start", None)

    def forward(self, x):
        y = self.layer(x)
        if self.start is None:
            self.start = y.detach().mean(0)
        return y - self.start


def parametrized():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh()).double()


def scalars(p, eps, slope):
    net = nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6, eps=eps), nn.LeakyReLU(slope), nn.Dropout(p)
    )
    return net.double()


class Noisy(Branch):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5))


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, value=x)[0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


# Each entry: the members, and a batch for each call.
NETS = {
    "dense": (lambda i: dense(), vectors),
    "conv": (lambda i: conv(), images),
    "batchnorm": (lambda i: batchnorm(), vectors),
    "momentum None": (lambda i: batchnorm(momentum=None), vectors),
    "no statistics": (lambda i: batchnorm(track_running_stats=False), vectors),
    "LSTM": (lambda i: Recurrent().double(), vectors),
    "branch": (lambda i: Branch().double(), vectors),
    "plain tensor": (lambda i: PlainTensor().double(), vectors),
    "tensor in place": (lambda i: InPlace().double(), vectors),
    "assigned buffer": (lambda i: AssignedBuffer().double(), vectors),
    "counter": (lambda i: Counter().double(), vectors),
    "list": (lambda i: Diary().double(), vectors),
    "hidden": (lambda i: Hidden().double(), vectors),
    "late buffer": (lambda i: LateBuffer().double(), vectors),
    "parametrized": (lambda i: parametrized(), vectors),
    "scalars": (lambda i: scalars(float(i == 1), (1e-5, 0.1, 3)[i], i / 10), vectors),
    "momenta": (lambda i: batchnorm(momentum=(0.1, 0.5, None)[i]), vectors),
}


def make(name, n=3):
    return [NETS[name][0](i) for i in range(n)]


def assert_members(ensemble, nets):
    """Parameters and buffers, momentum and counts included, are those of the networks."""
    state = ensemble.state_dict()
    for i, net in enumerate(nets):
        own = {k: v for k, v in net.state_dict().items() if k != "start"}
        assert list(state) == list(own)
        for name, value in own.items():
            torch.testing.assert_close(state[name][i], value)
