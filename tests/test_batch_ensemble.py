import functools
import math

import pytest
import torch
from distinct import of_rank, telltale
from torch import nn
from torch.func import functional_call

import ensemblayers as el

LINEARS = [{}, {"bias": False}]
CONVS = [
    {},
    {"stride": 2},
    {"stride": (2, 1, 3)},
    {"padding": 1},
    {"padding": (2, 0, 1)},
    {"padding": "same"},
    {"padding": "same", "dilation": (2, 1, 2)},
    {"padding": "valid", "dilation": 2},
    {"groups": 2},
    {"groups": 4, "out_channels": 8},
    {"bias": False},
    {"padding_mode": "circular", "padding": 1},
    {"padding_mode": "circular", "padding": "same", "dilation": 2},
    {"padding_mode": "reflect", "padding": (1, 2, 1)},
    {"padding_mode": "replicate", "padding": 2, "stride": 2, "groups": 2, "bias": False},
]


def conv_pair(space, options, n, **kwargs):
    """A BatchEnsemble convolution, and a function that makes the plain one of the same options."""
    options = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options}
    options = {k: v[:space] if isinstance(v, tuple) else v for k, v in options.items()}
    kind = getattr(nn, f"Conv{space}d")
    layer = getattr(el, f"BatchEnsembleConv{space}d")(**options, n=n, dtype=torch.float64, **kwargs)
    return layer, lambda: kind(**options, dtype=torch.float64)


def linear_pair(options, n, **kwargs):
    layer = el.BatchEnsembleLinear(5, 4, **options, n=n, dtype=torch.float64, **kwargs)
    return layer, lambda: nn.Linear(5, 4, **options, dtype=torch.float64)


def leaves(layer):
    return {k: p.detach().clone().requires_grad_() for k, p in layer.named_parameters()}


