"""BatchNorm with a set of parameters and statistics for each member of a BatchEnsemble."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from . import functional
from ._assignment import Assigned
from .ops import member_scale
from .simplex import check_n


class BatchEnsembleNorm(Assigned, _BatchNorm):
    """What the layers have in common."""

    plain_class: type[_BatchNorm]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        n: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self._attach(n)

    def _attach(self, n: int) -> None:
        check_n(n)
        self.n = n
        for own in (self._parameters, self._buffers):
            for name, tensor in own.items():
                if tensor is not None and tensor.dim() == 1:
                    own[name] = _repeated(tensor, n)

    def _detach(self, i: int) -> None:
        """Keep member i's parameters and statistics only, as the plain layer has them."""
        for own in (self._parameters, self._buffers):
            for name, tensor in own.items():
                if tensor is not None and tensor.dim() == 2:
                    one = tensor.detach()[i].clone()
                    is_parameter = isinstance(tensor, nn.Parameter)
                    own[name] = nn.Parameter(one, tensor.requires_grad) if is_parameter else one
        del self.n
        vars(self).pop("assignment", None)

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        of_batch = self.training or self.running_mean is None
        members = self.members
        if members is not None and of_batch:
            raise ValueError(
                "expected a member-major batch, or running statistics in evaluation, for BatchNorm "
                "of each member's own: rows by members= are no batch of a member's"
            )
        members = functional.check_members(x, self.n, members)
        if members is not None:
            return self._by_index(x, members)
        momentum = self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # The mean over all batches.
                momentum = 1.0 / float(self.num_batches_tracked)
        tensors = (self.running_mean, self.running_var, self.weight, self.bias)
        each = [[None] * self.n if t is None else t.unbind(0) for t in tensors]
        rows = x.unflatten(0, (self.n, x.shape[0] // self.n)).unbind(0)
        return torch.cat(
            [
                F.batch_norm(own, mean, var, weight, bias, of_batch, momentum or 0.0, self.eps)
                for own, mean, var, weight, bias in zip(rows, *each, strict=True)
            ]
        )

    def _by_index(self, x: Tensor, members: Tensor) -> Tensor:
        """Evaluation of rows with a member each: one scale and one shift of a member's channels."""
        scale, shift = scale_and_shift(self)
        # In the statistics' precision, as F.batch_norm does for half precision too.
        return member_scale.scale(x.to(scale.dtype), scale, shift, members).to(x.dtype)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # A plain layer's tensors become every member's.
        for name in ("weight", "bias", "running_mean", "running_var"):
            tensor = state_dict.get(prefix + name)
            if isinstance(tensor, Tensor) and tensor.dim() == 1:
                state_dict[prefix + name] = tensor.repeat(self.n, 1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, n={self.n}"


def scale_and_shift(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """What a BatchNorm with running statistics does in evaluation: ``x * scale + shift``."""
    scale = (norm.running_var + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias


def _repeated(tensor: Tensor, n: int) -> Tensor:
    copies = tensor.detach().repeat(n, 1)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copies, requires_grad=tensor.requires_grad)
    return copies


_DOC = """nn.BatchNorm{k}d for n members at once, with parameters and statistics of each one's own.

    Args:
        n: number of members.
        Others: as for nn.BatchNorm{k}d.

    Shape:
        - Input and output: nn.BatchNorm{k}d's, for a member-major batch ``[n * b, ...]``; in
          evaluation a :class:`BatchEnsemble` may call it with ``members`` too
        - weight, bias, running_mean, running_var: ``[n, num_features]``

    Raises:
        ValueError: n < 1; in the forward pass, a batch that does not divide by n, or, where the
            batch's own statistics count, one that has its members by an index.

    >>> layer = BatchEnsembleNorm{k}d(3, n=4)
    >>> layer(torch.zeros(4 * 2, 3{ones})).shape, layer.weight.shape
    (torch.Size([8, 3{ones}]), torch.Size([4, 3]))
    """


class BatchEnsembleNorm1d(BatchEnsembleNorm, nn.BatchNorm1d):
    __doc__ = _DOC.format(k=1, ones="")
    plain_class = nn.BatchNorm1d


class BatchEnsembleNorm2d(BatchEnsembleNorm, nn.BatchNorm2d):
    __doc__ = _DOC.format(k=2, ones=", 5, 5")
    plain_class = nn.BatchNorm2d


class BatchEnsembleNorm3d(BatchEnsembleNorm, nn.BatchNorm3d):
    __doc__ = _DOC.format(k=3, ones=", 5, 5, 5")
    plain_class = nn.BatchNorm3d


TYPED_NORMS = {
    cls.plain_class: cls for cls in (BatchEnsembleNorm1d, BatchEnsembleNorm2d, BatchEnsembleNorm3d)
}
