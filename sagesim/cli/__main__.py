"""Entry point of `python -m sagesim.cli` and `torchrun -m sagesim.cli`."""

import sys

from sagesim.cli import main

if __name__ == "__main__":
    sys.exit(main())
