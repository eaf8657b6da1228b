"""The cores of the single-network methods against computations by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F

from examples.memory import Memory, Reservoir
from examples.methods import METHODS
from examples.methods.a_gem import project_
from examples.methods.ewc import DECAY, normalised
from examples.models import mlp
from examples.settings import Settings, settings_for

EVERY = 4


def make():
    return mlp(6, 5, 3).double()


def method(name, **settings):
    return METHODS[name](make, Settings(lr=0.1, **settings), 1, Memory(torch.Generator()))


def batch(size=4):
    return torch.randn(size, 6).double(), torch.randint(3, (size,))


def gradients(model, x, y):
    return torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))


def test_fisher_information_is_the_running_mean_of_squared_gradients():
    trained = method("ewc", fisher_steps=EVERY)
    trained.start(0)
    expected = [torch.zeros_like(p) for p in trained.params]
    for _ in range(2):
        squares = [torch.zeros_like(p) for p in trained.params]
        for _ in range(EVERY):
            x, y = batch()
            squares = [
                s + g**2 for s, g in zip(squares, gradients(trained.model, x, y), strict=True)
            ]
            trained.step(x, y)
        expected = [
            DECAY * e + (1 - DECAY) * s / EVERY for e, s in zip(expected, squares, strict=True)
        ]
    torch.testing.assert_close(trained.fisher, expected)


def test_fisher_information_is_scaled_over_all_weights_together():
    parts = normalised([torch.tensor([1.0, 3.0]), torch.tensor([[2.0, 5.0]])])
    torch.testing.assert_close(parts, [torch.tensor([0, 0.5]), torch.tensor([[0.25, 1]])])


def test_fisher_information_that_is_the_same_everywhere_penalises_nothing():
    assert normalised([torch.ones(3)])[0].tolist() == [0, 0, 0]


def test_ewc_steps_along_the_gradient_of_loss_and_penalty():
    trained = method("ewc", penalty=10.0, fisher_steps=EVERY)
    for task in range(2):  # The second task's anchor is its own end, not the first one's.
        trained.start(task)
        for _ in range(2 * EVERY):
            trained.step(*batch())
        trained.finish(task)
    trained.start(2)
    anchor, importance = trained.anchor, normalised(trained.fisher)
    assert all(torch.equal(a, p) for a, p in zip(anchor, trained.params, strict=True))
    for _ in range(3):
        x, y = batch()
        model = copy.deepcopy(trained.model)
        params = list(model.parameters())
        distance = sum(
            (f * (p - a) ** 2).sum() for f, p, a in zip(importance, params, anchor, strict=True)
        )
        loss = F.cross_entropy(model(x), y) + 10 * distance
        expected = [
            p - 0.1 * g for p, g in zip(params, torch.autograd.grad(loss, params), strict=True)
        ]
        trained.step(x, y)
        torch.testing.assert_close(list(trained.model.parameters()), expected)


def test_a_gem_projects_onto_the_half_space():
    reference = torch.randn(7).double()
    against = -reference + torch.randn(7).double() * 0.1
    projected = against.clone()
    # The dot product goes over all parameters together.
    project_([projected[:3], projected[3:]], (reference[:3], reference[3:]))
    assert abs(projected @ reference) < 1e-12
    change = projected - against
    torch.testing.assert_close(change, reference * (change @ reference) / (reference @ reference))


@pytest.mark.parametrize("reference", [torch.tensor([1.0, 1.0]), torch.zeros(2)])
def test_a_gem_leaves_a_gradient_that_is_not_against_the_memory(reference):
    gradient = torch.tensor([2.0, -1.0])
    project_([gradient], (reference,))
    assert gradient.tolist() == [2.0, -1.0]


def test_a_gem_steps_along_the_projected_gradient():
    trained = method("a-gem", replay=5)
    trained.memory.store(*batch(5))
    trained.start(1)
    x, y = batch()
    # The opposite labels: the two gradients disagree.
    trained.memory.tasks[0] = (x[[0, 1, 2, 3, 0]], ((y + 1) % 3)[[0, 1, 2, 3, 0]])
    g = torch.cat([p.flatten() for p in gradients(trained.model, x, y)])
    r = torch.cat([p.flatten() for p in gradients(trained.model, *trained.memory.tasks[0])])
    assert g @ r < 0
    before = torch.nn.utils.parameters_to_vector(trained.model.parameters())
    trained.step(x, y)
    after = torch.nn.utils.parameters_to_vector(trained.model.parameters())
    torch.testing.assert_close(after, before - 0.1 * (g - (g @ r) / (r @ r) * r))


def test_a_reservoir_keeps_each_example_of_the_stream_equally_often():
    stream, capacity, trials = 40, 10, 2000
    kept = torch.zeros(stream)
    generator = torch.Generator().manual_seed(0)
    for _ in range(trials):
        reservoir = Reservoir(capacity, generator)
        for part in torch.arange(stream).split(7):
            reservoir.add(part.view(-1, 1).float(), part)
        assert len(reservoir.y.unique()) == capacity == len(reservoir)
        kept[reservoir.y] += 1
    share = capacity / stream
    sigma = (share * (1 - share) * trials) ** 0.5
    assert ((kept - share * trials).abs() < 4.5 * sigma).all()
    # Uniform over the stream: chi-square with 39 degrees of freedom, scaled as for a sample
    # without replacement.
    assert 15 < ((kept - share * trials) ** 2).sum() / sigma**2 < 75


def test_a_reservoir_keeps_labels_with_their_examples():
    reservoir = Reservoir(5, torch.Generator().manual_seed(0))
    for part in torch.arange(30).split(4):
        reservoir.add(part.view(-1, 1).float(), part)
    x, y = reservoir.sample(3)
    assert torch.equal(x.flatten(), y.float()) and len(y.unique()) == 3
    assert len(reservoir.sample(10)[1]) == 5


def test_er_replays_the_reservoir_before_the_batch_enters_it():
    trained = method("er-reservoir", replay=2, buffer=50)
    seen = []
    trained.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    trained.start(0)
    first, second = batch(), batch()
    trained.step(*first)
    trained.step(*second)
    assert torch.equal(seen[0], first[0])
    assert torch.equal(seen[1][:4], second[0]) and len(seen[1]) == 6
    assert all(row in first[0].tolist() for row in seen[1][4:].tolist())
    assert len(trained.reservoir) == 8


def test_stable_sgd_is_its_settings():
    s = settings_for("rotated-mnist", "stable-sgd", 1)
    assert (s.lr, s.decay, s.momentum, s.dropout, s.batch) == (0.1, 0.6, 0.8, 0.25, 64)
    trained = METHODS["stable-sgd"](make, s, 1, Memory(torch.Generator()))
    trained.start(2)
    assert trained.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.36)
