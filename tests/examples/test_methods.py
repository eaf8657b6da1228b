import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import ensemblayers as el
from examples.benchmarks import rotated_digits
from examples.memory import Memory
from examples.methods import METHODS
from examples.methods.connectivity import SubspaceConnectivity
from examples.methods.distillation import distillation
from examples.models import mlp
from examples.run import run
from examples.settings import Connect, Settings, settings_for

CPU = torch.device("cpu")
CONNECT = Connect(previous=0.75, lr=0.1, momentum=0.5, samples=1, sigma=0.0, steps=3)


def make():
    return mlp(6, 5, 3).double()


def learned(method, settings, n=2, tasks=2):
    """A method that was through some tasks of random data, and its memory."""
    memory = Memory(torch.Generator().manual_seed(0))
    trained = METHODS[method](make, settings, n, memory)
    for task in range(tasks):
        trained.start(task)
        for _ in range(5):
            trained.step(torch.randn(4, 6).double(), torch.randint(3, (4,)))
        memory.store(torch.randn(3, 6).double(), torch.arange(3))
        trained.finish(task)
    return trained


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_the_first_tasks(method):
    data = rotated_digits(0, None, False).shortened(2, None)
    settings = settings_for("rotated-digits", method, 2)
    result = run(data, method, settings, 2, 0, CPU)
    assert result["metrics"]["final_accuracy"] > 70, result["metrics"]


@pytest.mark.parametrize(
    "method",
    [
        "naive",
        "ewc",
        "a-gem",
        "er-reservoir",
        "stable-sgd",
        "subspace-connectivity",
        "batch-ensemble",
    ],
)
def test_a_seed_sets_the_whole_run(method):
    data = rotated_digits(0, None, False).shortened(2, 100)
    settings = settings_for("rotated-digits", method, 2)
    first, again, other = (
        run(data, method, settings, 2, seed, CPU)["accuracy"] for seed in (5, 5, 6)
    )
    assert first == again != other


def test_learning_rate_decays_with_the_task_and_momentum_starts_anew():
    trained = learned("naive", Settings(lr=0.4, decay=0.5, momentum=0.9), tasks=1)
    trained.start(2)
    assert trained.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert not trained.optimizer.state


def test_first_task_is_not_connected_to_anything():
    trained = learned("subspace-connectivity", Settings(lr=0.1, connect=CONNECT), tasks=1)
    without = [v.clone() for v in trained.optimizer.vertices()]
    trained.finish(0)
    assert all(map(torch.equal, trained.optimizer.vertices(), without))


@pytest.mark.parametrize(("method", "n"), [("mc-sgd", 1), ("subspace-connectivity", 3)])
@pytest.mark.parametrize("chain", [False, True])
def test_a_task_starts_from_what_was_connected_or_learned(method, n, chain, monkeypatch):
    before = {}

    def connect(self, task):
        before["learned"] = [v.clone() for v in self.optimizer.vertices()]
        original(self, task)
        before["connected"] = [v.clone() for v in self.optimizer.vertices()]

    original = SubspaceConnectivity._connect
    monkeypatch.setattr(SubspaceConnectivity, "_connect", connect)
    settings = Settings(lr=0.1, connect=replace(CONNECT, chain=chain))
    trained = learned(method, settings, n=n, tasks=2)
    previous = trained.previous
    trained.start(2)
    vertices = trained.optimizer.vertices()
    want = before["learned" if chain else "connected"]
    assert all(map(torch.equal, vertices, want))
    assert trained.previous is previous  # What was connected, in either case.
    point = trained.optimizer.alpha.to(vertices[0].dtype)
    for p, v in zip(trained.model.parameters(), vertices, strict=True):
        torch.testing.assert_close(p.detach(), torch.tensordot(point, v, 1))


