import copy
import datetime
import shutil

import pytest
import torch
import torch.nn.functional as F
from plain import explicit, leaf, scatter_
from points import rand, simplex
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.func import grad, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import ensemblayers as el
from ensemblayers import functional as EF

close = torch.testing.assert_close


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


MODELS = {
    "linear": (lambda: el.SubspaceLinear(3, 2, n=3), (4, 3)),
    "conv": (lambda: el.SubspaceConv2d(3, 2, 3, padding=1, n=3), (4, 3, 4, 4)),
    "conv_circular": (
        lambda: el.SubspaceConv1d(3, 2, 3, padding=1, padding_mode="circular", n=3),
        (4, 3, 4),
    ),
    "layer_norm": (lambda: el.Subspace(nn.LayerNorm(3), n=3), (4, 3)),
    "conv_net": (lambda: el.to_subspace(conv_net(), n=3), (4, 3, 4, 4)),
}
models = pytest.mark.parametrize("name", MODELS)


def make(name):
    build, shape = MODELS[name]
    return scatter_(build().double()), rand(*shape)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# torch.compile


@pytest.mark.parametrize("mode", [True, False])
@models
def test_twenty_points_are_one_compiled_frame(name, mode):
    model, x = make(name)
    model.train(mode)
    reference = copy.deepcopy(model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for alpha in simplex(20, 3):
        el.set_point(model, alpha)
        el.set_point(reference, alpha)
        y, y_ = compiled(x), reference(x)
        close(y, y_)
        params = list(model.parameters())
        close(
            torch.autograd.grad(y.pow(2).sum(), params),
            torch.autograd.grad(y_.pow(2).sum(), list(reference.parameters())),
        )
    assert counter.frame_count == 1
    close(dict(model.named_buffers()), dict(reference.named_buffers()))


@models
def test_twenty_training_draws_are_one_compiled_frame(name):
    model, x = make(name)
    reference = copy.deepcopy(model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    point = next(m.subspace_point for m in model.modules() if hasattr(m, "subspace_point"))
    seen = set()
    for _ in range(20):
        y = compiled(x)
        seen.add(tuple(point.alpha.tolist()))
        el.set_point(reference, point.alpha)
        close(y, reference(x))
        y.sum().backward()
    assert len(seen) == 20
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["linear", "conv_net"])
def test_compiled_layers_take_a_point_per_example(name):
    model, x = make(name)
    model.eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    stacked = {k: leaf(p) for k, p in model.named_parameters()}
    plain = conv_net() if name == "conv_net" else nn.Linear(3, 2)
    for _ in range(2):
        alpha = simplex(4, 3).requires_grad_()
        with el.at(model, alpha):
            y = compiled(x)
        z = explicit(plain.double().eval(), stacked, alpha, x)
        close(y, z)
        close(torch.autograd.grad(y.sum(), alpha), torch.autograd.grad(z.sum(), alpha))


def test_an_alpha_that_learns_moves_through_the_compiled_layer():
    layer = el.SubspaceLinear(3, 2, n=3, dtype=torch.float64)
    x, alpha = rand(4, 3), simplex(3).requires_grad_()
    el.set_point(layer, alpha)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y = compiled(x).pow(2).sum()
    z = F.linear(
        x, *(sum(a * v for a, v in zip(alpha, p, strict=True)) for p in layer.parameters())
    )
    close(torch.autograd.grad(y, alpha), torch.autograd.grad(z.pow(2).sum(), alpha))


def test_a_point_that_is_set_within_compiled_code_is_no_recompilation():
    model, x = make("conv_net")
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def f(x, alpha):
        with el.at(model, alpha):
            return model(x)

    model.eval()
    stacked = dict(model.named_parameters())
    plain = conv_net().double().eval()
    for alpha in simplex(20, 3):
        close(f(x, alpha), explicit(plain, stacked, alpha, x))
    assert counter.frame_count == 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = conv_net()

    def forward(self, x):
        return self.layers(x)


def test_a_network_of_ones_own_class_is_compiled_once():
    model = scatter_(el.to_subspace(Net(), n=3).double())
    x, counter = rand(4, 3, 4, 4), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for alpha in simplex(20, 3):
        with el.at(model, alpha):
            compiled(x).sum().backward()
    assert counter.frame_count == 1
    frames = []
    for _ in range(20):
        compiled(x).sum().backward()
        frames.append(counter.frame_count)
    # torch.compile runs the hooks of such a class, the draw among them, as a frame of their own.
    assert set(frames) == {3}


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_inductor_gives_the_gradients_of_eager_training():
    layers = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    model = scatter_(el.to_subspace(layers, n=3).double())
    x = rand(4, 3)
    compiled = torch.compile(model, fullgraph=True)
    y = compiled(x)
    grads = torch.autograd.grad(y.pow(2).sum(), list(model.parameters()))
    stacked = {k: leaf(p) for k, p in model.named_parameters()}
    z = explicit(layers.double(), stacked, model[0].point.alpha, x)
    close(y, z)
    close(grads, torch.autograd.grad(z.pow(2).sum(), list(stacked.values())))


# torch.func


@pytest.mark.parametrize("each", [False, True])
def test_vmap_and_grad_of_the_functional_operations(each):
    n, b = 3, 4
    alpha = simplex(b, n) if each else simplex(n)
    batch_r, batch_s = rand(2, 3), rand(2, 5)
    cases = [
        (EF.mix, (rand(n, 2, 3), alpha)),
        (EF.subspace_linear, (rand(b, 3), rand(n, 5, 3), rand(n, 5), alpha)),
        (EF.subspace_conv, (rand(b, 3, 6), rand(n, 5, 3, 2), rand(n, 5), alpha)),
        (EF.batch_ensemble_linear, (rand(b, 3), rand(5, 3), batch_r, batch_s)),
        (EF.batch_ensemble_conv, (rand(b, 3, 6), rand(5, 3, 2), batch_r, batch_s)),
    ]
    for f, args in cases:
        argnums = tuple(range(len(args)))

        def loss(*args, f=f):
            return f(*args).pow(2).sum()

        leaves = [leaf(a) for a in args]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        close(grad(loss, argnums)(*args), expected)
        tangents = tuple(torch.randn_like(a) for a in args)
        dot = sum((e * t).sum() for e, t in zip(expected, tangents, strict=True))
        close(jvp(loss, args, tangents)[1], dot)
        close(jacrev(loss, argnums)(*args), expected)
        for i in argnums:
            many = torch.stack([args[i], 2 * args[i], args[i].flip(0)])
            dims = tuple(0 if j == i else None for j in argnums)
            rows = [(*args[:i], m, *args[i + 1 :]) for m in many]
            stacked = (*args[:i], many, *args[i + 1 :])
            close(vmap(f, dims)(*stacked), torch.stack([f(*row) for row in rows]))
            grads = vmap(grad(loss, argnums), dims)(*stacked)
            for k, row in enumerate(rows):
                leaves = [leaf(a) for a in row]
                close([g[k] for g in grads], list(torch.autograd.grad(loss(*leaves), leaves)))


def test_gradients_per_sample_equal_a_loop_over_the_samples():
    model = scatter_(el.to_subspace(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), n=3).double())
    alpha, x = simplex(3), rand(5, 3)
    params = {k: p.detach() for k, p in model.named_parameters()}

    def loss(params, x):
        with el.at(model, alpha):
            return torch.func.functional_call(model, params, (x[None],)).pow(3).sum()

    per_sample = vmap(grad(loss), (None, 0))(params, x)
    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).double()
    for b in range(5):
        stacked = {k: leaf(p) for k, p in params.items()}
        explicit(plain, stacked, alpha, x[b : b + 1]).pow(3).sum().backward()
        close({k: g[b] for k, g in per_sample.items()}, {k: p.grad for k, p in stacked.items()})


