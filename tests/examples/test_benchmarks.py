import hashlib
import os
import struct

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from examples.benchmarks import (
    PixelTasks,
    permutation_maps,
    permuted_mnist,
    rotated_digits,
    rotated_mnist,
    rotation_maps,
)
from examples.errors import UsageError


def tiny(tasks=3, examples=7, pixels=4):
    x = torch.arange(examples * pixels).view(examples, pixels).to(torch.uint8)
    y = torch.arange(examples) % 3
    return PixelTasks("tiny", (x, y), (x[:4], y[:4]), permutation_maps(pixels, tasks, 0), 3)


@pytest.mark.parametrize("angle", [0.0, 9.0, 45.0, 90.0, 171.0])
def test_rotation_map_rotates_as_torchvision_does(angle):
    x = torch.rand(5, 28, 28)
    data = PixelTasks(
        "x",
        (x.flatten(1), torch.zeros(5)),
        (x.flatten(1), torch.zeros(5).long()),
        rotation_maps(28, [angle]),
    )
    expected = rotate(x, angle, InterpolationMode.NEAREST)
    torch.testing.assert_close(data.test_task(0)[0].view(5, 28, 28), expected, rtol=0, atol=0)


def test_first_permutation_is_the_identity_and_the_seed_sets_the_others():
    maps = permutation_maps(784, 20, seed=3)
    assert torch.equal(maps[0], torch.arange(784))
    assert torch.equal(maps.sort(1).values, torch.arange(784).expand(20, -1))
    assert torch.equal(maps, permutation_maps(784, 20, seed=3))
    assert not torch.equal(maps[1], permutation_maps(784, 20, seed=4)[1])


def test_an_epoch_shows_each_example_of_each_task_once():
    data = tiny()
    batches = list(data.batches([0, 2], 4, torch.Generator().manual_seed(0)))
    assert [len(y) for _, y in batches] == [4, 4, 4, 2]
    x = torch.cat([x for x, _ in batches]) * 255
    images = data.train[0].float()
    expected = torch.cat([images[:, data.maps[0]], images[:, data.maps[2]]])
    assert sorted(map(tuple, x.round().tolist())) == sorted(map(tuple, expected.tolist()))


def test_labels_stay_with_their_images():
    data = tiny()
    lookup = {
        tuple(row): label for row, label in zip(*map(torch.Tensor.tolist, data.train), strict=True)
    }
    for x, y in data.batches([0], 3, torch.Generator().manual_seed(0)):
        assert [lookup[tuple(row)] for row in (x * 255).round().tolist()] == y.tolist()


def test_epochs_differ_and_the_generator_decides():
    data = tiny()
    generator = torch.Generator().manual_seed(1)
    first, second = ([y.tolist() for _, y in data.batches([0], 7, generator)] for _ in range(2))
    again = [y.tolist() for _, y in data.batches([0], 7, torch.Generator().manual_seed(1))]
    assert first == again != second


def test_buffer_examples_are_one_of_each_class_of_the_task():
    data = tiny()
    x, y = data.one_per_class(1, torch.Generator().manual_seed(0))
    assert y.tolist() == [0, 1, 2]
    task = (data.train[0][:, data.maps[1]].float() / 255).tolist()
    assert all(row in task for row in x.tolist())


def test_shortened_keeps_the_first_tasks_and_examples():
    data = tiny().shortened(2, 5)
    assert data.num_tasks == 2 and len(data.train[0]) == 5 and len(data.test[0]) == 4


def test_digits_are_those_of_scikit_learn():
    data = rotated_digits(0, None, False)
    x = torch.cat([data.train[0], data.test[0]]) * 16
    expected = load_digits().data
    assert sorted(map(tuple, x.tolist())) == sorted(map(tuple, expected.tolist()))
    assert (len(data.train[0]), len(data.test[0]), data.num_tasks) == (1437, 360, 20)


def test_first_task_is_the_same_in_every_version():
    x, y = rotated_digits(0, None, False).test_task(0)
    digest = hashlib.sha256(np.ascontiguousarray((x * 16).byte().numpy()).tobytes())
    digest.update(y.numpy().tobytes())
    assert digest.hexdigest()[:16] == "3ea49a6c5c1f0810"


@pytest.mark.parametrize("make", [rotated_mnist, permuted_mnist])
def test_missing_data_says_what_to_do(make, tmp_path):
    with pytest.raises(UsageError, match="--download"):
        make(0, tmp_path, False)


def test_damaged_data_says_what_to_do(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{part}-ubyte").write_bytes(b"0000 damaged")
    with pytest.raises(UsageError, match="damaged"):
        rotated_mnist(0, tmp_path, False)


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_a_failed_download_is_no_damage(error, tmp_path, monkeypatch):
    def fails(*args, **options):
        raise error("Error downloading images:\nTried here, got:\nno network")

    monkeypatch.setattr("examples.benchmarks.pixels.MNIST", fails)
    with pytest.raises(UsageError, match=r"can't be downloaded.*no network") as raised:
        rotated_mnist(0, tmp_path, True)
    assert "\n" not in str(raised.value)


def write_mnist(root, images, labels, left_out=0):
    """MNIST's files with black images: numbers of each in the training and in the test set."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, n, m in zip(("train", "t10k"), images, labels, strict=True):
        pixels = struct.pack(">iiii", 0x803, n, 28, 28)
        path = folder / f"{name}-images-idx3-ubyte"
        path.write_bytes(pixels)
        os.truncate(path, len(pixels) + n * 28 * 28 - left_out)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 0x801, m) + bytes(m))


@pytest.mark.parametrize(
    ("images", "labels", "left_out"),
    [
        ((1500, 200), (1500, 200), 0),
        ((60_000, 10_000), (60_000, 200), 0),
        ((60_000, 10_000), (60_000, 10_000), 5),
    ],
)
def test_a_part_of_mnist_is_not_taken_for_it(images, labels, left_out, tmp_path):
    write_mnist(tmp_path, images, labels, left_out)
    with pytest.raises(UsageError, match="damaged"):
        rotated_mnist(0, tmp_path, False)


def test_the_whole_of_mnist_is_taken(tmp_path):
    write_mnist(tmp_path, (60_000, 10_000), (60_000, 10_000))
    data = rotated_mnist(0, tmp_path, False)
    assert (len(data.train[1]), len(data.test[1])) == (60_000, 10_000)