def explicit(make, own, x):
    """A folded batch through n plain layers of the weights W * (s_i r_i^T), one at a time."""
    weight, r, s = own["weight"], own["r"], own["s"]
    outputs, share = weight.shape[:2]
    groups = r.shape[1] // share
    channels = [
        [o // (outputs // groups) * share + j for j in range(share)] for o in range(outputs)
    ]
    y = []
    for i, rows in enumerate(x.chunk(len(r))):
        scale = s[i][:, None] * r[i][torch.tensor(channels)]
        tensors = {"weight": weight * scale.reshape(scale.shape + (1,) * (weight.dim() - 2))}
        if "bias" in own:
            tensors["bias"] = own["bias"][i]
        y.append(functional_call(make(), tensors, rows))
    return torch.cat(y)


def assert_explicit(layer, make, x):
    """Output and every gradient are those of the plain layers."""
    own = leaves(layer)
    x, x_ = x.requires_grad_(), x.detach().clone().requires_grad_()
    y, z = layer(x), explicit(make, own, x_)
    torch.testing.assert_close(y, z)
    g = torch.randn_like(z)
    names = [k for k, _ in layer.named_parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(y, [x, *layer.parameters()], g),
        torch.autograd.grad(z, [x_, *(own[k] for k in names)], g),
    )


@pytest.mark.parametrize("shape", [(6, 5), (3, 2, 5), (6, 2, 3, 5), (0, 5)])
@pytest.mark.parametrize("options", LINEARS)
def test_linear(options, shape):
    layer, make = linear_pair(options, n=3, init="normal")
    assert_explicit(layer, make, torch.randn(shape, dtype=torch.float64))
    assert vars(el.member(layer, 0)).keys() == vars(make()).keys()


@pytest.mark.parametrize("options", CONVS, ids=str)
@pytest.mark.parametrize("space", [1, 2, 3])
def test_conv(space, options):
    layer, make = conv_pair(space, options, n=2, init="normal")
    assert_explicit(layer, make, torch.randn(4, 4, *(7, 6, 5)[:space], dtype=torch.float64))
    plain, alone = make(), el.member(layer, 1)
    assert type(alone) is type(plain) and vars(alone).keys() == vars(plain).keys()
    assert layer.weight.shape == plain.weight.shape
    assert layer.r.shape == (2, 4) and layer.s.shape == (2, plain.out_channels)


@pytest.mark.parametrize("space, name", [(2, "channels_last"), (3, "channels_last_3d")])
def test_conv_channels_last(space, name):
    form = getattr(torch, name)
    layer, make = conv_pair(space, {"padding": 1}, n=2, init="normal")
    layer = layer.to(memory_format=form)
    x = torch.randn(4, 4, *(5,) * space, dtype=torch.float64).to(memory_format=form)
    assert_explicit(layer, make, x)
    plain = make().to(memory_format=form)
    assert layer(x).stride() == plain(x).stride()


@pytest.mark.parametrize("rows", ["sum", "expand", "slice", "transpose"])
def test_gradients_of_any_stride(rows):
    layer, make = linear_pair({}, n=2, init="normal")
    own, x = leaves(layer), torch.randn(10, 6, dtype=torch.float64).T[:, :5].repeat(2, 1)[:6]
    loss = {
        "sum": lambda y: y.sum(),
        "expand": lambda y: (y[:1].expand(7, -1) ** 2).sum(),
        "slice": lambda y: (y[::2, 1:] ** 2).sum(),
        "transpose": lambda y: (torch.cat([y.T, y.T]) ** 3).sum(),
    }[rows]
    loss(layer(x)).backward()
    loss(explicit(make, own, x)).backward()
    for k, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, own[k].grad)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    ],
)
@pytest.mark.parametrize("pair", [lambda: linear_pair({}, 3), lambda: conv_pair(1, {}, 3)])
def test_steps(pair, optimizer):
    layer, make = pair()
    own = leaves(layer)
    ours, theirs = (
        optimizer(layer.parameters()),
        optimizer([own[k] for k in dict(layer.named_parameters())]),
    )
    shape = (6, 5) if isinstance(layer, el.BatchEnsembleLinear) else (6, 4, 5)
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64)
        for opt, y in ((ours, layer(x)), (theirs, explicit(make, own, x))):
            opt.zero_grad()
            (y**2).mean().backward()
            opt.step()
    for k, p in layer.named_parameters():
        torch.testing.assert_close(p, own[k])


def test_gradcheck():
    layer, _ = linear_pair({}, n=2, init="normal")
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    names, params = zip(*layer.named_parameters(), strict=True)

    def call(x, *params):
        return functional_call(layer, dict(zip(names, params, strict=True)), x)

    assert torch.autograd.gradcheck(call, (x, *params))
    assert torch.autograd.gradgradcheck(call, (x, *params))


@pytest.mark.parametrize(
    "layer, x",
    [
        (el.BatchEnsembleLinear(5, 4, n=3), torch.zeros(7, 5)),
        (el.BatchEnsembleConv1d(2, 4, 3, n=3), torch.zeros(7, 2, 5)),
        (el.BatchEnsembleConv2d(2, 4, 3, n=3, padding="same"), torch.zeros(7, 2, 5, 5)),
    ],
)
def test_batch_that_does_not_divide(layer, x):
    with pytest.raises(ValueError, match=r"n=3.* 7 rows"):
        layer(x)
    model = el.BatchEnsemble(nn.Sequential(nn.ReLU(), layer))
    with pytest.raises(ValueError, match=r"n=3.* 7 rows.*train='repeat'"):
        model(x)
    assert model.eval()(x).shape[:2] == (3, 7)


def test_one_dimension():
    with pytest.raises(ValueError, match=r"\[n \* b, ..., in\].* \[4, 4\], got \[4\]"):
        el.BatchEnsembleLinear(4, 4, n=2)(torch.zeros(4))


