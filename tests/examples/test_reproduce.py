import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import joblib
import pytest
import torch
from joblib.externals.loky.process_executor import TerminatedWorkerError

from examples import reproduce as command
from examples import store, targets
from examples.benchmarks import BENCHMARKS, PixelTasks, permutation_maps
from examples.reproduce import main
from examples.settings import Settings, equals_stored, settings_for
from examples.store import Key
from examples.targets import Number, Row

NAIVE = Key("rotated-digits", "naive", 1, None, 0)
ROWS = (
    Row("rotated-digits", "naive", 1, None, Number(50, 1), Number(0.3, 0.01), 1.0),
    Row("rotated-digits", "mc-sgd", 1, None, Number(70, 1), Number(0.1, 0.01)),
)


def tiny(seed, root, download):
    x = torch.arange(48 * 4).view(48, 4).to(torch.uint8)
    y = torch.arange(48) % 3
    return PixelTasks("rotated-digits", (x, y), (x, y), permutation_maps(4, 2, 0), 3)


@pytest.fixture
def small(monkeypatch):
    """Tables with two rows, on a benchmark of two tasks with a few examples."""
    monkeypatch.setattr(targets, "rows", lambda table: ROWS)
    monkeypatch.setitem(BENCHMARKS, "rotated-digits", tiny)


def start(folder, *arguments):
    return main(["results_cnn", "--jobs", "1", "--out", str(folder), *arguments])


def stored(folder):
    return {path.name: path.read_text() for path in folder.glob("results/rotated-digits/*.json")}


def test_the_missing_runs_are_made_and_a_second_start_makes_none(small, tmp_path, monkeypatch):
    assert start(tmp_path, "--method", "naive", "--seeds", "0", "2") == 0
    assert sorted(stored(tmp_path)) == ["naive-n1-seed0.json", "naive-n1-seed2.json"]
    first = stored(tmp_path)
    assert start(tmp_path) == 0
    assert len(stored(tmp_path)) == 10 and stored(tmp_path).items() >= first.items()
    monkeypatch.setattr(store, "run", None)  # Any further run would fail.
    assert start(tmp_path) == 0


@pytest.mark.parametrize("moment", ["examples.store.run", "os.replace"])
def test_a_killed_run_leaves_no_half_file_and_the_next_start_goes_on(small, tmp_path, moment):
    """Killed in the middle of the second run, and between its file's writing and naming."""
    script = f"""
import os, signal, sys
sys.path[:0] = {[str(command.Path.cwd()), str(command.Path(__file__).parent)]!r}
from unittest import mock
import test_reproduce as t
import examples.store
module, name = {moment!r}.rsplit(".", 1)
module = sys.modules[module]
original, calls = getattr(module, name), []

def dying(*args, **kwargs):
    if name == "run" or str(args[1]).endswith(".json"):
        calls.append(args)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

with mock.patch.object(t.targets, "rows", lambda table: t.ROWS), \\
        mock.patch.dict(t.BENCHMARKS, {{"rotated-digits": t.tiny}}), \\
        mock.patch.object(module, name, dying):
    t.start(t.command.Path({str(tmp_path)!r}))
"""
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    first = stored(tmp_path)
    assert list(first) == ["naive-n1-seed0.json"]
    assert json.loads(first["naive-n1-seed0.json"])["seed"] == 0
    assert start(tmp_path) == 0
    assert len(stored(tmp_path)) == 10 and stored(tmp_path).items() >= first.items()
    assert not list(tmp_path.glob("results/rotated-digits/*seed*.part"))


