"""What every converted network shares with its source: outputs, steps, state, classes."""

import copy

import torch
from plain import assert_at, explicit, flat, leaf
from points import simplex
from zoo import classes, close, collapsed_at, exact, make, modes, subspaces, zoo

import ensemblayers as el


@modes
@zoo
def test_the_first_vertex_is_the_source_exactly(name, mode):
    source, x = make(name, mode)
    model = el.to_subspace(source, n=3)
    with el.at(model, vertex=0):
        exact(flat(model(x)), flat(source(x)))
    exact(dict(model.named_buffers()), dict(source.named_buffers()))


@modes
@zoo
def test_anywhere_it_equals_the_plain_network_of_summed_weights(name, mode):
    source, x = make(name, mode)
    model = el.to_subspace(source, n=3, sigma=1.0)
    for alpha in (simplex(3), torch.full((3,), 1 / 3).double(), torch.tensor([-0.5, 1.2, 0.3])):
        assert_at(model, source, alpha.double(), x)


@zoo
def test_a_training_step_moves_every_vertex_as_explicit_vertices_move(name):
    source, x = make(name)
    if name == "spectral_norm":
        source[0].parametrizations.weight[0].eval()
    model = el.to_subspace(source, n=3, sigma=0.5)
    stacked = {k: leaf(p) for k, p in model.named_parameters()}
    for _ in range(2):
        buffers = copy.deepcopy(dict(model.named_buffers()))
        flat(model(x)).pow(2).sum().backward()
        (alpha,) = {m.subspace_point.alpha for m in subspaces(model)}
        flat(explicit(source, stacked, alpha, x, buffers=buffers)).pow(2).sum().backward()
        for k, p in model.named_parameters():
            used = stacked[k].grad.any()
            assert p.grad.flatten(1).any(1).all() == used
        for params in (model.parameters(), stacked.values()):
            opt = torch.optim.SGD(params, lr=0.01)
            opt.step(), opt.zero_grad()
    close(dict(model.named_parameters()), stacked)


@zoo
def test_members_and_the_collapsed_network_are_plain(name):
    source, x = make(name, mode=False)
    model = el.to_subspace(source, n=3, sigma=0.5)
    stacked = dict(model.named_parameters())
    alpha = simplex(3)
    for plain, weights in [
        (el.member(model, 0), [1, 0, 0]),
        (el.member(model, -1), [0, 0, 1]),
        (el.collapse(model), [1 / 3] * 3),
        (collapsed_at(model, alpha), alpha.tolist()),
    ]:
        assert classes(plain) == classes(source)
        assert plain.state_dict().keys() == source.state_dict().keys()
        for (k, m), m_ in zip(plain.named_modules(), source.modules(), strict=True):
            assert vars(m).keys() == vars(m_).keys(), k
            assert len(m._forward_pre_hooks) == len(m_._forward_pre_hooks)
        weights = torch.tensor(weights, dtype=torch.float64)
        close(flat(plain(x)), flat(explicit(source, stacked, weights, x)))
        source.load_state_dict(plain.state_dict(), strict=True)


@zoo
def test_the_state_dict_of_a_member_is_a_slice(name):
    source, x = make(name, mode=False)
    model = el.to_subspace(source, n=3, sigma=0.5)
    parameters = {k for k, _ in model.named_parameters(remove_duplicate=False)}
    state = {k: v[1] if k in parameters else v for k, v in model.state_dict().items()}
    source.load_state_dict(state, strict=True)
    with el.at(model, vertex=1):
        close(flat(model(x)), flat(source(x)))


@zoo
def test_a_plain_state_dict_loads_as_the_first_vertex(name):
    source, x = make(name, mode=False)
    other, _ = make(name, mode=False)
    model = el.to_subspace(other, n=3)
    state = source.state_dict()
    before = {k: v.clone() for k, v in state.items()}
    assert not model.load_state_dict(state, strict=True).missing_keys
    with el.at(model, vertex=0):
        exact(flat(model(x)), flat(source(x)))
    exact(dict(state), before)


@zoo
def test_the_source_is_not_changed(name):
    source, x = make(name)
    state = copy.deepcopy(source.state_dict())
    before, hooks = classes(source), [len(m._forward_pre_hooks) for m in source.modules()]
    model = el.to_subspace(source, n=3)
    flat(model(x)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    el.collapse(model)
    exact(dict(source.state_dict()), dict(state))
    assert classes(source) == before
    assert [len(m._forward_pre_hooks) for m in source.modules()] == hooks
    assert all(p.grad is None for p in source.parameters())


@zoo
def test_collapsing_leaves_the_subspace_alone(name):
    source, x = make(name, mode=False)
    model = el.to_subspace(source, n=3, sigma=0.5)
    y, before = flat(model(x)), classes(model)
    plain = el.collapse(model)
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
    assert classes(model) == before
    exact(flat(model(x)), y)
