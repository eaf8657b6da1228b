"""Subspace-Connectivity, taught by its last midpoint too: beyond the paper.

Learning without Forgetting (Li and Hoiem 2016, https://arxiv.org/abs/1606.09282): on the new task's
images, the scores of the earlier tasks' classes stay near those that the last midpoint gives.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .connectivity import SubspaceConnectivity

TEMPERATURE = 2.0  # Li and Hoiem's


class SubspaceDistillation(SubspaceConnectivity):
    teacher: nn.Module | None = None

    def start(self, task: int) -> None:
        if task:
            self.teacher = self.midpoint()
            # A row for each task's classes; a single one where the tasks share theirs.
            self.classes = torch.stack([y.unique() for _, y in self.memory.tasks]).unique(dim=0)
            self.graphed = None  # It holds the last teacher.
        super().start(task)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.model(x)
        loss = self.criterion(scores, y)
        if self.teacher is not None:
            with torch.no_grad():
                wanted = self.teacher(x)
            loss = loss + self.settings.distill * distillation(scores, wanted, self.classes)
        return loss


def distillation(scores: Tensor, wanted: Tensor, classes: Tensor) -> Tensor:
    """How far a softened distribution of each task's classes is from the wanted one.

    Shape:
        - scores, wanted: ``[B, all classes]``
        - classes: ``[tasks, classes of a task]``, which columns are a task's
        - Output: scalar; Kullback-Leibler divergences, summed over tasks, mean over the batch.
    """
    new, old = ((s[:, classes] / TEMPERATURE).log_softmax(-1) for s in (scores, wanted))
    divergence = F.kl_div(new, old, reduction="sum", log_target=True)
    return TEMPERATURE**2 * divergence / len(scores)