@pytest.mark.skipif(os.name != "posix", reason="process groups")
@pytest.mark.parametrize(("by", "status"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_no_process_goes_on_when_the_command_has_ended(by, status, tmp_path):
    script = f"""
import sys
sys.path[:0] = {[str(command.Path.cwd()), str(command.Path(__file__).parent)]!r}
import test_reproduce as t
from examples.train import script
t.targets.rows = lambda table: t.ROWS
arguments = ["results_cnn", "--jobs", "2", "--out", {str(tmp_path)!r}]
script(lambda: t.main(arguments))
"""
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    started = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, **output)
    begun = tmp_path / "results" / "rotated-digits"
    wait_until(lambda: any(begun.glob("*.part")) or started.poll() is not None)
    started.send_signal(by)
    assert started.wait(60) == status, started.stderr.read()
    wait_until(lambda: not is_alive(started.pid))
    assert all(map(json.loads, stored(tmp_path).values()))


def test_a_killed_process_of_a_run_is_reported_in_one_line(small, tmp_path, capsys, monkeypatch):
    def killed(self, calls):
        raise TerminatedWorkerError("a long message\nof many lines")

    monkeypatch.setattr(joblib.Parallel, "__call__", killed)
    assert start(tmp_path, "--jobs", "2") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "--jobs" in message


def is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(done, seconds=90):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_results_do_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "rows", lambda table: ROWS[:1])
    results = []
    for jobs in ("1", "2"):
        folder = tmp_path / jobs
        arguments = ["results_cnn", "--out", str(folder), "--seeds", "0", "1", "--jobs", jobs]
        assert main(arguments) == 0
        results.append([json.loads(text) for text in dict(sorted(stored(folder).items())).values()])
    for one, other in zip(*results, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert len(results[0]) == 2


def test_what_another_version_stored_counts_where_it_says_the_same():
    settings = settings_for("permuted-mnist", "mc-sgd", 1)
    stored = dataclasses.asdict(settings)
    assert equals_stored(settings, stored)
    del stored["replay"], stored["connect"]["chain"]  # Before there were those fields.
    assert equals_stored(settings, stored)
    for changed in (stored | {"lr": 9.0}, stored | {"gone": 1}, stored | {"connect": {"gone": 1}}):
        assert not equals_stored(settings, changed)
    stored["connect"]["steps"] += 1
    assert not equals_stored(settings, stored)


def test_a_result_of_other_settings_does_not_count_and_is_kept(small, tmp_path):
    assert start(tmp_path, "--seeds", "0", "--method", "naive") == 0
    path = tmp_path / "results" / NAIVE.file
    other = json.loads(path.read_text())
    other["settings"]["lr"] = 0.5
    path.write_text(json.dumps(other))
    assert store.load(tmp_path / "results", NAIVE) is None
    assert start(tmp_path, "--seeds", "0", "--method", "naive") == 0
    assert store.load(tmp_path / "results", NAIVE)["settings"]["lr"] == 0.1
    (aside,) = path.parent.glob("other-settings/naive-n1-seed0-*.json")
    assert json.loads(aside.read_text()) == other


def test_a_shortened_run_does_not_count(small, tmp_path):
    assert start(tmp_path, "--seeds", "0", "--method", "naive") == 0
    path = tmp_path / "results" / NAIVE.file
    result = json.loads(path.read_text())
    assert result["whole"] and not tiny(0, None, False).shortened(1, None).whole
    path.write_text(json.dumps({**result, "whole": False}))
    assert store.load(tmp_path / "results", NAIVE) is None


def test_settings_that_were_added_later_have_their_default_in_old_results(small, tmp_path):
    assert start(tmp_path, "--seeds", "0", "--method", "naive") == 0
    path = tmp_path / "results" / NAIVE.file
    result = json.loads(path.read_text())
    del result["settings"]["penalty"]
    path.write_text(json.dumps(result))
    assert store.load(tmp_path / "results", NAIVE) == result


@pytest.mark.parametrize("text", ["", "{}", '{"accuracy": ['])
def test_a_damaged_result_is_named_and_kept(small, tmp_path, capsys, text):
    path = tmp_path / "results" / NAIVE.file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert start(tmp_path) == 2
    assert str(path) in capsys.readouterr().err and path.read_text() == text


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": None},
        {"metrics": {"final_accuracy": 1.0, "forgetting": 0.0}},
        {"metrics": {"final_accuracy": None, "forgetting": 0.0, "learning_accuracy": 1.0}},
        {"metrics": {"final_accuracy": "a", "forgetting": 0.0, "learning_accuracy": 1.0}},
        {"relative_flops": {"predict": 1.0}},
        {"method": "ewc"},
        {"seed": 1},
        {"n": 2},
        {"accuracy": None},
        {"accuracy": [[1.0, None], [1.0]]},
        {"accuracy": [[1.0, None]]},
    ],
)
def test_a_result_that_lacks_something_or_is_of_another_run_is_named(
    small, tmp_path, capsys, change
):
    assert start(tmp_path, "--seeds", "0", "--method", "naive") == 0
    path = tmp_path / "results" / NAIVE.file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert start(tmp_path, "--no-train") == 2
    assert f"{path} is not a result" in capsys.readouterr().err