def test_unbatched_conv():
    with pytest.raises(ValueError, match=r"\[4, 5, 5\]"):
        el.BatchEnsembleConv2d(4, 4, 3, n=2)(torch.zeros(4, 5, 5))


def test_rows_of_split():
    y = el.BatchEnsemble(telltale(3), train="split")(torch.arange(6.0)[:, None])
    assert y.flatten().tolist() == [0, 1, 102, 103, 204, 205]


@pytest.mark.parametrize("train, mode", [("split", False), ("repeat", False), ("repeat", True)])
def test_rows_of_repeat(train, mode):
    y = el.BatchEnsemble(telltale(3), train=train).train(mode)(torch.arange(2.0)[:, None])
    assert y.squeeze(-1).tolist() == [[0, 1], [100, 101], [200, 201]]


def test_members_see_images_with_channels_last_as_they_are():
    seen = []
    model = el.to_batch_ensemble(nn.Sequential(nn.Conv2d(3, 4, 3)), n=2).eval()
    model.module[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = torch.randn(5, 3, 8, 8).to(memory_format=torch.channels_last)
    model(x)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(seen[0], torch.cat([x, x]))


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = telltale(2)

    def forward(self, x, *, scale, nested, flag, table):
        assert flag == "on" and table.shape == (7, 1) and nested["none"] is None
        y = self.layer(x) * scale + nested["more"][0]
        return {"y": y, "pair": (y + 1, None), "flag": flag, "table": table, "loss": y.sum()}


def test_keyword_and_nested_arguments_are_folded():
    x, scale = torch.arange(3.0)[:, None], torch.tensor([[1.0], [2.0], [3.0]])
    nested = {"more": [scale * 1000], "none": None}
    model = el.BatchEnsemble(Keywords()).eval()
    out = model(x, scale=scale, nested=nested, flag="on", table=torch.zeros(7, 1))
    y = torch.stack([(x + 100 * i) * scale + scale * 1000 for i in range(2)])
    torch.testing.assert_close(out["y"], y)
    torch.testing.assert_close(out["pair"][0], y + 1)
    assert out["pair"][1] is None and out["flag"] == "on" and out["loss"].shape == ()
    assert out["table"].shape == (7, 1)


class Attends(nn.Module):
    """Attention of tokens, with whatever masks there are."""

    def __init__(self):
        super().__init__()
        self.layer = el.BatchEnsembleLinear(4, 4, n=2, init="normal")
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x, memory=None, key_padding_mask=None, **masks):
        (mask,) = masks.values() if masks else (None,)
        y = self.layer(x)
        options = {"key_padding_mask": key_padding_mask, "attn_mask": mask}
        return self.attention(y, *(y if memory is None else memory,) * 2, **options)[0]


def explicit_members(model, *args, **kwargs):
    return torch.stack([el.member(model, i)(*args, **kwargs) for i in range(model.n)])


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("name", ["attn_mask", "mask", "src_mask", "tgt_mask", "memory_mask"])
def test_masks_that_all_examples_share(name, kind):
    model = el.BatchEnsemble(Attends()).eval()
    for rows in (3, 5):  # As many as tokens, and not.
        x = torch.randn(rows, 5, 4)
        mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float32)
        mask = mask.to(kind) if kind is torch.float32 else mask < 0
        options = {name: mask, "key_padding_mask": torch.arange(5).expand(rows, 5) > 3}
        if kind is torch.float32:
            del options["key_padding_mask"]
        for call in (model, functools.partial(el.members, model.module)):
            torch.testing.assert_close(call(x, **options), explicit_members(model, x, **options))
            # The first tensor that counts is not the mask.
            torch.testing.assert_close(
                call(**options, x=x), explicit_members(model, x=x, **options)
            )


