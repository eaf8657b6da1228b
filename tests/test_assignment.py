"""What a call of a BatchEnsemble tells its layers: the member of each row, by an index."""

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from distinct import of_rank, telltale
from torch import nn
from torch.utils.checkpoint import checkpoint

import ensemblayers as el


class Windows(nn.Module):
    """Two rows of a layer's batch for each example, as windows of an image are."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.reshape(-1, *x.shape[2:])).unflatten(0, (len(x), 2))


def by_row(model, x, members):
    alone = [el.member(model, i) for i in range(model.n)]
    return torch.cat([alone[i](row[None]) for i, row in zip(members.tolist(), x, strict=True)])


def network(kind, **options):
    linear = el.BatchEnsembleLinear(5, 4, n=3, init="normal", **options)
    if kind == "linear":
        net, shape = nn.Sequential(linear, nn.Tanh(), el.BatchEnsembleLinear(4, 2, n=3)), (5,)
    elif kind == "windows":
        net, shape = Windows(linear), (2, 3, 5)
    else:
        conv = el.BatchEnsembleConv2d(2, 5, 3, n=3, init="normal", **options)
        net, shape = (
            nn.Sequential(conv, nn.ReLU(), nn.AvgPool2d(3), nn.Flatten(), linear),
            (2, 5, 5),
        )
    return el.BatchEnsemble(net.double(), train="random"), shape


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("kind", ["linear", "windows", "conv"])
def test_members_of_rows(kind, rank):
    model, shape = network(kind, rank=rank)
    for m in model.modules():
        if getattr(m, "rank", 1) > 1:
            of_rank(m)
    members = torch.tensor([2, 0, 0, 1, 2, 2, 0])
    x = torch.randn(7, *shape, dtype=torch.float64)
    for mode in (True, False):
        model.train(mode)
        y = model(x, members=members)
        torch.testing.assert_close(y, by_row(model, x, members))
    # The gradients are those of the members with all of their rows.
    params = list(model.parameters())
    got = torch.autograd.grad(model(x, members=members).sin().sum(), params)
    every = model.eval()(x)[members, torch.arange(7)]
    torch.testing.assert_close(got, torch.autograd.grad(every.sin().sum(), params))
    assert model.eval()(x).shape == (3, *y.shape)
    assert el.members(model.train(), x).shape == (3, *y.shape)
    assert model(x[:0], members=members[:0]).shape == (0, *y.shape[1:])


def test_random_members_in_training():
    model = el.BatchEnsemble(telltale(3), train="random")
    x = torch.zeros(3000, 1)
    torch.manual_seed(0)
    drawn = (model(x) / 100).flatten().long()
    torch.manual_seed(0)
    assert torch.equal(drawn, (model(x) / 100).flatten().long())
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.randint(3, (3000,)))
    assert drawn.bincount(minlength=3).min() > 900
    assert not torch.equal(drawn, (model(x) / 100).flatten().long())
    assert model(torch.zeros(7, 1)).shape == (7, 1)  # No division by n.
    assert model.eval()(x).shape == (3, 3000, 1)
    for other in ("split", "repeat"):
        model = el.BatchEnsemble(telltale(3), train=other)
        y = model(torch.zeros(3, 1), members=torch.tensor([2, 2, 0]))
        assert y.flatten().tolist() == [200, 200, 0]
        assert model(torch.zeros(3, 1)).numel() == (3 if other == "split" else 9)


class Checkpointed(nn.Module):
    """Two parts that the backward pass runs again, and what they hand on."""

    def __init__(self, net, how, reentrant):
        super().__init__()
        self.parts, self.how = nn.ModuleList([net[:2], net[2:]]), how
        self.again = functools.partial(checkpoint, use_reentrant=reentrant)
        self.between = None

    def forward(self, x):
        if self.how == "nested":
            return self.again(self.both, x)
        return self.both(x)

    def both(self, x):
        on = self.how in ("parts", "nested", "compiled")
        first, second = self.parts
        if self.how == "compiled":
            first, second = (torch.compile(m, backend="aot_eager") for m in self.parts)
        self.between = self.again(first, x) if on else first(x)
        return self.again(second, self.between) if on else second(self.between)


HOW = [(how, r) for how in ("parts", "nested", "whole", "compiled") for r in (True, False)]
# What a reentrant checkpoint does not return has no graph, and where a loss is not from the
# outputs, compiled layers can't tell.
HAVE_NO_PARTS = [("nested", True), ("whole", True), ("compiled", True), ("compiled", False)]


def checkpointed(how, reentrant):
    """A model that is run again in the backward pass, and its plain twin: the calls of both."""
    model, _ = network("linear")
    net = model.module.append(nn.Sigmoid())
    wrapped = el.BatchEnsemble(Checkpointed(net, how, reentrant), train="random")
    if how == "whole":
        again = functools.partial(checkpoint, wrapped, use_reentrant=reentrant)
    else:
        again = wrapped
    twin = el.BatchEnsemble(Checkpointed(copy.deepcopy(net), "plain", None), train="random")
    return (wrapped, again), (twin, twin)


def in_this_thread(call):
    return call()


def in_another_thread(call):
    """A new thread counts the nodes that it makes from 0, as CUDA's for the backward pass does."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def gradients(pair, loss, run=in_this_thread):
    model, call = pair
    torch.manual_seed(3)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    run(run(lambda: loss(model, call, x)).backward)
    found = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found


