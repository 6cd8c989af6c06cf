"""Output of the commands: tables, progress bars, and failures."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Final

from sagesim.printable import printable_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table
    from rich.text import Text

_WIDE = 1000
"""Columns of output to files and pipes, where tables are not folded."""

_NARROW: Final = 120
"""Columns of a terminal below which tables leave out spaces between their columns."""

_LINE_EVERY: Final = 10.0
"""Seconds between progress lines of training, if stderr is not a terminal."""


class Failure(Exception):
    """Invalid input. The command prints the message on one line of stderr and exits with 2."""


def stdout() -> Console:
    """A console for results. It prints text without interpreting rich's markup.

    Control characters, which names in files may contain, are printed as escapes.
    """
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable_lines(text), **options)

    width = None if sys.stdout.isatty() else _WIDE
    return Plain(width=width, markup=False, highlight=False, emoji=False)


def table(title: str, first: str, *numbers: str) -> Table:
    """An empty table. In a narrow terminal the first column is folded, without loss of text.

    Args:
        first: header of the first column.
        numbers: headers of the other columns, which are right-aligned.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    empty = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 0 if stdout().width < _NARROW else 1),
    )
    empty.add_column(first, overflow="fold")
    for name in numbers:
        empty.add_column(name, justify="right", no_wrap=True)
    return empty


def progress(what: str, hint: str = "") -> Progress:
    """Progress on stderr: a bar in a terminal, which disappears at the end, and otherwise lines.

    Args:
        what: what is done, for example "measuring layers".
        hint: what the user should know beforehand, such as how to do less.
    """
    bar = _bar(what)
    if bar.disable:
        from sagesim.progress_lines import ProgressLines

        return ProgressLines(what, hint, bar.console)
    if hint:
        bar.console.print(hint)
    return bar


def _bar(what: str) -> Progress:
    """A progress bar on stderr. It disappears at the end, and needs a terminal to show at all."""
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
    """Progress of training runs: a bar in a terminal, and otherwise a line every few seconds."""

    def __init__(self, bar: Progress, *, shown: bool) -> None:
        self._bar, self._shown, self._last, self._what, self._steps = bar, shown, 0.0, "", 0
        self._task = bar.add_task("", visible=shown)

    def begin(self, what: str, steps: int) -> None:
        """Start showing a run of `steps` steps."""
        self._what, self._steps, self._last = what, steps, -math.inf
        self._bar.reset(self._task, total=steps, description=what)

    def show(self, step: int, loss: float, speed: float) -> None:
        """Show the number of steps done, the loss of the last step, and tokens per second."""
        numbers = f"{self._what}  loss {loss:.4f}  {speed:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, description=numbers)
        now = time.monotonic()
        is_due = step == self._steps or now - self._last > _LINE_EVERY
        if self._shown and self._bar.disable and is_due:
            print(f"step {step}/{self._steps}  {numbers}", file=sys.stderr, flush=True)
            self._last = now


@contextlib.contextmanager
def training(*, shown: bool) -> Generator[Training]:
    """Show the progress of training runs on stderr, if `shown`."""
    with _bar("training") as bar:
        yield Training(bar, shown=shown)


class JobsView:
    """All running jobs in one view: a bar for each in a terminal, and otherwise lines of text."""

    def __init__(self, bar: Progress, count: int) -> None:
        self._bar, self._count, self._last = bar, count, -math.inf
        self._all = bar.add_task("all", total=count)
        self._tasks: dict[str, TaskID] = {}

    def show(self, running: Mapping[str, tuple[int, int, str]], ended: int) -> None:
        """Show the jobs.

        Args:
            running: steps done, all steps and words of each running job, by its name.
            ended: the number of jobs that have ended.
        """
        self._bar.update(self._all, completed=ended)
        for name in self._tasks.keys() - running.keys():
            self._bar.remove_task(self._tasks.pop(name))
        for name, (done, total, words) in running.items():
            if name not in self._tasks:
                self._tasks[name] = self._bar.add_task("")
            text = f"{name}  {words}"
            self._bar.update(self._tasks[name], completed=done, total=total, description=text)
        if self._bar.disable and time.monotonic() - self._last > _LINE_EVERY:
            lines = [f"{ended} of {self._count} jobs ended, {len(running)} running"]
            lines += [
                f"  {name}  {done}/{total}  {w}" for name, (done, total, w) in running.items()
            ]
            print("\n".join(lines), file=sys.stderr, flush=True)
            self._last = time.monotonic()


@contextlib.contextmanager
def jobs_shown(count: int) -> Generator[JobsView]:
    """Show the progress of `count` jobs on stderr."""
    with _bar("jobs") as bar:
        yield JobsView(bar, count)
