"""scripts/torchtitan_steps.py: torchtitan's small Llama trains with the override as with SDPA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "torchtitan_steps.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def installed():
    if not (ROOT / ".venv" / ".torchtitan").exists():
        pytest.skip("torchtitan is not installed: make .venv/.torchtitan")


def run(*arguments: str) -> None:
    command = [sys.executable, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LOCAL_RANK": "0"}
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_each_spec_trains_as_sdpa_does(tmp_path):
    """A spec that rounds nothing differs in the rounding of float32 alone."""
    out = tmp_path / "found.json"
    run(str(SCRIPT), "--out", str(out), "--steps", "4", "--rows", "2", "--tokens", "48")
    record = json.loads(out.read_text())
    assert record["command"].endswith("--steps 4 --rows 2 --tokens 48")
    assert record["setting"]["documents"] > 8  # more than the rows of all steps
    runs = record["runs"]
    sdpa = runs.pop("sdpa")
    assert sdpa["gradients_apart"] == 0.0
    assert sdpa["losses"][-1] < sdpa["losses"][0] - 0.5
    unrounded = runs.pop("fpa")
    assert 0 < unrounded["gradients_apart"] < 1e-5
    assert unrounded["losses"] == pytest.approx(sdpa["losses"], abs=1e-5)
    assert runs.keys() == {"factored_qk", "factored", "sagebwd"}
    for name, found in runs.items():
        assert 1e-5 < found["gradients_apart"] < 0.1, name
        assert found["losses"] == pytest.approx(sdpa["losses"], abs=0.01), name
    apart = [runs[name]["gradients_apart"] for name in ("factored_qk", "factored", "sagebwd")]
    assert apart == sorted(apart)


def test_a_batch_holds_the_documents_in_order_and_labels_inside_each():
    """Rows are pieces of the text; a label is the next token, and none follows a last one."""
    code = (
        "from scripts.torchtitan_steps import IGNORE_INDEX, batches, torch\n"
        "data = batches(3, 2, 40)\n"
        "text = torch.cat([b.tokens.flatten() for b in data])\n"
        "assert text.equal(torch.cat([b.tokens.flatten() for b in batches(1, 1, 240)]))\n"
        "for b in data:\n"
        "    first = b.positions == 0\n"
        "    assert first[:, 0].all() and b.positions.max() < 40\n"
        "    inside = ~first[:, 1:]\n"
        "    assert (b.positions[:, 1:] - b.positions[:, :-1])[inside].eq(1).all()\n"
        "    assert (b.labels[:, :-1] == b.tokens[:, 1:])[inside].all()\n"
        "    assert b.labels[:, :-1][~inside].eq(IGNORE_INDEX).all()\n"
        "    assert b.labels[:, -1].eq(IGNORE_INDEX).all()\n"
        "assert any((b.positions == 0).sum() > 2 for b in data)\n"
    )
    run("-c", code)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_the_trainer_of_torchtitan_has_a_cuda_device_on_a_machine_without_one():
    """The reason why the script does not use it."""
    code = (
        "import scripts.torchtitan_steps\n"
        "from torchtitan.tools import utils\n"
        "assert utils.get_local_device().type == 'cuda'\n"
        "try:\n"
        "    utils.device_module.set_device(utils.get_local_device())\n"
        "except (AttributeError, RuntimeError, AssertionError):\n"
        "    pass\n"
        "else:\n"
        "    raise SystemExit('Trainer.__init__ may work on a CPU now')\n"
    )
    run("-c", code)
