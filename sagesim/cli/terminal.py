"""What the commands print, and how they fail."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Generator
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


@contextlib.contextmanager
def training(steps: int, *, shown: bool) -> Generator[Callable[[int, float, float], None]]:
    """What to call with steps done, loss and tokens per second. On stderr: a bar for a person, a
    line now and then where nobody looks, nothing unless `shown`."""
    last = -math.inf
    with progress("training") as bar:
        task = bar.add_task("", total=steps, visible=shown)

        def show(step: int, loss: float, speed: float) -> None:
            nonlocal last
            numbers = f"loss {loss:.4f}  {speed:,.0f} tokens/s"
            bar.update(task, completed=step, description=numbers)
            now = time.monotonic()
            if shown and bar.disable and (step == steps or now - last > _LINE_EVERY):
                print(f"step {step}/{steps}  {numbers}", file=sys.stderr, flush=True)
                last = now

        yield show
