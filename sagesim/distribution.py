"""The distribution that installs this package."""

from __future__ import annotations

import warnings
from importlib import metadata


def warn_of_other_distribution() -> None:
    """Warn if the unrelated distribution `sagesim` is installed beside ours, `sagebwd`.

    Both install a package `sagesim`. Which files remain depends on the order of installation.
    """
    try:
        version = metadata.version("sagesim")
    except metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"the distribution sagesim {version} also installs a package named sagesim, and its files "
        "may replace those of sagebwd: run `pip uninstall sagesim`, then install sagebwd again",
        RuntimeWarning,
        stacklevel=3,
    )
