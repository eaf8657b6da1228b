import math

import pytest

from examples.orderings import Ordering, orderings, verdict
from examples.run import file_name
from examples.tables import Cell
from examples.targets import TITLES, Number, Row, rows


def found(table, **wanted):
    (row,) = [r for r in rows(table) if all(getattr(r, k) == v for k, v in wanted.items())]
    return row


def test_z_is_the_difference_in_standard_errors():
    # Standard deviations divided by the number of seeds, not one less: that of ours is sqrt(2).
    cell = Cell("accuracy", (84.0, 85.0, 86.0, 87.0, 88.0), Number(84.0, 0.5))
    assert cell.std == pytest.approx(math.sqrt(2))
    assert cell.z == pytest.approx(2 / math.sqrt((2 + 0.25) / 5))
    assert cell.matches is False


@pytest.mark.parametrize("metric", ["accuracy", "forgetting"])
@pytest.mark.parametrize(
    ("values", "paper"),
    [((), Number(1, 1)), ((1.0,) * 4, Number(1, 1)), ((1.0, 9.0) * 3, Number(1, None))],
)
def test_no_verdict_with_fewer_seeds_than_the_paper_or_without_its_deviation(metric, values, paper):
    cell = Cell(metric, values, paper)
    assert cell.z is None and cell.matches is None


def test_forgetting_matches_within_a_hundredth_of_the_rounded_number():
    paper = Number(0.07, 0.001)
    near, far = (0.0831, 0.0829, 0.083, 0.083, 0.083), (0.0861, 0.0859, 0.086, 0.086, 0.086)
    assert Cell("forgetting", near, paper).matches  # Rounds to 0.08.
    assert Cell("forgetting", far, paper).matches is False
    assert Cell("accuracy", near, paper).matches is False


def test_the_papers_numbers():
    subspace = {"benchmark": "rotated-mnist", "method": "subspace-connectivity", "n": 3}
    row = found("results_cnn", **subspace)
    assert (row.accuracy, row.forgetting, row.flops) == (
        Number(86.7, 0.67),
        Number(0.07, 0.01),
        1.2,
    )
    assert found("main_results", **subspace).accuracy == Number(86.7, 0.67)
    wide = {"benchmark": "permuted-mnist", "method": "mc-sgd", "n": 1}
    assert found("results_cnn", **wide, hidden=600).accuracy == Number(88.03, 0.36)
    # The same network in two tables, from separate runs.
    assert found("parameters", **wide, hidden=None).accuracy == Number(83.17, 0.63)
    assert found("main_results", **wide).accuracy == Number(82.9, 0.4)
    assert found("main_results", benchmark="split-cifar-100", method="multitask").forgetting == (
        Number(0.0, None)
    )


def test_tables_that_contradict_each_other_have_one_number_for_one_run():
    numbers = {
        (r.accuracy, r.forgetting)
        for table in ("results_cnn", "varying_n", "parameters", "main_results")
        for r in rows(table)
        if (r.benchmark, r.method, r.n) == ("permuted-mnist", "subspace-connectivity", 3)
    }
    assert numbers == {(Number(87.8, 0.53), Number(0.06, 0.01))}


def test_each_table_has_each_run_once():
    for table in TITLES:
        keys = [(r.benchmark, r.method, r.n, r.hidden) for r in rows(table)]
        assert keys and len(keys) == len(set(keys))


def write(folder, method, n, values, metric="final_accuracy"):
    """Results of the settings of today with given metrics, seeds from 0."""
    import dataclasses
    import json

    from examples.settings import settings_for

    (folder / "rotated-mnist").mkdir(exist_ok=True)
    for seed, value in enumerate(values):
        settings = dataclasses.asdict(settings_for("rotated-mnist", method, n))
        names = ("final_accuracy", "forgetting", "learning_accuracy")
        result = {
            **{"benchmark": "rotated-mnist", "method": method, "n": n, "seed": seed},
            **{"whole": True, "settings": settings},
            "accuracy": [[50.0]],
            "metrics": dict.fromkeys(names, 0.0) | {metric: value},
            "relative_flops": {"predict": 1.0, "step": 1.0},
        }
        (folder / "rotated-mnist" / file_name(method, n, seed)).write_text(json.dumps(result))


def test_an_ordering_is_judged_on_the_mean_of_the_seeds_that_both_have(tmp_path):
    ordering = Ordering(
        Row("rotated-mnist", "subspace-connectivity", 3), Row("rotated-mnist", "mc-sgd")
    )
    write(tmp_path, "subspace-connectivity", 3, [86.0, 85.0, 10.0])
    assert verdict(ordering, tmp_path, range(5)).endswith("not measured yet")
    write(tmp_path, "mc-sgd", 1, [82.0, 86.0])
    assert verdict(ordering, tmp_path, range(5)).endswith(
        "subspace-connectivity n=3 > mc-sgd: holds so far (85.50 against 84.00; in 1 of 2 seeds)"
    )
    write(tmp_path, "mc-sgd", 1, [88.0, 86.0])
    assert "does NOT hold so far" in verdict(ordering, tmp_path, range(5))
    write(tmp_path, "subspace-connectivity", 3, [86.0] * 5)
    write(tmp_path, "mc-sgd", 1, [85.0] * 5)
    assert "holds (86.00 against 85.00; in 5 of 5" in verdict(ordering, tmp_path, range(5))


def test_an_ordering_of_less_forgetting(tmp_path):
    rows = (Row("rotated-mnist", "subspace-connectivity", 3), Row("rotated-mnist", "naive"))
    ordering = Ordering(*rows, "forgetting", lower=True)
    write(tmp_path, "subspace-connectivity", 3, [0.1], "forgetting")
    write(tmp_path, "naive", 1, [0.5], "forgetting")
    assert "n=3 < naive: holds so far (0.100 against 0.500" in verdict(ordering, tmp_path, range(5))


def test_the_papers_orderings_are_all_there():
    claims = {
        (o.better.benchmark, o.better.name, o.worse.name)
        for o in orderings(["rotated-mnist", "permuted-mnist", "split-cifar-100"])
    }
    subspace, ensemble = "subspace-connectivity n=3", "ensemble-mc-sgd n=3"
    for benchmark in ("rotated-mnist", "permuted-mnist", "split-cifar-100"):
        assert (benchmark, subspace, "mc-sgd") in claims
        for n in (2, 3):
            assert (benchmark, f"ensemble-mc-sgd n={n}", f"ensemble-mc-sgd-bagging n={n}") in claims
    assert ("rotated-mnist", subspace, ensemble) in claims
    assert ("split-cifar-100", ensemble, subspace) in claims
    assert ("permuted-mnist", subspace, ensemble) not in claims
