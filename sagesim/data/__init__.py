"""Captures shipped with the package. README.md in this folder says how they were recorded."""

from pathlib import Path
from typing import Final

LLAMA: Final = Path(__file__).parent / "llama.safetensors"
"""Causal attention of a small Llama on 2048 tokens of text: one head of each of its six layers.

The file holds q, k, v and dO of each head.
"""
