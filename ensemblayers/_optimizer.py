"""What the subspace optimizers have in common: all but the update rule.

The model stays a plain module and holds one point of the simplex; the n vertices live in the
optimizer. A training step is the model's own forward and backward pass and a fused pass over the
vertices (:mod:`ensemblayers.ops.mix_next`), or, on a CPU, less than that in most steps of SGD
(:mod:`ensemblayers._ahead`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import _ahead
from ._ahead import Ahead
from ._flat import Block, check_apart, is_sharded, share
from ._follow import Follower
from ._init import check_sigma
from ._ranks import Ranks
from ._saving import Saving
from ._seed import common_seed, counted_generator, processes
from .ops.mix_next import AdamW, Rule, mix_, step_
from .simplex import check_member, check_n, sample_simplex

_BATCH = 64  # Points that are drawn at a time.
_FIRST_FILL = 2**40  # The first count of the vertices' noise, past those of the points.


class SubspaceOptimizer(Ranks, Saving):
    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        n: int,
        sigma: float,
        generator: torch.Generator | None,
    ) -> None:
        check_n(n)
        check_sigma(sigma)
        self.n, self.sigma = n, sigma
        self.frozen = 0
        self._mode = "train"
        self._fixed: Tensor | None = None
        self._seed = common_seed(generator)
        self._processes = processes()
        self._draws = self._fills = 0
        self._batch = (-1, 0, 0)
        self._blocks: list[Block] = []
        self._left_out: list[Tensor] = []  # Frozen parameters: they stay as they are.
        self.followers: list[Follower] = []
        super().__init__(params, defaults)
        self._draw()
        self._write()
        self._compare()

    # ------------------------------------------------------------------------------ what users call

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """Each parameter's ``"vertices"`` and moments, up to date when this is read."""
        self._settle()
        return self._state

    @state.setter
    def state(self, state: dict[Tensor, dict[str, Tensor]]) -> None:
        self._state = state

    @property
    def alpha(self) -> Tensor:
        """The weights ``[n + frozen]`` of the point that the model holds."""
        if self._fixed is not None:
            return self._fixed
        return self._drawn if self._mode == "train" else self._midpoint()

    def train(self) -> None:
        """Put the drawn point into the model, to train it.

        A point that was set (:meth:`set_point`) stays.

        Raises:
            RuntimeError: something else wrote to the parameters.
        """
        self._switch("train")

    def eval(self) -> None:
        """Put the midpoint into the model, to evaluate or save it.

        A point that was set (:meth:`set_point`) stays.

        Raises:
            RuntimeError: something else wrote to the parameters.
        """
        self._switch("eval")

    def set_point(self, alpha: Tensor | Sequence[float] | None = None) -> None:
        """Put a point of one's own into the model and keep it there, or release it with None.

        It holds in both modes. In training, steps share the gradient out by its weights.

        Args:
            alpha: ``[n]``, or ``[n + frozen]``, taken as it is: a point outside the simplex
                extrapolates.

        Raises:
            ValueError: another shape, or weights that are not finite.
        """
        if alpha is not None:
            alpha = torch.as_tensor(alpha, dtype=self._drawn.dtype, device="cpu").detach()
            if alpha.shape == (self.n,):
                alpha = torch.cat([alpha, alpha.new_zeros(self.frozen)])
            if alpha.shape != (self.n + self.frozen,):
                shapes = f"[{self.n}]" + (f" or [{self.n + self.frozen}]" if self.frozen else "")
                raise ValueError(f"expected alpha of shape {shapes}, got {list(alpha.shape)}")
            if not alpha.isfinite().all():
                raise ValueError(f"expected finite weights, got alpha={alpha.tolist()}")
        self._check_untouched()
        self._fixed = alpha
        self._write()

    def vertices(self) -> list[Tensor]:
        """The vertices of each parameter, ``[n, *shape]`` each, as views of the optimizer's own.

        Parameters that were frozen when the optimizer was built have none. Write to them in place,
        not through ``.data``, which torch does not count, and let :meth:`train` write the point
        anew. On a CPU steps take a little longer as long as somebody holds them.
        """
        state = self.state
        return [state[p]["vertices"][: self.n] for p in self._parameters()]

    def export(self, i: int) -> list[Tensor]:
        """Copies of vertex i, a tensor a parameter, in the order of :meth:`vertices`.

        Raises:
            ValueError: no such vertex.
        """
        i = check_member(i, self.n)
        return [
            v[i].to(p.dtype, copy=True)
            for v, p in zip(self.vertices(), self._parameters(), strict=True)
        ]

    @torch.no_grad()
    def add_frozen(self, tensors: Iterable[Tensor]) -> None:
        """Add a vertex that takes part in the points, and is not trained; release a set point.

        Args:
            tensors: one a parameter, in the order of :meth:`vertices` and of their shapes.

        Raises:
            ValueError: another number of tensors, or another shape.
            RuntimeError: something else wrote to the parameters.
        """
        tensors = list(tensors)
        shapes = [tuple(p.shape) for p in self._parameters()]
        if [tuple(t.shape) for t in tensors] != shapes:
            raise ValueError(
                f"expected {len(shapes)} tensors of the parameters' shapes {shapes}, "
                f"got {[tuple(t.shape) for t in tensors]}"
            )
        self._check_untouched()
        self._settle()
        given = dict(zip(self._parameters(), tensors, strict=True))
        for block in self._blocks:
            row = torch.empty_like(block.vertices[:1])
            for k, p in enumerate(block.params):
                block.view(row, k)[0].copy_(share(given[p], p))
            block.set_rows([*block.vertices, row[0]])
        self._set_frozen(self.frozen + 1)

    def clear_frozen(self) -> None:
        """Remove the frozen vertices; release a set point.

        Raises:
            RuntimeError: something else wrote to the parameters.
        """
        self._check_untouched()
        self._settle()
        for block in self._blocks:
            block.set_rows(block.vertices[: self.n])
        self._set_frozen(0)

    @torch.no_grad()
    def restart(self, sigma: float | None = None, *, first: bool = True) -> None:
        """Place new vertices around what the parameters hold, and forget momentum and steps.

        Args:
            sigma: standard deviation of the vertices, by default that of the construction.
            first: whether vertex 0 is the parameters themselves; else it is perturbed too.

        Raises:
            ValueError: sigma is negative.
        """
        sigma = self.sigma if sigma is None else sigma
        check_sigma(sigma)
        for block in self._blocks:
            block.find()
            block.ahead = None
            self._fill(block, sigma, first)
        self.forget()
        self._write()

    @torch.no_grad()
    def forget(self) -> None:
        """Forget momentum, steps and accumulated gradients; keep the vertices and the point."""
        self._settle()
        for block in self._blocks:
            for moment in block.moments.values():
                moment.zero_()
            block.steps = [0] * len(block.steps)
            block.gradients, block.gathered = None, set()

    def accumulate(self) -> None:
        """Keep the present gradients for the next step, and draw a new point.

        For a step over several points: backward passes with ``accumulate()`` between them, then
        ``step()``. Costs n gradients; passes at one and the same point need no call. Not for a
        GradScaler, which unscales the last gradients only.

        Raises:
            RuntimeError: as :meth:`step`.
        """
        self._check_train()
        self._check_untouched()
        self._apart = False
        for block in self._blocks:
            self._collect(block, self.alpha[: self.n])
        if self._fixed is None:
            self._draw()
        self._write()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the norm of all vertices' gradients together; return what it was.

        It is ``|alpha| |G|``, or that of the gradients of several draws (:meth:`accumulate`).

        ``torch.nn.utils.clip_grad_norm_`` on the model's parameters clips ``|G|`` instead.

        Raises:
            RuntimeError: gradients of several draws under FSDP.
        """
        if any(block.gradients is not None for block in self._blocks):
            return self._clip_accumulated(max_norm)
        grads = [p.grad for p in self._parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if is_sharded(norm):
            norm = norm.full_tensor()
        norm = norm * self.alpha[: self.n].norm().to(norm.device)
        nn.utils.clip_grads_with_norm_(self._parameters(), max_norm, norm)
        return norm

    def prepare(self) -> None:
        """Draw and count for one replay of a CUDA graph that captured a :meth:`step`.

        A captured step reads its numbers (learning rate, step, both points) from the device, where
        this writes them. Take a few steps first, then capture forward, backward and ``step()`` with
        gradients of all parameters, then repeat ``opt.prepare(); graph.replay()``. Momentum, betas
        and weight decay are captured as they were. Capture anew after ``add_frozen``,
        ``clear_frozen`` and ``load_state_dict``.
        """
        self._check_train()
        alpha = self.alpha[: self.n]
        if self._fixed is None:
            self._draw()
        for block in self._blocks:
            self._count(block)
            head = torch.tensor(
                [float(block.group["lr"]), block.steps[0]], dtype=torch.float64, device="cpu"
            )
            numbers = torch.cat([head, alpha.double(), self.alpha.double()])
            if block.vertices.is_cuda:
                numbers = numbers.pin_memory()
            self._numbers(block).copy_(numbers, non_blocking=True)
        self._written = self.alpha

    def follow(self, model: nn.Module) -> Follower:
        """Switch by itself: before each forward pass of a model, take over the model's mode.

        With this, ``model.train()`` and ``model.eval()`` are enough where a wrapper hides the
        optimizer's, before ``model.state_dict()`` too. Of a compiled model, follow that. A copy of
        the model is not followed, but by a copy of the optimizer that was made along with it.

        Returns:
            What follows; its ``remove()`` ends that.
        """
        self.followers.append(Follower(self, model))
        return self.followers[-1]

    def switch(self, mode: Literal["train", "eval"]) -> None:
        """:meth:`train` or :meth:`eval`, where the mode is not that already."""
        if mode != self._mode:
            self._switch(mode)

    # --------------------------------------------------------------------- torch.optim's own calls

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.frozen:
            raise ValueError("can't add parameters beside frozen vertices: clear_frozen() first")
        built = hasattr(self, "_written")  # Not in the constructor.
        if built:
            self._check_untouched()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            blocks = self._blocks_of(group)
        except Exception:
            self.param_groups.pop()
            raise
        self._left_out += [p for p in group["params"] if not p.requires_grad]
        for block in blocks:
            self._fill(block, self.sigma, first=True)
            self._blocks.append(block)
        self._publish()
        if built:
            self._write()
            self._compare()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the vertices, draw the next point and write it into the model.

        Args:
            closure: evaluates the model anew and returns the loss.

        Raises:
            RuntimeError: the midpoint is in the model (after ``eval()``), a sparse gradient,
                parameters that were changed by something else since the last step, or an optimizer
                that is older than ``fully_shard`` or ``init_process_group``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_train()
        if _is_capturing(self._blocks):
            self._step_captured()
            return loss
        self._check_untouched()
        self._apart = False
        self._check_in_use()
        if any(p.grad is not None for p in self._left_out):
            raise RuntimeError(
                "a parameter that was frozen when the optimizer was built has a gradient: build "
                "the optimizer after unfreezing it"
            )
        alpha = self.alpha[: self.n] if self.frozen else self.alpha
        if self._fixed is None:
            self._draw()
        for block in self._blocks:
            if block.gradients is None:
                self._step(block, alpha, self.alpha)
            else:
                self._step_accumulated(block, alpha)
        self._record()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those of several draws (:meth:`accumulate`) too."""
        super().zero_grad(set_to_none)
        for block in self._blocks:
            block.gradients, block.gathered = None, set()

    # -------------------------------------------------------------------------------------- inside

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        """A group's update rule for parameters at their step, counted from 1."""
        raise NotImplementedError

    def _kind(self, steps: int) -> int:
        """What of a parameter's number of steps so far its rule depends on."""
        return steps

    def _moment_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of what a group's rule keeps of each vertex."""
        raise NotImplementedError

    def _parameters(self) -> list[Tensor]:
        """The parameters that have vertices, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"] if p in self._state]

    def _fill(self, block: Block, sigma: float, first: bool) -> None:
        """Place the vertices around what the parameters hold."""
        for k, p in enumerate(block.params):
            rows = block.view(block.vertices, k)[: self.n]
            rows.copy_(block.shards[k])
            self._fills += 1
            generator = counted_generator(self._seed, _FIRST_FILL + self._fills)
            for row in rows[1:] if first else rows:
                # The whole parameter's, so that a shard starts as its part of one process's.
                noise = torch.randn(p.shape, dtype=row.dtype, device="cpu", generator=generator)
                row.mul_(share(noise.to(row.device), p).mul_(sigma).add_(1))

    def _blocks_of(self, group: dict[str, Any]) -> list[Block]:
        """The blocks of a new group's parameters, without values."""
        self._find_modules(group["params"])
        alike: dict[tuple, list[Tensor]] = {}
        for p in group["params"]:
            if p.requires_grad:
                alike.setdefault((p.device, p.dtype, is_sharded(p)), []).append(p)
        names = self._moment_names(group)
        blocks = [Block.of(group, params, self.n, names) for params in alike.values()]
        shards = [own for block in (*self._blocks, *blocks) for own in block.shards]
        check_apart(shards)
        return blocks

    def _publish(self) -> None:
        """Show the buffers as the parameters' state."""
        for block in self._blocks:
            for k, p in enumerate(block.params):
                state = self._state[p]
                state["vertices"] = block.shown(block.vertices, k)
                for name, moment in block.moments.items():
                    state[name] = block.shown(moment, k)
            if block.users is None:
                block.count_users()

    def _set_frozen(self, frozen: int) -> None:
        self.frozen = frozen
        self._fixed = None
        self._publish()
        self._draw()
        self._write()

    def _draw(self) -> None:
        """Draw the next point: a function of the seed and the count, the same on every rank."""
        self._draws += 1
        batch, at = divmod(self._draws, _BATCH)
        rows = self.n + self.frozen
        if (batch, rows, self._seed) != self._batch:
            # Many at a time: a draw alone would cost as much as all else that is done in Python.
            self._batch = (batch, rows, self._seed)
            double = any(block.vertices.dtype == torch.float64 for block in self._blocks)
            dtype = torch.float64 if double else torch.float32
            generator = counted_generator(self._seed, batch)
            like = {"dtype": dtype, "device": "cpu"}
            self._points = sample_simplex(rows, _BATCH, **like, generator=generator)
        self._drawn = self._points[at]

    def _switch(self, mode: str) -> None:
        self._check_untouched()
        self._mode = mode
        self._write()

    def _midpoint(self) -> Tensor:
        alpha = torch.zeros_like(self._drawn)
        alpha[: self.n] = 1 / self.n
        return alpha

    def _write(self) -> None:
        """Write the point in force into the parameters."""
        self._meet()
        self._settle()
        for block in self._blocks:
            block.find()
            self._mix(block, self.alpha, block.shards)
        self._record()

    def _mix(self, block: Block, alpha: Tensor, out: list[Tensor]) -> None:
        """Write a point of a settled block into tensors like its parameters."""
        ahead, present = block.ahead, None
        if ahead is not None and alpha is self._drawn and ahead.holds(block, self._draws):
            present = ahead.present  # To the bit what a step wrote.
        if present is None:
            mix_(block.vertices, alpha, out, block.columns)
        else:
            one = torch.ones(1, dtype=torch.float64, device="cpu")
            mix_(present, one, out, block.columns)

    def _settle(self) -> None:
        """Bring the vertices up to date."""
        for block in self._blocks:
            if block.ahead is not None:
                block.ahead.settle(block, self.n)

    def _record(self) -> None:
        """Remember what the parameters hold."""
        self._written = self.alpha
        for block in self._blocks:
            # The kernels write past autograd's counters, which guard saved tensors.
            torch.autograd.graph.increment_version(block.shards)
            block.versions = block.now()
        self._reshard()

    def _check_train(self) -> None:
        if self._mode != "train":
            raise RuntimeError(
                "the model holds the midpoint, not the point that was drawn: call train() on the "
                "optimizer (or follow(model) once) before the forward pass of a step, or, after "
                "an evaluation between backward pass and step, before the step"
            )

    def _check_untouched(self) -> None:
        """Raise where something else wrote to the parameters: the next write would undo it."""
        self._meet()
        if not self.is_untouched():
            raise RuntimeError(
                "the parameters were changed since the last step (weights loaded into the model? "
                "a layer that writes to its own?), and this would undo it: call restart() to place "
                "the vertices around them, or load the optimizer's state too; where training is "
                "over, remove() what follows the model"
            )

    def is_untouched(self) -> bool:
        """Whether the parameters hold what was written into them."""
        return all(map(self._is_untouched, self._blocks))

    def _is_untouched(self, block: Block) -> bool:
        if block.now() == block.versions:
            return True
        block.find()
        self._settle()
        held = [torch.empty_like(p) for p in block.shards]
        # Weights saved at another point of these vertices are no loss either.
        for alpha in (self._written, self._drawn, self._midpoint()):
            self._mix(block, alpha, held)
            if all(map(torch.equal, held, block.shards)):
                return True
        return False

    def _step(self, block: Block, alpha: Tensor, target: Tensor) -> None:
        grads = block.gradients_now()
        moments = self._moments(block)
        kinds = {self._kind(steps) for steps in set(block.steps)}
        if len(kinds) == 1 and not any(g is None for g in grads):
            self._step_whole(block, moments, grads, alpha, target)
        else:
            self._step_parts(block, moments, grads, alpha, target)

    def _step_whole(self, block, moments, grads, alpha, target) -> None:
        """The step of a block whose parameters all take part, by one and the same rule."""
        rule = self._rule(block.group, block.steps[0] + 1)
        alone = self._fixed is None and self._processes <= 1  # Ranks must not differ by a bit.
        if alone and _ahead.takes(block, rule, self.n):
            if block.ahead is None:
                block.ahead = Ahead(block)
            coming = self._points[self._draws % _BATCH :]
            block.ahead.step(block, moments, grads, alpha, rule, self._draws, coming)
        else:
            self._leave(block)
            buffers = (block.vertices, moments, block.shards, grads, block.columns)
            step_(rule, *buffers, alpha, target)
        self._count(block)

    def _step_parts(self, block, moments, grads, alpha, target) -> None:
        """The step of a block some of whose parameters miss it, or follow another rule."""
        self._leave(block)
        parts: dict[int | None, list[int]] = {}
        for k, g in enumerate(grads):
            parts.setdefault(None if g is None else self._kind(block.steps[k]), []).append(k)
        for kind, which in parts.items():
            params, columns = block.select(which)
            if kind is None:
                mix_(block.vertices, target, params, columns)
                continue
            own = [grads[k] for k in which]
            rule = self._rule(block.group, block.steps[which[0]] + 1)
            step_(rule, block.vertices, moments, params, own, columns, alpha, target)
            self._count(block, which)

    def _count(self, block: Block, which: Iterable[int] | None = None) -> None:
        """Count a step of parameters, by default all, where it moves moments."""
        if self._moment_names(block.group):
            for k in range(len(block.steps)) if which is None else which:
                block.steps[k] += 1

    def _leave(self, block: Block) -> None:
        """Leave a cycle of steps for one of another kind."""
        if block.ahead is not None:
            block.ahead.settle(block, self.n)
            block.ahead = None

    def _step_captured(self) -> None:
        """The step's kernels alone, with numbers that :meth:`prepare` writes."""
        for block in self._blocks:
            grads = block.gradients_now()
            moments = self._moments(block)
            if any(g is None for g in grads) or (moments and 0 in block.steps):
                raise RuntimeError(
                    "expected gradients of all parameters and a step before the capture"
                )
            lr, step, alpha, target = self._numbers(block).split(
                [1, 1, self.n, self.n + self.frozen]
            )
            rule = self._rule(block.group, step=2)  # Any but the first.
            rule.lr = lr
            if isinstance(rule, AdamW):
                rule.step = step
            step_(rule, block.vertices, moments, block.shards, grads, block.columns, alpha, target)

    def _numbers(self, block: Block) -> Tensor:
        """Where a captured step of a block reads its numbers: ``[2 + n + n + frozen]``."""
        size = 2 + 2 * self.n + self.frozen
        if block.numbers is None or len(block.numbers) != size:
            like = {"dtype": torch.float64, "device": block.vertices.device}
            block.numbers = torch.empty(size, **like)
        return block.numbers

    def _collect(self, block: Block, alpha: Tensor) -> None:
        """Move the present gradients, alpha_i times each, to the n that accumulate."""
        if block.gradients is None:
            block.gradients = torch.zeros_like(block.vertices[: self.n])
        alpha = alpha.to(block.vertices)
        for k, g in enumerate(block.gradients_now()):
            if g is not None:
                block.gathered.add(k)
                shares = alpha.view(-1, *(1,) * g.dim()) * g.to(alpha.dtype)
                block.view(block.gradients, k).add_(shares)
                block.params[k].grad = None

    def _clip_accumulated(self, max_norm: float) -> Tensor:
        if any(block.sharded for block in self._blocks):
            raise RuntimeError("gradients of several draws can't be clipped under FSDP")
        for block in self._blocks:
            self._collect(block, self.alpha[: self.n])
        gradients = [block.gradients for block in self._blocks]
        norm = nn.utils.get_total_norm(gradients)
        for g in gradients:
            # torch's own rule.
            g.mul_((max_norm / (norm.to(g.device) + 1e-6)).clamp(max=1.0))
        return norm

    def _step_accumulated(self, block: Block, alpha: Tensor) -> None:
        """The general path: n gradients of their own."""
        self._leave(block)
        self._collect(block, alpha)
        buffers = self._moments(block)
        for k in sorted(block.gathered):
            rule = self._rule(block.group, block.steps[k] + 1)
            moments = tuple(block.view(m, k) for m in buffers)
            own = block.view(block.gradients, k)
            rule.apply(block.view(block.vertices, k)[: self.n], moments, own)
        self._count(block, block.gathered)
        block.gradients, block.gathered = None, set()
        mix_(block.vertices, self.alpha, block.shards, block.columns)

    def _moments(self, block: Block) -> tuple[Tensor, ...]:
        """What the rule of a block's group keeps: momentum may have been switched on or off."""
        names = self._moment_names(block.group)
        if missing := [name for name in names if name not in block.moments]:
            block.add_moments(missing, self.n)
            block.steps = [0] * len(block.steps)
            self._publish()
        return tuple(block.moments[name] for name in names)


def _is_capturing(blocks: list[Block]) -> bool:
    on_cuda = any(block.vertices.is_cuda for block in blocks)  # torch.cuda is slow to ask.
    return on_cuda and torch.cuda.is_current_stream_capturing()
