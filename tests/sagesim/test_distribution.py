"""What is missing, or installed by another distribution, is named when a package is imported."""

import subprocess
import sys
from importlib import metadata

import pytest

import sagebwd


def test_another_distribution_of_the_same_package_is_named(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: {"sagesim": "0.5"}[name])
    with pytest.warns(RuntimeWarning, match=r"sagesim 0\.5 .* run `pip uninstall sagesim`"):
        sagebwd.warn_of_other_distribution()


def test_the_command_names_another_distribution_whose_files_replace_ours(tmp_path):
    """Its package fails to import without cupy, as that of the real one does."""
    (tmp_path / "sagesim").mkdir()
    (tmp_path / "sagesim" / "__init__.py").write_text("import a_package_that_is_not_installed")
    info = tmp_path / "sagesim-0.7.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sagesim\nVersion: 0.7.1\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sagebwd; exit(sagebwd.main())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "sagesim 0.7.1 also installs a package named sagesim" in line


def test_the_command_does_not_hide_another_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "sagesim.cli", None)
    with pytest.raises(ImportError):
        sagebwd.main()


def test_the_kernels_name_the_extra_that_installs_triton():
    code = "import sys; sys.modules['triton'] = None; from sagesim_kernels import attention"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.endswith("sagesim_kernels needs triton: pip install 'sagebwd[kernels]'")
