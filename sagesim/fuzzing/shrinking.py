"""From failing cases to the report of one: the smallest case, and what explains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from sagesim.fuzzing.cases import FuzzCase
from sagesim.fuzzing.diagnosis import explanations, infer, multiples
from sagesim.fuzzing.judge import Outcome, precedence
from sagesim.fuzzing.report import Failure, snippet
from sagesim.fuzzing.tolerance import ORDER, Contract
from sagesim.fuzzing.trials import Trials, fails_alike

SHRINK: Final = "shrinking the failing call"
EXPLAIN: Final = "looking for an explanation"
"""Phases of `sagesim.fuzz`."""

_CLEAR_RATIO: Final = 2.0
"""Factor by which the difference in the smallest case must exceed the allowed difference.

If half of the largest factor in the failing cases is less than this, that half is used instead. A
case that exceeds the allowed difference only slightly would not be convincing.
"""

_CASES_EXPLAINED: Final = 4
"""Number of failing cases that an explanation must reproduce."""


@dataclass(frozen=True, slots=True)
class Shrinking:
    """Shrinks and explains the failure that matters most.

    trials: runs cases.
    failing: the failing cases, in the order in which they ran.
    smallest: returns the smallest case for which a predicate is true, None if it finds none.
    function: "package.module:function"; None if it cannot be imported.
    progress: called with the phase after each case.
    """

    trials: Trials
    failing: Sequence[Outcome]
    smallest: Callable[[Callable[[FuzzCase], bool]], FuzzCase | None]
    function: str | None
    progress: Callable[[str], None]

    def run(self) -> Failure:
        """Shrink the first exception, or else the first wrong tensor, and explain it."""
        trials = self.trials
        first = min(self.failing, key=lambda o: min(map(precedence, o.symptoms)))
        if first.error is not None and not trials.has_passed:
            # Nothing shows whether the first exception caused the others.
            trials.leave(first)
        if trials.is_here:
            symptom = min(first.symptoms, key=precedence)
            clear = min(_CLEAR_RATIO, max(o.ratio(symptom) for o in self.failing) / 2)
            found = self._shrink(lambda o: symptom in o.symptoms and o.ratio(symptom) >= clear)
            if trials.is_here:
                outcome = first if found is None else trials(found)
                if outcome.error is None:
                    return self._explain(outcome, symptom, is_shrunk=found is not None)
                return self._raised(
                    outcome,
                    is_reproducible=symptom in trials.again(outcome.case).symptoms,
                    is_shrunk=found is not None,
                )
        damaging = trials.damaging if first.error is None else first
        assert damaging is not None
        return self._shrink_elsewhere(damaging)

    def _shrink(self, shows: Callable[[Outcome], bool]) -> FuzzCase | None:
        def predicate(case: FuzzCase) -> bool:
            self.progress(SHRINK)
            return shows(self.trials(case))

        self.progress(SHRINK)
        return self.smallest(predicate)

    def _shrink_elsewhere(self, first: Outcome) -> Failure:
        """Shrink an exception in fresh processes, because this one is damaged."""
        assert first.kind is not None
        kind, trials = first.kind, self.trials
        is_reproducible = fails_alike(trials.again(first.case), kind)
        if trials.stuck:
            note = f"not shrunk: later calls raised as well, and {trials.stuck}"
            return self._raised(first, note=note, is_shrunk=False)
        if not is_reproducible:
            note = "not shrunk: in a fresh process the call passes; an earlier call may be at fault"
            return self._raised(first, note=note, is_reproducible=False, is_shrunk=False)
        found = self._shrink(lambda outcome: fails_alike(outcome, kind))
        outcome = trials(first.case if found is None else found)
        return self._raised(
            outcome,
            note="later calls raised as well; shrunk in fresh processes",
            is_reproducible=fails_alike(trials.again(outcome.case), kind),
            is_shrunk=found is not None,
        )

    def _raised(
        self,
        outcome: Outcome,
        *,
        note: str = "",
        is_reproducible: bool = True,
        is_shrunk: bool = True,
    ) -> Failure:
        """Report an exception or a crash."""
        return Failure(
            case=outcome.case,
            error=outcome.error,
            is_shrunk=is_shrunk,
            note=note,
            is_reproducible=is_reproducible,
            snippet=self._snippet(outcome.case),
        )

    def _explain(self, outcome: Outcome, symptom: str, *, is_shrunk: bool) -> Failure:
        """Diagnose wrong tensors from the smallest case and all failing ones."""
        case, spec, device = outcome.case, self.trials.spec, self.trials.device
        is_reproducible = symptom in self.trials.again(case).symptoms
        contract = Contract(case, spec, device)
        # Only numbers are explained: not an input that was overwritten, nor an o that is invalid.
        numeric = [o for o in (*self.failing, outcome) if o.is_numeric]
        site = None
        explained: list[tuple[FuzzCase, Mapping[str, Tensor]]] = []
        if outcome.is_numeric and is_reproducible:
            site = infer([{name: o.ratio(name) for name in ORDER} for o in numeric])
            explained = self._compared(case, [o.case for o in numeric if o.case != case])
        return Failure(
            case=case,
            differences=outcome.differences,
            rounding={name: contract.rounding(name) for name in ORDER},
            site=site,
            explanations=explanations(
                spec, explained, device, progress=lambda: self.progress(EXPLAIN)
            ),
            multiples=multiples(spec, explained, device),
            cases_explained=len(explained),
            is_shrunk=is_shrunk,
            is_reproducible=is_reproducible,
            snippet=self._snippet(case),
        )

    def _compared(
        self, smallest: FuzzCase, others: Sequence[FuzzCase]
    ) -> list[tuple[FuzzCase, Mapping[str, Tensor]]]:
        """Cases that an explanation has to reproduce, and the kernel's outputs for them.

        The smallest case rejects most explanations fast; the largest ones distinguish the rest.
        """
        largest = sorted(others, key=lambda c: c.batch * c.heads * c.n_q * c.n_k, reverse=True)
        cases = [smallest, *largest[: _CASES_EXPLAINED - 1]]
        outputs = [(case, self.trials.outputs(case)) for case in cases]
        return [(case, found) for case, found in outputs if found is not None]

    def _snippet(self, case: FuzzCase) -> str:
        return snippet(case, self.function, self.trials.spec, str(self.trials.device))
