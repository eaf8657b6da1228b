"""Benchmarks of image sets whose classes are divided among the tasks."""

import os
import pickle
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from examples.benchmarks import BENCHMARKS, SplitTasks, images
from examples.costs import paper_cost, relative_flops
from examples.errors import UsageError
from examples.memory import Memory
from examples.methods import METHODS
from examples.models import reduced_resnet
from examples.prepare_miniimagenet import main as prepare
from examples.run import evaluate, run
from examples.settings import Connect, Settings, settings_for

CPU = torch.device("cpu")
SPLITS = ("split-cifar-100", "split-miniimagenet", "split-cifar-100-5")


@pytest.fixture
def few(monkeypatch):
    """Image sets with a few images of each class."""
    monkeypatch.setattr(images, "PER_CLASS", {"train": 4, "test": 2})


def arrays(part, side):
    """Random images in a random order of the classes."""
    random = np.random.default_rng(len(part))
    y = random.permutation(np.arange(100).repeat(images.PER_CLASS[part]))
    return random.integers(0, 256, (len(y), side, side, 3), dtype=np.uint8), y


def write_cifar(root, protocol=4, labels=np.ndarray.tolist):
    (root / "cifar-100-python").mkdir()
    for part in images.PER_CLASS:
        x, y = arrays(part, 32)
        entry = {"data": x.transpose(0, 3, 1, 2).reshape(len(x), -1), "fine_labels": labels(y)}
        text = pickle.dumps(entry, protocol=protocol)
        if protocol == 2:  # As the official files have it.
            text = text.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        (root / "cifar-100-python" / part).write_bytes(text)


def write_mini(root):
    (root / "miniimagenet").mkdir()
    for part in images.PER_CLASS:
        x, y = arrays(part, 84)
        np.savez(root / "miniimagenet" / f"{part}.npz", x=x, y=y, wnids=np.arange(100).astype(str))


WRITE = {"split-cifar-100": write_cifar, "split-miniimagenet": write_mini}
FILES = {
    "split-cifar-100": "cifar-100-python/train",
    "split-miniimagenet": "miniimagenet/train.npz",
}


