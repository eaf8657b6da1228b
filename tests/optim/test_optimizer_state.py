"""Saving, loading and copying an optimizer."""

import copy
import io
import pickle

import pytest
import torch
from explicit import backward, close, net
from torch import nn

from ensemblayers.optim import SubspaceAdamW, SubspaceSGD


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("subspace", [SubspaceSGD, SubspaceAdamW])
def test_a_resumed_run_is_bit_identical(subspace, mode):
    def go_on(model, opt):
        torch.manual_seed(7)
        for _ in range(5):
            opt.zero_grad()
            backward(model, torch.float32)
            opt.step()
        return [*opt.vertices(), *model.parameters(), opt.alpha]

    kwargs = {"momentum": 0.9} if subspace is SubspaceSGD else {}
    model = net(torch.float32)
    opt = subspace(model.parameters(), lr=0.1, n=3, sigma=0.5, **kwargs)
    go_on(model, opt)
    getattr(opt, mode)()
    file = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), file)
    opt.train()
    expected = go_on(model, opt)

    torch.manual_seed(99)
    other = net(torch.float32)
    again = subspace(other.parameters(), lr=0.7, n=3, sigma=0.1, **kwargs)
    file.seek(0)
    weights, state = torch.load(file)
    again.load_state_dict(state)
    other.load_state_dict(weights)
    if mode == "eval":  # The weights that were saved are the midpoint's.
        again.train()
    close(go_on(other, again), expected, rtol=0, atol=0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_model_and_optimizer_train_on_together(duplicate):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5, momentum=0.9)
    backward(model)
    opt.step()
    other, again = duplicate((model, opt))
    for _ in range(3):
        for m, o in ((model, opt), (other, again)):
            torch.manual_seed(3)
            o.zero_grad()
            backward(m)
            o.step()
    close(other.parameters(), model.parameters(), rtol=0, atol=0)
    close(again.vertices(), opt.vertices(), rtol=0, atol=0)
    assert again.vertices()[0].data_ptr() != opt.vertices()[0].data_ptr()


def test_a_pickle_holds_the_vertices_once_and_not_for_each_parameter():
    def size(layers):
        model = nn.Sequential(*(nn.Linear(120 // layers, 120 // layers) for _ in range(layers**2)))
        return len(pickle.dumps(SubspaceSGD(model.parameters(), lr=0.1, n=3, momentum=0.9)))

    assert size(6) < 1.2 * size(1)  # Of as many weights.


@pytest.mark.parametrize("steps", [0, 5])
def test_a_pickle_holds_each_buffer_once(steps):
    model = nn.Linear(120, 120, bias=False)
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, momentum=0.9)
    for _ in range(steps):
        model(torch.randn(2, 120)).sum().backward()
        opt.step()
    # Parameters and gradients, vertices and momentum, and a cycle's points and gradients.
    most = 2 + 3 + 3 + (4 if steps else 0)
    assert len(pickle.dumps(opt)) < 1.1 * most * model.weight.nbytes


def test_state_of_another_number_of_vertices_is_an_error():
    opt = SubspaceSGD(net().parameters(), lr=0.1, n=3)
    with pytest.raises(ValueError, match=r"n=2.*n=3|n=3.*n=2"):
        SubspaceSGD(net().parameters(), lr=0.1, n=2).load_state_dict(opt.state_dict())
    plain = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="none"):
        opt.load_state_dict(plain.state_dict())


def test_frozen_vertices_are_saved():
    model, other = net(), net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=2, sigma=0.5)
    opt.add_frozen([torch.randn_like(p) for p in model.parameters()])
    again = SubspaceSGD(other.parameters(), lr=0.1, n=2, sigma=0.5)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    close(other.parameters(), model.parameters(), rtol=0, atol=0)


def test_a_state_with_momentum_loads_into_an_optimizer_without():
    model, other = net(), net()
    opt = SubspaceSGD(model.parameters(), lr=0.05, n=2, sigma=0.5, momentum=0.9)
    backward(model)
    opt.step()
    again = SubspaceSGD(other.parameters(), lr=0.05, n=2, sigma=0.5)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for m, o in ((model, opt), (other, again)):
        torch.manual_seed(3)
        o.zero_grad()
        backward(m)
        o.step()
    close(other.parameters(), model.parameters(), rtol=0, atol=0)


@pytest.mark.parametrize("built", [0.0, 0.9])
def test_a_state_brings_just_the_moments_that_were_saved(built):
    """Momentum that was switched off before saving, into an optimizer with one of its own."""
    model, other = net(), net()
    opt = SubspaceSGD(model.parameters(), lr=0.05, n=2, sigma=0.5)
    again = SubspaceSGD(other.parameters(), lr=0.05, n=2, sigma=0.5, momentum=built)
    for m, o in ((model, opt), (other, again)):
        backward(m)
        o.step()
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for m, o in ((model, opt), (other, again)):
        torch.manual_seed(3)
        o.param_groups[0].update(momentum=0.9, dampening=0.5)
        for _ in range(2):
            o.zero_grad()
            backward(m)
            o.step()
        o.param_groups[0]["momentum"] = 0.0
    close(other.parameters(), model.parameters(), rtol=0, atol=0)
    third = SubspaceSGD(net().parameters(), lr=0.05, n=2)
    third.load_state_dict(copy.deepcopy(opt.state_dict()))
    close(third.vertices(), opt.vertices(), rtol=0, atol=0)


def test_a_state_of_other_frozen_parameters_is_an_error():
    def build(frozen):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[frozen].requires_grad_(False)
        return SubspaceSGD(model.parameters(), lr=0.1, n=2)

    with pytest.raises(ValueError, match="frozen"):
        build(0).load_state_dict(build(1).state_dict())


def test_a_state_that_does_not_fit_changes_nothing():
    opt = SubspaceSGD(net().parameters(), lr=0.1, n=3)
    before, mixed = [v.clone() for v in opt.vertices()], net()
    others = [
        SubspaceAdamW(net().parameters(), lr=0.7, n=3),
        SubspaceSGD(nn.Linear(2, 2).parameters(), lr=0.7, n=3),
        SubspaceSGD([*mixed[0].float().parameters(), *mixed[2].parameters()], lr=0.7, n=3),
    ]
    others[2].load_state_dict(others[2].state_dict())
    messages = "SubspaceAdamW", r"\(3, 2, 2\)", "one dtype and device"
    for other, message in zip(others, messages, strict=True):
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(other.state_dict())
    close(opt.vertices(), before, rtol=0, atol=0)
    assert opt.param_groups[0]["lr"] == 0.1


def test_hooks_see_the_whole_state():
    opt = SubspaceSGD(net().parameters(), lr=0.1, n=3, momentum=0.9)
    saved = copy.deepcopy(opt.state_dict())
    opt.restart(1.0)
    seen = []
    handles = [
        opt.register_state_dict_post_hook(lambda o, state: {"wrapped": state}),
        opt.register_load_state_dict_pre_hook(lambda o, state: state["wrapped"]),
        opt.register_load_state_dict_pre_hook(lambda o, state: seen.append(len(state["state"]))),
        opt.register_load_state_dict_post_hook(lambda o: seen.append(o.vertices()[0].clone())),
    ]
    assert "subspace" in opt.state_dict()["wrapped"]
    opt.load_state_dict({"wrapped": saved})
    assert seen[0] == 4
    close(seen[1:], [saved["state"][0]["vertices"]], rtol=0, atol=0)
    for handle in handles:
        handle.remove()
    opt.load_state_dict(opt.state_dict())
