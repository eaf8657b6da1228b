import csv
import dataclasses
import functools
import json
import shutil
from pathlib import Path

import joblib
import matplotlib.image
import pytest
import torch
from joblib.externals.loky.process_executor import TerminatedWorkerError
from torch import nn

import ensemblayers as el
from examples import store, targets
from examples.benchmarks import BENCHMARKS, rotated_digits
from examples.drawing import FIGURES, Sources, hessian, weights
from examples.drawing.costs import _runs as family_runs
from examples.drawing.figure import judge
from examples.drawing.hessian import top_eigenvalues
from examples.drawing.rows import mean_over_seeds
from examples.drawing.weights import Run, percent
from examples.figures import main
from examples.reproduce import TABLES, write_report
from examples.run import run
from examples.settings import settings_for
from examples.store import Key

TASKS = {"rotated-mnist": 12, "rotated-mnist-5": 5, "split-cifar-100-5": 5}


def tiny(name):
    """Rotated digits under another name, with a few images."""

    @functools.cache
    def benchmark(seed, root, download):
        data = rotated_digits(seed, root, download).shortened(TASKS[name], 40)
        test = (data.test[0][:60], data.test[1][:60])
        return dataclasses.replace(data, name=name, test=test, whole=True)

    return benchmark


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name in TASKS:
        monkeypatch.setitem(BENCHMARKS, name, tiny(name))
    monkeypatch.setattr(hessian, "TOP", 3)


@pytest.fixture
def start(tmp_path):
    """The command on the folder of a test, with made-up stored results in it."""
    for table in ("ablation", "parameters", "main_results", "image_results"):
        for row in targets.rows(table):
            store_made_up(tmp_path / "results", row)
    folders = {name: str(tmp_path / name) for name in ("results", "weights", "out")}

    def start(*arguments):
        return main([*arguments, *(text for k, v in folders.items() for text in (f"--{k}", v))])

    return start


def store_made_up(folder, row, seed=0):
    key = Key(row.benchmark, row.method, row.n, row.hidden, seed)
    tasks = 5 if row.benchmark.endswith("-5") else 20
    metrics = {"final_accuracy": 50.0 + row.n, "forgetting": 0.1, "learning_accuracy": 90.0}
    result = {
        **{name: getattr(key, name) for name in ("benchmark", "method", "n", "seed")},
        "whole": True,
        "settings": dataclasses.asdict(key.settings),
        "accuracy": [[90.0 - t if k <= t else None for k in range(tasks)] for t in range(tasks)],
        "metrics": metrics,
        "relative_flops": {"predict": float(row.n), "step": 1.0, "paper": row.flops or 1.0},
    }
    path = folder / key.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))


def test_every_figure_is_drawn_with_its_data_and_its_statements(start, tmp_path, capsys):
    assert start("all") == 0
    printed = capsys.readouterr().out
    assert "not measured yet" not in printed and "not drawn" not in printed
    assert printed.count("  seeds: 0\n") == len(FIGURES)
    for name in FIGURES:
        assert f"{name}:" in printed
        assert matplotlib.image.imread(tmp_path / "out" / f"{name}.png").std() > 0
        for line in (tmp_path / "out" / f"{name}.txt").read_text().splitlines():
            assert line in printed
        with (tmp_path / "out" / f"{name}.csv").open() as file:
            lines = list(csv.DictReader(file))
        assert lines and all(None not in line.values() for line in lines)
    assert not list(tmp_path.glob("out/*-mean.csv"))  # Of a single seed.


def test_what_was_not_measured_is_said_and_not_drawn(tmp_path, capsys):
    folders = [f"--{name}={tmp_path / name}" for name in ("results", "weights", "out")]
    assert main(["all", "--no-train", *folders]) == 0
    printed = capsys.readouterr().out
    assert printed.count("not drawn") == len(FIGURES) and not list(tmp_path.glob("out/*"))
    assert "examples.reproduce ablation" in printed
    assert ": met" not in printed and "NOT met" not in printed


