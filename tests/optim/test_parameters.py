"""Parameters of all kinds, their groups, and what torch does around an optimizer."""

import copy

import pytest
import torch
from explicit import Explicit, backward, close, net
from torch import nn

from ensemblayers.optim import SubspaceAdamW, SubspaceSGD


def test_parameters_without_gradient_keep_their_vertices_and_move_with_the_point():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5, momentum=0.9)
    before = [v.clone() for v in opt.vertices()]
    backward(model)
    model[2].weight.grad = None
    opt.step()
    close([opt.vertices()[2]], [before[2]], rtol=0, atol=0)
    close([model[2].weight], [torch.tensordot(opt.alpha, before[2], 1)])


def test_groups_schedules_and_closures_work_as_torchs():
    model = net()
    groups = [
        {"params": model[0].parameters(), "lr": 0.5},
        {"params": model[2].parameters(), "weight_decay": 0.1},
    ]
    opt = SubspaceSGD(groups, lr=0.1, n=2, sigma=0.5)
    explicit = Explicit(model, opt, torch.optim.SGD, lr=0.1)
    copies = explicit.copies
    explicit.opt = torch.optim.SGD(
        [{"params": copies[:2], "lr": 0.5}, {"params": copies[2:], "weight_decay": 0.1}], lr=0.1
    )
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (opt, explicit.opt)]
    for _ in range(6):
        alpha = opt.alpha.clone()
        seen = []

        def closure(seen=seen):
            opt.zero_grad()
            seen.append(backward(model))
            return 3.5

        assert opt.step(closure) == 3.5
        explicit.backward(alpha, seen[0])
        explicit.step()
        for schedule in schedules:
            schedule.step()
    close(opt.vertices(), copies, rtol=1e-9, atol=1e-11)


def test_a_group_added_later_joins_the_point():
    model = net()
    opt = SubspaceSGD(model[0].parameters(), lr=0.1, n=2, sigma=0.5)
    opt.add_param_group({"params": model[2].parameters(), "lr": 0.01})
    close(model.parameters(), [torch.tensordot(opt.alpha, v, 1) for v in opt.vertices()])
    backward(model)
    opt.step()


def test_a_skipped_step_of_a_grad_scaler_changes_nothing():
    model = net(torch.float32)
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [*(v.clone() for v in opt.vertices()), opt.alpha.clone()]
    scaler.scale(model(torch.randn(4, 5)).mean()).backward()
    model[0].weight.grad[0, 0] = torch.inf
    scaler.step(opt)
    scaler.update()
    close([*opt.vertices(), opt.alpha], before, rtol=0, atol=0)

    opt.zero_grad()
    other = copy.deepcopy(model)
    alpha, x = opt.alpha.clone(), torch.randn(4, 5)
    other(x).mean().backward()
    scaler.scale(model(x).mean()).backward()
    scaler.step(opt)
    for v, old, p in zip(opt.vertices(), before, other.parameters(), strict=False):
        expected = old - 0.1 * alpha.view(-1, *(1,) * p.dim()) * p.grad
        torch.testing.assert_close(v, expected)


def test_memory_formats_and_gradients_of_any_strides(backend):
    def build():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)).double()

    torch.manual_seed(1)
    model = build().to(memory_format=torch.channels_last)
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=2, sigma=0.5)
    explicit = Explicit(model, opt, torch.optim.SGD, lr=0.1)
    assert not model[0].weight.is_contiguous()
    for _ in range(3):
        alpha = opt.alpha.clone()
        opt.zero_grad()
        x = torch.randn(2, 3, 6, 6).double()
        model(x).square().mean().backward()
        explicit.backward(alpha, x)
        model[2].weight.grad = model[2].weight.grad.t().contiguous().t()
        opt.step()
        explicit.step()
    close(opt.vertices(), explicit.copies, rtol=1e-9, atol=1e-11)


