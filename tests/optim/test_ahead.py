"""Cycles of steps, whose points one pass writes: the same steps, to the bit whatever is between."""

import copy
import io
import pickle

import pytest
import torch
from explicit import SGD, Explicit, backward, close, net
from torch import nn

from ensemblayers import _ahead
from ensemblayers.optim import SubspaceSGD

pytestmark = pytest.mark.usefixtures("native_only")


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Cycles for any number of vertices and parameters."""
    monkeypatch.setattr(_ahead, "pays", lambda *args: True)


@pytest.fixture
def steps(monkeypatch):
    """What the steps of one block were: a full pass, or one between."""
    seen = []
    step = _ahead.Ahead.step

    def spy(self, *args):
        before = self.position
        step(self, *args)
        seen.append("between" if self.position > before else "full")

    monkeypatch.setattr(_ahead.Ahead, "step", spy)
    return seen


def train(model, opt, count=1, dtype=torch.float64):
    for _ in range(count):
        opt.zero_grad()
        backward(model, dtype)
        opt.step()


def twins(n, options, dtype=torch.float32, frozen=0):
    """Twice the same model and optimizer."""
    pairs = []
    for _ in range(2):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(5, 43), nn.Tanh(), nn.Linear(43, 3)).to(dtype)
        opt = SubspaceSGD(model.parameters(), lr=0.05, n=n, sigma=0.5, **options)
        for _ in range(frozen):
            opt.add_frozen([torch.randn_like(p) for p in model.parameters()])
        pairs.append((model, opt))
    return pairs


def test_most_steps_go_without_a_full_pass(steps):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, momentum=0.9)
    train(model, opt, 64)
    # The first is torch's own kind, the next begins with no rule to rely on.
    assert steps[:7] == ["full", "full", "between", "between", "full", "between", "between"]
    assert steps.count("between") > 0.6 * len(steps)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize(
    ("dtype", "frozen"), [(torch.float32, 0), (torch.float32, 1), (torch.bfloat16, 0)]
)
@pytest.mark.parametrize("options", SGD)
def test_looking_between_steps_changes_no_bit(n, options, dtype, frozen):
    (model, opt), (other, again) = twins(n, options, dtype, frozen)
    looks = [
        lambda: (again.eval(), again.train()),
        lambda: again.export(0),
        again.state_dict,
        lambda: None,
        again.vertices,
        lambda: (again.set_point([1.0] + [0.0] * (n - 1)), again.set_point(None)),
        lambda: copy.deepcopy((other, again)),
    ]
    for step in range(3 * len(looks)):
        for m, o in ((model, opt), (other, again)):
            torch.manual_seed(step)
            train(m, o, dtype=dtype)
        looks[(step + step // len(looks)) % len(looks)]()
        close(other.parameters(), model.parameters(), rtol=0, atol=0)
    close(again.vertices(), opt.vertices(), rtol=0, atol=0)


@pytest.mark.parametrize("options", SGD)
@pytest.mark.parametrize("when", range(1, 8))
@pytest.mark.parametrize("schedule", [False, True])
def test_a_run_resumes_to_the_bit_at_any_step(when, options, schedule):
    def go_on(model, opt):
        torch.manual_seed(7)
        train(model, opt, 5, torch.float32)
        return [*model.parameters(), *opt.vertices()]

    (model, opt), (other, again) = twins(3, options)
    train(model, opt, when, torch.float32)
    if schedule:
        opt.param_groups[0]["lr"] *= 0.5
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    expected = go_on(model, opt)
    file.seek(0)
    again.load_state_dict(torch.load(file))
    close(go_on(other, again), expected, rtol=0, atol=0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("when", range(1, 6))
def test_copies_go_on_to_the_bit(when, duplicate):
    (model, opt), _ = twins(5, {"momentum": 0.9})
    train(model, opt, when, torch.float32)
    pairs = (model, opt), duplicate((model, opt))
    for m, o in pairs:
        torch.manual_seed(9)
        train(m, o, 5, torch.float32)
    close(pairs[1][0].parameters(), model.parameters(), rtol=0, atol=0)


@pytest.mark.parametrize("options", SGD)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_between_the_steps_are_those_of_explicit_copies(options, seed):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.01, n=3, sigma=0.5, **options)
    explicit = Explicit(model, opt, torch.optim.SGD, lr=0.01, **options)
    chance = torch.Generator().manual_seed(seed)

    def lr(value):
        for o in (opt, explicit.opt):
            o.param_groups[0]["lr"] = value

    def another_draw():
        explicit.backward(opt.alpha.clone(), backward(model))
        opt.accumulate()

    def a_vertex_moves():
        opt.vertices()[0][1] += 0.1
        explicit.copies[0].data[1] += 0.1
        opt.train()  # Writes the point anew.

    def momentum_is_forgotten():
        opt.forget()
        explicit.opt.state.clear()

    events = [
        lambda: lr(0.02),
        lambda: lr(0.01),
        another_draw,
        a_vertex_moves,
        momentum_is_forgotten,
        lambda: opt.set_point([0.2, 0.3, 0.5]),
        lambda: opt.set_point(None),
        lambda: (opt.eval(), opt.train()),
        lambda: opt.load_state_dict(copy.deepcopy(opt.state_dict())),
    ]
    for _ in range(60):
        event = None
        if torch.rand((), generator=chance) < 0.4:
            event = events[int(torch.randint(len(events), (), generator=chance))]
            event()
        explicit.backward(opt.alpha.clone(), backward(model))
        if torch.rand((), generator=chance) < 0.1 and event is not another_draw:
            model[0].bias.grad = explicit.copies[1].grad = None
        opt.step()
        explicit.step()
        # In place: the memory of gradients that are kept may be written over.
        opt.zero_grad(set_to_none=bool(torch.rand((), generator=chance) < 0.5))
        for p, c in zip(model.parameters(), explicit.copies, strict=True):
            if p.grad is not None:  # As a gradient of zeros it takes part in the next step.
                c.grad = torch.zeros_like(c)
    close(opt.vertices(), explicit.copies, rtol=1e-9, atol=1e-11)
    close(model.parameters(), explicit.weights(opt.alpha).values(), rtol=1e-9, atol=1e-11)


def test_views_of_the_vertices_are_up_to_date_as_long_as_they_are_held(steps):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.01, n=3, sigma=0.5, momentum=0.9)
    explicit = Explicit(model, opt, torch.optim.SGD, lr=0.01, momentum=0.9)

    def steps_are_right(held, count):
        for _ in range(count):
            explicit.backward(opt.alpha.clone(), backward(model))
            opt.step()
            explicit.step()
            opt.zero_grad()
            if held is not None:
                close([held], [explicit.copies[2][1]], rtol=1e-9, atol=1e-11)

    steps_are_right(None, 4)
    held = opt.vertices()[2][1]  # Of the views alone, a view.
    steps_are_right(held, 4)
    assert steps == ["full", "full", "between"]
    del held
    steps_are_right(None, 4)
    assert steps[3:] == ["full", "full", "between", "between"]


@pytest.mark.parametrize("bound", ["MEMORY", "pays"])
def test_cycles_are_only_where_memory_allows_and_time_asks_for_them(bound, steps, monkeypatch):
    monkeypatch.setattr(_ahead, bound, 0 if bound == "MEMORY" else lambda *args: False)
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, momentum=0.9)
    train(model, opt, 5)
    assert not steps
