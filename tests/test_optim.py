import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import ensemblayers as el
from ensemblayers import _optimizer
from ensemblayers.ops import mix_next, native
from ensemblayers.optim import SubspaceAdamW, SubspaceSGD

SGD = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.05},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    {"weight_decay": 0.05},
    {"momentum": 0.5, "maximize": True},
]
RULES = [(SubspaceSGD, torch.optim.SGD, options) for options in SGD] + [
    (SubspaceAdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    (SubspaceAdamW, torch.optim.AdamW, {"betas": (0.5, 0.7), "eps": 1e-3, "maximize": True}),
]


@pytest.fixture(params=["plain", "native"])
def backend(request, monkeypatch):
    """Each backend in turn; the native one has to be there, or its tests show nothing."""
    if request.param == "plain":
        monkeypatch.setattr(mix_next, "_in_cpp", lambda vertices, params: False)
    elif not native.available():
        pytest.skip("no C++ compiler")
    return request.param


def net(dtype=torch.float64):
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def backward(model, dtype=torch.float64):
    x = torch.randn(4, 5, dtype=dtype)
    model(x).square().mean().backward()
    return x


def close(a, b, **tolerance):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


class Explicit:
    """n explicit copies of a network, trained by autograd and torch's own optimizer."""

    def __init__(self, model, opt, rule, **options):
        self.plain = copy.deepcopy(model)
        self.copies = [v.detach().clone().requires_grad_() for v in opt.vertices()]
        self.opt = rule(self.copies, **options)

    def weights(self, alpha, anchors=()):
        names = [name for name, _ in self.plain.named_parameters()]
        n = len(self.copies[0])
        mixed = [sum(alpha[i] * v[i] for i in range(n)) for v in self.copies]
        for a, anchor in zip(alpha[n:], anchors, strict=True):
            mixed = [m + a * w for m, w in zip(mixed, anchor, strict=True)]
        return dict(zip(names, mixed, strict=True))

    def backward(self, alpha, x, anchors=()):
        functional_call(self.plain, self.weights(alpha, anchors), x).square().mean().backward()

    def step(self):
        self.opt.step()
        self.opt.zero_grad()


# In C++, up to 6 vertices go side by side: 7 are 3 and 4, 13 are 4, 4 and 5.
@pytest.mark.parametrize("n", [1, 2, 3, 7, 13])
@pytest.mark.parametrize(("subspace", "rule", "options"), RULES)
def test_trajectory_is_that_of_explicit_copies(backend, subspace, rule, options, n):
    model = net()
    opt = subspace(model.parameters(), lr=0.01, n=n, sigma=0.5, **options)
    explicit = Explicit(model, opt, rule, lr=0.01, **options)
    for _ in range(50):
        alpha = opt.alpha.clone()
        close(model.parameters(), explicit.weights(alpha).values(), rtol=1e-9, atol=1e-11)
        opt.zero_grad()
        explicit.backward(alpha, backward(model))
        opt.step()
        explicit.step()
    close(opt.vertices(), explicit.copies, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("subspace", "rule", "options"), RULES)
def test_trajectory_is_that_of_the_layers(subspace, rule, options):
    model = net()
    opt = subspace(model.parameters(), lr=0.01, n=3, sigma=0.5, **options)
    layers = el.to_subspace(net(), n=3)
    for p, v in zip(layers.parameters(), opt.vertices(), strict=True):
        p.data.copy_(v)
    other = rule(layers.parameters(), lr=0.01, **options)
    for _ in range(50):
        el.set_point(layers, opt.alpha)
        opt.zero_grad()
        other.zero_grad()
        x = backward(model)
        layers(x).square().mean().backward()
        opt.step()
        other.step()
    close(opt.vertices(), layers.parameters(), rtol=1e-9, atol=1e-11)
    opt.eval()
    close(model.parameters(), el.collapse(_released(layers)).parameters())


def _released(layers):
    el.set_point(layers)
    return layers


def test_the_start_is_the_model_and_vertices_around_it():
    model = nn.Linear(300, 300)
    before = [p.detach().clone() for p in model.parameters()]
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.2)
    weight, bias = opt.vertices()
    close([weight[0], bias[0]], before, rtol=0, atol=0)
    ratio = weight[1:] / weight[0]
    assert (ratio.mean() - 1).abs() < 0.01 and (ratio.std() - 0.2).abs() < 0.01
    assert not torch.equal(ratio[0], ratio[1])


