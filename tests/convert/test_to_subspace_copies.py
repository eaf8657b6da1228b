"""Copies of a converted network: pickled, saved, deep, averaged."""

import copy
import io

import pytest
import torch
from copies import through_averaging, through_pickle, through_save
from plain import flat, scatter_
from zoo import NOT_PICKLED, ZOO, classes, exact, make, subspaces

import ensemblayers as el


def through_state_dict(model):
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    copied = scatter_(copy.deepcopy(model))
    copied.load_state_dict(torch.load(buffer), strict=True)
    return copied


PICKLES = [through_pickle, through_save]
COPIES = [copy.deepcopy, through_state_dict, through_averaging]
# torch copies no outputs of a graph, which these leave as attributes.
GRAPHS = ("old_weight_norm", "old_weight_norm_root", "pruned")


@pytest.mark.parametrize(
    ("name", "duplicate"),
    [(name, f) for name in ZOO if name not in GRAPHS for f in COPIES]
    + [(name, f) for name in ZOO if name not in (*GRAPHS, *NOT_PICKLED) for f in PICKLES],
)
def test_copies_after_a_backward_pass_are_equal_and_independent(name, duplicate):
    source, x = make(name)
    model = el.to_subspace(source, n=3, sigma=0.5)
    flat(model(x)).sum().backward()
    model.eval()
    copied = duplicate(model)
    assert classes(copied) == classes(model)
    y = flat(model(x))
    exact(flat(copied(x)), y)
    alpha = subspaces(model)[0].subspace_point.alpha
    flat(copied.train()(x)).sum().backward()
    assert subspaces(model)[0].subspace_point.alpha.equal(alpha)
    assert len({id(m.subspace_point) for m in subspaces(copied)}) == 1
    torch.optim.SGD(copied.parameters(), lr=1.0).step()
    exact(flat(model(x)), y)
