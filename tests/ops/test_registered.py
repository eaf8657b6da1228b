"""BatchEnsemble's registered operations: definition, derivatives and transforms, on a CPU."""

import pytest
import torch
from torch.func import grad, vmap

from ensemblayers.ops import batch_ensemble_linear as linear
from ensemblayers.ops import member_scale as scale

close = torch.testing.assert_close
F64 = torch.float64


def rand(*shape):
    return torch.randn(*shape, dtype=F64)


def linear_inputs(indexed, bias):
    members = torch.tensor([2, 0, 2]) if indexed else None
    biases = rand(3, 2) if bias else None
    return rand(6, 4), rand(2, 4), rand(3, 4), rand(3, 2), biases, members


def scale_inputs(indexed, shift):
    members = torch.tensor([2, 0, 2]) if indexed else None
    return rand(6, 2, 3), rand(3, 2), rand(3, 2) if shift else None, members


def each_linear(x, weight, r, s, bias, members):
    """Each group of rows by its own weights, by loops and nothing else."""
    groups = []
    order = range(len(r)) if members is None else members.tolist()
    for i, own in zip(order, x.reshape(len(order), -1, x.shape[1]), strict=True):
        y = own @ (weight * torch.outer(s[i], r[i])).mT
        groups.append(y if bias is None else y + bias[i])
    return torch.cat(groups)


def each_scale(x, scale, shift, members):
    groups = []
    order = range(len(scale)) if members is None else members.tolist()
    for i, own in zip(order, x.reshape(len(order), -1, *x.shape[1:]), strict=True):
        y = own * scale[i].view(-1, 1)
        groups.append(y if shift is None else y + shift[i].view(-1, 1))
    return torch.cat(groups)


OPERATIONS = {
    "linear": (linear, linear.rows_linear, each_linear, linear_inputs),
    "scale": (scale, scale.fused_scale, each_scale, scale_inputs),
}


@pytest.fixture(params=OPERATIONS)
def name(request):
    return request.param


@pytest.fixture(params=[(False, True), (True, True), (True, False)], ids=str)
def case(request, name):
    """The operation, a reference by loops, and inputs for both."""
    _, ours, reference, inputs = OPERATIONS[name]
    return ours, reference, inputs(*request.param)


def floats(given):
    """The inputs that have gradients, as leaves, and a function that puts them in their places."""
    places = [k for k, t in enumerate(given) if t is not None and t.is_floating_point()]

    def fill(f):
        def call(*some):
            every = list(given)
            for k, t in zip(places, some, strict=True):
                every[k] = t
            return f(*every)

        return call

    return [given[k].clone().requires_grad_() for k in places], fill


def test_output_and_gradients(case):
    ours, reference, given = case
    leaves, fill = floats(given)
    y, z = fill(ours)(*leaves), fill(reference)(*leaves)
    close(y, z)
    g = torch.randn_like(z)
    close(torch.autograd.grad(y, leaves, g), torch.autograd.grad(z, leaves, g))


def test_each_gradient_alone(case):
    ours, reference, given = case
    leaves, fill = floats(given)
    expected = torch.autograd.grad(fill(reference)(*leaves).sum(), leaves)
    for k, g in enumerate(expected):
        alone = [t if i == k else t.detach() for i, t in enumerate(leaves)]
        close(torch.autograd.grad(fill(ours)(*alone).sum(), alone[k])[0], g)


def test_first_and_second_derivatives(case):
    ours, _, given = case
    leaves, fill = floats(given)
    assert torch.autograd.gradcheck(fill(ours), leaves)
    assert torch.autograd.gradgradcheck(fill(ours), leaves)


def test_opcheck(case, name):
    _, reference, given = case
    module = OPERATIONS[name][0]
    torch.library.opcheck(module._forward_op, given)
    wanted = [t is not None and t.is_floating_point() for t in given]
    g = torch.randn_like(reference(*given))
    for needs in (
        wanted,
        [k == 0 for k in range(len(wanted))],
        [k == 1 for k in range(len(wanted))],
    ):
        torch.library.opcheck(module._backward_op, (g, *given, needs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_channels_that_are_last(dtype):
    x = torch.randn(6, 2, 3, 4).to(memory_format=torch.channels_last)
    given = (x, torch.randn(3, 2, dtype=dtype), torch.randn(3, 2, dtype=dtype), None)
    torch.library.opcheck(scale._forward_op, given)
    torch.library.opcheck(
        scale._backward_op, (torch.randn_like(x), *given, [True, True, True, False])
    )


def assert_compiles(ours, reference, given, backend):
    torch._dynamo.reset()
    leaves, fill = floats(given)
    compiled = torch.compile(lambda *t: ours(*t).relu(), fullgraph=True, backend=backend)
    y, z = fill(compiled)(*leaves), fill(reference)(*leaves).relu()
    close(y, z)
    close(torch.autograd.grad(y.pow(2).sum(), leaves), torch.autograd.grad(z.pow(2).sum(), leaves))


def test_compile(case):
    assert_compiles(*case, "aot_eager")


def test_compile_by_inductor():
    assert_compiles(linear.rows_linear, each_linear, linear_inputs(True, True), "inductor")


def test_transforms(case):
    ours, reference, given = case
    leaves, fill = floats(given)
    many = [torch.stack([t.detach(), t.detach().flip(0)]) for t in leaves]
    close(
        vmap(fill(ours))(*many), torch.stack([fill(reference)(*t) for t in zip(*many, strict=True)])
    )
    places = tuple(range(len(leaves)))

    def derivative(f):
        return grad(lambda *t: fill(f)(*t).pow(2).sum(), places)

    expected = [derivative(reference)(*t) for t in zip(*many, strict=True)]
    close(derivative(ours)(*(t[1] for t in many)), expected[1])
    mapped = vmap(derivative(ours))(*many)
    close(mapped, tuple(torch.stack(t) for t in zip(*expected, strict=True)))


def test_a_batch_of_gradients(case):
    ours, reference, given = case
    leaves, fill = floats(given)
    y, z = fill(ours)(*leaves), fill(reference)(*leaves)
    many = rand(2, *y.shape)
    batched = torch.autograd.grad(y, leaves, many, is_grads_batched=True)
    for k, g in enumerate(many):
        close(tuple(t[k] for t in batched), torch.autograd.grad(z, leaves, g, retain_graph=True))


def test_export(name):
    _, ours, reference, inputs = OPERATIONS[name]
    x, *rest = inputs(True, True)

    class Layer(torch.nn.Module):
        def forward(self, x):
            return ours(x, *rest)

    program = torch.export.export(Layer(), (x,))
    close(program.module()(2 * x), reference(2 * x, *rest))


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_its_dtype_and_gradients_in_the_inputs(dtype, indexed):
    *given, members = linear_inputs(indexed, True)
    given = [t.float().requires_grad_() for t in given]
    with torch.autocast("cpu", dtype):
        y = linear.fused_linear(*given, members)
        assert y.dtype == torch.nn.functional.linear(given[0], given[1]).dtype == dtype
    grads = torch.autograd.grad(y.float().sum(), given)
    assert {g.dtype for g in grads} == {torch.float32}
    exact = torch.autograd.grad(linear.fused_linear(*given, members).sum(), given)
    for g, e in zip(grads, exact, strict=True):
        assert (g - e).norm() <= 4 * torch.finfo(dtype).eps * e.norm()
