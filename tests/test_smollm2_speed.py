"""scripts/smollm2_speed.py trains on the same tokens in both layouts; here on a CPU."""

import argparse
import runpy
from pathlib import Path

import pytest
import torch

import sagesim
from sagesim_kernels.integrations.transformers import register, unregister
from tests.sagesim_kernels.integrations.models import WORDS, model

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "smollm2_speed.py"))
IDS = torch.randint(1, WORDS, (500,), generator=torch.Generator().manual_seed(0))
LONGEST = 24


@pytest.fixture(autouse=True)
def registered():
    register("exact", spec=sagesim.FPA)
    yield
    unregister("exact")


def run(layout: str) -> dict:
    return SCRIPT["measure"](
        model("llama", "sdpa"),
        ["sdpa", "exact", "no such attention"],
        layout,
        IDS,
        steps=4,
        untimed=1,
        longest=LONGEST,
    )


def test_packed_and_padded_documents_give_the_same_losses_with_each_attention():
    found = {layout: run(layout) for layout in SCRIPT["LAYOUTS"]}
    losses = {
        (layout, name): row["losses"]
        for layout, measured in found.items()
        for name, row in measured["runs"].items()
    }
    assert losses.keys() == {(x, y) for x in ("packed", "padded") for y in ("sdpa", "exact")}
    for each in losses.values():
        assert len(each) == 4
        # bfloat16 has 8 bits, and padding shifts what is rounded together
        assert each == pytest.approx(losses["padded", "sdpa"], rel=2.0**-8)
    for measured in found.values():
        assert all(row["tokens_per_second"] > 0 for row in measured["runs"].values())
        assert "no such attention" in measured["not_run"]["no such attention"]


def test_the_documents_are_consecutive_and_start_again_at_the_end_of_the_text():
    steps = list(SCRIPT["documents"](IDS, 3, LONGEST))
    read = torch.cat([part for step in steps for part in step])
    assert torch.equal(read, IDS.repeat(3)[: len(read)])
    assert {len(part) <= LONGEST for step in steps for part in step} == {True}


def test_the_recorded_command_has_the_options_that_were_given():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--specs", nargs="+", default=("factored_qk",))
    changed = SCRIPT["_changed"]
    assert changed(parser, parser.parse_args([])) == []
    given = ["file", "--specs", "sagebwd", "factored", "--steps", "3"]
    assert changed(parser, parser.parse_args(given)) == ["--steps 3", "--specs sagebwd factored"]
