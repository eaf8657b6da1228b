import math

import pytest
import torch

from examples import metrics

NAN = math.nan
MATRIX = torch.tensor([[90.0, NAN, NAN], [85.0, 80.0, NAN], [70.0, 82.0, 95.0]])


def test_final_accuracy_is_the_mean_of_the_last_row():
    assert metrics.final_accuracy(MATRIX) == pytest.approx((70 + 82 + 95) / 3)


def test_forgetting_is_the_drop_from_the_best_earlier_accuracy():
    # Task 1 gained 2 points after it was learned: its drop is negative.
    assert metrics.forgetting(MATRIX) == pytest.approx((20 - 2) / 2 / 100)


def test_forgetting_takes_the_best_row_not_the_first():
    matrix = torch.tensor([[60.0, NAN, NAN], [90.0, 50.0, NAN], [80.0, 50.0, 50.0]])
    assert metrics.forgetting(matrix) == pytest.approx(0.05)


def test_learning_accuracy_is_the_mean_of_the_diagonal():
    assert metrics.learning_accuracy(MATRIX) == pytest.approx((90 + 80 + 95) / 3)


def test_forgetting_improvement_is_positive_where_less_is_forgotten():
    better = MATRIX.clone()
    better[2, 0] = 80
    assert metrics.forgetting_improvement(MATRIX, better) == pytest.approx(0.05)


def test_seen_accuracy_averages_the_lower_triangle():
    assert metrics.seen_accuracy(MATRIX) == pytest.approx([90, 82.5, (70 + 82 + 95) / 3])


def test_a_single_task_forgets_nothing_that_could_be_measured():
    assert math.isnan(metrics.forgetting(torch.tensor([[90.0]])))


def test_joint_training_has_only_a_final_accuracy():
    matrix = torch.full((2, 2), NAN)
    matrix[1] = torch.tensor([90.0, 80.0])
    assert metrics.final_accuracy(matrix) == 85
    assert math.isnan(metrics.forgetting(matrix)) and math.isnan(metrics.learning_accuracy(matrix))


def test_metrics_leave_the_matrix_as_it_is():
    before = MATRIX.clone()
    for metric in (metrics.final_accuracy, metrics.forgetting, metrics.seen_accuracy):
        metric(MATRIX)
    assert torch.equal(before.nan_to_num(), MATRIX.nan_to_num())