def test_the_committed_figures_are_those_of_the_committed_results(tmp_path):
    here = Path(targets.__file__).parent
    for folder in (here / "results").iterdir():  # None of the CSV files, which are written anew.
        if folder.is_dir():
            shutil.copytree(folder, tmp_path / "results" / folder.name)
    of_results = [name for name, figure in FIGURES.items() if figure.table]
    folders = [f"--{name}={tmp_path / name}" for name in ("results", "weights", "out")]
    assert main([*of_results, "--no-train", *folders]) == 0
    drawn = [name for name in of_results if (tmp_path / "out" / f"{name}.csv").exists()]
    assert len(drawn) > 3
    for name in drawn:
        for kind in ("csv", "txt"):
            file = f"{name}.{kind}"
            assert (tmp_path / "out" / file).read_text() == (here / "figures" / file).read_text()
    write_report(tmp_path)
    for file in ("RESULTS.md", *(f"results/{table}.csv" for table in TABLES)):
        assert (tmp_path / file).read_text("utf-8") == (here / file).read_text("utf-8"), file


@pytest.mark.parametrize("name", ["1-accuracy-against-n", "4-metrics-against-n", "5-cost"])
def test_the_ablation_is_compared_on_the_seeds_that_all_methods_have(name, start, tmp_path):
    folder = tmp_path / "results"
    for row in targets.rows("ablation"):
        store_made_up(folder, row, seed=1)
        if row.method == "naive":
            store_made_up(folder, row, seed=2)
    sources = Sources(folder, tmp_path, tmp_path, (0,))
    assert {row["seed"] for row in FIGURES[name].rows(sources)} == {0, 1}


def test_the_means_over_the_seeds_go_into_a_file_of_their_own(start, tmp_path):
    assert start("12", "--seeds", "0", "1") == 0
    rows, means = (
        list(csv.DictReader((tmp_path / "out" / f"12-barrier{end}.csv").open()))
        for end in ("", "-mean")
    )
    assert len(rows) == 2 * len(means) == 82
    half = [r for r in rows if r["step"] == means[20]["step"]]
    expected = sum(float(r["loss"]) for r in half) / 2
    assert float(means[20]["loss"]) == pytest.approx(expected, rel=1e-4)
    assert means[20]["seeds"] == "2" and "seed" not in means[20]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["4-metrics-against-n"]),
        (["nonsense"], ["nonsense", "4-metrics-against-n"]),
        (["1", "--benchmark", "foo"], ["foo", "rotated-mnist"]),
        (["1", "--jobs", "0"], ["--jobs"]),
        (["1", "--seeds"], ["seed"]),
        (["1", "--seeds", "-1"], ["--seeds", "-1"]),
        (["1", "--seeds", "99999999999999999999"], ["--seeds"]),
        (["1", "--threads", "2000"], ["--threads", "1024"]),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(arguments, names, tmp_path, capsys):
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and all(name in message for name in names)


@pytest.mark.parametrize(
    ("method", "n"),
    [
        ("naive", 1),
        ("subspace", 3),
        ("subspace-connectivity", 2),
        ("vanilla-ensemble", 2),
        ("batch-ensemble", 2),
    ],
)
def test_the_kept_weights_predict_what_the_run_did(method, n, tmp_path):
    wanted = Run("rotated-mnist", method, n, tasks=3)
    weights.make(wanted, 0, tmp_path, tmp_path, None, "cpu", 1)
    trained = weights.load(wanted, 0, tmp_path, None)
    data = BENCHMARKS["rotated-mnist"](0, None, False).shortened(3, None)
    result = run(data, method, wanted.settings, n, 0, torch.device("cpu"))
    for after in range(3):
        for task in range(after + 1):
            points = [trained.midpoint(after)]
            if not method.startswith("subspace"):
                points = [trained.member(after, i) for i in range(n)]
            scores = torch.stack([trained.scores(point, task) for point in points])
            accuracy = percent(el.combine(scores), trained.labels(task))
            assert accuracy == pytest.approx(result["accuracy"][after][task], abs=1e-3)


def test_weights_are_made_once_and_anew_where_the_settings_changed(tmp_path, monkeypatch):
    wanted = Run("rotated-mnist", "naive", 1, tasks=1)
    weights.make(wanted, 0, tmp_path, tmp_path, None, "cpu", 1)
    monkeypatch.setattr(weights, "run", None)  # Any further run would fail.
    weights.make(wanted, 0, tmp_path, tmp_path, None, "cpu", 1)
    changed = dataclasses.replace(settings_for("rotated-mnist", "naive", 1), lr=0.5)
    monkeypatch.setattr(weights, "settings_for", lambda *run: changed)
    assert weights.load(wanted, 0, tmp_path, None) is None
    with pytest.raises(TypeError):
        weights.make(wanted, 0, tmp_path, tmp_path, None, "cpu", 1)


