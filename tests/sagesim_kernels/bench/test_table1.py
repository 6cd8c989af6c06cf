"""Table 1 through the kernels and through the emulator, on small inputs."""

import pytest
import torch

from sagesim.analysis import COLUMNS, Setting
from sagesim_kernels.bench.table1 import LABELS, measure, relative_l2
from tests.support.kernels import DEVICE, HERE

pytestmark = HERE


@pytest.mark.parametrize("label", LABELS)
def test_kernels_and_emulator_have_the_same_errors(label):
    row = measure(3.0, label, torch.float32, Setting(tokens=80, head_dim=16, draws=2), DEVICE)
    assert (row["label"], row["dtype"], row["sigma"]) == (label, "float32", 3.0)
    for name in COLUMNS:
        kernels, emulator, between = (row[name][x] for x in ("kernels", "emulator", "between"))
        assert 0.001 < kernels < 0.2 and abs(kernels / emulator - 1) < 0.05
        assert between < kernels / 4


def test_relative_l2():
    assert relative_l2(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == 4 / 3
