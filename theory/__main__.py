"""Check every bound and estimate of `theory` against the emulator.

    python -m theory [--json] [TOPIC ...]

The exit code is 1 if any statement does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from theory.checks import CHECKS
from theory.checks.check import Check

HEAD = ("topic", "statement", "inputs", "bound", "measured", "ratio", "holds")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default the process's; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m theory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "topics",
        nargs="*",
        metavar="TOPIC",
        help=f"topics to check, all by default: {', '.join(CHECKS)}",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    args = parser.parse_args(arguments)
    if unknown := [t for t in args.topics if t not in CHECKS]:
        parser.error(f"no topic is called {unknown[0]!r}; there are {', '.join(CHECKS)}")
    checks = [check for topic in args.topics or CHECKS for check in CHECKS[topic]()]
    if args.json:
        found = [asdict(c) | {"ratio": c.ratio, "holds": c.holds} for c in checks]
        print(json.dumps(found, indent=1))
    else:
        print(table(checks))
    failed = [c for c in checks if not c.holds]
    if failed:
        print(f"{len(failed)} of {len(checks)} statements do not hold", file=sys.stderr)
    return 1 if failed else 0


def table(checks: Sequence[Check]) -> str:
    """The checks as aligned columns. An estimate shows its tolerance in percent after its value."""
    rows: list[tuple[str, ...]] = [HEAD]
    for c in checks:
        claim = f"{c.predicted:.3g}" + ("" if c.within is None else f" +-{c.within:.0%}")
        word = "yes" if c.holds else "NO"
        rows.append(
            (c.topic, c.statement, c.inputs, claim, f"{c.measured:.3g}", f"{c.ratio:.3f}", word)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    numbers = range(3, 6)
    lines = [
        "  ".join(
            cell.rjust(w) if i in numbers else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