def test_a_whole_run_for_weights_leaves_the_result_that_the_tables_would_make(tmp_path):
    stored, anew = tmp_path / "stored", tmp_path / "anew"
    key = Key("rotated-mnist-5", "subspace", 2, None, 0)
    wanted = Run(key.benchmark, key.method, key.n)
    weights.make(wanted, 0, tmp_path, stored, None, "cpu", 1)
    store.execute(key, anew, "cpu", 1, None)
    result, expected = (store.load(folder, key) for folder in (stored, anew))
    assert result["accuracy"] == expected["accuracy"]
    assert result["relative_flops"] == expected["relative_flops"]
    assert not list(anew.glob("**/other-settings"))


def test_a_run_for_weights_leaves_a_stored_result_alone(tmp_path):
    row = next(row for row in targets.rows("ablation") if row.method == "naive")
    store_made_up(tmp_path / "results", row)
    key = Key(row.benchmark, "naive", 1, None, 0)
    before = store.load(tmp_path / "results", key)
    wanted = Run(key.benchmark, key.method, key.n)
    weights.make(wanted, 0, tmp_path, tmp_path / "results", None, "cpu", 1)
    assert store.load(tmp_path / "results", key) == before


def test_a_part_of_a_run_leaves_no_result(tmp_path):
    wanted = Run("rotated-mnist", "naive", 1, tasks=2)
    weights.make(wanted, 0, tmp_path / "weights", tmp_path / "results", None, "cpu", 1)
    assert wanted.file(tmp_path / "weights", 0).exists() and not (tmp_path / "results").exists()


def test_junk_in_place_of_weights_is_one_line_and_status_2(start, tmp_path, capsys):
    run = FIGURES["12-barrier"].runs[0]
    path = run.file(tmp_path / "weights", 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"junk")
    for arguments in ([], ["--no-train"]):
        assert start("12", *arguments) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and f"{path} holds no weights" in message
    assert path.read_bytes() == b"junk"


def test_a_killed_process_of_a_run_is_reported_in_one_line(start, capsys, monkeypatch):
    def killed(self, calls):
        raise TerminatedWorkerError("a long message\nof many lines")

    monkeypatch.setattr(joblib.Parallel, "__call__", killed)
    assert start("12", "--jobs", "2") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "--jobs" in message


