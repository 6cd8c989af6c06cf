"""One process of test_distributed: runs one backward under DDP, then leaves the process group.

Exits with 1 if a thread of the process group is still running.
"""

import gc
import sys
from pathlib import Path

import torch
from torch import nn

from sagesim.experiments.pretrain.run.distributed import distribute, join_processes


def main() -> int:
    with join_processes() as world:
        model = nn.Linear(4, 4)
        distribute(model, [], world, fsdp=False)(torch.randn(2, 4)).sum().backward()
    gc.collect()
    names = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    return int(any("gloo" in name for name in names))


if __name__ == "__main__":
    sys.exit(main())