def toy(tasks=2, train=30, test=20, per_task=2, side=32, classes=6):
    """Images of a coarse pattern a class, and noise."""
    torch.manual_seed(1)
    coarse = torch.rand(classes, 4, 4, 3) * 200
    patterns = coarse.repeat_interleave(side // 4, 1).repeat_interleave(side // 4, 2)

    def images_of(count):
        y = torch.arange(classes).repeat(count)
        return (patterns[y] + 55 * torch.rand(len(y), side, side, 3)).to(torch.uint8), y

    parts = (images_of(train), images_of(test))
    return SplitTasks("split-cifar-100", *parts, tasks=tasks, per_task=per_task, classes=classes)


def gentle(method, n, **changes):
    """A method's settings for a small network that sees few images."""
    connect = Connect(previous=0.5, lr=0.01, momentum=0.0, samples=2, sigma=0.01, steps=3)
    common = {"lr": 0.05, "momentum": 0.5, "hidden": 4, "sigma": 0.1, "replay": 5, "penalty": 1.0}
    batch = 10 // n * n if method == "batch-ensemble" else 10
    return Settings(**{**common, "batch": batch, "connect": connect, **changes})


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_cifar_images_are_read_as_torchvision_reads_them(few, tmp_path, protocol):
    write_cifar(tmp_path, protocol)
    x, y = BENCHMARKS["split-cifar-100"](0, tmp_path, False).train
    expected = arrays("train", 32)
    assert x.dtype == torch.uint8 and torch.equal(x, torch.from_numpy(expected[0]))
    assert torch.equal(y, torch.from_numpy(expected[1]))


@pytest.mark.parametrize("name", WRITE)
def test_tasks_are_the_classes_in_the_order_of_their_labels(few, tmp_path, name):
    WRITE[name](tmp_path)
    data = BENCHMARKS[name](0, tmp_path, False)
    assert (data.num_tasks, data.classes, data.examples) == (20, 100, 20)
    for task in (0, 7, 19):
        own = list(range(5 * task, 5 * task + 5))
        assert list(data.task_classes(task)) == own
        batches = list(data.batches([task], 8, torch.Generator().manual_seed(0)))
        assert [len(y) for _, y in batches] == [8, 8, 4]
        assert sorted(torch.cat([y for _, y in batches]).tolist()) == sorted(own * 4)
        assert sorted(data.test_task(task)[1].tolist()) == sorted(own * 2)
        x, y = data.one_per_class(task, torch.Generator().manual_seed(0))
        assert y.tolist() == own and x.shape == (5, *data.shape)
    joint = [y for _, y in data.batches(list(range(20)), 8, torch.Generator().manual_seed(0))]
    assert sorted(torch.cat(joint).tolist()) == sorted(list(range(100)) * 4)
    assert len((joint[0] // 5).unique()) > 1


def test_the_classes_of_miniimagenet_are_in_an_order_drawn_for_each_seed(few, tmp_path):
    write_mini(tmp_path)
    stored = images.miniimagenet(tmp_path)
    orders = []
    for seed in (0, 1, 0):
        data = BENCHMARKS["split-miniimagenet"](seed, tmp_path, False)
        # Each class as a whole has a new label, in the test set the same one.
        place = torch.full((100,), -1)
        place[stored[0][1]] = data.train[1]
        assert place.unique().tolist() == list(range(100))
        assert torch.equal(data.train[0], stored[0][0])
        assert torch.equal(data.train[1], place[stored[0][1]])
        labels = {x.numpy().tobytes(): y.item() for x, y in zip(*stored[1], strict=True)}
        read = [labels[x.contiguous().numpy().tobytes()] for x in data.test[0]]
        assert torch.equal(data.test[1], place[torch.tensor(read)])
        orders.append(place.tolist())
    assert orders[0] == orders[2] and orders[0] != orders[1]
    assert all(order != list(range(100)) for order in orders)


def test_the_ablation_has_the_first_25_classes(few, tmp_path):
    write_cifar(tmp_path)
    data = BENCHMARKS["split-cifar-100-5"](0, tmp_path, False)
    assert (data.name, data.num_tasks, data.whole) == ("split-cifar-100-5", 5, True)
    assert list(data.task_classes(4)) == [20, 21, 22, 23, 24]


def test_images_are_shown_as_fractions_with_their_labels(few, tmp_path):
    write_cifar(tmp_path)
    data = BENCHMARKS["split-cifar-100"](0, tmp_path, False)
    examples = zip(*data.train, strict=True)
    stored = {image.numpy().tobytes(): label.item() for image, label in examples}
    shown = [data.one_per_class(3, torch.Generator().manual_seed(0))]
    shown += data.batches([3], 8, torch.Generator().manual_seed(0))
    for x, y in shown:
        assert x.dtype == torch.float32 and x.shape[1:] == (3, 32, 32)
        assert x.is_contiguous(memory_format=torch.channels_last)
        whole = (x * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        assert [stored[image.contiguous().numpy().tobytes()] for image in whole] == y.tolist()


def test_the_test_images_are_in_one_random_order(few, tmp_path, monkeypatch):
    monkeypatch.setitem(images.PER_CLASS, "test", 8)
    write_cifar(tmp_path)
    first, second = (BENCHMARKS["split-cifar-100"](seed, tmp_path, False) for seed in (0, 1))
    x, y = first.test_task(2)
    assert torch.equal(x, second.test_task(2)[0]) and torch.equal(y, second.test_task(2)[1])
    assert y.tolist() != sorted(y.tolist())
    read, labels = images.cifar_100(tmp_path, False)[1]
    assert sorted(x.flatten(1).sum(1).tolist()) == pytest.approx(
        sorted((read[labels // 5 == 2].flatten(1).float() / 255).sum(1).tolist()), rel=1e-5
    )
    assert y.tolist() != labels[labels // 5 == 2].tolist()


def test_the_loss_is_that_of_masked_outputs():
    data = toy(tasks=3)
    scores = torch.randn(7, 6, dtype=torch.double, requires_grad=True)
    y = torch.tensor([5, 0, 3, 2, 1, 4, 4])  # Of all tasks.
    mask = torch.full((7, 6), -1e11, dtype=torch.double)
    for row, label in enumerate(y.tolist()):
        mask[row, label // 2 * 2 : label // 2 * 2 + 2] = 0
    expected = F.cross_entropy(torch.where(mask == 0, scores, mask), y)
    torch.testing.assert_close(data.loss(scores, y), expected)
    (gradient,) = torch.autograd.grad(data.loss(scores, y), scores)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, scores)[0])
    assert (gradient[mask != 0] == 0).all()


def test_predictions_are_of_the_tasks_own_classes():
    data = toy(tasks=3, classes=6)
    seen = []

    def predict(x):
        seen.append(len(x))
        scores = torch.zeros(2, len(x), 6)
        scores[:, :, 5] = 9.0  # Of another task, for tasks 0 and 1.
        scores[0, :, [0, 2, 4]] = 3.0
        return scores

    assert evaluate(predict, data, 2).tolist() == [50.0, 50.0]
    assert seen == [40, 40]


def test_members_are_combined_over_the_tasks_own_classes():
    data = toy(tasks=1, classes=4)

    def predict(x):
        # Over all classes the first member's weight on the second one is lost to the fourth.
        first, second = torch.tensor([0.0, 5.0, 0.0, 9.0]), torch.tensor([1.0, 0.0, 0.0, 0.0])
        return torch.stack([first, second])[:, None].expand(2, len(x), 4)

    _, y = data.test_task(0)
    assert evaluate(predict, data, 1).item() == pytest.approx(100 * (y == 1).float().mean().item())


def test_test_images_come_in_batches_of_a_hundred():
    sizes = []

    def predict(x):
        sizes.append(len(x))
        return torch.zeros(1, len(x), 4)

    evaluate(predict, toy(test=75, classes=4), 2)
    assert sizes == [100, 50, 100, 50]


def test_shortened_keeps_the_first_tasks_and_examples_of_each_class():
    data = toy(tasks=3)
    short = data.shortened(2, 7)
    assert (short.num_tasks, short.examples, short.whole) == (2, 6, False)
    for task in (0, 1):
        _, y = next(short.batches([task], 10, torch.Generator()))
        assert y.bincount(minlength=6)[2 * task : 2 * task + 2].tolist() == [3, 3]
    assert data.shortened(None, 1).examples == 2
    assert data.shortened(2, None).examples == 60 and data.shortened(None, None).whole


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize("part", ["train", "test"])
def test_missing_files_say_what_to_do(few, tmp_path, name, part):
    remedy = {"split-cifar-100": "--download", "split-miniimagenet": "prepare_miniimagenet"}[name]
    with pytest.raises(UsageError, match=remedy):
        BENCHMARKS[name](0, tmp_path, False)
    WRITE[name](tmp_path)
    (tmp_path / FILES[name].replace("train", part)).unlink()
    with pytest.raises(UsageError, match=remedy):
        BENCHMARKS[name](0, tmp_path, False)


@pytest.mark.parametrize("labels", [list, np.asarray, lambda y: y.astype(float).tolist()])
def test_labels_may_be_of_any_kind(few, tmp_path, labels):
    write_cifar(tmp_path, labels=labels)
    data = BENCHMARKS["split-cifar-100"](0, tmp_path, False)
    assert torch.equal(data.train[1], torch.from_numpy(arrays("train", 32)[1]))


def test_damage_inside_compressed_images_says_what_to_do(few, tmp_path):
    path = tmp_path / FILES["split-miniimagenet"]
    path.parent.mkdir()
    x, y = arrays("train", 84)
    np.savez_compressed(path, x=x, y=y)
    text = bytearray(path.read_bytes())
    text[2000:2050] = bytes(50)
    path.write_bytes(text)
    with pytest.raises(UsageError, match=r"train.npz is damaged.*prepare_miniimagenet"):
        BENCHMARKS["split-miniimagenet"](0, tmp_path, False)


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize("error", [MemoryError, ImportError, RuntimeError, zlib.error])
def test_whatever_damage_raises_is_one_line(few, tmp_path, monkeypatch, name, error):
    def fails(*args):
        raise error("broken")

    WRITE[name](tmp_path)
    monkeypatch.setattr(images, "_checked", fails)
    with pytest.raises(UsageError, match=r"damaged.*broken"):
        BENCHMARKS[name](0, tmp_path, False)


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "labels", "images"])
def test_damaged_files_say_what_to_do(few, tmp_path, monkeypatch, name, damage):
    if damage in ("labels", "images"):
        wrong = {
            "labels": lambda x, y: (x, y.clip(0, 98)),
            "images": lambda x, y: (x[1:], y[1:]),
        }[damage]
        original = arrays
        monkeypatch.setitem(globals(), "arrays", lambda *args: wrong(*original(*args)))
    WRITE[name](tmp_path)
    path = tmp_path / FILES[name]
    text = path.read_bytes()
    path.write_bytes(
        {"cut": text[: len(text) // 2], "empty": b"", "garbage": b"x"}.get(damage, text)
    )
    with pytest.raises(UsageError, match="damaged") as raised:
        BENCHMARKS[name](0, tmp_path, False)
    assert "\n" not in str(raised.value) and "train" in str(raised.value)


class Calling:
    def __reduce__(self):
        return os.mkdir, ("called",)


def test_a_file_that_calls_something_is_refused(few, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path)
    (tmp_path / FILES["split-cifar-100"]).write_bytes(pickle.dumps({"data": Calling()}))
    with pytest.raises(UsageError, match=r"damaged.*mkdir"):
        BENCHMARKS["split-cifar-100"](0, tmp_path, False)
    assert not (tmp_path / "called").exists()


def test_downloads_pass_torchvisions_own_check(few, tmp_path, monkeypatch):
    """Files of another checksum are accepted where they lie, and not as a download."""
    write_cifar(tmp_path)
    assert BENCHMARKS["split-cifar-100"](0, tmp_path, False)

    def no_network(*args, **kwargs):
        raise OSError("no network")

    module = "torchvision.datasets.cifar.download_and_extract_archive"
    monkeypatch.setattr(module, no_network)
    with pytest.raises(UsageError, match=r"can't be downloaded.*no network"):
        BENCHMARKS["split-cifar-100"](0, tmp_path, True)
    monkeypatch.setattr(module, lambda *args, **kwargs: None)
    with pytest.raises(UsageError, match=r"can't be downloaded.*corrupted"):
        BENCHMARKS["split-cifar-100"](0, tmp_path, True)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_two_tasks(method):
    result = run(toy(), method, gentle(method, 2), 2, 0, CPU)
    assert result["metrics"]["final_accuracy"] > 80, result["accuracy"]
    assert result["examples"] == 60 and result["relative_flops"]["predict"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_no_method_trains_the_outputs_of_classes_that_it_has_not_met(method):
    """In training, in replay and in the second phase."""
    data = toy(tasks=2, train=5)
    connect = Connect(previous=0.5, lr=0.1, momentum=0.0, samples=2, sigma=0.0, steps=2)
    settings = gentle(method, 2, sigma=0.0, connect=connect)
    memory = Memory(torch.Generator().manual_seed(0))
    trained = METHODS[method](lambda: data.network(4), settings, 2, memory, data.loss)

    def heads():
        """The outputs' weights, of each member."""
        return [p.detach().clone() for p in trained.model.parameters() if p.shape[-2:] == (6, 32)]

    before = heads()
    generator = torch.Generator().manual_seed(0)
    for task in range(2):
        trained.start(task)
        for x, y in data.batches([task], settings.batch, generator):
            trained.step(x, y)
        memory.store(*data.one_per_class(task, generator))
        trained.finish(task)
    after = heads()
    assert before
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new[..., 4:, :], old[..., 4:, :])
        assert not torch.allclose(new[..., :4, :], old[..., :4, :], atol=1e-4)


@pytest.mark.parametrize("apart", [True, False])
def test_the_second_phase_sees_past_tasks_apart_or_in_one_batch(apart):
    data = toy(tasks=3, train=5)
    settings = gentle("mc-sgd", 1)
    settings = replace(settings, connect=replace(settings.connect, apart=apart))
    memory = Memory(torch.Generator().manual_seed(0))
    seen = []

    def criterion(scores, y):
        seen.append(y.tolist())
        return data.loss(scores, y)

    trained = METHODS["mc-sgd"](lambda: data.network(4), settings, 1, memory, criterion)
    for task in range(3):
        trained.start(task)
        trained.step(*next(data.batches([task], 10, torch.Generator().manual_seed(0))))
        memory.store(*data.one_per_class(task, torch.Generator().manual_seed(0)))
        seen.clear()
        trained.finish(task)
    each = [[0, 1], [2, 3], [4, 5]] if apart else [[0, 1, 2, 3], [4, 5]]
    assert seen == each * settings.connect.steps * settings.connect.samples


def test_a_multitask_batch_has_each_examples_own_classes():
    """Labels of all tasks in a batch: the same step as one on each task's loss, weighted."""
    data = toy(tasks=3, train=5)
    torch.manual_seed(0)
    trained = METHODS["multitask"](
        lambda: data.network(4), Settings(lr=0.1), 1, Memory(torch.Generator()), data.loss
    )
    x, y = next(data.batches([0, 1, 2], 12, torch.Generator().manual_seed(0)))
    scores = trained.model(x)
    parts = []
    for task in range(3):
        rows = y // 2 == task
        own = scores[rows][:, 2 * task : 2 * task + 2]
        parts.append(F.cross_entropy(own, y[rows] - 2 * task, reduction="sum"))
    torch.testing.assert_close(trained.loss(x, y), sum(parts) / len(y))


@pytest.mark.parametrize(
    ("width", "side", "macs"),
    [(20, 32, 25.145e6), (35, 32, 76.260e6), (20, 84, 177.07e6), (29, 84, 369.76e6)],
)
def test_multiplications_of_the_resnet(width, side, macs):
    model, x = reduced_resnet(width, 100, side=side), torch.zeros(2, 3, side, side)
    parameters = sum(p.numel() for p in model.parameters()) - 100
    added = paper_cost("subspace-connectivity", 2, model, x) - 1
    assert parameters / (10 * added) == pytest.approx(macs, rel=1e-4)


def test_the_papers_counts_for_the_resnet():
    single, x = reduced_resnet(20, 100), torch.zeros(2, 3, 32, 32)
    for width, expected in ((20, 1.0), (29, 2.08), (35, 3.01)):
        count = paper_cost("mc-sgd", 1, reduced_resnet(width, 100), x, single)
        assert round(count, 2) == expected
    for n, expected in ((2, 1.002), (3, 1.004)):
        assert round(paper_cost("subspace-connectivity", n, single, x), 3) == expected


@pytest.mark.parametrize(
    ("method", "n", "predict"),
    [("ensemble-mc-sgd", 3, 3), ("batch-ensemble", 2, 2), ("subspace-connectivity", 3, 1)],
)
def test_flops_of_a_prediction_by_the_resnet(method, n, predict):
    settings = settings_for("split-cifar-100", method, n)
    flops = relative_flops(method, lambda: reduced_resnet(20, 100), settings, n, (3, 32, 32))
    assert flops["predict"] == pytest.approx(predict, rel=1e-2)


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_settings_on_every_benchmark(name, method):
    settings = settings_for(name, method, 3)
    connects = "mc-sgd" in method or method == "subspace-connectivity"
    assert settings.lr > 0 and (settings.connect is not None or not connects)
    assert settings.hidden == 20 or name not in SPLITS
    assert settings.epochs == 5 or name != "split-cifar-100-5"


def test_subspaces_learn_images_with_the_learning_rate_times_n():
    cifar, mini = (settings_for(b, "subspace-connectivity", 5) for b in SPLITS[:2])
    assert (cifar.lr, mini.lr) == (pytest.approx(1.5), pytest.approx(0.75))
    assert (cifar.sigma, cifar.connect.sigma, cifar.connect.lr) == (0.1, 0.01, 0.1)
    ablation = settings_for("split-cifar-100-5", "subspace", 2)
    assert (ablation.lr, ablation.decay, ablation.epochs) == (pytest.approx(0.3), 1.0, 5)


@pytest.fixture
def folder(few, tmp_path):
    """A folder of images, of one colour each: class, number and file's place."""
    out = tmp_path / "images"
    for label in range(100):
        (out / f"n{label:03}").mkdir(parents=True)
        for i in range(6):
            image = Image.new("RGB", (84, 84), (label, i, 7))
            image.save(out / f"n{label:03}" / f"{label}-{i}.png")
    return out


def test_prepared_images_are_read_as_a_benchmark(folder, tmp_path, capsys):
    assert prepare([str(folder), str(tmp_path / "root")]) == 0
    assert "Written" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "root" / "miniimagenet").iterdir()) == [
        "test.npz",
        "train.npz",
    ]
    data = BENCHMARKS["split-miniimagenet"](0, tmp_path / "root", False)
    place = torch.randperm(100, generator=torch.Generator().manual_seed(0)).argsort()
    for (x, y), numbers in ((data.train, {0, 1, 2, 3}), (data.test, {4, 5})):
        assert torch.equal(place[x[:, 40, 40, 0].long()], y) and (x[..., 2] == 7).all()
        assert set(x[:, 0, 0, 1].tolist()) == numbers
    with np.load(tmp_path / "root" / "miniimagenet" / "test.npz") as entry:
        assert entry["wnids"].tolist() == sorted(path.name for path in folder.iterdir())


def broken_png(image, path):
    """An image whose data end in a chunk without a name."""
    image.save(path)
    text = path.read_bytes()
    at = text.index(b"IDAT") - 4
    short = struct.pack(">I", 5) + text[at + 4 : at + 13] + struct.pack(">I", 0)
    path.write_bytes(text[:at] + short + struct.pack(">I", 4) + bytes(12))


@pytest.mark.parametrize(
    "fault", ["nowhere", "classes", "count", "size", "text", "chunk", "16 bits", "target"]
)
def test_what_cannot_be_prepared_is_one_line_and_status_2(folder, tmp_path, capsys, fault):
    path = folder / "n042" / "42-3.png"
    if fault == "nowhere":
        folder = tmp_path / "nowhere"
    elif fault == "classes":
        (folder / "more").mkdir()
    elif fault == "count":
        path.unlink()
    elif fault == "size":
        Image.new("RGB", (84, 83)).save(path)
    elif fault == "chunk":
        broken_png(Image.new("RGB", (84, 84)), path)
        with pytest.raises(SyntaxError):
            Image.open(path).load()
    elif fault == "16 bits":
        Image.fromarray(np.full((84, 84), 40_000, np.uint16)).save(path)
    elif fault == "target":
        (tmp_path / "root").write_text("a file")
        path.write_text("no image")  # Not read.
    else:
        path.write_text("no image")
    assert prepare([str(folder), str(tmp_path / "root")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    names = {"nowhere": "nowhere", "classes": "101", "count": "n042", "target": "root"}
    named = names.get(fault, path.name)
    assert named in message
    assert not list(tmp_path.glob("root/*/*"))
