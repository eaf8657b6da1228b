"""Calls of a whole model: which rows are whose, masks, states, wrong inputs."""

import functools

import pytest
import torch
from distinct import telltale
from fast_weights import linear_pair
from torch import nn

import ensemblayers as el


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


@pytest.mark.parametrize(
    ("layer", "shape", "weight"),
    [
        (el.BatchEnsembleLinear(3, 4, n=2), (4, 5), "[4, 3]"),
        (el.BatchEnsembleConv2d(3, 4, 3, n=2), (4, 5, 6, 6), "[4, 3, 3, 3]"),
        (el.BatchEnsembleConv2d(6, 4, 3, groups=2, n=2), (4, 3, 6, 6), "[4, 3, 3, 3]"),
        (el.BatchEnsembleConv1d(3, 4, 3, n=2), (3, 6), "[4, 3, 3]"),
    ],
)
def test_other_features_than_the_weights_are_named(layer, shape, weight):
    with pytest.raises(ValueError) as caught:
        layer(torch.zeros(shape))
    assert weight in str(caught.value) and str(list(shape)) in str(caught.value)


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