def two_calls(model, call, x):
    return call(x).pow(2).sum() - call(x.sin()).exp().sum()


def indexed_and_split(model, call, x):
    model.train_fold = "split"
    members = torch.tensor([2, 0, 0, 1, 1, 1])
    outputs = [model(x, members=members), model(x), model(2 * x, members=members.flip(0)), model(x)]
    model.train_fold = "random"
    return sum((k + 1) * y.sum() for k, y in enumerate(outputs))


def chained(model, call, x):
    y = call(x)
    return call(torch.cat([y, y, y], 1)[:, :5]).pow(2).sum() + y.sum()


def evaluated_between(model, call, x):
    loss = call(x).pow(2).sum()
    model(x, members=torch.zeros(6, dtype=torch.int64))  # Its graph is dropped.
    with torch.no_grad():
        model.eval()(x)
        model(x, members=torch.ones(6, dtype=torch.int64))
    model.train()
    return loss


def from_a_part(model, call, x):
    call(x)
    return model.module.between.pow(2).sum()


def from_parts_of_two(model, call, x):
    kept = []
    for factor in (1, 2):
        kept += [call(factor * x), model.module.between]
    model.module.kept = kept  # The outputs' graphs stay, but take no part.
    return kept[1].pow(2).sum() - kept[3].exp().sum()


def direct_too(model, call, x):
    y = call(x)
    return y.pow(2).sum() + model.module(x).exp().sum() + model.module(x[:3]).sin().sum()


LOSSES = [
    lambda model, call, x: call(x).pow(2).sum(),
    two_calls,
    chained,
    evaluated_between,
    indexed_and_split,
    from_a_part,
    from_parts_of_two,
    direct_too,
]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("run", [in_this_thread, in_another_thread])
@pytest.mark.parametrize(
    "how, reentrant, loss",
    [
        (*how, loss)
        for how in HOW
        for loss in LOSSES
        if loss not in (from_a_part, from_parts_of_two) or how not in HAVE_NO_PARTS
    ],
)
def test_checkpointed_layers_see_the_members_of_their_own_call(how, reentrant, loss, run):
    ours, plain = checkpointed(how, reentrant)
    for _ in range(2):  # The second has a first before it.
        torch.testing.assert_close(gradients(ours, loss, run), gradients(plain, loss))
    assert ours[0].assignment.members is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_index_that_is_not_known_any_more(reentrant):
    (model, _), _ = checkpointed("parts", reentrant)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    model(x)
    kept = model.module.between
    model(x)
    with pytest.raises(RuntimeError, match="before its next call with members"):
        kept.sum().backward()
    # That leaves nothing behind.
    y = model.module(x)
    torch.testing.assert_close(y, by_row(model, x, torch.arange(3).repeat_interleave(2)))
    y.sum().backward()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise OSError


def direct_calls(model, x):
    """The model and its layer without an index, run as they are and compiled."""
    layer = model.module[0]
    y = torch.cat([el.member(layer, i)(rows) for i, rows in enumerate(x.chunk(3))])
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(call(x), y)
    z = by_row(model, x, torch.arange(3).repeat_interleave(2))
    for call in (model.module, copy.deepcopy(model.module)):
        torch.testing.assert_close(call(x), z)
    with pytest.raises(ValueError, match=r"member-major.* 4 rows"):
        layer(x[:4])


