"""Several draws a step, frozen vertices among the points, and clipping over all of them."""

import copy

import pytest
import torch
from explicit import Explicit, backward, close, net
from torch import nn

from ensemblayers.optim import SubspaceAdamW, SubspaceSGD


@pytest.mark.parametrize("subspace", [SubspaceSGD, SubspaceAdamW])
def test_several_draws_accumulate_into_one_step(subspace):
    rule = torch.optim.SGD if subspace is SubspaceSGD else torch.optim.AdamW
    options = {"lr": 0.01, "weight_decay": 0.1}
    model = net()
    opt = subspace(model.parameters(), n=3, sigma=0.5, **options)
    explicit = Explicit(model, opt, rule, **options)
    for _ in range(3):
        for draw in range(3):
            alpha = opt.alpha.clone()
            explicit.backward(alpha, backward(model))
            if draw < 2:
                opt.accumulate()
                assert not torch.equal(opt.alpha, alpha)
        opt.step()
        opt.zero_grad()
        explicit.step()
    close(opt.vertices(), explicit.copies, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("n", [2, 8])
def test_frozen_vertices_take_part_and_are_not_trained(backend, n):
    model = net()
    anchors = [[torch.randn_like(p) for p in model.parameters()] for _ in range(2)]
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=n, sigma=0.5, momentum=0.9)
    explicit = Explicit(model, opt, torch.optim.SGD, lr=0.1, momentum=0.9)
    for anchor in anchors:
        opt.add_frozen(anchor)
    for _ in range(5):
        alpha = opt.alpha.clone()
        assert alpha.shape == (n + 2,)
        close(model.parameters(), explicit.weights(alpha, anchors).values())
        opt.zero_grad()
        explicit.backward(alpha, backward(model), anchors)
        opt.step()
        explicit.step()
    close(opt.vertices(), explicit.copies, rtol=1e-9, atol=1e-11)
    opt.eval()
    close(model.parameters(), [v.mean(0) for v in opt.vertices()])
    opt.train()
    opt.clear_frozen()
    close(model.parameters(), [torch.tensordot(opt.alpha, v, 1) for v in opt.vertices()])


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clipping_is_that_of_all_vertices_gradients(max_norm):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=1.0, n=3, sigma=0.5)
    explicit = Explicit(model, opt, torch.optim.SGD, lr=1.0)
    alpha = opt.alpha.clone()
    explicit.backward(alpha, backward(model))
    norm = nn.utils.clip_grad_norm_(explicit.copies, max_norm)
    torch.testing.assert_close(opt.clip_grad_norm_(max_norm), norm)
    opt.step()
    explicit.step()
    # torch adds 1e-6 to the norm that it divides by, and the two norms are computed differently.
    close(opt.vertices(), explicit.copies, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clipping_counts_the_gradients_of_all_draws(max_norm):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=1.0, n=3, sigma=0.5)
    explicit = Explicit(model, opt, torch.optim.SGD, lr=1.0)
    explicit.backward(opt.alpha.clone(), backward(model))
    opt.accumulate()
    explicit.backward(opt.alpha.clone(), backward(model))
    norm = nn.utils.clip_grad_norm_(explicit.copies, max_norm)
    torch.testing.assert_close(opt.clip_grad_norm_(max_norm), norm)
    opt.step()
    explicit.step()
    close(opt.vertices(), explicit.copies, rtol=1e-9, atol=1e-11)


def test_zero_grad_drops_the_gradients_of_all_draws():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=1.0, n=3, sigma=0.5)
    before = [v.clone() for v in opt.vertices()]
    backward(model)
    opt.accumulate()
    with pytest.raises(RuntimeError, match=r"step\(\)"):
        opt.state_dict()
    opt.zero_grad()
    opt.step()
    close(opt.vertices(), before, rtol=0, atol=0)


def test_frozen_vertices_may_be_given_as_parameters():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=2)
    opt.add_frozen(net().parameters())
    assert not any(v.requires_grad for v in opt.vertices())
    copy.deepcopy(opt.state_dict())