def test_the_last_midpoint_teaches_the_classes_of_earlier_tasks():
    trained = learned("subspace-distillation", Settings(lr=0.1, distill=0.5, connect=CONNECT))
    trained.start(2)
    # The vertices lie at one point, as sigma is 0: the teacher gives the student's own scores.
    x, y = torch.randn(4, 6).double(), torch.randint(3, (4,))
    plain = F.cross_entropy(trained.model(x), y)
    torch.testing.assert_close(trained.loss(x, y), plain)
    for _ in range(3):
        trained.step(x, y)
    new, old = trained.model(x), trained.teacher(x)
    p, q = (torch.softmax(scores / 2, -1) for scores in (old, new))
    expected = F.cross_entropy(new, y) + 0.5 * 4 * (p * (p / q).log()).sum() / 4
    torch.testing.assert_close(trained.loss(x, y), expected)
    assert expected > F.cross_entropy(new, y)


def test_nothing_teaches_the_first_task():
    results = []
    for method in ("subspace-connectivity", "subspace-distillation"):
        torch.manual_seed(0)
        trained = learned(method, Settings(lr=0.1, connect=CONNECT), tasks=1)
        results.append([v.clone() for v in trained.optimizer.vertices()])
    assert all(map(torch.equal, *results))


def test_distillation_is_over_each_tasks_own_classes():
    new, old = torch.randn(2, 5, 6).double()
    classes = torch.tensor([[0, 1], [4, 5]])
    parts = [distillation(new[:, own], old[:, own], torch.tensor([[0, 1]])) for own in classes]
    torch.testing.assert_close(distillation(new, old, classes), sum(parts))
    changed = old + torch.tensor([3.0, 3.0, 9.0, -9.0, 0.0, 0.0])  # Of no task, or no difference.
    torch.testing.assert_close(distillation(new, changed, classes), sum(parts))


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_mc_sgd_connects_as_equation_2_says(monkeypatch, summed, apart):
    """The second phase against plain autograd on one network, point by point."""
    connect = replace(CONNECT, summed=summed, apart=apart)
    trained = learned("mc-sgd", Settings(lr=0.1, momentum=0.5, connect=connect), tasks=2)
    memory, previous = trained.memory, trained.previous
    trained.start(2)
    for _ in range(5):
        trained.step(torch.randn(4, 6).double(), torch.randint(3, (4,)))
    memory.store(torch.randn(3, 6).double(), torch.arange(3))
    solution = {k: v.detach() for k, v in trained.midpoint().named_parameters()}

    points = torch.rand(CONNECT.steps, dtype=torch.float64)
    drawn = iter(points)

    def draw(n, *size, **kwargs):
        share = next(drawn)
        return torch.stack([1 - share, share]).view(1, 2)

    monkeypatch.setattr(el, "sample_simplex", draw)
    trained.finish(2)

    net = make()
    names = [name for name, _ in net.named_parameters()]
    w = {k: (0.75 * previous[k] + 0.25 * solution[k]).requires_grad_() for k in names}
    (x1, y1), (x2, y2), (x, y) = memory.tasks
    velocity = {k: torch.zeros_like(v) for k, v in w.items()}
    for share in points:
        loss = 0
        for anchor, images, labels in [(previous, x1, y1), (previous, x2, y2), (solution, x, y)]:
            at = {k: (1 - share) * w[k] + share * anchor[k] for k in names}
            own = F.cross_entropy(torch.func.functional_call(net, at, images), labels)
            loss = loss + (own if summed or anchor is solution else own / 2)
        grads = torch.autograd.grad(loss, list(w.values()))
        with torch.no_grad():
            for (k, v), g in zip(w.items(), grads, strict=True):
                velocity[k] = 0.5 * velocity[k] + g
                v -= 0.1 * velocity[k]
    connected = dict(trained.midpoint().named_parameters())
    for k in names:
        torch.testing.assert_close(connected[k], w[k], rtol=1e-5, atol=1e-7)


