"""What the commands print, and how they fail."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

_WIDE = 1000
"""Columns where nobody looks: tables in files and pipes are not folded."""

_LINE_EVERY: Final = 10.0
"""Seconds between lines about training where nobody looks."""


class Failure(Exception):
    """Wrong input. Its message becomes one line on stderr, and the exit code 2."""


def stdout() -> Console:
    """For results. Text is printed as it is: names from files are not markup."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDE
    return Console(width=width, markup=False, highlight=False, emoji=False)


def table(title: str, first: str, *numbers: str) -> Table:
    """An empty table: where a terminal is narrow the first column is folded, and no number."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    empty = Table(first, title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in numbers:
        empty.add_column(name, justify="right", no_wrap=True)
    return empty


def progress(what: str) -> Progress:
    """A bar on stderr that is gone when it is done, and is not there unless a person looks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    return Progress(
        what,
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class Training:
    """A bar for a person, or a line now and then where nobody looks, about the run in hand."""

    def __init__(self, bar: Progress, *, shown: bool) -> None:
        self._bar, self._shown, self._last, self._what, self._steps = bar, shown, 0.0, "", 0
        self._task = bar.add_task("", visible=shown)

    def begin(self, what: str, steps: int) -> None:
        """A run of so many steps begins."""
        self._what, self._steps, self._last = what, steps, -math.inf
        self._bar.reset(self._task, total=steps, description=what)

    def show(self, step: int, loss: float, speed: float) -> None:
        """Steps done, the last one's loss, and tokens per second."""
        numbers = f"{self._what}  loss {loss:.4f}  {speed:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, description=numbers)
        now = time.monotonic()
        is_due = step == self._steps or now - self._last > _LINE_EVERY
        if self._shown and self._bar.disable and is_due:
            print(f"step {step}/{self._steps}  {numbers}", file=sys.stderr, flush=True)
            self._last = now


@contextlib.contextmanager
def training(*, shown: bool) -> Generator[Training]:
    """What shows how runs get on, on stderr; nothing is shown unless `shown`."""
    with progress("training") as bar:
        yield Training(bar, shown=shown)