def test_vmap_over_points_equals_a_loop_over_points():
    model, x = make("conv_net")
    model.eval()

    def f(alpha):
        with el.at(model, alpha):
            return model(x)

    alphas = simplex(4, 3)
    close(vmap(f)(alphas), torch.stack([f(a) for a in alphas]))


def test_a_model_trains_and_copies_as_before_after_a_transform_in_training():
    model, x = make("layer_norm")
    params = {k: p.detach() for k, p in model.named_parameters()}
    grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(params)
    copy.deepcopy(model)(x).sum().backward()
    model(x).sum().backward()
    assert type(model.subspace_point.alpha.tolist()) is list


# torch.export


@models
@pytest.mark.parametrize("copied", [False, True])
def test_export_in_evaluation_is_at_the_midpoint(name, copied):
    model, x = make(name)
    model.eval()
    program = torch.export.export(copy.deepcopy(model) if copied else model, (x,))
    close(program.module()(x), el.collapse(model)(x))


def test_export_of_a_set_point():
    model, x = make("conv_net")
    model.eval()
    with el.at(model, vertex=1):
        program = torch.export.export(model, (x,))
    close(program.module()(x), el.member(model, 1)(x))


# autocast

PLAIN = {
    "linear": (nn.Linear(4, 2), (6, 4)),
    "linear_no_bias": (nn.Linear(4, 2, bias=False), (6, 4)),
    "conv1d": (nn.Conv1d(4, 2, 3), (6, 4, 5)),
    "conv2d": (nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect"), (6, 4, 5, 5)),
    "conv3d": (nn.Conv3d(4, 2, 3, groups=2), (6, 4, 5, 5, 5)),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def ensembles(plain):
    yield el.to_subspace(plain, n=3), None
    yield el.to_subspace(plain, n=3), 6
    yield el.to_batch_ensemble(plain, n=3).module, None


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_dtypes_are_those_of_the_plain_layer(name, dtype, autocast):
    plain, shape = PLAIN[name]
    plain = copy.deepcopy(plain).to(dtype)
    inputs = DTYPES if autocast else [dtype]
    for layer, points in ensembles(plain):
        if points:
            el.set_point(layer, el.sample_simplex(3, points))
        for x_dtype in inputs:
            x = torch.randn(shape, dtype=x_dtype, requires_grad=True)
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                try:
                    expected = plain(x)
                except RuntimeError:
                    with pytest.raises(RuntimeError):
                        layer(x)
                    continue
                y = layer(x)
                assert y.dtype == expected.dtype, (type(layer), x_dtype)
            y.float().pow(2).sum().backward()
            assert x.grad.dtype == x_dtype
            for p in layer.parameters():
                assert p.grad.dtype == dtype and p.grad.isfinite().all()


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_rounds_weights_once_as_the_plain_layer_does(autocast):
    layer = scatter_(el.SubspaceLinear(64, 32, n=3), std=0.1)
    alpha, x = el.sample_simplex(3), torch.randn(8, 64)
    weight = torch.einsum("n,noi->oi", alpha, layer.weight)
    bias = torch.einsum("n,no->o", alpha, layer.bias)
    with torch.autocast("cpu", autocast), el.at(layer, alpha):
        y, expected = layer(x), F.linear(x, weight, bias)
    error = (y.double() - expected.double()).norm() / expected.double().norm()
    assert error < 0.1 * torch.finfo(autocast).eps


def test_norms_under_autocast_have_the_plain_norms_dtype():
    for plain in (nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.RMSNorm(4)):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(6, 4, dtype=dtype)
            norm = el.Subspace(plain, n=3).eval()
            with torch.autocast("cpu", torch.bfloat16):
                expected = plain.eval()(x).dtype
                assert norm(x).dtype == expected
                with el.at(norm, el.sample_simplex(3, 6)):
                    assert norm(x).dtype == expected


# checkpointing


class Checkpointed(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.on = False

    def forward(self, x):
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False) if self.on else part(x)
        return x


def test_checkpointed_parts_have_the_same_gradients():
    parts = (nn.Linear(3, 8), nn.LayerNorm(8), nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 2)))
    model = scatter_(el.to_subspace(Checkpointed(*parts), n=3).double())
    own = Checkpointed(
        el.SubspaceLinear(3, 8, n=3), el.Subspace(nn.LayerNorm(8), n=3), nn.Dropout(0.5)
    ).double()
    x = rand(4, 3)
    for net in (model, own):
        results = []
        for on in (False, True):
            net.on = on
            torch.manual_seed(3)
            y = net(x)
            results.append([y, *torch.autograd.grad(y.pow(2).sum(), list(net.parameters()))])
        close(results[0], results[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_model_has_the_same_gradients(reentrant):
    model, x = make("conv_net")
    x.requires_grad_()
    state = copy.deepcopy(model.state_dict())
    results = []
    for call in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        model.load_state_dict(state)
        torch.manual_seed(3)
        model.zero_grad()
        call(x).pow(2).sum().backward()
        results.append([p.grad.clone() for p in model.parameters()])
    close(results[0], results[1])


# processes


def train_part(rank, world, port_file, x, model, out):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{port_file}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    model = copy.deepcopy(model)  # spawn hands over the parameters in shared memory
    net = nn.parallel.DistributedDataParallel(model)
    part = x.chunk(world)[rank]
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(7)
    for _ in range(3):
        opt.zero_grad()
        net(part).pow(2).mean().backward()
        opt.step()
    if rank == 0:
        torch.save(model.state_dict(), out)
    torch.distributed.destroy_process_group()


def test_two_processes_seeded_alike_equal_one_on_the_joint_batch(tmp_path):
    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model, x = scatter_(el.to_subspace(plain, n=3).double()), rand(8, 3)
    stacked = {k: leaf(p) for k, p in model.named_parameters()}
    out = tmp_path / "state.pt"
    torch.multiprocessing.spawn(
        train_part, (2, tmp_path / "rendezvous", x, model, out), nprocs=2, join=True
    )
    torch.manual_seed(7)
    opt = torch.optim.SGD(stacked.values(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        explicit(plain.double(), stacked, simplex(3), x).pow(2).mean().backward()
        opt.step()
    trained = torch.load(out)
    close(dict(trained), {k: p.detach() for k, p in stacked.items()})