def test_masks_of_other_tokens_and_masks_of_the_batch():
    model = el.BatchEnsemble(Attends()).eval()
    x, memory = torch.randn(4, 4, 4), torch.randn(4, 6, 4)
    mask = torch.zeros(4, 6)
    mask[:, 4:] = -torch.inf
    for name in ("memory_mask", "attn_mask"):
        options = {"memory": memory, name: mask}
        torch.testing.assert_close(model(x, **options), explicit_members(model, x, **options))

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = telltale(2)

        def forward(self, x, mask):
            return self.layer(x) * mask.sum(1, keepdim=True)

    model, x = el.BatchEnsemble(Keeps()).eval(), torch.arange(3.0)[:, None]
    mask = torch.arange(12.0).view(3, 4)  # One of each example, which many models call mask.
    torch.testing.assert_close(model(x, mask=mask), explicit_members(model, x, mask=mask))


def test_transformers_with_a_mask_for_as_many_rows_as_tokens():
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    x = torch.randn(4, 4, 8, dtype=torch.float64)
    decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    for source, args, options in (
        (layer, (x,), {"src_mask": mask}),
        (nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), (x,), {"mask": mask}),
        (decoder, (x, x.sin()), {"tgt_mask": mask, "memory_mask": mask}),
    ):
        with pytest.warns(UserWarning, match="shared by all members"):
            model = el.to_batch_ensemble(source, n=3, init="normal").eval()
        torch.testing.assert_close(
            model(*args, **options), explicit_members(model, *args, **options)
        )


class Recurrent(nn.Module):
    def __init__(self, n, layers, **options):
        super().__init__()
        self.layer = el.BatchEnsembleLinear(3, 3, n=n, init="normal")
        self.lstm = nn.LSTM(3, 5, layers, batch_first=True, **options)

    def forward(self, x):
        y, (h, c) = self.lstm(self.layer(x))
        return {"y": y, "states": (h, c), "last": h[-1], "time first": y.movedim(1, 0)}


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}])
def test_states_of_recurrent_layers_are_those_of_each_member(layers, options):
    model = el.BatchEnsemble(Recurrent(2, layers, **options)).eval()
    for rows in (4, 5):  # Also as many as there are states.
        x = torch.randn(rows, 7, 3)
        for out in (model(x), el.members(model.module, x)):
            each = [el.member(model, i)(x) for i in range(2)]
            for key in ("y", "last", "time first"):
                torch.testing.assert_close(out[key], torch.stack([own[key] for own in each]))
            for k in (0, 1):
                expected = torch.stack([own["states"][k] for own in each])
                torch.testing.assert_close(out["states"][k], expected)


def test_a_state_that_may_be_rows():
    model = el.BatchEnsemble(Recurrent(2, 2)).eval()
    with pytest.raises(ValueError, match=r"\[2, 2, 5\].*n \* B = 2"):
        model(torch.zeros(1, 7, 3))
    # Sequences as long as the batch are no states, nor are they classes.
    model = el.BatchEnsemble(el.BatchEnsembleLinear(3, 6, n=2)).eval()
    assert model(torch.zeros(3, 6, 3)).shape == (2, 3, 6, 6)
    assert model(torch.zeros(3, 3)).shape == (2, 3, 6)


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = telltale(2)

    def forward(self, x):
        return torch.distributions.Normal(self.layer(x), 1.0)


def test_outputs_that_cannot_be_unfolded():
    with pytest.raises(ValueError, match="got Normal"):
        el.BatchEnsemble(Opaque()).eval()(torch.zeros(4, 1))


def test_no_batch():
    with pytest.raises(ValueError, match="batch dimension"):
        el.BatchEnsemble(telltale(2))(3)


