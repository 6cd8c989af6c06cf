"""What each of several processes does in test_distributed: trains one step by DDP, and leaves.

Exits with 1 where a thread of its group is still there.
"""

import gc
import sys
from pathlib import Path

import torch
from torch import nn

from sagesim.experiments.pretrain.distributed import distribute, world


def main() -> int:
    with world() as here:
        model = nn.Linear(4, 4)
        distribute(model, [], here, fsdp=False)(torch.randn(2, 4)).sum().backward()
    gc.collect()
    names = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    return int(any("gloo" in name for name in names))


if __name__ == "__main__":
    sys.exit(main())
