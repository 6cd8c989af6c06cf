"""The Python code of the README runs, and its labels and commands exist."""

import re
from pathlib import Path
from typing import Any

import pytest

from sagesim import PRESETS, AttentionSpec
from sagesim.cli import COMMANDS
from sagesim_kernels.integrations.transformers import unregister, uses
from tests.sagesim_kernels.integrations.models import model

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readme_has_three_python_blocks():
    assert len(BLOCKS) == 3


@pytest.mark.slow
def test_the_lines_for_transformers_run(tmp_path):
    """They load a model of two layers."""
    model("llama", "eager").save_pretrained(tmp_path)
    names: dict[str, Any] = {"path": tmp_path}
    try:
        exec(compile(BLOCKS[0], "README.md", "exec"), names)
        assert uses(names["model"])
    finally:
        unregister("sagebwd")


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS[1:], ids=lambda block: block.splitlines()[-1][:40])
def test_the_python_blocks_run(block, capsys):
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.slow
def test_the_summary_in_the_readme_is_the_printed_one(capsys):
    summary = re.search(r'print\(found\.summary\(\)\)  # "(.*)"', README)
    exec(compile(BLOCKS[1], "README.md", "exec"), {})
    assert summary is not None
    assert summary[1] in capsys.readouterr().out


def test_the_labels_parse():
    labels = re.findall(rf"^    ((?:{'|'.join(PRESETS)})\b.*?)(?:   .*)?$", README, re.MULTILINE)
    assert len(labels) == 4
    for label in labels:
        AttentionSpec.parse(label)


def test_every_preset_is_listed():
    assert [label for label in PRESETS if f"`{label}`" not in README] == []


def test_the_commands_exist():
    named = set(re.findall(r"sagesim (\w+)", README)) & {"attribute", "capture", "sweep"}
    assert named == {"attribute", "capture", "sweep"}
    assert named <= set(COMMANDS)