def test_members_of_the_connected_subspace_start_around_the_centre():
    connect = Connect(previous=0.75, lr=0.0, momentum=0.0, samples=1, sigma=0.1, steps=1)
    trained = learned("subspace-connectivity", Settings(lr=0.1, connect=connect), n=3, tasks=1)
    previous = trained.previous
    trained.start(1)
    trained.step(torch.randn(4, 6).double(), torch.randint(3, (4,)))
    solution = {k: v.detach() for k, v in trained.midpoint().named_parameters()}
    trained.memory.store(torch.randn(3, 6).double(), torch.arange(3))
    trained.finish(1)
    ratios = torch.cat(
        [
            (v.detach() / (0.75 * previous[k] + 0.25 * solution[k])).flatten(1)
            for k, v in zip(solution, trained.optimizer.vertices(), strict=True)
        ],
        dim=1,
    )
    assert (ratios.mean() - 1).abs() < 0.02 and (ratios.std() - 0.1).abs() < 0.02
    assert not torch.equal(ratios[0], torch.ones_like(ratios[0]))


def test_a_task_is_learned_as_by_subspace_layers_and_torchs_own_optimizer():
    settings = Settings(lr=0.1, decay=0.5, momentum=0.8, sigma=0.5)
    trained = METHODS["subspace"](make, settings, 3, Memory(torch.Generator()))
    layers = el.to_subspace(make(), n=3)
    with torch.no_grad():
        for p, v in zip(layers.parameters(), trained.optimizer.vertices(), strict=True):
            p.copy_(v)
    for task in range(2):
        optimizer = torch.optim.SGD(layers.parameters(), 0.1 * 0.5**task, momentum=0.8)
        trained.start(task)
        for _ in range(5):
            x, y = torch.randn(4, 6).double(), torch.randint(3, (4,))
            el.set_point(layers, trained.optimizer.alpha)
            optimizer.zero_grad()
            F.cross_entropy(layers(x), y).backward()
            optimizer.step()
            trained.step(x, y)
    for p, v in zip(layers.parameters(), trained.optimizer.vertices(), strict=True):
        torch.testing.assert_close(v, p, rtol=1e-9, atol=1e-11)


def test_ensemble_mc_sgd_members_see_the_same_data_from_different_starts():
    settings = Settings(lr=0.1, connect=CONNECT)
    memory = Memory(torch.Generator())
    ensemble = METHODS["ensemble-mc-sgd"](make, settings, 2, memory)
    alone = copy.deepcopy(ensemble.members[1])
    x, y = torch.randn(4, 6).double(), torch.randint(3, (4,))
    for trained in (ensemble, alone):
        trained.start(0)
        trained.step(x, y)
    first, second = (m.midpoint()[0].weight for m in ensemble.members)
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, alone.midpoint()[0].weight)


def test_bagging_trains_one_member_a_batch():
    settings = Settings(lr=0.1, connect=CONNECT)
    trained = METHODS["ensemble-mc-sgd-bagging"](make, settings, 3, Memory(torch.Generator()))
    trained.start(0)
    chosen = set()
    for _ in range(20):
        before = [m.midpoint()[0].weight for m in trained.members]
        trained.step(torch.randn(4, 6).double(), torch.randint(3, (4,)))
        after = [m.midpoint()[0].weight for m in trained.members]
        moved = [i for i in range(3) if not torch.equal(before[i], after[i])]
        assert len(moved) == 1
        chosen.add(moved[0])
    assert chosen == {0, 1, 2}


def test_replay_joins_examples_of_earlier_tasks():
    trained = learned("subspace-er", Settings(lr=0.1, replay=2), tasks=1)
    seen = []
    trained.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    trained.start(1)
    trained.step(torch.zeros(4, 6).double(), torch.zeros(4, dtype=torch.long))
    stored = trained.memory.tasks[0][0].tolist()
    assert len(seen[0]) == 6 and all(row in stored for row in seen[0][4:].tolist())


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_batch_ensemble_batches_divide_among_the_members(n):
    assert settings_for("rotated-mnist", "batch-ensemble", n).batch % n == 0


def test_memory_samples_without_replacement():
    memory = Memory(torch.Generator().manual_seed(0))
    memory.store(torch.arange(3.0).view(3, 1), torch.arange(3))
    memory.store(torch.arange(3.0, 6).view(3, 1), torch.arange(3))
    x, y = memory.sample(10)
    assert sorted(x.flatten().tolist()) == [0, 1, 2, 3, 4, 5]
    assert torch.equal(x.flatten() % 3, y.float())
    assert len(memory.sample(4)[0]) == 4