@pytest.mark.parametrize(
    "kind", [lambda **k: linear_pair({}, **k), lambda **k: conv_pair(2, {}, **k)]
)
def test_init(kind):
    torch.manual_seed(1)
    sign, normal, ones = (kind(n=2000, init=i)[0] for i in ("random_sign", "normal", "ones"))
    for fast in (sign.r, sign.s):
        assert set(fast.unique().tolist()) == {-1, 1} and abs(fast.mean()) < 0.05
    for fast in (normal.r, normal.s):
        assert abs(fast.mean() - 1) < 0.03 and abs(fast.std() - 0.5) < 0.03
    assert (ones.r == 1).all() and (ones.s == 1).all()
    assert not torch.equal(sign.r[:, 0], sign.r[:, 1]) and not torch.equal(sign.r[0], sign.r[1])


@pytest.mark.parametrize(
    "layer, fan_in",
    [
        (lambda: el.BatchEnsembleLinear(256, 512, n=4), 256),
        (lambda: el.BatchEnsembleConv2d(32, 256, 3, n=4), 288),
        (lambda: el.BatchEnsembleConv1d(128, 512, 5, n=4, groups=4), 160),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_init_is_a_plain_layers(layer, fan_in, meta):
    if meta:
        with torch.device("meta"):
            layer_ = layer()
        layer_ = layer_.to_empty(device="cpu")
        layer_.reset_parameters()
    else:
        layer_ = layer()
    bound = 1 / math.sqrt(fan_in)
    assert layer_.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert layer_.bias.abs().max() <= bound
    for own in layer_.bias:
        assert own.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
    assert not torch.equal(layer_.bias[0], layer_.bias[1])
    assert set(layer_.r.unique().tolist()) == {-1, 1}


def test_reset_fast_weights_leaves_the_rest():
    layer, _ = linear_pair({}, n=4)
    before = leaves(layer)
    layer.reset_fast_weights()
    assert torch.equal(layer.weight, before["weight"]) and torch.equal(layer.bias, before["bias"])
    assert not (torch.equal(layer.r, before["r"]) and torch.equal(layer.s, before["s"]))


@pytest.mark.parametrize("name", ["Linear", "Conv1d"])
@pytest.mark.parametrize(
    "options, match",
    [
        ({"init": "zeros", "n": 2}, "random_sign, normal, ones.*'zeros'"),
        ({"n": 0}, "n=0"),
        ({"n": 2.0}, "n=2.0"),
    ],
)
def test_layer_errors(name, options, match):
    args = (3, 4) if name == "Linear" else (3, 4, 1)
    with pytest.raises(ValueError, match=match):
        getattr(el, f"BatchEnsemble{name}")(*args, **options)


@pytest.mark.parametrize(
    "module, options, match",
    [
        (nn.Linear(2, 2), {}, "none"),
        (nn.Sequential(telltale(2), telltale(3)), {}, r"n=\[2, 3\]"),
        (telltale(2), {"train": "share"}, "'share'"),
        ([telltale(2)], {}, "a module, got list"),
        (el.BatchEnsemble(telltale(2)), {}, "without a whole BatchEnsemble in it, got one"),
        (nn.Sequential(telltale(2), el.to_stacked(nn.Linear(2, 2), n=2)), {}, "Stacked.* as '1'"),
    ],
)
def test_wrapper_errors(module, options, match):
    with pytest.raises(ValueError, match=match):
        el.BatchEnsemble(module, **options)


@pytest.mark.parametrize(
    "text, layer",
    [
        ("in_features=5, out_features=4, bias=True, n=3", lambda: linear_pair({}, 3)[0]),
        (
            "padding=(1, 1), groups=2, bias=False",
            lambda: conv_pair(2, {"padding": 1, "groups": 2, "bias": False}, 3)[0],
        ),
        ("n=3, train='repeat'", lambda: el.BatchEnsemble(telltale(3), train="repeat")),
    ],
)
def test_repr(text, layer):
    assert text in repr(layer())


def test_n_is_that_of_the_shapes():
    assert telltale(5).n == 5 and el.BatchEnsemble(telltale(5)).n == 5


def test_compile():
    model = el.BatchEnsemble(nn.Sequential(linear_pair({}, n=2)[0], nn.ReLU()))
    x = torch.randn(4, 5, dtype=torch.float64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for mode in (True, False):
        model.train(mode)
        torch.testing.assert_close(compiled(x), model(x))


def test_the_wrapper_checks_the_number_of_members():
    layer = el.BatchEnsembleLinear(3, 2, n=4)
    assert el.BatchEnsemble(layer, n=4).n == 4
    with pytest.raises(ValueError, match="n=3 members, got n=4"):
        el.BatchEnsemble(layer, n=3)


# Pairs of fast weights


def explicit_pairs(make, own, x):
    """As ``explicit``, for several pairs: the sum over them, the bias once."""
    bias = own.pop("bias", None)
    ranks = zip(own["r"].unbind(1), own["s"].unbind(1), strict=True)
    y = 0
    for r, s in ranks:
        zero = {} if bias is None else {"bias": torch.zeros_like(bias)}
        y = y + explicit(make, {**own, "r": r, "s": s, **zero}, x)
    if bias is None:
        return y
    return y + bias.repeat_interleave(len(x) // len(bias), 0).view(
        len(x), -1, *(1,) * (y.dim() - 2)
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_several_pairs(kind, bias):
    if kind == "linear":
        layer, make = linear_pair({"bias": bias}, n=3, rank=2)
        x = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    else:
        layer, make = conv_pair(2, {"bias": bias, "groups": 2}, n=3, rank=3)
        x = torch.randn(6, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    of_rank(layer)
    names = [k for k, _ in layer.named_parameters()]
    own = leaves(layer)
    y, z = layer(x), explicit_pairs(make, dict(own), x)
    torch.testing.assert_close(y, z)
    g = torch.randn_like(z)
    torch.testing.assert_close(
        torch.autograd.grad(y, [x, *layer.parameters()], g),
        torch.autograd.grad(z, [x, *(own[k] for k in names)], g),
    )
    plain = make()
    for i, rows in enumerate(x.chunk(3)):
        member = el.member(layer, i)
        assert vars(member).keys() == vars(plain).keys()
        torch.testing.assert_close(member(rows), y.chunk(3)[i])


@pytest.mark.parametrize("init", ["random_sign", "normal", "ones"])
def test_further_pairs_start_without_effect_and_learn(init):
    layer, _ = linear_pair({}, n=2, rank=3, init=init)
    assert layer.rank == 3 and layer.r.shape == (2, 3, 5) and layer.s.shape == (2, 3, 4)
    assert "rank=3" in repr(layer) and "rank" not in repr(linear_pair({}, n=2)[0])
    assert (layer.s[:, 1:] == 0).all()
    one = el.BatchEnsembleLinear(5, 4, n=2, dtype=torch.float64)
    with torch.no_grad():
        one.weight.copy_(layer.weight)
        one.bias.copy_(layer.bias)
        one.r.copy_(layer.r[:, 0])
        one.s.copy_(layer.s[:, 0])
    x = torch.randn(8, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), one(x))
    layer(x).pow(2).sum().backward()
    first, second = layer.s.grad[:, 1], layer.s.grad[:, 2]
    assert first.any() and second.any() and not torch.equal(first, second)


# Random starts


def test_probability_and_deviation_of_the_start():
    for positive in (0.0, 0.2, 1.0):
        layer = el.BatchEnsembleLinear(300, 200, n=4, positive=positive)
        for fast in (layer.r, layer.s):
            assert set(fast.unique().tolist()) <= {-1, 1}
            assert (fast == 1).float().mean().item() == pytest.approx(positive, abs=0.06)
    layer = el.BatchEnsembleLinear(300, 200, n=4, init="normal", std=0.1)
    assert layer.r.std().item() == pytest.approx(0.1, rel=0.1)
    assert layer.s.mean().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"positive": 1.5}, "positive=1.5"),
        ({"std": -1.0}, "std=-1.0"),
        ({"rank": 0}, "rank=0"),
        ({"rank": 1.5}, "rank=1.5"),
    ],
)
def test_wrong_starts(options, match):
    for make in (
        lambda: el.BatchEnsembleLinear(2, 2, n=2, **options),
        lambda: el.BatchEnsembleConv1d(2, 2, 1, n=2, **options),
        lambda: el.to_batch_ensemble(nn.Linear(2, 2), n=2, **options),
    ):
        with pytest.raises(ValueError, match=match):
            make()