def test_points_are_uniform_on_the_simplex():
    opt = SubspaceSGD(nn.Linear(1, 1).parameters(), lr=0.0, n=3)
    draws = []
    for _ in range(2000):
        draws.append(opt.alpha.clone())
        opt._draw()
    draws = torch.stack(draws)
    # Mean 1 / n, variance (n - 1) / (n^2 (n + 1)): three standard errors and a bit.
    assert (draws.mean(0) - 1 / 3).abs().max() < 0.02
    assert (draws.var(0) - 2 / 36).abs().max() < 0.006
    torch.testing.assert_close(draws.sum(1), torch.ones(2000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("subspace", [SubspaceSGD, SubspaceAdamW])
@pytest.mark.parametrize("n", [3, 8])
def test_low_precision_parameters_have_float32_vertices(backend, n, subspace, dtype):
    model = net(dtype)
    opt = subspace(model.parameters(), lr=0.01, n=n, sigma=0.1)
    for _ in range(3):
        opt.zero_grad()
        backward(model, dtype)
        opt.step()
    for p, v in zip(model.parameters(), opt.vertices(), strict=True):
        assert v.dtype == torch.float32 and p.dtype == dtype
        exact = torch.einsum("n,n...->...", opt.alpha.double(), v.double())
        torch.testing.assert_close(p.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("n", [3, 11])
def test_the_backends_agree_in_every_precision(n, monkeypatch):
    if not native.available():
        pytest.skip("no C++ compiler")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        runs = []
        for cpp in (True, False):
            torch.manual_seed(0)
            model = nn.Linear(67, 53).to(dtype)  # More than a block of the C++ pass, and a rest.
            opt = SubspaceSGD(model.parameters(), lr=0.01, n=n, sigma=0.1, momentum=0.9)
            if not cpp:
                monkeypatch.setattr(mix_next, "_in_cpp", lambda vertices, params: False)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            opt.step()
            runs.append(opt.vertices())
            monkeypatch.undo()
        eps = torch.finfo(runs[0][0].dtype).eps
        close(*runs, rtol=4 * eps, atol=4 * eps)


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


def test_exported_vertices_are_plain_networks():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    for i in (0, 2, -1):
        close(opt.export(i), [v[i] for v in opt.vertices()], rtol=0, atol=0)
    opt.export(0)[0].zero_()
    assert opt.vertices()[0].count_nonzero()
    with pytest.raises(ValueError, match="3"):
        opt.export(3)


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


def test_state_of_another_number_of_vertices_is_an_error():
    opt = SubspaceSGD(net().parameters(), lr=0.1, n=3)
    with pytest.raises(ValueError, match=r"n=2.*n=3|n=3.*n=2"):
        SubspaceSGD(net().parameters(), lr=0.1, n=2).load_state_dict(opt.state_dict())
    plain = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="none"):
        opt.load_state_dict(plain.state_dict())


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


def test_parameters_without_gradient_keep_their_vertices_and_move_with_the_point():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5, momentum=0.9)
    before = [v.clone() for v in opt.vertices()]
    backward(model)
    model[2].weight.grad = None
    opt.step()
    close([opt.vertices()[2]], [before[2]], rtol=0, atol=0)
    close([model[2].weight], [torch.tensordot(opt.alpha, before[2], 1)])


@pytest.mark.parametrize(("subspace", "rule", "options"), [RULES[3], RULES[-2]])
def test_a_parameter_that_joins_late_starts_as_in_torch(backend, subspace, rule, options):
    model = net()
    opt = subspace(model.parameters(), lr=0.01, n=2, sigma=0.5, **options)
    explicit = Explicit(model, opt, rule, lr=0.01, **options)
    for step in range(4):
        alpha = opt.alpha.clone()
        opt.zero_grad()
        explicit.backward(alpha, backward(model))
        if step < 2:
            model[0].bias.grad = explicit.copies[1].grad = None
        opt.step()
        explicit.step()
    close(opt.vertices(), explicit.copies, rtol=1e-9, atol=1e-11)


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


def test_frozen_vertices_are_saved():
    model, other = net(), net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=2, sigma=0.5)
    opt.add_frozen([torch.randn_like(p) for p in model.parameters()])
    again = SubspaceSGD(other.parameters(), lr=0.1, n=2, sigma=0.5)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    close(other.parameters(), model.parameters(), rtol=0, atol=0)


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


def test_sparse_gradients_are_a_clear_error():
    model = nn.Embedding(5, 3, sparse=True)
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=2)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        opt.step()


def test_it_learns_what_the_midpoint_predicts():
    x = torch.randn(200, 5)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 2))
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.1, momentum=0.9)
    for _ in range(200):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    opt.eval()
    assert (model(x).argmax(1) == y).float().mean() > 0.95


