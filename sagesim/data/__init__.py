"""Captures that come with the package; README.md beside them says where they come from."""

from pathlib import Path
from typing import Final

LLAMA: Final = Path(__file__).parent / "llama.safetensors"
"""Six layers of a small Llama, a head of each, causal, on 2048 tokens of real text, with its dO."""
