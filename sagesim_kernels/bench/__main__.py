"""`python -m sagesim_kernels.bench`; see `sagesim_kernels.bench.cli`."""

import sys

from sagesim_kernels.bench.cli import main

sys.exit(main())
