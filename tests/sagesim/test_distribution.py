"""What is missing, or installed by another distribution, is named when a package is imported."""

import subprocess
import sys
from importlib import metadata

import pytest

from sagesim.distribution import warn_of_other_distribution


def test_another_distribution_of_the_same_package_is_named(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: {"sagesim": "0.5"}[name])
    with pytest.warns(RuntimeWarning, match=r"sagesim 0\.5 .* run `pip uninstall sagesim`"):
        warn_of_other_distribution()


def test_the_kernels_name_the_extra_that_installs_triton():
    code = "import sys; sys.modules['triton'] = None; import sagesim_kernels"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.endswith("sagesim_kernels needs triton: pip install 'sagebwd[kernels]'")