@pytest.mark.parametrize("overwrite", ["eval", "train", "set_point", "a forward pass"])
def test_nothing_overwrites_loaded_weights_in_silence(overwrite):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    opt.follow(model)
    if overwrite == "train":
        opt.eval()
    best = net().state_dict()
    model.load_state_dict(best)
    with pytest.raises(RuntimeError, match=r"restart\(\)"):
        if overwrite == "a forward pass":
            model.eval()(torch.zeros(1, 5).double())
        else:
            getattr(opt, overwrite)(*([[1.0, 0.0, 0.0]] if overwrite == "set_point" else []))
    close(model.state_dict().values(), best.values(), rtol=0, atol=0)


def test_a_released_point_leaves_what_the_mode_asks_for():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.5)
    opt.eval()
    opt.set_point([0.0, 1.0, 0.0])
    close(model.parameters(), opt.export(1))
    opt.set_point(None)
    close(model.parameters(), [v.mean(0) for v in opt.vertices()])


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


@pytest.mark.parametrize("values", [(0.0, 0.9), (0.9, 0.0), (0.9, 0.5)])
def test_momentum_may_change_on_the_way(values):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.05, n=2, sigma=0.5, momentum=values[0])
    explicit = Explicit(model, opt, torch.optim.SGD, lr=0.05, momentum=values[0])
    for step in range(6):
        for o in (opt, explicit.opt):
            o.param_groups[0]["momentum"] = values[step >= 3]
            o.param_groups[0]["dampening"] = 0.25
        alpha = opt.alpha.clone()
        opt.zero_grad()
        explicit.backward(alpha, backward(model))
        opt.step()
        explicit.step()
    close(opt.vertices(), explicit.copies, rtol=1e-9, atol=1e-11)


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
    before = [v.clone() for v in opt.vertices()]
    others = [
        SubspaceAdamW(net().parameters(), lr=0.7, n=3),
        SubspaceSGD(nn.Linear(2, 2).parameters(), lr=0.7, n=3),
    ]
    for other, message in zip(others, ("SubspaceAdamW", r"\(3, 2, 2\)"), strict=True):
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(other.state_dict())
    close(opt.vertices(), before, rtol=0, atol=0)
    assert opt.param_groups[0]["lr"] == 0.1


def test_frozen_vertices_may_be_given_as_parameters():
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=2)
    opt.add_frozen(net().parameters())
    assert not any(v.requires_grad for v in opt.vertices())
    copy.deepcopy(opt.state_dict())


@pytest.mark.parametrize("subspace", [SubspaceSGD, SubspaceAdamW])
def test_a_captured_step_reads_its_numbers_when_it_is_replayed(subspace, monkeypatch):
    """A capture and its replays without a device: the same calls in the same order."""
    kwargs = {"momentum": 0.9} if subspace is SubspaceSGD else {}
    runs = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = net()
        opt = subspace(model.parameters(), lr=0.1, n=3, sigma=0.5, **kwargs)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        for step in range(5):
            opt.zero_grad()
            backward(model)
            if captured and step > 1:
                opt.prepare()
                with monkeypatch.context() as patch:
                    patch.setattr(_optimizer, "_is_capturing", lambda: True)
                    opt.step()
            else:
                opt.step()
            schedule.step()
        runs.append([*opt.vertices(), *model.parameters(), opt.alpha])
    close(*runs, rtol=1e-12, atol=1e-13)


def test_a_capture_needs_a_step_and_all_gradients(monkeypatch):
    opt = SubspaceSGD(net().parameters(), lr=0.1, n=3)
    monkeypatch.setattr(_optimizer, "_is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before the capture"):
        opt.step()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("subspace", [SubspaceSGD, SubspaceAdamW])
def test_training_in_a_cuda_graph(subspace):
    kwargs = {"momentum": 0.9} if subspace is SubspaceSGD else {}
    x, y = torch.randn(8, 4).cuda(), torch.randint(3, (8,)).cuda()
    runs = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).cuda()
        opt = subspace(model.parameters(), lr=0.1, n=3, sigma=0.5, **kwargs)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)

        def step(model=model, opt=opt):
            torch.nn.functional.cross_entropy(model(x), y).backward()
            opt.step()

        graph = torch.cuda.CUDAGraph()
        for k in range(6):
            opt.zero_grad(set_to_none=k < 3 or not captured)
            if captured and k >= 3:
                opt.prepare()
                if k == 3:
                    opt.zero_grad(set_to_none=True)
                    with torch.cuda.graph(graph):
                        step()
                graph.replay()
            else:
                step()
            schedule.step()
        runs.append([*opt.vertices(), *model.parameters(), opt.alpha])
    close(*runs, rtol=1e-5, atol=1e-6)