@pytest.mark.parametrize(
    "members, match",
    [
        (torch.tensor([0, 1]), r"\[3\].*got \[2\]"),
        (torch.tensor([[0], [1], [0]]), r"\[3\].*\[3, 1\]"),
        (torch.tensor([0, 1, 7]), r"0\.\.1, got 7"),
        (torch.tensor([0, -1, 1]), r"0\.\.1, got -1"),
        ([0, 1, 1], "tensor.*got list"),
        (torch.tensor([0.0, 1.0, 1.0]), "int64.*got torch.float32"),
        (torch.tensor([True, False, True]), "int64.*got torch.bool"),
    ],
)
def test_wrong_members(members, match):
    with pytest.raises((ValueError, IndexError), match=match):
        el.BatchEnsemble(telltale(2))(torch.zeros(3, 1), members=members)


def test_members_of_functions():
    layer, _ = linear_pair({}, n=2)
    tensors = (layer.weight, layer.r, layer.s)
    for members, match in (([0, 1], "tensor.*got list"), (torch.ones(2), "torch.float32")):
        with pytest.raises(ValueError, match=match):
            el.functional.batch_ensemble_linear(torch.zeros(2, 5), *tensors, members=members)
    members = torch.tensor([1, 0], dtype=torch.int32)
    x = torch.randn(2, 5, dtype=torch.float64)
    y = el.functional.batch_ensemble_linear(x, *tensors, members=members)
    torch.testing.assert_close(
        y, el.functional.batch_ensemble_linear(x, *tensors, members=members.long())
    )


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("rank", [1, 2])
def test_export(mode, rank):
    model = el.BatchEnsemble(nn.Sequential(linear_pair({}, n=2, rank=rank)[0], nn.ReLU()))
    model, x = model.train(mode), torch.randn(8, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


def test_compiled_training_has_the_gradients_of_eager_training():
    layer, _ = linear_pair({}, n=2, init="normal")
    x = torch.randn(8, 5, dtype=torch.float64)
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        y = call(x)
        results.append([y, *torch.autograd.grad(y.sin().sum(), list(layer.parameters()))])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("training", [True, False])
def test_export_with_any_number_of_rows(training):
    model = el.to_batch_ensemble(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), n=2)
    model.train(training)
    rows = 2 * torch.export.Dim("half", min=2, max=512) if training else torch.export.Dim.DYNAMIC
    exported = torch.export.export(model, (torch.randn(8, 6),), dynamic_shapes=(({0: rows},),))
    x = torch.randn(20, 6)
    torch.testing.assert_close(exported.module()(x), model(x))


class WithMembers(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, members):
        return self.model(x, members=members)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_export_with_any_batch_from_one_row_on(indexed, strict):
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    model = el.to_batch_ensemble(net, n=3, init="normal").eval()
    x, rows = torch.randn(6, 2, 4, 4), torch.export.Dim.DYNAMIC
    whole = WithMembers(model) if indexed else model

    def inputs(x):
        return (x, torch.randint(3, (len(x),))) if indexed else (x,)

    sizes = ({0: rows}, {0: rows}) if indexed else (({0: rows},),)
    exported = torch.export.export(whole, inputs(x), dynamic_shapes=sizes, strict=strict)
    for count in (1, 2, 3, 50):
        given = inputs(torch.randn(count, 2, 4, 4))
        torch.testing.assert_close(exported.module()(*given), whole(*given))
