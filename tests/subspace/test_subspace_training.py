"""Layers in training, their copies and their state."""

import copy

import pytest
import torch
from copies import through_averaging, through_pickle, through_save
from plain import explicit, flat, leaf, scatter_
from points import rand, simplex
from torch import nn

import ensemblayers as el

close = torch.testing.assert_close
LAYERS = {
    "linear": (lambda: nn.Linear(3, 2), lambda: el.SubspaceLinear(3, 2, n=3), (4, 3)),
    "conv": (lambda: nn.Conv1d(3, 2, 2), lambda: el.SubspaceConv1d(3, 2, 2, n=3), (4, 3, 5)),
    "norm": (lambda: nn.LayerNorm(3), lambda: el.Subspace(nn.LayerNorm(3), n=3), (4, 3)),
    "gru": (lambda: nn.GRU(3, 2), lambda: el.Subspace(nn.GRU(3, 2), n=3), (4, 1, 3)),
}
OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    lambda p: torch.optim.AdamW(p, lr=0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", LAYERS)
def test_training_moves_every_vertex_as_explicit_vertices_move(kind, optimizer):
    make, make_subspace, shape = LAYERS[kind]
    plain, layer = make().double(), scatter_(make_subspace().double())
    stacked = {k: leaf(p) for k, p in layer.named_parameters()}
    opt, opt_ = optimizer(layer.parameters()), optimizer(stacked.values())
    for _ in range(3):
        x = rand(*shape)
        opt.zero_grad(), opt_.zero_grad()
        flat(layer(x)).pow(2).sum().backward()
        alpha = layer.subspace_point.alpha
        flat(explicit(plain, stacked, alpha, x)).pow(2).sum().backward()
        for p in layer.parameters():
            assert p.grad.flatten(1).any(1).all()
        opt.step(), opt_.step()
    close(dict(layer.named_parameters()), stacked)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_have_derivatives_of_second_order(kind):
    _, make, shape = LAYERS[kind]
    layer = scatter_(make().double())
    names = [k for k, _ in layer.named_parameters()]
    values = [leaf(p) for p in layer.parameters()]
    x = rand(2, *shape[1:]).requires_grad_()

    def f(x, alpha, *values):
        with el.at(layer, alpha):
            params = dict(zip(names, values, strict=True))
            return flat(torch.func.functional_call(layer, params, (x,))).pow(2).sum()

    inputs = (x, simplex(3).requires_grad_(), *values)
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs, gen_non_contig_grad_outputs=True)


COPIES = [copy.deepcopy, through_pickle, through_save, through_averaging]


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("kind", LAYERS)
def test_copies_after_a_backward_pass_are_equal_and_independent(kind, duplicate):
    _, make, shape = LAYERS[kind]
    layer = make().double()
    flat(layer(rand(*shape))).sum().backward()
    el.set_point(layer, leaf(simplex(3)) * 1)
    copied = duplicate(layer)
    x = rand(*shape)
    close(flat(copied(x)), flat(layer(x)), rtol=0, atol=0)
    assert type(copied) is type(layer) and repr(copied) == repr(layer)
    el.set_point(layer)
    flat(layer(x)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    flat(copied(x)).sum().backward()
    for p, q in zip(copied.parameters(), layer.parameters(), strict=True):
        assert not p.equal(q)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_plain_state_dict_becomes_the_first_vertex(kind):
    make, make_subspace, shape = LAYERS[kind]
    plain, layer = make(), make_subspace()
    state = plain.state_dict()
    layer.load_state_dict(state, strict=True)
    x = torch.randn(*shape)
    with el.at(layer, vertex=0):
        close(flat(layer(x)), flat(plain(x)), rtol=0, atol=0)
    for p in layer.parameters():
        close(p[1:], p[:1].expand_as(p[1:]), rtol=0.6, atol=0)
        assert p[0].eq(0).all() or not p[1].equal(p[0])
    close(state, plain.state_dict(), rtol=0, atol=0)


def test_a_state_dict_of_another_number_of_vertices_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        el.SubspaceLinear(2, 2, n=3).load_state_dict(el.SubspaceLinear(2, 2, n=4).state_dict())
