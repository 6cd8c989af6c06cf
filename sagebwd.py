"""The distribution `sagebwd`: its command, and a warning if another one replaces its files.

This module is beside the package `sagesim`, so that it can be imported if `sagesim` cannot.
"""

from __future__ import annotations

import sys
import warnings
from importlib import metadata


def main() -> int:
    """Run the command `sagesim` and return its exit code; see `sagesim.cli.main`."""
    try:
        from sagesim.cli import main as run
    except ImportError:
        if (problem := _other_distribution()) is None:
            raise
        print(f"sagesim: error: {problem}", file=sys.stderr)
        return 2
    return run()


def warn_of_other_distribution() -> None:
    """Warn if the unrelated distribution `sagesim` is installed as well."""
    if (problem := _other_distribution()) is not None:
        warnings.warn(problem, RuntimeWarning, stacklevel=3)


def _other_distribution() -> str | None:
    """What is wrong if the distribution `sagesim` is installed.

    Both install a package `sagesim`. Which files remain depends on the order of installation.
    """
    try:
        version = metadata.version("sagesim")
    except metadata.PackageNotFoundError:
        return None
    return (
        f"the distribution sagesim {version} also installs a package named sagesim, and its files "
        "may replace those of sagebwd: run `pip uninstall sagesim`, then install sagebwd again"
    )
