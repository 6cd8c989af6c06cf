"""The options of commands whose jobs may run on a cluster."""

from __future__ import annotations

import argparse


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Declare --cluster and --dry-run."""
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="run the jobs at the same time with Ray: local for all CPUs and GPUs of this machine, "
        "or HOST:PORT of a cluster that this machine belongs to (default: one after the other)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be computed, and the GPU hours"
    )
