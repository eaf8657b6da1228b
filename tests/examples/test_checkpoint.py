"""Runs that were stopped between two tasks."""

import dataclasses
import re

import pytest
import torch

from examples import run as runs
from examples.benchmarks import rotated_digits
from examples.errors import UsageError
from examples.methods import METHODS
from examples.run import run
from examples.settings import settings_for

CPU = torch.device("cpu")


class Stopped(Exception):
    pass


def made(method, n, path=None, stop=None, seed=0, **changes):
    data = rotated_digits(seed, None, False).shortened(3, 60)
    settings = dataclasses.replace(settings_for("rotated-digits", method, n), **changes)

    def progress(done, total):
        if done == stop:
            raise Stopped

    result = run(data, method, settings, n, seed, CPU, progress, checkpoint=path)
    return {k: v for k, v in result.items() if k != "seconds"}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(method, tmp_path, monkeypatch):
    whole = made(method, 2)
    path = tmp_path / "run.part"
    for stop in [3] if METHODS[method].joint else [1, 2]:
        with pytest.raises(Stopped):
            made(method, 2, path, stop)
        torch.manual_seed(stop)  # Whatever the next process does before.
    rounds = []
    evaluate = runs.evaluate
    monkeypatch.setattr(runs, "evaluate", lambda *a: rounds.append(a) or evaluate(*a))
    assert made(method, 2, path) == whole
    assert len(rounds) == (0 if METHODS[method].joint else 1)


def test_a_file_of_another_run_is_left_alone_and_a_damaged_one_is_an_error(tmp_path):
    path = tmp_path / "run.part"
    with pytest.raises(Stopped):
        made("naive", 1, path, 2)
    for other in ({"seed": 1}, {"lr": 0.01}):
        assert made("naive", 1, path, **other) == made("naive", 1, **other)
    with pytest.raises(Stopped):
        made("naive", 1, path, 2)
    for damaged in (b"junk", b"", path.read_bytes()[:-100]):
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match=re.escape(f"{path}")):
            made("naive", 1, path)
        assert path.read_bytes() == damaged
