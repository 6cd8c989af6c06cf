"""The reference names every integration."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_PUBLIC = {"__init__", "attend", "per_tensor"}
"""Modules of the folder that users do not import."""


def test_the_reference_has_every_integration():
    page = (ROOT / "docs" / "api" / "integrations.md").read_text(encoding="utf-8")
    folder = ROOT / "sagesim_kernels" / "integrations"
    modules = {path.stem for path in folder.iterdir() if path.name != "__pycache__"}
    assert modules >= NOT_PUBLIC
    for module in modules - NOT_PUBLIC:
        assert f":: sagesim_kernels.integrations.{module}." in page, module
