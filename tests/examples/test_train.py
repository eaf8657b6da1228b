import json

import pytest
import torch

from examples.benchmarks import rotated_digits
from examples.costs import paper_cost, relative_flops
from examples.models import mlp
from examples.run import accuracy_matrix, run, save
from examples.settings import settings_for
from examples.train import main

SHORT = ["--tasks", "2", "--examples", "40"]


def cost(method, n):
    settings = settings_for("rotated-mnist", method, n)
    return relative_flops(method, lambda: mlp(784, settings.hidden, 10), settings, n, (784,))


def test_main_job_leaves_results_and_a_figure(tmp_path, capsys):
    assert main([*SHORT, "--out", str(tmp_path)]) == 0
    folder = tmp_path / "rotated-digits"
    assert sorted(path.name for path in folder.iterdir()) == [
        "accuracy-seed0.png",
        "ensemble-mc-sgd-n3-seed0.json",
        "mc-sgd-n1-seed0.json",
        "naive-n1-seed0.json",
        "subspace-connectivity-n3-seed0.json",
    ]
    printed = capsys.readouterr().out
    assert "subspace-connectivity" in printed and "final" in printed
    result = json.loads((folder / "naive-n1-seed0.json").read_text())
    assert {"accuracy", "settings", "seed", "versions", "seconds", "metrics"} <= result.keys()
    assert result["accuracy"][0][1] is None and result["examples"] == 40


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--benchmark", "rotated-mnist", "--data-root", "nowhere"], ["nowhere", "--download"]),
        (["--method", "foo"], ["foo", "subspace-connectivity"]),
        (["--benchmark", "foo"], ["foo", "rotated-digits"]),
        (["--n", "0"], ["--n", "0"]),
        (["--tasks", "0"], ["--tasks", "0"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--seed", str(2**63)], ["--seed", str(2**63)]),
        (["--tasks", "21"], ["--tasks", "20", "21"]),
        (["--threads", "100000"], ["--threads", "100000"]),
        (["--method"], ["--method", "naive"]),
        (["--set", "foo=1"], ["foo"]),
        (["--set", "connect.lr=1"], ["connect.lr"]),  # Naive SGD connects nothing.
        (["--set", "lr=fast"], ["lr=fast"]),
        (["--set", "lr=-1"], ["lr=-1", "a number from 0\n"]),
        (["--set", "lr"], ["NAME=VALUE", "'lr'"]),
        (["--set", "lr=True"], ["lr=True"]),
        (["--set", "lr=1e999"], ["lr=1e999"]),
        (["--set", "batch=2", "--method", "batch-ensemble"], ["batch of 2", "3 members"]),
        (["--set", "batch=0"], ["batch=0"]),
        (["--set", "batch=2.5"], ["batch=2.5"]),
        (["--set", "epochs=0"], ["epochs=0", "a whole number from 1\n"]),
        (["--set", "dropout=2"], ["dropout=2", "from 0 to 1"]),
        (["--set", "connect.samples=0", "--method", "mc-sgd"], ["mc-sgd", "connect.samples=0"]),
        (["--set", "connect.summed=1", "--method", "mc-sgd"], ["=1", "True or False"]),
        (["--set", "connect.steps=2", "--method", "mc-sgd", "naive"], ["naive", "connect.steps"]),
        (["--set", "connect=1"], ["connect"]),
        (["--device", "meta"], ["--device", "meta"]),
        (["--device", "nonsense"], ["--device", "nonsense"]),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(arguments, names, tmp_path, capsys):
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and all(name in message for name in names)


def test_settings_can_be_changed_and_are_stored(tmp_path):
    changes = ["--set", "lr=0.05", "connect.steps=2"]
    arguments = [*SHORT, "--method", "mc-sgd", *changes, "--out", str(tmp_path)]
    assert main(arguments) == 0
    (path,) = tmp_path.glob("*/*.json")
    settings = json.loads(path.read_text())["settings"]
    usual = settings_for("rotated-digits", "mc-sgd", 1)
    assert (settings["lr"], settings["connect"]["steps"]) == (0.05, 2)
    assert (settings["decay"], settings["connect"]["lr"]) == (usual.decay, usual.connect.lr)


def test_an_output_folder_that_cannot_be_written_is_one_line_and_status_2(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "--out" in message


def test_a_file_name_that_is_taken_by_a_folder_is_one_line_and_status_2(tmp_path, capsys):
    (tmp_path / "rotated-digits" / "naive-n1-seed0.json").mkdir(parents=True)
    assert main([*SHORT, "--method", "naive", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "naive-n1-seed0.json" in message


def test_unusual_folder_names_are_printed_as_they_are(tmp_path, capsys):
    folder = tmp_path / "odd [bold]x[/] [/y]"
    assert main([*SHORT, "--method", "naive", "--out", str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out


def test_a_failed_save_leaves_no_half_file(tmp_path):
    with pytest.raises(TypeError):
        save({"method": "x", "n": 1, "seed": 0, "accuracy": object()}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_stored_accuracy_reads_back():
    data = rotated_digits(0, None, False).shortened(2, 40)
    settings = settings_for("rotated-digits", "naive", 1)
    result = run(data, "naive", settings, 1, 0, torch.device("cpu"))
    matrix = accuracy_matrix(json.loads(json.dumps(result)))
    assert matrix[0, 1].isnan() and matrix[1].mean().item() == pytest.approx(
        result["metrics"]["final_accuracy"], abs=1e-3
    )


@pytest.mark.parametrize(
    ("method", "n", "expected"),
    [
        ("naive", 1, 1),
        ("mc-sgd", 1, 1),
        ("ensemble-mc-sgd", 3, 3),
        ("vanilla-ensemble", 3, 3),
        ("batch-ensemble", 2, 2),
        ("subspace-connectivity", 3, 1),
    ],
)
def test_flops_of_a_prediction(method, n, expected):
    assert cost(method, n)["predict"] == pytest.approx(expected, abs=0.01)


def test_flops_of_a_subspace_step_are_those_of_the_mix_more():
    # Mixing and sharing out the gradient take 2 n P each. A single step of batch B takes 2 B W for
    # the forward pass and for the weights' gradient, and 2 B (W - first layer) for the inputs'.
    first, weights, parameters = 784 * 256, 268_800, 269_322
    plain = 2 * 10 * (2 * weights + weights - first)
    # SGD's update takes 2 P.
    expected = (plain + 4 * 3 * parameters) / (plain + 2 * parameters)
    assert cost("subspace-connectivity", 3)["step"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("method", "n", "batches"),
    [("a-gem", 1, 2), ("er-reservoir", 1, 2), ("subspace-er", 3, 2), ("ewc", 1, 1)],
)
def test_flops_of_a_step_count_what_is_replayed(method, n, batches):
    without = cost("subspace", n) if method == "subspace-er" else {"step": 1}
    products = 2 * 10 * (3 * 268_800 - 784 * 256)
    naive = products + 2 * 269_322
    added = (batches - 1) * products / naive
    assert cost(method, n)["step"] == pytest.approx(without["step"] + added, rel=1e-6)


@pytest.mark.parametrize(("n", "expected"), [(2, 1.1), (3, 1.2)])
def test_the_papers_count_for_the_mlp(n, expected):
    count = paper_cost("subspace-connectivity", n, mlp(784, 256, 10), torch.zeros(10, 784))
    assert count == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("hidden", "weights"), [(256, 268_800), (450, 559_800), (600, 836_400)])
def test_the_papers_parameter_counts(hidden, weights):
    model = mlp(784, hidden, 10)
    assert sum(p.numel() for p in model.parameters() if p.dim() > 1) == weights
