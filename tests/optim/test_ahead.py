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


class Run:
    """A model and its optimizer, and the explicit copies that they have to equal."""

    def __init__(self, options, n=3):
        self.options = {"lr": 0.01, **options}
        self.model = net()
        self.opt = SubspaceSGD(self.model.parameters(), n=n, sigma=0.5, **self.options)
        self.anchors = []
        self.follow_anew()

    def follow_anew(self):
        now = {name: self.opt.param_groups[0][name] for name in self.options}
        self.explicit = Explicit(self.model, self.opt, torch.optim.SGD, **now)

    def backward(self):
        x = backward(self.model)
        self.explicit.backward(self.opt.alpha.clone(), x, self.anchors)

    def step(self, missing=(), keep=False):
        """A step in which parameters have no gradient, and after which gradients are zeros."""
        self.backward()
        params = list(self.model.parameters())
        for k in missing:
            params[k].grad = self.explicit.copies[k].grad = None
        self.opt.step()
        self.explicit.step()
        # In place: the memory of gradients that are kept may be written over.
        self.opt.zero_grad(set_to_none=not keep)
        for p, c in zip(params, self.explicit.copies, strict=True):
            if p.grad is not None:  # As a gradient of zeros it takes part in the next step.
                c.grad = torch.zeros_like(c)

    def check(self):
        # The model first: looking at the vertices settles them.
        expected = self.explicit.weights(self.opt.alpha, self.anchors).values()
        close(self.model.parameters(), expected, rtol=1e-9, atol=1e-11)

    def check_vertices(self):
        close(self.opt.vertices(), self.explicit.copies, rtol=1e-9, atol=1e-11)


def another_learning_rate(run):
    for opt in (run.opt, run.explicit.opt):
        opt.param_groups[0]["lr"] = 0.03 - opt.param_groups[0]["lr"]


def another_momentum(run):
    if run.options.get("momentum"):
        for opt in (run.opt, run.explicit.opt):
            opt.param_groups[0]["momentum"] = 1.3 - opt.param_groups[0]["momentum"]


def another_draw(run):
    run.backward()
    run.opt.accumulate()


def another_draw_that_is_dropped(run):
    backward(run.model)
    run.opt.accumulate()
    run.opt.zero_grad()
    run.explicit.opt.zero_grad()


def a_vertex_moves(run):
    run.opt.vertices()[0][1] += 0.1
    run.explicit.copies[0].data[1] += 0.1
    run.opt.train()  # Writes the point anew.


def a_vertex_moves_before_the_step(run):
    run.backward()
    run.opt.vertices()[0][1] += 0.1
    run.opt.step()
    run.opt.zero_grad()
    run.explicit.copies[0].data[1] += 0.1
    run.explicit.step()


def momentum_is_halved(run):
    for state in (*run.opt.state.values(), *run.explicit.opt.state.values()):
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"] *= 0.5


def momentum_is_forgotten(run):
    run.opt.forget()
    run.explicit.opt.state.clear()


def a_restart(run):
    weights = [p.detach().clone() for p in run.model.parameters()]
    run.opt.restart(0.3)
    close([v[0] for v in run.opt.vertices()], weights, rtol=0, atol=0)
    run.follow_anew()


def a_set_point(run):
    run.opt.set_point(torch.arange(run.opt.n) / 3)
    run.step()
    run.step()
    run.opt.set_point(None)


def an_evaluation(run):
    run.opt.eval()
    run.opt.train()


def add_a_frozen_vertex(run):
    run.anchors.append([torch.randn_like(p) for p in run.model.parameters()])
    run.opt.add_frozen(run.anchors[-1])


def no_frozen_vertices(run):
    run.opt.clear_frozen()
    run.anchors = []


def saved_and_loaded(run):
    run.opt.load_state_dict(copy.deepcopy(run.opt.state_dict()))


def back_to_a_state_of_before(run):
    saved = copy.deepcopy((run.opt.state_dict(), run.explicit))
    run.step()
    run.step()
    state, run.explicit = saved
    run.opt.load_state_dict(state)


def a_pickle(run):
    run.model, run.opt = pickle.loads(pickle.dumps((run.model, run.opt)))


def a_copy(run):
    run.model, run.opt = copy.deepcopy((run.model, run.opt))


def weights_out_and_in_again(run):
    weights = copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict({name: torch.zeros_like(w) for name, w in weights.items()})
    run.model.load_state_dict(weights)


def the_midpoint_is_loaded(run):
    model, opt = copy.deepcopy((run.model, run.opt))
    opt.eval()
    run.model.load_state_dict(model.state_dict())
    run.opt.train()


def a_gradient_is_missing(run):
    run.step(missing=[1])


def gradients_are_kept(run):
    run.step(keep=True)


EVENTS = [
    another_learning_rate,
    another_momentum,
    another_draw,
    another_draw_that_is_dropped,
    a_vertex_moves,
    a_vertex_moves_before_the_step,
    momentum_is_halved,
    momentum_is_forgotten,
    a_restart,
    a_set_point,
    an_evaluation,
    add_a_frozen_vertex,
    no_frozen_vertices,
    saved_and_loaded,
    back_to_a_state_of_before,
    a_pickle,
    a_copy,
    weights_out_and_in_again,
    the_midpoint_is_loaded,
    a_gradient_is_missing,
    gradients_are_kept,
]


@pytest.mark.parametrize("options", SGD)
@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("event", EVENTS)
def test_steps_are_those_of_explicit_copies_whatever_is_between(event, position, options, steps):
    run = Run(options)
    if event is no_frozen_vertices:
        add_a_frozen_vertex(run)
    # With momentum, the first step is of a kind of its own.
    for _ in range((3 if "momentum" in options else 2) + position):
        run.step()
    assert steps == ["full", "full", "between", "between"][: 2 + position]
    event(run)
    for _ in range(7):
        run.step()
        run.check()
    assert steps[-7:].count("between") >= 2
    run.check_vertices()


@pytest.mark.parametrize("options", SGD)
@pytest.mark.parametrize("n", [3, 5, 7])
def test_steps_are_those_of_explicit_copies_whatever_happens(options, n, steps):
    run = Run(options, n)
    chance = torch.Generator().manual_seed(n)
    for _ in range(100):
        if torch.rand((), generator=chance) < 0.3:
            EVENTS[int(torch.randint(len(EVENTS), (), generator=chance))](run)
        run.step()
        run.check()
    run.check_vertices()
    assert steps.count("between") > 20


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


def test_cycles_are_only_where_memory_allows_and_time_asks_for_them(steps, monkeypatch):
    def of(model, **options):
        steps.clear()
        opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, momentum=0.9)
        opt.__dict__.update(options)
        train(model, opt, 5)
        return bool(steps)

    assert of(net())
    # Ranks must not differ by a bit.
    assert not of(net(), _processes=2)
    with monkeypatch.context() as patch:
        patch.setattr(_ahead, "MEMORY", 0)
        assert not of(net())
    monkeypatch.setattr(_ahead, "pays", lambda *args: False)
    assert not of(net())


def test_parameters_that_missed_steps_take_part_in_cycles_again(steps):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, momentum=0.9)
    for step in range(12):
        opt.zero_grad()
        backward(model)
        if step in (2, 3):
            model[0].bias.grad = None
        opt.step()
    assert steps[1:] == ["full", "full", "between", "between", "full", "between", "between", "full"]
