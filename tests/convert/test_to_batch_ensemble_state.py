"""State dicts and copies of converted networks: whole, plain, incomplete, in a parent."""

import copy
import io

import pytest
import torch
from branched import OWN, images, plain
from copies import through_averaging, through_pickle, through_save
from torch import nn

import ensemblayers as el

pytestmark = pytest.mark.filterwarnings("ignore:shared by all members", "ignore:.*nested tensor")


@pytest.mark.parametrize("assign", [False, True])
def test_plain_state_dict(assign):
    model, other = el.to_batch_ensemble(plain(), n=3), plain()
    fast = {k: v.clone() for k, v in model.state_dict().items() if k.endswith((".r", ".s"))}
    assert len(fast) == 10
    state = other.state_dict()
    keys = list(state)
    model.load_state_dict(state, strict=True, assign=assign)
    assert list(state) == keys
    now = model.state_dict()
    for k, v in state.items():
        layer, _, kind = k.rpartition(".")
        expected = torch.stack([v] * 3) if kind == "bias" and layer + ".r" in now else v
        assert torch.equal(now[k], expected)
    assert all(torch.equal(now[k], v) for k, v in fast.items())
    # A step works, and moves each member's bias on its own.
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(images()) ** 2).sum().backward()
    opt.step()
    assert not torch.equal(model.module.twice.bias[0], model.module.twice.bias[1])


@pytest.mark.parametrize("drop", ["stem.weight", "stem.bias", "norm.running_mean"])
def test_incomplete_state_dict(drop):
    state = plain().state_dict()
    del state[drop]
    with pytest.raises(RuntimeError, match=drop):
        el.to_batch_ensemble(plain(), n=3).load_state_dict(state)


def loaded_directly(model, state):
    return model.load_state_dict(state)


def loaded_in_a_parent(model, state):
    state_ = type(state)((f"a.{k}", v) for k, v in state.items())
    if hasattr(state, "_metadata"):
        state_._metadata = {f"a.{k}".rstrip("."): v for k, v in state._metadata.items()}
    return nn.ModuleDict({"a": model}).load_state_dict(state_)


def loaded_as_the_inner_module(model, state):
    return model.module.load_state_dict(state)


LOADS = [
    (load, keep)
    for load in (loaded_directly, loaded_in_a_parent, loaded_as_the_inner_module)
    for keep in (copy.copy, dict)  # With metadata, and without, as safetensors loads it.
]
DROPS = [
    ["stem.r"],
    ["twice.s"],
    ["stem.r", "heads.b.s"],
    [f"{name}.r" for name in ("stem", "blocks.0", "twice", "heads.a", "heads.b")],
]
OF_A_LAYER = ["stem.r", "stem.s"]  # Without metadata and without the wrapper: a plain layer's.


@pytest.mark.parametrize(
    "load, keep, drop",
    [(*how, drop) for how in LOADS for drop in DROPS]
    + [(*how, OF_A_LAYER) for how in LOADS if how != (loaded_as_the_inner_module, dict)],
)
def test_missing_fast_weights_are_reported(load, keep, drop):
    source = el.to_batch_ensemble(plain(), n=3)
    state = keep(source.state_dict())
    for key in drop:
        del state[key]
    model = el.to_batch_ensemble(plain(), n=3)
    with pytest.raises(RuntimeError, match="Missing key") as error:
        load(model, state)
    text = str(error.value)
    assert all(f'{key}"' in text for key in drop)
    assert sum(text.count(f'.{fast}"') for fast in "rs") == len(drop)
    assert ("a.module." in text) == (load is loaded_in_a_parent)
    renamed = keep(source.state_dict())
    renamed["stem.rr"] = renamed.pop("stem.r")
    with pytest.raises(RuntimeError, match=r"stem\.r\""):
        load(model, renamed)


@pytest.mark.parametrize("load, keep", LOADS)
def test_whole_and_plain_state_dicts_load(load, keep):
    model, source, other = (
        el.to_batch_ensemble(plain(), n=3),
        el.to_batch_ensemble(plain(), n=3),
        plain(),
    )
    fast = {k: v.clone() for k, v in model.state_dict().items() if k.endswith((".r", ".s"))}
    load(model, keep(other.state_dict()))
    now = model.state_dict()
    torch.testing.assert_close({k: now[k] for k in fast}, fast)
    torch.testing.assert_close(now["twice.weight"], other.twice.weight.detach())
    load(model, keep(source.state_dict()))
    torch.testing.assert_close(model.state_dict(), source.state_dict())
    result = model.load_state_dict({"twice.r": fast["twice.r"]}, strict=False)
    assert torch.equal(model.module.twice.r, fast["twice.r"])
    assert {"twice.s", "stem.r", "stem.weight"} <= set(result.missing_keys)


@pytest.mark.parametrize("load, keep", LOADS)
def test_missing_fast_weights_of_a_single_layer(load, keep):
    model = el.to_batch_ensemble(nn.Linear(3, 2), n=3)
    state = keep(model.state_dict())
    load(model, state)
    del state["s"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "(a\.module\.)?s"'):
        load(model, state)
    load(model, keep(nn.Linear(3, 2).state_dict()))


def test_a_layer_that_was_plain_when_it_was_saved():
    source = el.to_batch_ensemble(plain(), n=3, where=lambda m, name: name != "twice")
    model = el.to_batch_ensemble(plain(), n=3)
    r = model.module.twice.r.detach().clone()
    model.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(model.module.twice.r, r)
    torch.testing.assert_close(model.module.twice.weight, source.module.twice.weight)


def by_state_dict(model):
    other = el.to_batch_ensemble(plain(), n=model.n)
    other.load_state_dict(model.state_dict(), strict=True)
    return other


def by_parent(model):
    old, new = (nn.ModuleDict({"a": m}) for m in (model, el.to_batch_ensemble(plain(), n=model.n)))
    assert "a.stem.weight" in old.state_dict()
    new.load_state_dict(old.state_dict(), strict=True)
    return new["a"]


def by_save_of_state(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    other = el.to_batch_ensemble(plain(), n=model.n)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())), strict=True)
    return other


ROUND_TRIPS = {
    "state_dict": by_state_dict,
    "in a parent": by_parent,
    "torch.save": through_save,
    "saved state_dict": by_save_of_state,
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "AveragedModel": through_averaging,
}


@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_round_trips(trip):
    model = el.to_batch_ensemble(plain(), n=3)
    model(images()).sum().backward()
    other = ROUND_TRIPS[trip](model.eval()).eval()
    x = images()
    assert torch.equal(model(x), other(x))
    assert other.n == 3 and all(m.n == 3 for m in other.modules() if isinstance(m, OWN))
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}
    other.train()(x).sum().backward()
