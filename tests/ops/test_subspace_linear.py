"""The registered operations: their definition, derivatives and transforms, on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jacrev, vmap

import ensemblayers as el
from ensemblayers import functional as EF
from ensemblayers.ops import mix, subspace_linear

close = torch.testing.assert_close
linear = subspace_linear.rows_linear
F64 = torch.float64


def rand(*shape):
    return torch.randn(*shape, dtype=F64)


def inputs(each, bias=True, rows=4, outs=3, ins=5, n=3):
    alpha = el.sample_simplex(n, *((rows,) if each else ()), dtype=F64)
    return rand(rows, ins), rand(n, outs, ins), rand(n, outs) if bias else None, alpha


def leaves(tensors):
    return [None if t is None else t.clone().requires_grad_() for t in tensors]


def explicit(x, weight, bias, alpha):
    """Each row at its own weights, by loops and nothing else."""
    rows = []
    for b in range(len(x)):
        a = alpha[b] if alpha.dim() == 2 else alpha
        y = sum(a[i] * (weight[i] @ x[b]) for i in range(len(weight)))
        rows.append(y if bias is None else y + sum(a[i] * bias[i] for i in range(len(bias))))
    return torch.stack(rows)


every_kind = pytest.mark.parametrize(
    ("each", "bias"), [(False, True), (False, False), (True, True), (True, False)]
)

# ------------------------------------------------------------------------------------------- values


@every_kind
def test_output_and_gradients(each, bias):
    given = inputs(each, bias)
    ours, theirs = leaves(given), leaves(given)
    y, z = linear(*ours), explicit(*theirs)
    close(y, z)
    g = torch.randn_like(z)
    present = [k for k, t in enumerate(ours) if t is not None]
    close(
        torch.autograd.grad(y, [ours[k] for k in present], g),
        torch.autograd.grad(z, [theirs[k] for k in present], g),
    )


@every_kind
def test_each_gradient_alone(each, bias):
    given = inputs(each, bias)
    z = leaves(given)
    expected = torch.autograd.grad(explicit(*z).sum(), [t for t in z if t is not None])
    expected = iter(expected)
    for k, t in enumerate(given):
        if t is not None:
            alone = list(given)
            alone[k] = t.clone().requires_grad_()
            close(torch.autograd.grad(linear(*alone).sum(), alone[k])[0], next(expected))


@pytest.mark.parametrize("each", [False, True])
def test_empty_batch(each):
    given = leaves(inputs(each, rows=0))
    y = linear(*given)
    assert y.shape == (0, 3)
    for t, g in zip(given, torch.autograd.grad(y.sum(), given), strict=True):
        close(g, torch.zeros_like(t))


def test_the_mixed_weight_is_kept_only_for_a_backward_pass():
    x, weight, bias, alpha = inputs(False)
    y, mixed = subspace_linear._forward_op(x, weight, bias, alpha, True)
    close(mixed, EF.mix(weight, alpha))
    y_, nothing = subspace_linear._forward_op(x, weight, bias, alpha, False)
    close(y, y_)
    assert nothing.numel() == 0


# -------------------------------------------------------------------------------------- derivatives


@every_kind
def test_first_and_second_derivatives(each, bias):
    x, weight, b, alpha = leaves(inputs(each, bias, rows=2, outs=2, ins=3, n=2))

    def f(x, weight, alpha, *b):
        return linear(x, weight, b[0] if b else None, alpha)

    given = (x, weight, alpha) + ((b,) if bias else ())
    assert torch.autograd.gradcheck(f, given)
    assert torch.autograd.gradgradcheck(f, given)


def test_first_and_second_derivatives_of_the_mix():
    given = leaves((rand(3, 2, 2), el.sample_simplex(3, dtype=F64)))
    assert torch.autograd.gradcheck(mix.fused_mix, given)
    assert torch.autograd.gradgradcheck(mix.fused_mix, given)


class Launches:
    """Stands for the Triton kernels, which want a GPU, and counts their launches."""

    def __init__(self):
        self.calls = []

    def mix_all(self, stacks, alpha):
        self.calls.append("forward")
        return [mix.plain_mix(s, alpha) for s in stacks]

    def mix_all_backward(self, *arguments):
        self.calls.append("backward")
        return mix._plain_mix_all_backward(*arguments)


@pytest.mark.parametrize("kernels", [False, True])
def test_the_mix_of_many_at_once(kernels, monkeypatch):
    if kernels:
        launches = Launches()
        monkeypatch.setattr(mix._triton, "takes", lambda *tensors: len(tensors) > 2)
        monkeypatch.setattr(mix._triton, "module", lambda name: launches)
    alpha = el.sample_simplex(3, dtype=F64).requires_grad_()
    stacks = [rand(3, *shape).requires_grad_() for shape in ((2, 2), (), (3,))]

    def ours(alpha, *stacks):
        return tuple(mix.mix_all(stacks, alpha))

    mixed = ours(alpha, *stacks)
    close(mixed, tuple(mix.plain_mix(s, alpha) for s in stacks))
    torch.autograd.grad(sum(m.sum() for m in mixed), (alpha, *stacks))
    assert not kernels or launches.calls == ["forward", "backward"]
    assert torch.autograd.gradcheck(ours, (alpha, *stacks))
    assert torch.autograd.gradgradcheck(ours, (alpha, *stacks))
    mapped = vmap(ours)(alpha.expand(2, 3), *(s.expand(2, *s.shape) for s in stacks))
    close(tuple(t[1] for t in mapped), ours(alpha, *stacks))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    close(compiled(alpha, *stacks), ours(alpha, *stacks))


@every_kind
def test_a_batch_of_gradients(each, bias):
    given = [t for t in leaves(inputs(each, bias)) if t is not None]
    x, weight, *b, alpha = given
    y = linear(x, weight, b[0] if b else None, alpha)
    many = rand(2, *y.shape)
    batched = torch.autograd.grad(y, given, many, is_grads_batched=True, retain_graph=True)
    for k, g in enumerate(many):
        one = torch.autograd.grad(y, given, g, retain_graph=True)
        close(tuple(t[k] for t in batched), one)


def test_a_third_derivative():
    x, weight, bias, alpha = leaves(inputs(False, rows=2, outs=2, ins=2, n=2))

    def third(f):
        y = f(x, weight, bias, alpha).pow(3).sum()
        for t in (x, alpha, weight):
            (y,) = torch.autograd.grad(y, t, create_graph=True)
            y = y.pow(2).sum()
        return y

    close(third(linear), third(explicit))


# ------------------------------------------------------------------------------------ registration


@every_kind
def test_opcheck(each, bias):
    x, weight, b, alpha = inputs(each, bias)
    for keep in (True, False):
        torch.library.opcheck(subspace_linear._forward_op, (x, weight, b, alpha, keep))
    mixed = rand(3, 5) if not each else rand(0)
    for needs in (
        [True, True, bias, True],
        [False, True, False, False],
        [True, False, False, True],
    ):
        arguments = (rand(4, 3), x, weight, b, alpha, mixed, needs)
        torch.library.opcheck(subspace_linear._backward_op, arguments)


def test_opcheck_of_the_mix():
    stacked, alpha = rand(3, 2, 5), el.sample_simplex(3, dtype=F64)
    torch.library.opcheck(mix._mix, (stacked, alpha))
    for needs in ([True, True], [True, False], [False, True]):
        torch.library.opcheck(mix._mix_backward, (rand(2, 5), stacked, alpha, needs))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@every_kind
def test_compile(each, bias, backend):
    given = inputs(each, bias)
    ours, theirs = leaves(given), leaves(given)
    compiled = torch.compile(lambda *t: linear(*t).relu(), fullgraph=True, backend=backend)
    y, z = compiled(*ours), linear(*theirs).relu()
    close(y, z)
    y.pow(2).sum().backward()
    z.pow(2).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        if a is not None:
            close(a.grad, b.grad)


def test_compile_knows_any_batch_size():
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(linear, fullgraph=True, backend=counter, dynamic=True)
    _, weight, bias, alpha = leaves(inputs(False))
    for rows in range(2, 12):
        x = rand(rows, 5)
        close(compiled(x, weight, bias, alpha), explicit(x, weight, bias, alpha))
    assert counter.frame_count == 1


@every_kind
def test_torch_func_grad(each, bias):
    given = inputs(each, bias)
    present = tuple(k for k, t in enumerate(given) if t is not None)

    def loss(f):
        return grad(lambda *t: f(*t).pow(2).sum(), present)(*given)

    close(loss(linear), loss(explicit))
    close(
        jacrev(lambda w: linear(given[0], w, given[2], given[3]))(given[1]),
        jacrev(lambda w: explicit(given[0], w, given[2], given[3]))(given[1]),
    )


@every_kind
def test_vmap_and_vmap_of_grad(each, bias):
    many = [inputs(each, bias) for _ in range(2)]
    stacked = [None if t[0] is None else torch.stack(t) for t in zip(*many, strict=True)]
    dims = tuple(None if t is None else 0 for t in stacked)
    close(vmap(linear, dims)(*stacked), torch.stack([explicit(*t) for t in many]))
    x, weight, b, alpha = many[0]

    def loss(f):
        return lambda x, weight, a: f(x[None], weight, b, a[None] if each else a).pow(2).sum()

    def per_example(f):
        derivative = grad(loss(f), (0, 1, 2))
        return derivative, (x, weight, alpha)

    derivative, arguments = per_example(linear)
    reference, _ = per_example(explicit)
    dims = (0, None, 0 if each else None)
    mapped = vmap(derivative, dims)(*arguments)
    for k in range(len(x)):
        one = reference(x[k], weight, alpha[k] if each else alpha)
        close(tuple(t[k] for t in mapped), one)


def test_vmap_of_the_mix():
    stacked, alpha = rand(4, 3, 2, 5), el.sample_simplex(3, 4, dtype=F64)
    close(
        vmap(grad(lambda s, a: mix.fused_mix(s, a).pow(2).sum(), (0, 1)))(stacked, alpha),
        vmap(grad(lambda s, a: mix.plain_mix(s, a).pow(2).sum(), (0, 1)))(stacked, alpha),
    )


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        _, weight, bias, self.alpha = inputs(False)
        self.weight, self.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)

    def forward(self, x):
        return linear(x, self.weight, self.bias, self.alpha)


def test_export():
    layer, x = Layer(), rand(4, 5)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},))
    assert "ensemblayers.subspace_linear" in program.graph_module.code
    x = rand(7, 5)
    close(program.module()(x), explicit(x, layer.weight, layer.bias, layer.alpha))


def test_functional_call_under_grad():
    layer, x = Layer(), rand(4, 5)
    parameters = dict(layer.named_parameters())
    found = grad(lambda p: functional_call(layer, p, x).sum())(parameters)
    expected = torch.autograd.grad(layer(x).sum(), list(parameters.values()))
    close(tuple(found.values()), expected)


# ----------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_x_and_not_alpha(each, dtype):
    x, weight, bias, alpha = (t.float().requires_grad_() for t in inputs(each))
    with torch.autocast("cpu", dtype):
        y = subspace_linear.subspace_linear(x, weight, bias, alpha)
        assert y.dtype == F.linear(x, weight[0]).dtype == dtype
    grads = torch.autograd.grad(y.float().sum(), (x, weight, bias, alpha))
    assert {g.dtype for g in grads} == {torch.float32}
    exact = torch.autograd.grad(
        subspace_linear.subspace_linear(x, weight, bias, alpha).sum(), (x, weight, bias, alpha)
    )
    for g, e in zip(grads, exact, strict=True):
        assert (g - e).norm() <= 4 * torch.finfo(dtype).eps * e.norm()


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (2, 0, 5)])
def test_leading_dimensions(shape):
    _, weight, bias, alpha = inputs(False)
    x = rand(*shape)
    close(
        subspace_linear.subspace_linear(x, weight, bias, alpha),
        EF.subspace_linear(x, weight, bias, alpha),
    )
    if len(shape) > 1:
        alpha = el.sample_simplex(3, shape[0], dtype=F64)
        close(
            subspace_linear.subspace_linear(x, weight, bias, alpha),
            EF.subspace_linear(x, weight, bias, alpha),
        )
