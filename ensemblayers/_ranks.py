"""What the subspace optimizers do about the other processes of torch.distributed."""

import gc
import sys
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._flat import Block, is_sharded
from ._seed import everyones, processes


class Ranks:
    """A part of :class:`~ensemblayers._optimizer.SubspaceOptimizer`: DDP, FSDP2, and neither."""

    _blocks: list[Block]
    _processes: int  # When the optimizer was built.
    _apart = False  # Whether the ranks hold different parameters so far.
    _in_use = False  # Whether gradients have come.
    _modules: Sequence[nn.Module] = ()  # Those under FSDP.

    def _find_modules(self, params: list[Tensor]) -> None:
        """Find the modules under FSDP that have some of these parameters."""
        for module in fsdp_modules() if processes() else ():
            own = {id(p) for p in module.parameters()}.intersection(map(id, params))
            if own:
                module.reshard()
                if not own <= {id(p) for p in module.parameters()}:
                    raise ValueError(
                        "expected the sharded parameters, got gathered ones: after a forward pass, "
                        "call model.reshard() before model.parameters()"
                    )
                self._modules = [*self._modules, module]

    def _compare(self) -> None:
        """Find out whether ranks hold different parameters: wrapping may give them rank 0's."""
        whole = [b for b in self._blocks if not is_sharded(b.params[0])]
        own = [(b.vertices.shape, float(b.vertices[0].sum(dtype=torch.float64))) for b in whole]
        self._apart = bool(own) and any(other != own for other in everyones(own))

    def _meet(self) -> None:
        """Take over rank 0's vertices, where ranks that differed were given its parameters.

        DistributedDataParallel does so at wrapping; without it the ranks stay apart, and that is
        so from the first step on.
        """
        if not self._apart:
            return
        changed = everyones(not self.is_untouched())
        self._apart = not any(changed)
        if any(changed[1:]) and not changed[0]:
            for block in self._blocks:
                if not is_sharded(block.params[0]):
                    rows = block.vertices.contiguous()
                    dist.broadcast(rows, src=0)
                    block.vertices.copy_(rows)
            self._write()

    def _check_in_use(self) -> None:
        """Raise where the optimizer was built too early for torch.distributed."""
        if not processes():
            return
        if processes() > max(self._processes, 1):
            raise RuntimeError(
                "the optimizer was built before init_process_group, and the ranks did not agree on "
                "a seed: build it afterwards, or load its state on every rank"
            )
        params = self._parameters()
        if self._in_use and any(p.grad is not None for p in params):
            return
        idle = [p for p in params if p.grad is None and not is_sharded(p)]
        if idle and not any(b.gathered for b in self._blocks) and left_behind(idle):
            raise RuntimeError(
                "the optimizer was built before fully_shard, which replaced the model's "
                "parameters: build it from model.parameters() after fully_shard"
            )
        self._in_use = len(idle) < len(params)

    def _reshard(self) -> None:
        # A root module keeps its gathered parameters after a forward pass without a backward.
        for module in self._modules:
            module.reshard()


def fsdp_modules() -> list[nn.Module]:
    """The modules alive in this process to which ``fully_shard`` was applied."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [m for m in gc.get_objects() if issubclass(type(m), kind)]


def left_behind(params: Iterable[Tensor]) -> bool:
    """Whether ``fully_shard`` put others in the place of some of these parameters.

    No module has those any more, and a module under FSDP has one of the same shape. Slow: walks
    all objects of the process.
    """
    shapes = {p.shape for m in fsdp_modules() for p in m.parameters() if is_sharded(p)}
    held = {
        id(p)
        for m in (gc.get_objects() if shapes else ())
        if issubclass(type(m), nn.Module)
        for p in m.__dict__.get("_parameters", {}).values()
    }
    return any(p.shape in shapes and id(p) not in held for p in params)
