"""What a member assigns to itself in the forward pass, seen after its call."""

import pytest
import torch
from nets import QUIET
from torch import nn

import ensemblayers as el
from ensemblayers._attributes import Snapshot

pytestmark = QUIET


class Assigning(nn.Module):
    def __init__(self, assign):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.assign, self.seen, self.last = assign, [], 1.5

    def forward(self, x):
        y = self.layer(x) + getattr(self, "last", 0)
        self.assign(self)
        return y


def fill_and_replace(m):
    m.seen.append(1)
    m.seen = []


def replace(m):
    m.seen = list(m.seen)


def fill(m):
    m.seen.append(1)


def rename(m):
    if hasattr(m, "last"):
        value = m.last
        del m.last
        m.later = value


def rename_list(m):
    if hasattr(m, "seen"):
        value = m.seen
        del m.seen
        m.others = value


def delete(m):
    vars(m).pop("seen", None)


def assign(m):
    m.last = 2.5


@pytest.mark.parametrize("act", [fill_and_replace, replace])
def test_what_is_equal_in_the_end_is_no_change(act):
    model = Assigning(act)
    before = Snapshot(model)
    act(model)
    assert not before.changed() and before.changes() == [({}, set())] * 2


@pytest.mark.parametrize("act", [fill, rename, rename_list, delete, assign])
def test_a_change_is_seen_and_taken_back(act):
    model = Assigning(act)
    attributes = {k: v for k, v in vars(model).items() if not k.startswith("_")}
    attributes["seen"] = []
    before = Snapshot(model)
    act(model)
    assert before.changed()
    before.restore()
    assert {k: v for k, v in vars(model).items() if not k.startswith("_")} == attributes


@pytest.mark.parametrize(
    "act", [fill_and_replace, replace, fill, rename, rename_list, delete, assign]
)
def test_members_are_on_their_own(act):
    nets = [Assigning(act) for _ in range(3)]
    ensemble, x = el.StackedEnsemble(nets), torch.randn(2, 4)
    for _ in range(3):
        torch.testing.assert_close(ensemble(x), torch.stack([net(x) for net in nets]))
