import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_runs_as_printed():
    (example,) = blocks("python")
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["probabilities"].shape == (32, 3)
    assert {type(m).__module__.split(".")[0] for m in names["plain"].modules()} == {"torch"}


def test_the_commands_name_extras_that_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = re.findall(r"'\.\[(\w+)\]'", "".join(blocks("sh")))
    assert len(named) == 2 and set(named) <= extras.keys()
