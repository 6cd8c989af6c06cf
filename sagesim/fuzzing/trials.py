"""Run a kernel on many cases, and leave a process that the kernel has damaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sagesim.fuzzing.cases import FuzzCase, call_with
from sagesim.fuzzing.fresh_process import CRASH, CannotStart, FreshProcesses
from sagesim.fuzzing.judge import Outcome, judge
from sagesim.spec import AttentionSpec


class Trials:
    """Runs cases in this process as long as it is healthy, then in fresh ones; caches outcomes.

    After an exception such as an illegal memory access, every later call in a process raises. So
    after an exception, a case that did not raise before runs again. If it raises now, the process
    is damaged.

    Args:
        attention: the kernel.
        spec, device: see `sagesim.fuzz`.
        function: "package.module:function", by which a fresh process imports the kernel; None if
            it cannot.
    """

    def __init__(
        self,
        attention: Callable[..., Tensor],
        spec: AttentionSpec,
        device: torch.device,
        function: str | None,
    ) -> None:
        self.spec, self.device = spec, device
        self.damaging: Outcome | None = None  #: after this one every call in this process raised
        self.stuck = ""  #: why no more cases can be run; "" if they can
        self._attention, self._function = attention, function
        self._innocent: FuzzCase | None = None
        self._fresh: FreshProcesses | None = None
        self._outcomes: dict[FuzzCase, Outcome] = {}

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fresh is not None:
            self._fresh.stop()

    @property
    def is_here(self) -> bool:
        """Whether cases run in this process."""
        return self._fresh is None and not self.stuck

    @property
    def has_passed(self) -> bool:
        """Whether a case has run without an exception."""
        return self._innocent is not None

    def __call__(self, case: FuzzCase) -> Outcome:
        """The outcome of a case; without a symptom if no more cases can be run."""
        if case in self._outcomes:
            return self._outcomes[case]
        if self.stuck:
            return Outcome(case)
        outcome = self._run(case)
        if outcome is not self.damaging:  # a fresh process has to confirm it
            self._outcomes[case] = outcome
        return outcome

    def again(self, case: FuzzCase) -> Outcome:
        """Run a case once more; in a new process, if this one is damaged."""
        if self._fresh is not None:
            self._fresh.stop()
        return self._run(case)

    def outputs(self, case: FuzzCase) -> Mapping[str, Tensor] | None:
        """The kernel's outputs, from a call in this process; None if something else is wrong."""
        try:
            called = call_with(case, self._attention, self.device)
        except (Exception, SystemExit):  # whatever the kernel raises
            return None
        return None if called.problems else called.outputs

    def leave(self, damaging: Outcome) -> None:
        """Run later cases in fresh processes, and forget the exceptions in this one."""
        self.damaging = damaging
        self._outcomes = {c: o for c, o in self._outcomes.items() if o.error is None}
        if self._function is None:
            self.stuck = "the function has no name that a fresh process can import"
        else:
            self._fresh = FreshProcesses(self._function, self.spec, str(self.device))

    def _run(self, case: FuzzCase) -> Outcome:
        if self._fresh is not None:
            try:
                return self._fresh.run(case)
            except CannotStart as problem:
                self.stuck = f"a fresh process cannot import the function: {problem}"
                return Outcome(case)
        outcome = self._judge(case)
        if outcome.error is None:
            self._innocent = self._innocent or case
        elif self._innocent is not None and self._judge(self._innocent).error is not None:
            self.leave(outcome)
        return outcome

    def _judge(self, case: FuzzCase) -> Outcome:
        return judge(case, self._attention, self.spec, self.device)


def fails_alike(outcome: Outcome, symptom: str) -> bool:
    """Whether the outcome has the symptom. A crash of the process counts as any exception."""
    return symptom in outcome.symptoms or outcome.kind == CRASH
