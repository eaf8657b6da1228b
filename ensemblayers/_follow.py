"""The hook by which a subspace optimizer takes over the mode of a model."""

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from ._optimizer import SubspaceOptimizer


class Follower:
    """Runs before a model's forward passes and before its state_dict is taken.

    On a copy of the model it does nothing: the optimizer has the parameters of the original. Where
    both were copied together, the copy of the optimizer takes its own followers over.
    """

    def __init__(self, optimizer: "SubspaceOptimizer", model: nn.Module) -> None:
        self.optimizer: SubspaceOptimizer | None = optimizer
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self.before_forward),
            model.register_state_dict_pre_hook(self.before_saving),
        ]

    def before_forward(self, model: nn.Module, args: Any) -> None:
        if self.optimizer is not None:
            self.optimizer.switch("train" if model.training else "eval")

    def before_saving(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        # Weights that were loaded into the model are saved as they are.
        if self.optimizer is not None and self.optimizer.is_untouched():
            self.optimizer.switch("train" if model.training else "eval")

    def remove(self) -> None:
        """Stop to follow the model."""
        for handle in self._handles:
            handle.remove()
        if self.optimizer is not None:
            self.optimizer.followers.remove(self)
        self.optimizer = None

    def __getstate__(self) -> dict[str, Any]:
        # The handles would take all hooks of the model along with a copy of the optimizer.
        return {"optimizer": None, "_handles": []}
