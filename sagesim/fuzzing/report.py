"""The result of fuzzing and its printed form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from sagesim.fuzzing.calls import INPUTS
from sagesim.fuzzing.cases import FuzzCase
from sagesim.fuzzing.diagnosis import Site
from sagesim.fuzzing.tolerance import ORDER, Difference
from sagesim.spec import AttentionSpec

_HEADER: Final = ("difference", "allowed", "ratio", "spec's error")
"""Columns of the table of outputs."""

_LABEL: Final = 11
"""Width of the labels in the left column."""

_NAME: Final = 7
"""Width of the names of outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The smallest failing case and its diagnosis."""

    case: FuzzCase
    error: str | None = None  #: type and message of the exception, if the kernel raised one
    differences: Mapping[str, Difference] = field(default_factory=dict[str, Difference])
    """By tensor: overwritten inputs, then o, dv, dq and dk, and dsinks if the case has sinks. Empty
    if the kernel raised."""
    rounding: Mapping[str, float] = field(default_factory=dict[str, float])
    """By output, the RMS error of the emulator against float64: the error of the spec itself."""
    site: Site | None = None
    """Inferred from all failing cases; None if the numbers are not at fault or not reproducible."""
    explanations: tuple[str, ...] = ()
    """Mistakes that reproduce the kernel's outputs in all `cases_explained` failing cases."""
    multiples: Mapping[str, str] = field(default_factory=dict[str, str])
    """The outputs that are a multiple of the emulator's in these cases, and the factors."""
    cases_explained: int = 0
    is_shrunk: bool = True  #: False if `case` is the first failing case, not the smallest
    note: str = ""  #: on exceptions: how the case was shrunk, or why it was not
    is_reproducible: bool  #: False if the case passed when it was run again
    snippet: str  #: a program that reproduces the failure

    @property
    def tensor(self) -> str | None:
        """The first overwritten input, or the first output that is outside the contract."""
        outside = [name for name, d in self.differences.items() if d.is_outside]
        return outside[0] if outside else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzReport:
    """The result of `sagesim.fuzz`; prints as a page of text."""

    function: str  #: "package.module:function", or "the function" if it cannot be imported
    spec: AttentionSpec
    device: str
    seed: int
    cases: int  #: number of different cases, without those of the shrinking
    failing: int  #: number of failing cases among them
    outside: Mapping[str, int]
    """Number of cases in which each input was overwritten and each output was outside. dsinks is
    one of the outputs if a case has sinks."""
    failure: Failure | None

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        label, failure = self.spec.label(), self.failure
        where = f"{self.cases} different cases on {self.device}, seed {self.seed}"
        if failure is None:
            yield f"{self.function} agrees with the emulator under {label!r}"
            *names, last = (name for name in ORDER if name in self.outside)
            yield f"{where}: {', '.join(names)} and {last} within the contract"
            return
        yield f"{self.function} {_verb(failure)} under {label!r}"
        counts = ", ".join(f"{name} in {n}" for name, n in self.outside.items() if n)
        yield f"{where}: {self.failing} failed{f', {counts}' if counts else ''}"
        yield ""
        which = "smallest" if failure.is_shrunk else "first"
        yield _entry(which, ", ".join(failure.case.describe()))
        if failure.error is not None:
            yield _entry("raised", failure.error.splitlines()[0])
        else:
            yield from _found(failure)
        if failure.note:
            yield _entry("note", failure.note)
        elif not failure.is_reproducible:
            yield _entry("flaky", "the case passed when it was run again: the kernel's results")
            yield _entry("", "change from run to run")
        yield ""
        yield "reproduce with"
        yield ""
        yield from ("    " + line if line else "" for line in failure.snippet.splitlines())


def _verb(failure: Failure) -> str:
    if failure.error is not None:
        return "raises"
    if failure.tensor in INPUTS:
        return "overwrites its inputs"
    return "differs from the emulator"


def _found(failure: Failure) -> Iterator[str]:
    """What is wrong first, the table of all outputs, and what explains it."""
    if failure.tensor is not None:
        first = failure.differences[failure.tensor]
        if first.problem:
            yield _entry("wrong", f"{first.tensor}: {first.problem}")
        else:
            place = ", ".join(map(str, first.worst))
            yield _entry(
                "wrong",
                f"{first.tensor}[{place}] is {first.kernel:.6g}, the emulator's "
                f"{first.emulator:.6g}",
            )
    yield ""
    yield from _table(failure)
    yield ""
    plural = "s" if failure.cases_explained > 1 else ""
    compared = f"{failure.cases_explained} failing case{plural}"
    if failure.explanations:
        for number, words in enumerate(failure.explanations):
            yield _entry("or" if number else "looks like", words)
        each = "each of these" if len(failure.explanations) > 1 else "this"
        yield _entry("", f"({each} reproduces the kernel in {compared})")
    elif failure.site is not None:
        yield _entry("inferred", f"{' or '.join(failure.site.names)}: {failure.site.words}")
        yield _entry("", f"because {failure.site.reason}")
        for name, factors in failure.multiples.items():
            yield _entry("", f"{name} is the emulator's times {factors} in {compared}")


def _table(failure: Failure) -> Iterator[str]:
    """The differences of all outputs."""
    found, allowed, ratio, rounding = _HEADER
    yield f"{'':{_LABEL}}{'':{_NAME + 5}}{found:>12}{allowed:>12}{ratio:>10}{rounding:>13}"
    for name in ORDER:
        d = failure.differences.get(name)
        if name == "dsinks" and not failure.case.sinks:
            continue
        if d is None or d.problem:
            mark = "" if d is None else "<- out"
            yield f"{'':{_LABEL}}{name:{_NAME}}{'not compared':53}{mark}".rstrip()
            continue
        numbers = (
            f"{d.found:>12.2e}{d.allowed:>12.2e}{d.ratio:>10.3g}{failure.rounding[name]:>13.2e}"
        )
        mark = "<- out" if d.is_outside else ""
        yield f"{'':{_LABEL}}{name:{_NAME}}{d.measure:5}{numbers}  {mark}".rstrip()


def _entry(label: str, text: str) -> str:
    return f"{label:{_LABEL}}{text}"


def snippet(case: FuzzCase, function: str | None, spec: AttentionSpec, device: str) -> str:
    """A program that runs function and emulator on the case and prints the largest differences.

    function: "package.module:name"; None if it cannot be imported.
    """
    if function is None:
        import_line, call = "function = ...  # the function that was fuzzed", "function"
    else:
        module, _, call = function.partition(":")
        import_line = f"from {module} import {call.partition('.')[0]}"
    return f"""\
import sagesim
{import_line}

case = sagesim.{case!r}
spec = sagesim.AttentionSpec.parse({spec.label()!r})
emulator = case.run(sagesim.attention, {device!r}, spec=spec)
kernel = case.run({call}, {device!r})
for name, ours, theirs in zip(kernel._fields, kernel, emulator):
    print(name, (ours.double() - theirs.double()).abs().max().item())
"""
