"""Predictions of an ensemble's members, their combination and their uncertainty."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._module import check_module, check_outermost
from ._outputs import stack_outputs
from ._own_inputs import OwnInputs
from .batch_ensemble import (
    BatchEnsemble,
    BatchEnsembleLayer,
    batch_ensemble_size,
    repeat_forward,
)
from .simplex import at, vertex_count
from .stacked import StackedEnsemble
from .subspace import SubspaceLayer


def members(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Outputs of all members for one batch: ``[n, B, ...]``, whatever the kind of ensemble.

    The members of a subspace are its vertices; a plain module counts as one member. The model's
    mode stays as it is: call ``model.eval()`` before. One thread at a time: meanwhile, a subspace
    is at its vertices for all.

    Args:
        model: an ensemble, or a plain module.
        *args, **kwargs: the model's arguments, ``[B, ...]``, shared by all members.

    Raises:
        ValueError: no module, or one that holds a BatchEnsemble or a StackedEnsemble among others,
            or outputs that can't be stacked.

    >>> from ensemblayers import SubspaceLinear
    >>> members(SubspaceLinear(8, 2, n=3), torch.zeros(5, 8)).shape
    torch.Size([3, 5, 2])
    """
    if isinstance(model, StackedEnsemble):
        return model(*args, shared=True, **kwargs)
    check_outermost(model)
    kinds = {
        k for m in model.modules() for k in (SubspaceLayer, BatchEnsembleLayer) if isinstance(m, k)
    }
    if BatchEnsembleLayer in kinds:
        if isinstance(model, BatchEnsemble):
            return model.every_member(args, kwargs)
        return repeat_forward(model, batch_ensemble_size(model), args, kwargs)
    if not kinds:
        return stack_outputs([model(*args, **kwargs)])
    inputs, outputs = OwnInputs(), []
    for vertex in range(vertex_count(model)):
        with at(model, vertex=vertex):
            outputs.append(inputs.call("vertex", lambda a, k: model(*a, **k), args, kwargs))
    return stack_outputs(outputs)


def combine(
    logits: Tensor, rule: Literal["average", "hard", "majority", "logits"] = "average"
) -> Tensor:
    """Combine the members' logits into one prediction.

    Args:
        rule: ``"average"``: the mean of the members' probabilities. ``"logits"``: the
            probabilities of the mean logits. ``"hard"``: the probabilities of the most confident
            member. ``"majority"``: each class's share of the members' votes; among classes of
            equal votes the one of the highest mean probability comes first.

    Shape:
        - logits: ``[n, ..., classes]``
        - Output: ``[..., classes]``, probabilities that sum to 1

    Raises:
        ValueError: an unknown rule, no tensor of floats, or fewer than 2 dimensions.

    >>> combine(torch.tensor([[[0.0, 1e4]], [[1e4, 0.0]]]))
    tensor([[0.5000, 0.5000]])
    """
    _check_logits(logits)
    n, classes = logits.shape[0], logits.shape[-1]
    if rule == "logits":
        return logits.mean(0).softmax(-1)
    p = logits.softmax(-1)
    mean = p.mean(0)
    if rule == "average":
        return mean
    if rule == "hard":
        most_confident = p.amax(-1, keepdim=True).argmax(0, keepdim=True)
        return p.gather(0, most_confident.expand(1, *p.shape[1:])).squeeze(0)
    if rule == "majority":
        votes = nn.functional.one_hot(logits.argmax(-1), classes).sum(0).to(mean.dtype)
        tied = votes == votes.amax(-1, keepdim=True)
        winner = mean.masked_fill(~tied, -1).argmax(-1, keepdim=True)
        # The winner of a tie, of at most half of the votes, comes first by what rounding leaves.
        leads = nn.functional.one_hot(winner.squeeze(-1), classes) * (
            tied.sum(-1, keepdim=True) > 1
        )
        return votes / n + leads.to(mean.dtype) * torch.finfo(mean.dtype).eps
    raise ValueError(f"expected rule average, logits, hard or majority, got rule={rule!r}")


def _check_logits(logits: Tensor) -> None:
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = f"a tensor of {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"expected logits [n, ..., classes], a tensor of floats, got {got}")
    if logits.dim() < 2:
        raise ValueError(f"expected logits [n, ..., classes], got {list(logits.shape)}")


class Uncertainty(NamedTuple):
    """Entropies of a prediction, in nats, ``[...]`` each; total = expected + information."""

    total: Tensor
    expected: Tensor
    information: Tensor


def uncertainty(logits: Tensor) -> Uncertainty:
    """Split the uncertainty of an ensemble's prediction into the members' own and their dispute.

    ``total`` is the entropy of the averaged probabilities, ``expected`` the mean entropy of the
    members, and ``information`` their difference: the mutual information of the prediction and
    the choice of the member, 0 where all members agree.

    Shape:
        - logits: ``[n, ..., classes]``
        - Output: three tensors ``[...]``

    Raises:
        ValueError: no tensor of floats, or fewer than 2 dimensions.

    Source: Houlsby et al. 2011, https://arxiv.org/abs/1112.5745

    >>> uncertainty(torch.zeros(3, 1, 2)).total
    tensor([0.6931])
    """
    _check_logits(logits)
    log_p = logits.log_softmax(-1).clamp_min(torch.finfo(logits.dtype).min)  # -inf of masked ones
    log_mean = log_p.logsumexp(0) - math.log(logits.shape[0])
    total = _entropy(log_mean)
    expected = _entropy(log_p).mean(0)
    return Uncertainty(total, expected, (total - expected).clamp_min(0))


