"""The networks of the experiments."""

from torch import Tensor, nn


def mlp(inputs: int, hidden: int, classes: int, dropout: float = 0.0) -> nn.Sequential:
    """Two hidden layers, each followed by ReLU and dropout.

    Shape:
        - Input: ``[B, inputs]``
        - Output: ``[B, classes]``
    """

    def after() -> list[nn.Module]:
        return [nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]

    first, second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
    return nn.Sequential(first, *after(), second, *after(), nn.Linear(hidden, classes))


def reduced_resnet(
    width: int, classes: int, *, side: int = 32, dropout: float = 0.0
) -> nn.Sequential:
    """The small ResNet of continual learning: eight blocks of one 3x3 convolution each.

    BatchNorm takes each batch's statistics, in evaluation too: a network between two others has no
    running ones.

    Args:
        width: channels of the first stage; the others have 2, 4 and 8 times as many.
        side: height and width of the images.

    Shape:
        - Input: ``[B, 3, side, side]``
        - Output: ``[B, classes]``
    """
    layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), _norm(width), _relu()]
    channels = width
    for stage in range(4):
        for block in range(2):
            out, stride = width * 2**stage, 2 if stage and not block else 1
            layers.append(Block(channels, out, stride, dropout))
            channels = out
    last = -(-side // 8) // 4
    head = [nn.AvgPool2d(4), nn.Flatten(), nn.Linear(channels * last**2, classes)]
    return nn.Sequential(*layers, *head)


class Block(nn.Module):
    """A 3x3 convolution beside a shortcut, which is a 1x1 convolution where the shape changes.

    Shape:
        - Input: ``[B, channels, H, W]``
        - Output: ``[B, out, H / stride, W / stride]``
    """

    def __init__(self, channels: int, out: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.inner = nn.Sequential(_relu(), _norm(out), nn.Dropout(dropout))
        same = channels == out and stride == 1
        # The weight gradient of a strided 1x1 convolution of under 16 channels, channels last, goes
        # out of bounds in oneDNN 3.12 (uxlfoundation/oneDNN#6035): there the stride comes before.
        self.before, stride = (stride, 1) if channels < 16 else (1, stride)
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)
        self.outer = nn.Sequential(_relu(), _norm(out), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(self.conv(x))
        out += self.shortcut(x[..., :: self.before, :: self.before])
        return self.outer(out)


def _relu() -> nn.ReLU:
    return nn.ReLU(inplace=True)  # New memory costs a CPU more than the operation.


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, track_running_stats=False)
