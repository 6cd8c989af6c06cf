"""Runs `sagesim_kernels.bench.cli` as `python -m sagesim_kernels.bench`."""

import sys

from sagesim_kernels.bench.cli import main

sys.exit(main())