def test_the_width_is_part_of_the_key():
    wide = dataclasses.replace(NAIVE, method="mc-sgd", hidden=450)
    assert wide.file.name == "mc-sgd-n1-h450-seed0.json"
    assert wide.settings.hidden == 450 and NAIVE.settings.hidden == 256
    assert dataclasses.replace(wide.settings, hidden=256) == settings_for(
        "rotated-digits", "mc-sgd", 1
    )


def test_a_folder_without_results_is_named(tmp_path, capsys):
    (tmp_path / "results" / "split-cifar-100").mkdir(parents=True)
    assert start(tmp_path, "--no-train") == 0
    assert f"No results in {tmp_path / 'results'}" in capsys.readouterr().out


def test_it_prints_and_writes_what_is_missing_as_missing(small, tmp_path, capsys):
    assert start(tmp_path, "--seeds", "0", "--method", "naive") == 0
    printed = capsys.readouterr().out
    assert "70.00±1.00" in printed and "not measured yet" in printed
    report = (tmp_path / "RESULTS.md").read_text("utf-8")
    naive, mc_sgd = (
        next(line for line in report.splitlines() if line.startswith(f"| {name} "))
        for name in ("naive", "mc-sgd")
    )
    assert naive.endswith("| 1.00 | 1.00 | 1.00 | 1 |")
    assert mc_sgd.split(" | ")[3:7] == ["-", "70.00 ± 1.00", "-", "-"]
    assert mc_sgd.endswith("| - | - | - | 0 |")
    lines = list(csv.DictReader((tmp_path / "results" / "results_cnn.csv").open()))
    assert {line["mean"] for line in lines if line["method"] == "mc-sgd"} == {""}
    stored_accuracy = json.loads((tmp_path / "results" / NAIVE.file).read_text())["metrics"]
    assert float(lines[0]["mean"]) == stored_accuracy["final_accuracy"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["results_cnn", "ablation"]),
        (["foo"], ["foo", "results_cnn"]),
        (["results_cnn", "--benchmark", "foo"], ["foo", "rotated-mnist"]),
        (["results_cnn", "--method", "foo"], ["foo", "mc-sgd"]),
        (["results_cnn", "--seeds", "100"], ["--seeds", "100"]),
        (["results_cnn", "--jobs", "0"], ["--jobs"]),
        (["results_cnn", "--threads", "99999999999"], ["--threads", "1024"]),
        (["results_cnn", "--backend", "foo"], ["foo", "dask"]),
        (["results_cnn", "--device", "nonsense"], ["--device", "nonsense"]),
        (["results_cnn", "--data-root", "nowhere"], ["nowhere", "--download", "--benchmark"]),
        (["results_cnn", "--n", "7"], ["--n"]),
        (["results_cnn", "--method", "subspace"], ["--method"]),
        (["results_cnn", "--seeds"], ["--seeds"]),
        (["ablation", "--benchmark", "permuted-mnist", "--no-train"], ["--benchmark"]),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(arguments, names, tmp_path, capsys):
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and all(name in message for name in names)


@pytest.mark.parametrize(("backend", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_a_backend_that_is_not_installed_is_named(
    small, tmp_path, capsys, monkeypatch, backend, package
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert start(tmp_path, "--backend", backend) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and f"--backend {backend}" in message and package in message


def test_the_ablation_multiplies_the_subspaces_learning_rate_by_n():
    assert settings_for("rotated-mnist-5", "subspace", 3) == Settings(
        lr=pytest.approx(0.3), decay=0.5, hidden=100
    )
    assert settings_for("rotated-mnist-5", "subspace", 10).sigma == 1.5