def test_shared_parameters_are_one():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    model[2].weight = model[0].weight
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=2, sigma=0.5)
    assert len(opt.vertices()) == 3
    backward(model)
    opt.step()
    assert model[2].weight is model[0].weight


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: SubspaceSGD(p, lr=0.1, n=0), "n=0"),
        (lambda p: SubspaceSGD(p, lr=-1.0, n=2), "lr=-1.0"),
        (lambda p: SubspaceSGD(p, lr=0.1, n=2, sigma=-0.5), "sigma=-0.5"),
        (lambda p: SubspaceSGD(p, lr=0.1, n=2, momentum=-0.5), "momentum=-0.5"),
        (lambda p: SubspaceSGD(p, lr=0.1, n=2, nesterov=True), "nesterov"),
        (lambda p: SubspaceAdamW(p, lr=0.1, n=2, betas=(1.0, 0.9)), r"betas=\(1.0, 0.9\)"),
        (
            lambda p: SubspaceSGD([nn.Parameter(torch.zeros(3).expand(2, 3))], lr=0.1, n=2),
            r"\[2, 3\]",
        ),
    ],
)
def test_errors_name_the_offending_value(call, message):
    with pytest.raises(ValueError, match=message):
        call(net().parameters())


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameters_that_share_memory_are_a_clear_error():
    memory = torch.zeros(8)
    a, b, c = (nn.Parameter(part) for part in (memory[:5], memory[3:], memory[5:]))
    opt = SubspaceSGD([a], lr=0.1, n=2)
    for params in ([b], [c, c]):
        with pytest.raises(ValueError, match=r"memory of their own.*\[[35]\]"):
            opt.add_param_group({"params": params})
    assert len(opt.param_groups) == 1 and len(opt.vertices()) == 1
    opt.add_param_group({"params": [c]})
    for p in (a, c):
        p.grad = torch.ones_like(p)
    opt.step()


def test_sparse_gradients_are_a_clear_error():
    model = nn.Embedding(5, 3, sparse=True)
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=2)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        opt.step()


def test_frozen_parameters_stay_as_they_are():
    model = net()
    model[0].requires_grad_(False)
    before = [p.clone() for p in model[0].parameters()]
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    for _ in range(3):
        opt.zero_grad()
        backward(model)
        opt.step()
    opt.eval()
    close(model[0].parameters(), before, rtol=0, atol=0)
    assert len(opt.vertices()) == 2
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt.train()
    model[0].requires_grad_(True)
    opt.zero_grad()
    backward(model)
    with pytest.raises(RuntimeError, match="unfreezing"):
        opt.step()


@pytest.mark.parametrize(
    ("dtype", "of_gradient"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.half)],
)
def test_gradients_of_another_dtype(backend, dtype, of_gradient):
    model = net(dtype)
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3)
    for p in model.parameters():
        p.grad_dtype = of_gradient
    backward(model, dtype)
    expected = [v.clone() for v in opt.vertices()]
    for v, p in zip(expected, model.parameters(), strict=True):
        assert p.grad.dtype == of_gradient
        grad = p.grad.to(dtype).to(v.dtype)
        v -= 0.1 * opt.alpha.to(v.dtype).view(3, *(1,) * p.dim()) * grad
    opt.step()
    close(opt.vertices(), expected)


def test_the_state_is_up_to_date_whenever_it_is_read(backend):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5, momentum=0.9)
    explicit = Explicit(model, opt, torch.optim.SGD, lr=0.1, momentum=0.9)
    for _ in range(8):
        opt.zero_grad()
        explicit.backward(opt.alpha.clone(), backward(model))
        opt.step()
        explicit.step()
        for p, c in zip(model.parameters(), explicit.copies, strict=True):
            close([opt.state[p]["vertices"]], [c], rtol=1e-9, atol=1e-11)
            momentum = explicit.opt.state[c]["momentum_buffer"]
            close([opt.state[p]["momentum_buffer"]], [momentum], rtol=1e-9, atol=1e-11)
