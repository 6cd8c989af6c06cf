"""Constants in the reference: autodoc does not find their docstrings under their public names."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]

_CODE = re.compile(r"(`[^`]*`)")
_MARKS = re.compile(r"([*|\\_])")


def docstrings(path: str) -> dict[str, str]:
    """The docstring that follows each constant of a module, by the constant's name."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    found: dict[str, str] = {}
    for assigned, text in pairwise(body):
        if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
            continue
        if isinstance(assigned, ast.Assign | ast.AnnAssign):
            target = assigned.target if isinstance(assigned, ast.AnnAssign) else assigned.targets[0]
            found[ast.unparse(target)] = str(text.value.value)
    return found


def constants(names: Mapping[str, Sequence[str]]) -> str:
    """Public constants of `sagesim` and what their docstrings say, as a list in Markdown.

    names: by the path of the module that defines them.
    """
    items: list[str] = []
    for path, wanted in names.items():
        texts = docstrings(path)
        items += [f"`sagesim.{name}`\n: {_markdown(texts[name])}\n" for name in wanted]
    return "\n".join(items)


def _markdown(text: str) -> str:
    """Plain text with `code` as Markdown in a list of definitions."""
    parts = _CODE.split(text.strip())
    parts[::2] = [_MARKS.sub(r"\\\1", part) for part in parts[::2]]
    return "".join(parts).replace("\n", "\n  ")
