"""The README's Python runs as it stands, and its labels and commands exist."""

import re
from pathlib import Path

import pytest

from sagesim import PRESETS, AttentionSpec
from sagesim.cli import COMMANDS

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_is_python_in_it():
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[-1][:40])
def test_its_python_runs(block, capsys):
    exec(compile(block, "README.md", "exec"), {})


def test_what_it_says_is_printed(capsys):
    said = re.search(r'print\(found\.summary\(\)\)  # "(.*)"', README)
    exec(compile(BLOCKS[0], "README.md", "exec"), {})
    assert said is not None
    assert said[1] in capsys.readouterr().out


def test_its_labels_parse():
    labels = re.findall(rf"^    ((?:{'|'.join(PRESETS)})\b.*?)(?:   .*)?$", README, re.MULTILINE)
    assert len(labels) == 4
    for label in labels:
        AttentionSpec.parse(label)


def test_its_commands_exist():
    named = set(re.findall(r"sagesim (\w+)", README)) & {"attribute", "capture", "sweep"}
    assert named == {"attribute", "capture", "sweep"}
    assert named <= set(COMMANDS)
