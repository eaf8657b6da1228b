"""Make miniImageNet's files, train.npz and test.npz, from a folder of images.

The folder has a subfolder for each of the 100 classes, with 600 images of 84x84 pixels. Classes are
numbered in the order of their names; of the images of a class, in the order of their names, the
first 500 are for training and the others for testing.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UsageError
from .files import whole_file

if TYPE_CHECKING:
    import numpy as np

SIDE = 84


@dataclass
class Options:
    folder: Path
    """The folder with the subfolders of images."""
    root: Path
    """The data root: the files are written to ROOT/miniimagenet/."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    from .train import command_line

    return command_line("examples.prepare_miniimagenet", __doc__, Options, prepare, arguments)


def prepare(options: Options) -> None:
    """Read the images and write the files."""
    import numpy as np
    from rich.progress import track

    from .benchmarks.images import CLASSES, PER_CLASS
    from .run import check_writable

    if not options.folder.is_dir():
        raise UsageError(f"no folder {options.folder}")
    folders = sorted(path for path in options.folder.iterdir() if path.is_dir())
    if len(folders) != CLASSES:
        raise UsageError(
            f"expected {CLASSES} subfolders, a class each, in {options.folder}, got {len(folders)}"
        )
    target = options.root / "miniimagenet"
    check_writable(target, "ROOT")
    count = sum(PER_CLASS.values())
    x = np.empty((CLASSES, count, SIDE, SIDE, 3), np.uint8)
    for label, folder in enumerate(track(folders, "Reading")):
        paths = sorted(folder.iterdir())
        if len(paths) != count:
            raise UsageError(f"expected {count} images in {folder}, got {len(paths)}")
        for i, path in enumerate(paths):
            x[label, i] = _image(path)
    names = np.array([folder.name for folder in folders])
    train = PER_CLASS["train"]
    for part, own in (("train", x[:, :train]), ("test", x[:, train:])):
        labels = np.arange(CLASSES).repeat(own.shape[1])
        with whole_file(target / f"{part}.npz") as file:
            np.savez(file, x=own.reshape(-1, SIDE, SIDE, 3), y=labels, wnids=names)
    print(f"Written: train.npz and test.npz in {target}")


def _image(path: Path) -> "np.ndarray":
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as file:
            mode, image = file.mode, np.asarray(file.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(f"{path} is not an image: {error}") from None
    if mode.startswith(("I", "F")):
        raise UsageError(f"expected 8 bits a channel in {path}, got more (mode {mode})")
    if image.shape != (SIDE, SIDE, 3):
        raise UsageError(f"expected {SIDE}x{SIDE} pixels in {path}, got {image.shape[:2]}")
    return image


if __name__ == "__main__":
    sys.exit(main())
