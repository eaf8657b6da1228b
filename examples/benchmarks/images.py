"""Labelled images from files: CIFAR-100 and miniImageNet, as bytes.

The files that lie in the data root are taken by their content, not by a checksum: all classes must
be there, with all their images. A process that makes several runs reads them once.
"""

import functools
import pickle
import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import CIFAR100

from ..errors import UsageError

CLASSES = 100
PER_CLASS = {"train": 500, "test": 100}


@functools.lru_cache(maxsize=1)
def cifar_100(root: Path, download: bool) -> list[tuple[Tensor, Tensor]]:
    """CIFAR-100, from ``root/cifar-100-python/{train,test}``: its training and its test set.

    What is downloaded passes torchvision's own check of the checksums.

    Shape:
        - Images: ``[N, 32, 32, 3]``, uint8
        - Labels: ``[N]``, 0 to 99
    """
    if download:
        try:
            CIFAR100(str(root), download=True)
        except (RuntimeError, OSError, urllib.error.URLError) as error:
            raise UsageError(f"CIFAR-100 can't be downloaded to {root}: {error}") from None
    folder = root / "cifar-100-python"
    sets = []
    for part in PER_CLASS:
        try:
            with open(folder / part, "rb") as file:
                entry = _Unpickler(file, encoding="latin1").load()
            x = entry["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            sets.append(_checked(x, np.asarray(entry["fine_labels"]), part, 32))
        except FileNotFoundError:
            raise UsageError(
                f"no CIFAR-100 in {folder}: pass --download, or --data-root with a folder that "
                "holds it"
            ) from None
        except OSError:
            raise
        except Exception as error:  # Damage may raise any.
            raise UsageError(
                f"the CIFAR-100 files in {folder} are damaged ({part}: {error}): remove them, and "
                "pass --download"
            ) from None
    return sets


@functools.lru_cache(maxsize=1)
def miniimagenet(root: Path) -> list[tuple[Tensor, Tensor]]:
    """miniImageNet, from ``root/miniimagenet/{train,test}.npz``: its training and its test set.

    Shape:
        - Images: ``[N, 84, 84, 3]``, uint8
        - Labels: ``[N]``, 0 to 99
    """
    folder = root / "miniimagenet"
    remedy = "python -m examples.prepare_miniimagenet makes them from a folder of images"
    sets = []
    for part in PER_CLASS:
        try:
            with np.load(folder / f"{part}.npz") as entry:
                sets.append(_checked(entry["x"], entry["y"], part, 84))
        except FileNotFoundError:
            raise UsageError(f"no {part}.npz in {folder}: {remedy}") from None
        except OSError:
            raise
        except Exception as error:  # Damage may raise any.
            raise UsageError(f"{folder / part}.npz is damaged ({error}): {remedy}") from None
    return sets


def _checked(x: np.ndarray, y: np.ndarray, part: str, side: int) -> tuple[Tensor, Tensor]:
    """Images and labels as tensors; a ValueError where they are not all of the data set."""
    count = CLASSES * PER_CLASS[part]
    if x.dtype != np.uint8 or x.shape != (count, side, side, 3):
        expected = f"uint8 {(count, side, side, 3)}"
        raise ValueError(f"expected images {expected}, got {x.dtype} {x.shape}")
    if sorted(y.tolist()) != np.arange(CLASSES).repeat(PER_CLASS[part]).tolist():
        raise ValueError(f"expected {PER_CLASS[part]} images of each label 0 to {CLASSES - 1}")
    return torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y.astype(np.int64))


class _Unpickler(pickle.Unpickler):
    """Reads arrays and numbers only: a file that no checksum vouches for may call nothing."""

    def find_class(self, module: str, name: str) -> Any:
        arrays = ("ndarray", "dtype", "_reconstruct", "_frombuffer", "scalar")
        if (module.split(".")[0] == "numpy" and name in arrays) or (module, name) == (
            "_codecs",
            "encode",
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it calls {module}.{name}")
