import re
import tomllib
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run(example):
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    return names


def test_the_examples_run_as_printed():
    layers, optimizer = map(run, blocks("python"))
    assert layers["probabilities"].shape == (32, 3)
    assert {type(m).__module__.split(".")[0] for m in layers["plain"].modules()} == {"torch"}
    midpoint = [v.mean(0) for v in optimizer["opt"].vertices()]
    torch.testing.assert_close(list(optimizer["net"].parameters()), midpoint)


def test_the_commands_name_extras_that_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = re.findall(r"'\.\[(\w+)\]'", "".join(blocks("sh")))
    assert len(named) == 2 and set(named) <= extras.keys()
