"""Tables in Markdown, and lists in a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"[-+\u2212]?[\d.,]+(e[-+]\d+)?( (to|±) [\d.,]+)?( ?(%|x|ms|MB))?|-|")
"""A cell of a column that is aligned right."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: columns that hold only numbers are aligned right, the others left."""
    columns = zip(*rows, strict=True)
    ruler = ["---:" if all(map(_NUMBER.fullmatch, column)) else "---" for column in columns]
    lines = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in (head, ruler, *rows))
    return "\n".join(f"| {line} |" for line in lines)


def listed(words: Iterable[str]) -> str:
    """The words with commas, and "and" before the last one."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
