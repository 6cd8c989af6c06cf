"""Text from files, made safe to print."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    r"""Return `text` with escapes instead of control characters and other invisible ones.

    A terminal would obey control characters. Line breaks are escaped too, so the result is one
    line.

    >>> print(printable("layer\x1b[31m 0\n"))
    layer\x1b[31m 0\n
    """
    return "".join(_escape(c) if _is_invisible(c) else c for c in text)


def printable_lines(text: str) -> str:
    """Return each line of `text` as `printable` does, with the line breaks unchanged."""
    return "\n".join(map(printable, text.split("\n")))


def _is_invisible(c: str) -> bool:
    """Whether `c` is a control, format, private or surrogate character, or a line separator."""
    category = unicodedata.category(c)
    return category[0] == "C" or category in ("Zl", "Zp")


def _escape(c: str) -> str:
    return c.encode("unicode_escape").decode("ascii")