@pytest.mark.parametrize("folder", ["results", "weights", "out"])
def test_folders_that_cannot_be_written_are_found_before_a_run(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(weights, "run", None)
    (tmp_path / folder).write_text("a file")
    folders = [f"--{name}={tmp_path / name}" for name in ("results", "weights", "out")]
    assert main(["12", *folders]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and f"pass --{folder}" in message


def test_weights_count_that_were_kept_before_a_setting_was_there(tmp_path):
    wanted = Run("rotated-mnist", "naive", 1, tasks=1)
    weights.make(wanted, 0, tmp_path, tmp_path, None, "cpu", 1)
    path = wanted.file(tmp_path, 0)
    entry = torch.load(path)
    del entry["settings"]["replay"]
    torch.save(entry, path)
    assert weights.is_stored(wanted, 0, tmp_path)


def test_the_point_of_a_vertex_is_the_vertex(tmp_path):
    wanted = Run("rotated-mnist", "subspace", 3, tasks=1)
    weights.make(wanted, 0, tmp_path, tmp_path, None, "cpu", 1)
    trained = weights.load(wanted, 0, tmp_path, None)
    third = (1 / 3, 1 / 3, 1 / 3)
    for point, expected in (
        (trained.at(0, (0.0, 1.0, 0.0)), trained.member(0, 1)),
        (trained.at(0, third), trained.midpoint(0)),
    ):
        torch.testing.assert_close(point, expected)


def test_the_hessians_eigenvalues_are_those_of_the_whole_matrix():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.randint(3, (30,))
    names, values = zip(*network.named_parameters(), strict=True)
    sizes = [v.numel() for v in values]

    def loss(flat):
        parts = [f.view_as(v) for f, v in zip(flat.split(sizes), values, strict=True)]
        outputs = torch.func.functional_call(network, dict(zip(names, parts, strict=True)), x)
        return nn.functional.cross_entropy(outputs, y)

    flat = torch.cat([v.detach().flatten() for v in values])
    whole = torch.autograd.functional.hessian(loss, flat)
    expected = torch.linalg.eigvalsh(whole).flip(0)[:6]
    found = torch.tensor(top_eigenvalues(network, x, y, 6), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


def claims(name, rows):
    return [claim.holds for claim in FIGURES[name].claims(rows)]


def test_a_claim_that_lacks_a_number_is_not_measured():
    assert str(judge("x", {"a": 1.0, "b": None}, max)).endswith("not measured yet")
    assert judge("x", {}, max).holds is None
    assert str(judge("x", {"a": 1.0}, lambda a: a > 2)) == "x: NOT met (a 1.00)"
    assert str(judge("x", {"a": 1.0}, lambda a: a > 0)) == "x: met (a 1.00)"


@pytest.mark.parametrize("name", FIGURES)
def test_without_data_nothing_is_met_or_not_met(name):
    assert not [holds for holds in claims(name, []) if holds is not None]


def ablation(benchmark, accuracy, improvement, learning):
    """Rows of the ablation by functions of the method and n."""
    runs = [("naive", 1)]
    runs += [(m, n) for m in targets.ABLATION_METHODS for n in targets.ABLATION_MEMBERS]
    return [
        {
            "benchmark": benchmark,
            "method": m,
            "n": n,
            "seed": 0,
            "final_accuracy": accuracy(m, n),
            "forgetting_improvement": improvement(m, n),
            "learning_accuracy": learning(m, n),
        }
        for m, n in runs
    ]


def test_metrics_against_n():
    def learning(method, n):
        return 95.0 if method == "vanilla-ensemble" else 90.0

    rows = ablation("rotated-mnist-5", lambda m, n: n, lambda m, n: n - 1, learning)
    assert claims("4-metrics-against-n", rows) == [True] * 3 + [None] * 4
    # A single ensemble of one size that fails is enough.
    worst = ablation(
        "rotated-mnist-5",
        lambda m, n: 0 if (m, n) == ("batch-ensemble", 5) else n,
        lambda m, n: -0.1 if (m, n) == ("subspace", 10) else n - 1,
        lambda m, n: 96.0 if (m, n) == ("subspace", 2) else learning(m, n),
    )
    assert claims("4-metrics-against-n", worst)[:3] == [False] * 3
    images = ablation("split-cifar-100-5", lambda m, n: n, lambda m, n: n - 1, learning)
    assert claims("4-metrics-against-n", images) == [None] * 3 + [True] * 3 + [False]
    level = ablation("split-cifar-100-5", lambda m, n: min(n, 5), lambda m, n: n, learning)
    assert claims("4-metrics-against-n", level)[-1] is True
    vanilla = [r for r in images if r["method"] in ("naive", "vanilla-ensemble")]
    assert claims("1-accuracy-against-n", vanilla) == [True]
    assert claims("1-accuracy-against-n", vanilla[:-1]) == [None]


def test_voting():
    def rows(average):
        return [
            {"benchmark": "rotated-mnist-5", "n": n, "seed": 0, "rule": rule, "final_accuracy": a}
            for n in (1, 2, 3, 5, 10)
            for rule, a in (("average", average), ("hard", 70.0), ("majority", 71.0))
        ]

    assert claims("3-voting", rows(72.0)) == [True, None]
    assert claims("3-voting", rows(70.5)) == [False, None]
    assert claims("3-voting", rows(72.0)[:-3]) == [None, None]


def test_members():
    def rows(lead):
        return [
            {"n": n, "seed": 0, "task": task, "member": member, "accuracy": accuracy}
            for n in targets.ABLATION_MEMBERS
            for task in range(1, 6)
            for member, accuracy in [
                *((i + 1, 60.0) for i in range(n)),
                ("ensemble", 60 + lead(n)),
            ]
        ]

    assert claims("7-members", rows(lambda n: n)) == [True, True]
    assert claims("7-members", rows(lambda n: 10 - n)) == [False, False]
    assert claims("2-members", rows(lambda n: 1)) == [True]
    assert claims("7-members", [r for r in rows(lambda n: n) if r["n"] < 10]) == [None, None]


def test_predictions():
    def rows(truth):
        return [
            {"n": 10, "seed": 0, "after_task": t, "member": m, "class": c, "probability": p}
            for t in (4, 5)
            for m in (1, 2)
            for c, p in ((0, 1 - truth), (1, truth))
        ]

    assert claims("9-predictions", rows(0.6)) == [True]
    assert claims("9-predictions", rows(0.4)) == [False]


def test_hessian():
    def rows(greatest):
        runs = [("naive", 1), *(("subspace", n) for n in targets.ABLATION_MEMBERS)]
        return [
            {"method": m, "n": n, "seed": 0, "index": i, "eigenvalue": greatest(n) if i == 1 else 0}
            for m, n in runs
            for i in (1, 2)
        ]

    assert claims("5-hessian", rows(lambda n: 20 - n)) == [True, True]
    assert claims("5-hessian", rows(lambda n: 20 - n % 10)) == [False, False]
    flatter = rows(lambda n: 20 - n % 10)
    for row in flatter:  # But for the greatest.
        row["eigenvalue"] += 100 - 10 * row["n"] if row["index"] == 2 else 0
    assert claims("5-hessian", flatter) == [False, True]


def test_costs_of_the_ablation():
    def rows(top, cost):
        runs = [(m, n) for m in targets.ABLATION_METHODS for n in targets.ABLATION_MEMBERS]
        return [
            {"method": m, "n": n, "seed": 0, "counted": cost(m, n), "accuracy": top[m]}
            for m, n in runs
        ]

    order = {"vanilla-ensemble": 3, "subspace": 2, "batch-ensemble": 1}
    assert claims("5-cost", rows(order, lambda m, n: n)) == [True] * 3
    other = {"vanilla-ensemble": 1, "subspace": 2, "batch-ensemble": 3}
    assert claims("5-cost", rows(other, lambda m, n: n**2)) == [False] * 3


def test_costs_on_twenty_tasks():
    def rows(benchmark, accuracy, paper, seed=0):
        return [
            {"benchmark": benchmark, "family": f, "size": n, "seed": seed, "paper": paper}
            | {"accuracy": accuracy[f]}
            for f, n, *_ in family_runs(benchmark)
        ]

    accuracy = {"scaled": 80.0, "ensemble": 82.0, "bagging": 79.0, "subspace": 81.8}
    assert claims("6-cost", rows("rotated-mnist", accuracy, 1.2))[:2] == [None, True]
    assert claims("6-cost", rows("split-cifar-100", accuracy, 1.004))[2:4] == [True, True]
    accuracy["subspace"] = 81.4
    assert claims("6-cost", rows("rotated-mnist", accuracy, 1.2))[1] is False
    accuracy["scaled"] = 83.0
    assert claims("6-cost", rows("split-cifar-100", accuracy, 1.2))[2:4] == [False, False]
    # A run is missing, or has no seed in common with the others.
    for row in rows("rotated-mnist", accuracy, 1.2):
        others = [r for r in rows("rotated-mnist", accuracy, 1.2) if r != row]
        assert claims("6-cost", others)[1] is None
        assert claims("6-cost", [*others, row | {"seed": 1}])[1] is None
    # What only some runs have does not count.
    more = rows("rotated-mnist", {f: 99.0 for f in accuracy}, 1.2, seed=1)[:-1]
    assert claims("6-cost", rows("rotated-mnist", accuracy, 1.2) + more)[1] is False


def test_simplex_and_noise():
    from examples.drawing.simplex import grid

    def rows(centre):
        points = [(*alpha, "grid") for alpha in grid(10)] + [(1 / 3, 1 / 3, 1 / 3, "midpoint")]
        return [
            {"method": "subspace", "seed": 0, "task": t, "after_task": t, "point": point}
            | {"alpha_1": a, "alpha_2": b, "alpha_3": c}
            | {"accuracy": centre if point == "midpoint" else 90 - max(a, b, c)}
            for t in (1, 10)
            for a, b, c, point in points
        ]

    assert claims("10-simplex", rows(89.5)) == [True, True] * 2  # The grid's best: 89.6.
    assert claims("10-simplex", rows(89.3)) == [True, False] * 2
    assert claims("10-simplex", rows(88.9)) == [False, False] * 2

    def noisy(drop):
        return [
            {"point": p, "seed": 0, "std": std, "accuracy": 95.0 - drop[p] * std}
            for p in drop
            for std in (0.0, 0.1, 0.2)
        ]

    assert claims("10-noise", noisy({"midpoint": 10, "vertex 1": 20, "vertex 2": 30})) == [True]
    assert claims("10-noise", noisy({"midpoint": 26, "vertex 1": 20, "vertex 2": 30})) == [False]


@pytest.mark.parametrize(
    ("replay", "expected"), [(55.0, [True, True]), (61.0, [False, True]), (49.0, [False, False])]
)
def test_the_first_task_in_later_subspaces(replay, expected):
    rows = [
        {"method": m, "seed": 0, "after_task": 10, "point": "midpoint", "accuracy": a}
        for m, a in (("subspace", 50.0), ("subspace-er", replay))
    ]
    assert claims("11-simplex-of-task-1", rows) == expected


def along(losses_and_accuracies):
    """Rows of paths, by method and path: three losses, three accuracies."""
    return [
        {"method": m, "seed": 0, "task": 1, "from": a, "to": b, "step": step}
        | {"loss": loss, "accuracy": accuracy}
        for (m, a, b), values in losses_and_accuracies.items()
        for step, loss, accuracy in zip((0, 0.5, 1), *values, strict=True)
    ]


def test_a_barrier_is_above_both_ends():
    def rows(top):
        return along({("subspace", 1, 2): ((0.1, top, 0.2), (95, 90, 94))})

    assert claims("12-barrier", rows(0.3)) == [True]
    assert claims("12-barrier", rows(0.21)) == [False]


def test_paths():
    def rows(ours, second, third):
        drops = {"subspace-connectivity": (ours, ours)}
        drops |= {m: (second, third) for m in ("subspace", "subspace-er")}
        found = {}
        for method, (a, b) in drops.items():
            found[method, 2, 3] = ((0.1, 0.2, 0.3), (95, 95 - a, 95 - a / 2))
            found[method, 3, 4] = ((0.1, 0.2, 0.3), (90, 90 - b / 2, 90 - b))
        return along(found)

    assert claims("13-paths", rows(1, 3, 4)) == [True, True]
    assert claims("13-paths", rows(2, 3, 2.5)) == [False, False]
    assert claims("13-paths", rows(1, 1.9, 4)) == [False, True]


def test_later_paths():
    def rows(first, green, red):
        flat = (0.1, 0.1, 0.1)
        method = "subspace-connectivity"
        return along(
            {
                (method, 1, 2): (flat, (first, first, first)),
                (method, 6, 7): (flat, (94.5, 94, 94.5 - green)),
                (method, 11, 12): (flat, (90, 89, 90 - red)),
            }
        )

    assert claims("14-later-paths", rows(96, 1, 2)) == [True, True]
    assert claims("14-later-paths", rows(94, 1, 4)) == [False, False]


def test_only_a_flat_loss_is_flat():
    def rows(ours):
        rises = {"subspace-connectivity": ours, "subspace": 0.9, "subspace-er": 0.6}
        return along(
            {
                (m, t, t + 1): ((0.1, 0.1 + rise * t / 4, 0.1 + rise * t / 8), (0, 0, 0))
                for m, rise in rises.items()
                for t in range(1, 5)
            }
        )

    assert claims("15-losses", rows(0.1)) == [True]
    assert claims("15-losses", rows(0.3)) == [False]


def test_means_over_seeds_keep_the_other_columns_apart():
    rows = [{"n": n, "seed": seed, "v": 10.0 * n + seed} for n in (1, 2) for seed in (0, 1)]
    assert mean_over_seeds(rows, ["v"]) == [
        {"n": 1, "seeds": 2, "v": 10.5},
        {"n": 2, "seeds": 2, "v": 20.5},
    ]


def test_each_figure_has_a_name_of_its_own():
    numbers = {int(name.split("-")[0]) for name in FIGURES}
    assert numbers == set(range(1, 17))
