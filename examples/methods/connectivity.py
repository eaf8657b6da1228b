"""Subspace-Connectivity: subspaces of successive tasks, connected by paths of low loss.

Algorithm 1 and equation 2 of Doan et al. 2023, taken literally: after a task was learned, a new
subspace is placed between its midpoint and the previous one, and trained on the buffer so that the
loss is low between it and either midpoint. MC-SGD (Mirzadeh et al. 2021,
https://arxiv.org/abs/2010.04495) is the case of a single vertex.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

import ensemblayers as el
from ensemblayers.functional import mix

from .subspace import SubspaceMethod

Weights = dict[str, Tensor]


class SubspaceConnectivity(SubspaceMethod):
    def start(self, task: int) -> None:
        if task and self.settings.connect.chain:
            for vertex, learned in zip(self.optimizer.vertices(), self.learned, strict=True):
                vertex.copy_(learned)
        super().start(task)

    def finish(self, task: int) -> None:
        if self.settings.connect.chain:
            self.learned = [v.clone() for v in self.optimizer.vertices()]
        if task:
            self._connect(task)
        self.previous = self._midpoint()

    def _connect(self, task: int) -> None:
        connect = self.settings.connect
        learned, plain = self._midpoint(), self.midpoint()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(torch.lerp(learned[name], self.previous[name], connect.previous))
        self.optimizer.restart(connect.sigma, first=False)
        # The optimizer's own vertices, in place: each step has 2 K points, with an anchor each.
        names = [name for name, _ in self.model.named_parameters()]
        vertices = [v.requires_grad_() for v in self.optimizer.vertices()]
        optimizer = torch.optim.SGD(vertices, connect.lr, momentum=connect.momentum)
        # One batch of all past tasks has the mean of their losses: each has as many examples.
        past = self.memory.tasks[:-1] if connect.apart else [self.memory.past()]
        each = (task if connect.summed else 1) / len(past)
        terms = [(each, self.previous, *batch) for batch in past]
        terms.append((1, learned, *self.memory.current()))
        for _ in range(connect.steps):
            optimizer.zero_grad()
            for alpha in el.sample_simplex(self.n + 1, connect.samples, device=vertices[0].device):
                mixed = [mix(v, alpha[:-1]) for v in vertices]
                loss = 0
                for weight, anchor, x, y in terms:
                    weights = {
                        name: w + alpha[-1] * anchor[name]
                        for name, w in zip(names, mixed, strict=True)
                    }
                    scores = functional_call(plain, weights, x)
                    loss = loss + weight * self.criterion(scores, y)
                (loss / connect.samples).backward()
            optimizer.step()

    def _midpoint(self) -> Weights:
        return {name: p.detach() for name, p in self.midpoint().named_parameters()}


class MCSGD(SubspaceConnectivity):
    """Subspace-Connectivity with one vertex."""

    ensemble = False

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        self.n = 1
        return super().build(make)
