"""Steps of SGD that move less memory, on a CPU: one pass writes the points of several steps.

SGD is linear in vertices and gradients, and points are drawn without looking at either. So a pass
over the vertices and their momentum writes, beside the next point, the two after it, as they would
be without the gradients until then. The steps in between read such a point, subtract what these
gradients change of it, and keep their own for the next pass. On average a step moves 9 numbers a
parameter in place of 14 with n = 3 and momentum, 12 in place of 22 with n = 5. The kernels, and
what exactly is subtracted: ``csrc/sgd_ahead.cpp``.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ._flat import Block, lay_out, padded
from .ops import mix_next
from .ops.mix_next import Rule, Sgd

STEPS = 3  # A cycle's, the full pass included.
MEMORY = 1 << 28  # Bytes that a block's points and kept gradients may take.
ROWS = 6  # Of vertices and momentum, from which on cycles are faster, measured with AVX-512.


class Ahead:
    """A block's cycle of steps. Until :meth:`settle`, its vertices lack the kept gradients."""

    def __init__(self, block: Block) -> None:
        like = {"dtype": block.vertices.dtype, "device": block.vertices.device}
        rows = padded(2 * (STEPS - 1), block.vertices.shape[1], **like)
        self.points, self.kept = rows.split(STEPS - 1)  # Of positions 1, 2; gradients.
        # The points of all positions, [1 to STEPS, n + frozen].
        self.alphas = torch.empty(0, device="cpu")
        self.rule: Sgd | None = None  # None: of the points, only the present one holds.
        self.draw = -1  # The count of the draw at position 0.
        self.versions = block.buffer_versions()  # Others' writes to the vertices change them.
        self.position = 0
        self.pending = 0  # Gradients that are kept: those of the last positions.

    def __getstate__(self) -> dict[str, Any]:
        # Compact, as the block's own buffers.
        return {**vars(self), "points": self.points.clone(), "kept": self.kept.clone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.points, self.kept = lay_out(self.points, self.kept)

    def holds(self, block: Block, draw: int) -> bool:
        """Whether the present point is that of a draw, by its count, and of the vertices."""
        return self.draw + self.position == draw and self.versions == block.buffer_versions()

    @property
    def present(self) -> Tensor | None:
        """The present point ``[1, P]``, once settled; None where a full pass wrote it."""
        return self.points[self.position - 1 : self.position] if self.position else None

    def step(
        self,
        block: Block,
        moments: tuple[Tensor, ...],
        grads: Sequence[Tensor],
        alpha: Tensor,
        rule: Sgd,
        draw: int,
        coming: Tensor,
    ) -> None:
        """Take gradients at alpha, of the draw before ``draw``, and write the point of that.

        Args:
            coming: the points from that of ``draw`` on, ``[points, n + frozen]``.
        """
        goes_on = rule == self.rule and self.holds(block, draw - 1)
        if goes_on and self.position + 1 < len(self.alphas):
            self._follow(block, bool(moments), grads, len(alpha))
            return
        if not goes_on:
            self.settle(block, len(alpha))
        taken = alpha[None]
        if self.pending:
            taken = self.alphas[self.position - self.pending : self.position + 1]
        # Rules that change with each step, as schedules may have it, leave no use for points ahead.
        self.alphas = coming[: STEPS if goes_on else 1]
        torch.ops.ensemblayers.sgd_cycle_.default(
            block.vertices,
            moments[0] if moments else None,
            block.shards,
            grads,
            block.columns,
            self.kept,
            self.points,
            taken,
            self.alphas,
            len(alpha),
            *_numbers(rule),
        )
        self.rule, self.draw, self.position, self.pending = rule, draw, 0, 0
        self.versions = block.buffer_versions()

    def _follow(self, block: Block, moment: bool, grads: Sequence[Tensor], n: int) -> None:
        torch.ops.ensemblayers.sgd_follow_.default(
            self.points,
            self.kept,
            block.shards,
            grads,
            block.columns,
            self.alphas,
            n,
            self.position,
            self.pending,
            moment,
            *_numbers(self.rule),
        )
        self.position += 1
        self.pending += 1

    def settle(self, block: Block, n: int) -> None:
        """Apply the kept gradients to the vertices, and to the points from the present one on.

        That changes no bit of the steps that follow.
        """
        if self.pending:
            torch.ops.ensemblayers.sgd_settle_.default(
                block.vertices,
                block.moments["momentum_buffer"] if self.rule.momentum else None,
                self.kept,
                self.points,
                self.alphas,
                n,
                self.position,
                self.pending,
                *_numbers(self.rule),
            )
            self.pending = 0

    def state(self) -> dict[str, Any]:
        """What a settled cycle is beside its points."""
        rule = None if self.rule is None else asdict(self.rule)
        return {"alphas": self.alphas, "rule": rule, "draw": self.draw, "position": self.position}

    def load(self, state: dict[str, Any]) -> None:
        rule = state["rule"]
        self.rule = None if rule is None else Sgd(**rule)
        self.alphas, self.draw, self.position = state["alphas"], state["draw"], state["position"]


def takes(block: Block, rule: Rule, n: int) -> bool:
    """Whether a block's next step, of all its parameters, may be one of a cycle.

    It is not their first, and nobody holds views of the vertices, which each step would have to
    bring up to date.
    """
    if not isinstance(rule, Sgd) or rule.first:
        return False
    if block.ahead is None and not (pays(rule, n) and fits(block)):
        return False
    return not block.is_viewed()


def pays(rule: Sgd, n: int) -> bool:
    """Whether cycles are faster than full passes."""
    return (2 * n if rule.momentum else n) >= ROWS


def fits(block: Block) -> bool:
    """Whether there are kernels for a block, and memory enough."""
    size = 2 * (STEPS - 1) * block.vertices.shape[1] * block.vertices.element_size()
    return not block.sharded and size <= MEMORY and mix_next._in_cpp(block.vertices, block.shards)


def _numbers(rule: Sgd) -> tuple[float, float, float, float, bool, bool]:
    numbers = (float(rule.lr), rule.momentum, rule.dampening, rule.weight_decay)
    return *numbers, rule.nesterov, rule.maximize
