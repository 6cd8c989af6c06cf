"""Captures that come with the package; README.md beside them says where they come from."""

from pathlib import Path
from typing import Final

MINILM: Final = Path(__file__).parent / "minilm.safetensors"
"""Six layers of all-MiniLM-L6-v2 on 256 tokens of real text, with the dO of a real loss."""