def _entropy(log_p: Tensor) -> Tensor:
    # Not torch.special.entr of the probabilities: where one is 0, its gradient is not finite.
    return -(log_p.exp() * log_p).sum(-1)


def ensemble_loss(
    loss: Any, logits: Tensor, target: Tensor, *, over_members: Literal["sum", "mean"] = "sum"
) -> Tensor:
    """Loss of an ensemble whose members each have a mean loss of their own.

    Args:
        loss: ``loss(logits, target)`` of one member, for example ``F.cross_entropy``.
        over_members: ``"sum"``: one step on it equals n separate steps. ``"mean"``: the same
            divided by n, which divides every member's learning rate by n.

    Shape:
        - logits: ``[n, B, ...]``; not the ``[B, ...]`` of a BatchEnsemble in training, whose rows
          are divided among the members: their loss is ``loss(logits, target)``
        - target: ``[B, ...]``, the same for all members
        - Output: a scalar

    >>> ensemble_loss(nn.functional.cross_entropy, torch.zeros(3, 1, 2), torch.tensor([0]))
    tensor(2.0794)
    """
    losses = torch.stack([loss(own, target) for own in logits])
    if over_members not in ("sum", "mean"):
        raise ValueError(f"expected over_members sum or mean, got over_members={over_members!r}")
    return losses.sum() if over_members == "sum" else losses.mean()


class Recalibration:
    """What :func:`recalibrate` returns: as a context manager, it restores the old statistics."""

    def __init__(self, saved: list[tuple[Tensor, Tensor]]) -> None:
        self._saved = saved

    def restore(self) -> None:
        """Write the statistics from before the recalibration back."""
        for buffer, before in self._saved:
            buffer.copy_(before)

    def __enter__(self) -> "Recalibration":
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


@torch.no_grad()
def recalibrate(model: nn.Module, data: Iterable[Any]) -> Recalibration:
    """Compute BatchNorm's running statistics anew at the model's present point.

    A network at a new point of its subspace has no valid running statistics: those of training
    belong to many points. The statistics become the plain mean over all batches (momentum None);
    everything else of the model stays in evaluation mode meanwhile. Modes, momentum and the state
    of the random generators are as before afterwards.

    Args:
        model: any module; without BatchNorm statistics, nothing happens.
        data: batches of inputs, or tuples and lists whose first item is the input.

    Returns:
        A handle. ``with recalibrate(model, data): evaluate(model)`` restores the old statistics at
        the end, so that an evaluation in mid-training leaves no trace.

    Raises:
        ValueError: ``data`` is empty.

    >>> model = nn.Sequential(nn.BatchNorm1d(2))
    >>> with recalibrate(model, [torch.full((4, 2), 3.0)]):
    ...     model[0].running_mean
    tensor([3., 3.])
    >>> model[0].running_mean
    tensor([0., 0.])
    """
    check_module(model)
    modules = list(model.modules())
    for ensemble in [m for m in modules if isinstance(m, StackedEnsemble)]:
        modules += ensemble.skeleton_modules()
    norms = [m for m in modules if isinstance(m, _BatchNorm) and m.track_running_stats]
    # vmap can't do momentum None, which alone is right for a norm that is called several times.
    strategies = [(m, m.strategy) for m in modules if isinstance(m, StackedEnsemble)]
    modes = [(m, m.training) for m in modules]
    momenta = [(m, m.momentum) for m in norms]
    buffers = [b for m in norms for b in m.buffers(recurse=False)]
    handle = Recalibration([(b, b.clone()) for b in buffers if not b.is_meta])
    first = next(model.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")
    batches = 0
    with _generators_kept(data, device):
        try:
            model.eval()
            for m in norms:
                m.training = True
                m.momentum = None
                m.reset_running_stats()
            for ensemble, _ in strategies:
                ensemble.strategy = "loop"
            for batch in data if norms else ():
                batches += 1
                x = batch[0] if isinstance(batch, (tuple, list)) else batch
                model(x.to(device))
            if norms and not batches:
                raise ValueError("expected at least one batch of data, got none")
        except BaseException:
            handle.restore()
            raise
        finally:
            for m, mode in modes:
                m.training = mode
            for m, momentum in momenta:
                m.momentum = momentum
            for ensemble, strategy in strategies:
                ensemble.strategy = strategy
    return handle


@contextlib.contextmanager
def _generators_kept(data: Any, device: torch.device) -> Iterator[None]:
    """Restore the state of torch's generators, and of a data loader's own."""
    batches = getattr(data, "batch_sampler", None)
    owners = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    own = {g for o in owners if (g := getattr(o, "generator", None)) is not None}
    states = [(g, g.get_state()) for g in own]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)
