"""How the subspace optimizers are saved, loaded, copied and pickled."""

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import _ahead
from ._ahead import Ahead
from ._flat import Block, local
from ._follow import Follower
from ._seed import processes

_OWN = ("n", "sigma", "frozen", "_mode", "_fixed", "_drawn", "_blocks")
_OWN += ("_seed", "_draws", "_fills", "_batch", "_points", "_processes", "_left_out")
_OWN += ("followers",)


class Saving(torch.optim.Optimizer):
    """A part of :class:`~ensemblayers._optimizer.SubspaceOptimizer`."""

    n: int
    frozen: int
    followers: list[Follower]
    _blocks: list[Block]
    _state: dict[Tensor, dict[str, Tensor]]
    _fixed: Tensor | None
    _drawn: Tensor
    _seed: int
    _draws: int
    _fills: int
    _processes: int
    _apart: bool

    def state_dict(self) -> dict[str, Any]:
        """The vertices and moments of each parameter, and the state of the draws.

        Under FSDP the former are DTensors, as torch's own optimizers have them. Save it as it is:
        ``get_optimizer_state_dict`` of ``torch.distributed.checkpoint`` drops the latter.

        Raises:
            RuntimeError: between ``accumulate()`` and ``step()``.
        """
        if any(block.gradients is not None for block in self._blocks):
            raise RuntimeError("gradients of several draws can't be saved: call step() first")
        self._settle()
        with self._hooks_aside("_optimizer_state_dict_post_hooks") as (hooks,):
            out = super().state_dict()
        cycles = [block.ahead for block in self._blocks]
        for block, ahead in zip(self._blocks, cycles, strict=True):
            if ahead is not None:
                self._add_points(out, block, ahead.points.clone())
        out["subspace"] = {
            "kind": type(self).__name__,
            "n": self.n,
            "frozen": self.frozen,
            "fixed": self._fixed,
            "drawn": self._drawn,
            "seed": self._seed,
            "draws": self._draws,
            "fills": self._fills,
            "steps": [list(block.steps) for block in self._blocks],
            "ahead": [None if ahead is None else ahead.state() for ahead in cycles],
        }
        for hook in hooks:
            changed = hook(self, out)
            out = out if changed is None else changed
        return out

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, and write the point in force into the model.

        The mode stays the optimizer's own: a state saved after ``eval()`` goes on in training.

        Raises:
            ValueError: the state of another number of vertices, of another optimizer, of parameters
                of other dtypes, or of other shards than this process has.
        """
        names = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
        with self._hooks_aside(*names) as (before, after):
            state_dict = dict(state_dict)
            for hook in before:
                changed = hook(self, state_dict)
                state_dict = state_dict if changed is None else changed
            self._load(state_dict)
            for hook in after:
                hook(self)

    @contextlib.contextmanager
    def _hooks_aside(self, *names: str) -> Iterator[list[list[Callable]]]:
        """Take hooks out of torch's hands, by the attributes that hold them: it has a part only."""
        held = {name: vars(self)[name] for name in names}
        try:
            vars(self).update({name: OrderedDict() for name in names})
            yield [list(hooks.values()) for hooks in held.values()]
        finally:
            vars(self).update(held)

    def _load(self, state_dict: dict[str, Any]) -> None:
        own = state_dict.get("subspace")
        wanted = (type(self).__name__, self.n)
        if own is None or (own["kind"], own["n"]) != wanted:
            found = "none" if own is None else f"that of {own['kind']} with n={own['n']}"
            raise ValueError(f"expected the state of {wanted[0]} with n={self.n}, got {found}")
        given = self._match(state_dict, self.n + own["frozen"])
        alike, saved = [len(b.params) for b in self._blocks], [len(s) for s in own["steps"]]
        if alike != saved:
            raise ValueError(
                f"expected parameters in groups {alike} of one dtype and device each, got {saved}"
            )
        # Not the values: torch would cast float32 vertices to the dtype of the parameters.
        super().load_state_dict({**state_dict, "state": {}})
        for block in self._blocks:
            # As many rows as were saved; their values follow.
            spare = block.vertices[:1].expand(own["frozen"], -1)
            block.set_rows([*block.vertices[: self.n], *spare])
        self.frozen = own["frozen"]
        self._rebind_groups()
        for block in self._blocks:
            # What was saved, whatever this optimizer's own groups kept so far.
            block.moments = {}
            names = given[block.params[0]].keys() - {"vertices", "points"}
            block.add_moments(sorted(names), self.n)
        self._state.clear()
        self._publish()
        for p, state in given.items():
            for name, own_values in self._state[p].items():
                local(own_values).copy_(local(state[name]))
        self._fixed, self._drawn = own["fixed"], own["drawn"]
        self._seed, self._draws, self._fills = own["seed"], own["draws"], own["fills"]
        self._processes, self._apart = processes(), False
        cycles = own.get("ahead") or [None] * len(self._blocks)
        for block, steps, cycle in zip(self._blocks, own["steps"], cycles, strict=True):
            block.steps = list(steps)
            block.gradients, block.gathered = None, set()
            if cycle is not None and _ahead.fits(block):
                block.ahead = Ahead(block)
                block.ahead.load(cycle)
                for k, p in enumerate(block.params):
                    block.view(block.ahead.points, k).copy_(given[p]["points"])
        self._write()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name in _OWN}
        # Without the state, views that are made anew: pickle would write their memory for each.
        return {**super().__getstate__(), **own, "state": {}}

    @torch.no_grad()
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: value for name, value in state.items() if name != "state"})
        self._state = defaultdict(dict)
        # Copies of parameters don't share memory with copies of their aliases.
        for block in self._blocks:
            block.shards = [local(p.detach()) for p in block.params]
            block.users = None
            if block.ahead is not None:
                block.ahead.versions = block.buffer_versions()
        for follower in self.followers:
            follower.optimizer = self
        self._rebind_groups()
        self._publish()
        self._write()

    def _match(self, state_dict: dict[str, Any], rows: int) -> dict[Tensor, dict[str, Tensor]]:
        """The saved state of each parameter; a ValueError unless it fits the parameters."""
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        states = [state_dict["state"].get(i) for i in saved]
        shapes = [(rows, *local(p).shape) if p in self._state else None for p in params]
        found = [None if s is None else tuple(local(s["vertices"]).shape) for s in states]
        if shapes != found:
            of_shards = any(block.sharded for block in self._blocks)
            raise ValueError(
                f"expected vertices of shapes {shapes} (None for frozen parameters), got {found}"
                + (": were they saved by another number of processes?" if of_shards else "")
            )
        return {p: s for p, s in zip(params, states, strict=True) if s is not None}

    def _rebind_groups(self) -> None:
        """Find the groups again after torch replaced them."""
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        for block in self._blocks:
            block.group = group_of[block.params[0]]

    def _add_points(self, state: dict[str, Any], block: Block, points: Tensor) -> None:
        """Add a cycle's points to a state_dict, parameter by parameter as the vertices."""
        index = {id(p): i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        for k, p in enumerate(block.params):
            i = index[id(p)]
            state["state"][i] = {**state["state"][i], "points": block.view(points, k)}
