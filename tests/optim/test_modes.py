"""The point that the model holds: drawn, the midpoint, or set; and what is not overwritten."""

import copy
import pickle

import pytest
import torch
from explicit import backward, close, net
from torch.optim.swa_utils import AveragedModel

from ensemblayers.optim import SubspaceSGD


def test_eval_holds_the_midpoint_and_train_the_same_draw_again():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    drawn = [p.detach().clone() for p in model.parameters()]
    opt.eval()
    close(model.parameters(), [v.mean(0) for v in opt.vertices()])
    opt.train()
    close(model.parameters(), drawn, rtol=0, atol=0)


def test_a_step_at_the_midpoint_is_an_error_that_says_what_to_call():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3)
    opt.eval()
    backward(model)
    with pytest.raises(RuntimeError, match=r"train\(\)"):
        opt.step()


def test_following_a_model_is_enough_for_closures():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    opt.follow(model)
    for _ in range(2):
        model.train()
        opt.step(lambda: backward(model))
        model.eval()
        model(torch.zeros(1, 5).double())
    with pytest.raises(RuntimeError, match=r"train\(\)"):
        opt.step(lambda: backward(model))


def test_following_a_model_is_enough():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    handle = opt.follow(model)
    model.eval()
    model(torch.zeros(1, 5).double())
    close(model.parameters(), [v.mean(0) for v in opt.vertices()])
    model.train()
    backward(model)
    opt.step()
    handle.remove()
    drawn = [p.detach().clone() for p in model.parameters()]
    model.eval()(torch.zeros(1, 5).double())
    close(model.parameters(), drawn, rtol=0, atol=0)


def test_a_followed_model_saves_what_its_mode_asks_for():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    opt.follow(model)
    drawn = [p.detach().clone() for p in model.parameters()]
    close(model.state_dict().values(), drawn, rtol=0, atol=0)
    close(model.eval().state_dict().values(), [v.mean(0) for v in opt.vertices()])
    close(model.train().state_dict().values(), drawn, rtol=0, atol=0)
    best = net().state_dict()
    model.load_state_dict(best)
    close(model.eval().state_dict().values(), best.values(), rtol=0, atol=0)


def clone(x):
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, clone, AveragedModel])
def test_a_copy_of_a_followed_model_is_on_its_own(duplicate):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    opt.follow(model)
    drawn = [p.detach().clone() for p in model.parameters()]
    other = duplicate(model)
    x = torch.zeros(1, 5).double()
    loss = model(x).sum()
    other.eval()(x)
    other.state_dict()
    loss.backward()
    close(model.parameters(), drawn, rtol=0, atol=0)
    opt.step()


def test_a_copy_of_an_optimizer_leaves_the_hooks_of_the_model_alone():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3)
    follower = opt.follow(model)
    model.register_forward_pre_hook(lambda *args: None)  # Can't be pickled.
    clone(opt)
    follower.remove()
    model.eval()(torch.zeros(1, 5).double())
    assert not opt.followers


@pytest.mark.parametrize("duplicate", [copy.deepcopy, clone])
@pytest.mark.parametrize("model_first", [True, False])
def test_copies_of_model_and_optimizer_follow_each_other(duplicate, model_first):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    opt.follow(model)
    if model_first:
        other, again = duplicate((model, opt))
    else:
        again, other = duplicate((opt, model))
    drawn = [p.detach().clone() for p in model.parameters()]
    other.eval()(torch.zeros(1, 5).double())
    close(other.parameters(), [v.mean(0) for v in again.vertices()])
    close(model.parameters(), drawn, rtol=0, atol=0)
    model.eval()(torch.zeros(1, 5).double())
    close(model.parameters(), other.parameters(), rtol=0, atol=0)


def test_a_point_that_was_set_stays_and_is_trained():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    opt.set_point([0.0, 1.0, 0.0])
    before = [v.clone() for v in opt.vertices()]
    close(model.parameters(), [v[1] for v in before])
    backward(model)
    opt.step()
    close(model.parameters(), [v[1] for v in opt.vertices()])
    for old, new in zip(before, opt.vertices(), strict=True):
        assert torch.equal(old[0], new[0]) and not torch.equal(old[1], new[1])
    opt.set_point(None)
    assert not torch.equal(opt.alpha, torch.tensor([0.0, 1.0, 0.0]).double())
    with pytest.raises(ValueError, match=r"\[3\].*\[2\]"):
        opt.set_point([0.5, 0.5])
    with pytest.raises(ValueError, match="nan"):
        opt.set_point([0.5, 0.5, torch.nan])


def test_exported_vertices_are_plain_networks():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    for i in (0, 2, -1):
        close(opt.export(i), [v[i] for v in opt.vertices()], rtol=0, atol=0)
    opt.export(0)[0].zero_()
    assert opt.vertices()[0].count_nonzero()
    with pytest.raises(ValueError, match="3"):
        opt.export(3)


def test_weights_loaded_into_the_model_are_not_undone_in_silence():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3)
    model.load_state_dict(net().state_dict())
    backward(model)
    with pytest.raises(RuntimeError, match=r"restart\(\)"):
        opt.step()
    held = [p.detach().clone() for p in model.parameters()]
    opt.restart()
    close([v[0] for v in opt.vertices()], held, rtol=0, atol=0)
    opt.step()


def test_weights_that_were_swapped_out_and_back_are_no_error():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3)
    saved = copy.deepcopy(model.state_dict())
    model.load_state_dict(net().state_dict())
    model.load_state_dict(saved)
    backward(model)
    opt.step()


OVERWRITE = {
    "eval": lambda model, opt: opt.eval(),
    "train": lambda model, opt: opt.train(),
    "set_point": lambda model, opt: opt.set_point([1.0, 0.0, 0.0]),
    "a forward pass": lambda model, opt: model.eval()(torch.zeros(1, 5).double()),
    "accumulate": lambda model, opt: opt.accumulate(),
    "add_frozen": lambda model, opt: opt.add_frozen(opt.export(0)),
    "clear_frozen": lambda model, opt: opt.clear_frozen(),
    "add_param_group": lambda model, opt: opt.add_param_group({"params": net().parameters()}),
}


@pytest.mark.parametrize("overwrite", OVERWRITE)
def test_nothing_overwrites_loaded_weights_in_silence(overwrite):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    opt.follow(model)
    if overwrite == "train":
        opt.eval()
    best = net().state_dict()
    model.load_state_dict(best)
    with pytest.raises(RuntimeError, match=r"restart\(\)"):
        OVERWRITE[overwrite](model, opt)
    close(model.state_dict().values(), best.values(), rtol=0, atol=0)


def test_a_released_point_leaves_what_the_mode_asks_for():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    opt.eval()
    opt.set_point([0.0, 1.0, 0.0])
    close(model.parameters(), opt.export(1))
    opt.set_point(None)
    close(model.parameters(), [v.mean(0) for v in opt.vertices()])