@pytest.mark.parametrize("mode", [True, False])
def test_direct_calls_are_member_major_after_a_call_with_members(mode):
    model, shape = network("linear")
    model.train(mode)
    x = torch.randn(6, *shape, dtype=torch.float64)
    members = torch.tensor([2, 0, 0, 1, 1, 2])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for call in (model, compiled):
        call(x, members=members).sum().backward()
        direct_calls(model, x)
        call(x)
        direct_calls(model, x)
    with pytest.raises(ValueError, match="for a weight"):
        model(x[:, :2], members=members)
    direct_calls(model, x)
    # After a backward pass that fails on the way.
    model(Fails.apply(x.requires_grad_()), members=members)
    with pytest.raises(OSError):
        model(Fails.apply(x), members=members).sum().backward()
    direct_calls(model, x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_in_what_is_compiled(reentrant):
    (model, _), plain = checkpointed("parts", reentrant)
    for backend in ("aot_eager", "eager"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for loss in (LOSSES[0], two_calls, direct_too):
            torch.testing.assert_close(gradients((model, compiled), loss), gradients(plain, loss))


def test_export_and_transforms_with_members():
    model, shape = network("linear")
    x, members = torch.randn(6, *shape, dtype=torch.float64), torch.tensor([2, 0, 0, 1, 1, 2])
    y = model(x, members=members)
    exported = torch.export.export(model, (x,), {"members": members})
    torch.testing.assert_close(exported.module()(x, members=members), y)
    xs = torch.stack([x, 2 * x])
    torch.testing.assert_close(
        torch.func.vmap(lambda x: model(x, members=members))(xs),
        torch.stack([model(x, members=members) for x in xs]),
    )

    def loss(x):
        return model(x, members=members).sin().sum()

    found = torch.func.grad(loss)(x)
    torch.testing.assert_close(found, torch.autograd.grad(loss(x.requires_grad_()), x)[0])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(xs)[0], found)


def test_two_wrappers_of_one_module():
    net = nn.Sequential(telltale(2))
    first, second = el.BatchEnsemble(net, train="random"), el.BatchEnsemble(net, train="repeat")
    x = torch.zeros(3, 1)
    for model in (first, second):
        y = model(x, members=torch.tensor([1, 0, 1]))
        assert y.flatten().tolist() == [100, 0, 100]
    assert second(x).flatten().tolist() == [0, 0, 0, 100, 100, 100]


def test_copies_have_an_assignment_of_their_own():
    model, shape = network("linear")
    x = torch.randn(4, *shape, dtype=torch.float64)
    model(x)
    other = copy.deepcopy(model)
    assert other.module[0].assignment is other.assignment is not model.assignment
    other(x, members=torch.tensor([0, 1, 2, 2]))
    assert pickle.loads(pickle.dumps(model)).eval()(x).shape == (3, 4, 2)
    member = el.member(model, 0)
    assert vars(member[0]).keys() == vars(nn.Linear(5, 4)).keys()


def test_compiled_random_members():
    model, shape = network("linear")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, *shape, dtype=torch.float64)
    members = torch.tensor([2, 0, 1, 1])
    torch.testing.assert_close(compiled(x, members=members), model(x, members=members))
    torch.manual_seed(5)
    y = compiled(x)
    torch.manual_seed(5)
    torch.testing.assert_close(y, by_row(model, x, torch.randint(3, (4,))))
    torch.testing.assert_close(compiled.eval()(x), model.eval()(x))


def test_an_index_that_is_changed_before_the_backward_pass_is_an_error():
    model = el.BatchEnsemble(nn.Sequential(el.BatchEnsembleLinear(4, 3, n=4)))
    index, x = torch.zeros(5, dtype=torch.long), torch.randn(5, 4)

    y = model(x, members=index)
    index.fill_(3)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_an_index_of_inference_mode():
    model = el.BatchEnsemble(nn.Sequential(el.BatchEnsembleLinear(4, 3, n=4)))
    with torch.inference_mode():
        index = torch.zeros(5, dtype=torch.long)
    with torch.no_grad():
        assert model(torch.randn(5, 4), members=index).shape == (5, 3)


@pytest.mark.parametrize("by", ["index", "random"])
def test_a_layer_that_was_put_in_later_reads_the_index(by):
    model, shape = network("linear")
    model.module[2] = el.BatchEnsembleLinear(4, 6, n=3, init="normal").double()
    x, members = torch.randn(7, *shape, dtype=torch.float64), torch.tensor([2, 0, 0, 1, 2, 2, 0])
    if by == "random":
        torch.manual_seed(1)
        members = torch.randint(3, (7,))
        torch.manual_seed(1)
        y = model.train()(x)
    else:
        y = model(x, members=members)
    torch.testing.assert_close(y, by_row(model, x, members))
