"""Saving, loading, copying and moving a stacked ensemble."""

import copy
import io

import pytest
import torch
from copies import through_averaging, through_pickle, through_save
from nets import QUIET, assert_members, batchnorm, make, vectors
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import ensemblayers as el

pytestmark = QUIET


def test_state_dict_and_plain_state_dict():
    nets, source = make("batchnorm"), batchnorm()
    ensemble = el.StackedEnsemble(nets)
    assert_members(ensemble, nets)
    source(vectors(9))
    state = source.state_dict()
    for assign in (False, True):
        ensemble = el.StackedEnsemble(nets)
        ensemble.load_state_dict(state, strict=True, assign=assign)
        assert_members(ensemble, [source] * 3)
        opt = torch.optim.SGD(ensemble.parameters(), lr=0.1)
        ensemble(vectors(3, 5), shared=False).pow(2).sum().backward()
        opt.step()
        assert not torch.equal(ensemble.module[0].weight[0], ensemble.module[0].weight[1])
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        el.StackedEnsemble(nets).load_state_dict(
            {k: v for k, v in state.items() if k != "0.weight"}
        )


def by_state_dict(ensemble):
    file = io.BytesIO()
    torch.save(ensemble.state_dict(), file)
    other = el.StackedEnsemble([ensemble.member(0) for _ in range(ensemble.n)])
    other.reset_parameters()
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())), strict=True)
    return other


ROUND_TRIPS = {
    "state_dict": by_state_dict,
    "torch.save": through_save,
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "AveragedModel": through_averaging,
}


@pytest.mark.parametrize("name", ["batchnorm", "LSTM", "plain tensor", "counter", "hidden"])
@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_round_trips(name, trip):
    if trip == "state_dict" and name in ("plain tensor", "counter", "hidden"):
        return  # Their state is no part of a state_dict.
    ensemble = el.StackedEnsemble(make(name))
    ensemble(vectors(5)).sum().backward()
    other = ROUND_TRIPS[trip](ensemble.eval()).eval()
    x = vectors(5)
    torch.testing.assert_close(other(x), ensemble(x))
    assert not {id(p) for p in other.parameters()} & {id(p) for p in ensemble.parameters()}
    torch.optim.SGD(other.parameters(), lr=1.0).zero_grad()
    other.train()(x).sum().backward()
    assert all(p.grad is not None for p in other.parameters())


@pytest.mark.parametrize("name", ["batchnorm", "momenta", "scalars", "LSTM"])
def test_modes_and_dtype_propagate(name):
    ensemble = el.StackedEnsemble(make(name)).eval()
    assert not any(m.training for m in ensemble.modules())
    x = vectors(5)
    assert torch.equal(ensemble(x), ensemble(x))
    ensemble.train().float()
    assert all(m.training for m in ensemble.modules())
    assert ensemble(x.float()).dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in ensemble.member(0).parameters())
    assert all(p.is_meta for p in ensemble.to("meta").parameters())


@pytest.mark.parametrize("wrap", [el.to_stacked, el.to_batch_ensemble])
def test_versions_in_a_state_dict_reach_the_modules(wrap):
    ensemble = wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), n=2)
    seen = []
    norm = ensemble.module[1]
    norm.register_load_state_dict_pre_hook(lambda m, sd, prefix, meta, *rest: seen.append(meta))
    ensemble.load_state_dict(ensemble.state_dict())
    assert seen == [{"version": 2}]
    with pytest.raises(RuntimeError, match=r'"0\.weight"'):
        ensemble.load_state_dict({})


WRAPPED = {
    "sequential": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
    "linear": lambda: nn.Linear(4, 3),
}


@pytest.mark.parametrize("wrap", [el.to_stacked, el.to_batch_ensemble])
@pytest.mark.parametrize("kind", WRAPPED)
def test_functional_call_takes_names_and_refuses_keys(wrap, kind):
    one, other = (wrap(WRAPPED[kind](), n=2).eval() for _ in range(2))
    x, state = torch.randn(6, 4), other.state_dict()
    tensors = dict(other.named_parameters()) | dict(other.named_buffers())
    assert torch.equal(torch.func.functional_call(one, tensors, x), other(x))
    assert not torch.equal(one(x), other(x))
    with pytest.raises(AttributeError) as error:
        torch.func.functional_call(one, state, x)
    cause = error.value.__cause__ or error.value
    first = next(iter(state)).partition(".")[0]
    assert f"expected module.{first}, got {first}" in str(cause)
    assert "dict(model.named_parameters()) | dict(model.named_buffers())" in str(cause)
    # torch.distributed.checkpoint pairs names with keys, which in the module are the same.
    assert list(get_model_state_dict(one.module)) == list(state)
    set_model_state_dict(one.module, get_model_state_dict(other.module))
    assert torch.equal(one(x), other(x))
    assert not hasattr(one, "nothing") and not hasattr(one, first)
