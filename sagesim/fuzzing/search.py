"""Find the smallest attention call on which an implementation violates its spec's contract."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from sagesim.fuzzing.cases import DTYPES, FEATURES, HEAD_SIZES, FuzzCase
from sagesim.fuzzing.diagnosis import explanations, infer
from sagesim.fuzzing.report import Failure, FuzzReport, snippet
from sagesim.fuzzing.tolerance import ORDER, Contract, Difference
from sagesim.problem import check_spec
from sagesim.spec import AttentionSpec

ENOUGH: Final = 20
"""The search stops after this many failing cases. They show which outputs a bug reaches."""

_CLEAR_RATIO: Final = 2.0
"""Factor by which the difference in the smallest case must exceed the allowed difference.

If half of the largest factor in the failing cases is less than this, that half is used instead. A
case that exceeds the allowed difference only slightly would not be convincing.
"""

_CASES_EXPLAINED: Final = 4
"""Number of failing cases that an explanation must reproduce."""


def fuzz(
    attention_fn: Callable[..., Tensor],
    *,
    spec: AttentionSpec,
    cases: int = 500,
    device: str | torch.device = "cpu",
    seed: int = 0,
    dtypes: Sequence[str] | None = None,
    head_sizes: Sequence[int] = HEAD_SIZES,
    max_length: int | None = None,
    without: Collection[str] = (),
    name: str | None = None,
    progress: Callable[[], None] | None = None,
) -> FuzzReport:
    """Search for a call on which `attention_fn` does not compute what `spec` says.

    Hypothesis draws calls with many shapes, masks, layouts and kinds of numbers. o, dq, dk and dv
    are compared with the emulator's, and a failing case is shrunk to the smallest that fails.
    `sagesim.fuzzing.tolerance` defines which differences are allowed. Equal arguments give equal
    cases.

    Args:
        attention_fn: called as `fn(q, k, v, is_causal=..., scale=..., enable_gqa=...)` with q
            [B, H, n_q, D] and k, v [B, H_kv, n_k, D]; differentiable by autograd. The arguments
            mean what they mean in `torch.nn.functional.scaled_dot_product_attention`.
        spec: the spec that it should compute.
        cases: number of cases to draw. The search stops early after `ENOUGH` failures.
        device: device of the tensors and of the emulator.
        seed: seed of the search.
        dtypes: names of torch dtypes. By default float32 and float16, and on other devices than
            the CPU also bfloat16.
        head_sizes: the head sizes to draw from.
        max_length: largest number of tokens; by default 7/3 of the spec's larger block.
        without: features of calls to exclude: full (calls without a causal mask), causal, cross
            (n_q different from n_k), tails, gqa, scale, strides.
        name: "package.module:function", for the report. By default it is taken from the function's
            own module and name.
        progress: called after each case.

    Returns:
        a report; `report.failure` is None if no case failed.

    Raises:
        ModuleNotFoundError: if hypothesis is not installed; it comes with `sagebwd[fuzz]`.
        ValueError, TypeError: if an argument is invalid; the message names it.

    >>> import functools, sagesim
    >>> kernel = functools.partial(sagesim.attention, spec=sagesim.FACTORED)
    >>> print(sagesim.fuzz(kernel, spec=sagesim.FACTORED, cases=3, max_length=40))
    the function agrees with the emulator under 'factored'
    3 different cases on cpu, seed 0: o, dv, dq and dk within the contract
    """
    check_spec(spec)
    if dtypes is None:
        on_cpu = torch.device(device).type == "cpu"
        dtypes = ("float32", "float16") if on_cpu else tuple(DTYPES)
    _check_words("dtypes", dtypes, DTYPES)
    _check_words("without", without, FEATURES)
    if {"full", "causal"} <= set(without):
        raise ValueError("without: full and causal together exclude all calls")
    numbers = {"cases": [cases], "head_sizes": head_sizes}
    if max_length is not None:
        numbers["max_length"] = [max_length]
    for argument, sizes in numbers.items():
        if not sizes or min(sizes) < 1:
            raise ValueError(f"{argument}: {', '.join(map(str, sizes))}; needs positive numbers")
    try:
        from sagesim.fuzzing.hypothesis_search import find
        from sagesim.fuzzing.strategies import cases as draws
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        message = "sagesim.fuzz needs hypothesis: pip install 'sagebwd[fuzz]'"
        raise ModuleNotFoundError(message, name="hypothesis") from None

    strategy = draws(
        block_q=spec.block_q,
        block_k=spec.block_k,
        dtypes=dtypes,
        head_sizes=head_sizes,
        longest=max_length,
        without=without,
    )
    device_ = torch.device(device)
    judge = _Judge(attention_fn, spec, device_)
    seen: dict[FuzzCase, _Outcome] = {}

    def is_last(case: FuzzCase) -> bool:
        seen[case] = judge(case)
        if progress is not None:
            progress()
        return sum(bool(outcome.symptoms) for outcome in seen.values()) >= ENOUGH

    find(strategy, is_last, cases=cases, seed=seed)
    failing = [outcome for outcome in seen.values() if outcome.symptoms]
    importable = name or _import_name(attention_fn)
    failure = None
    if failing:
        symptom = min((s for outcome in failing for s in outcome.symptoms), key=_precedence)
        clear = min(_CLEAR_RATIO, max(outcome.ratio(symptom) for outcome in failing) / 2)

        def shows(case: FuzzCase) -> bool:
            outcome = judge(case)
            return symptom in outcome.symptoms and outcome.ratio(symptom) >= clear

        smallest = find(strategy, shows, cases=cases, seed=seed, shrink=True)
        failure = _describe(judge, failing, symptom, smallest, importable)
    return FuzzReport(
        function=importable or "the function",
        spec=spec,
        device=str(device),
        seed=seed,
        cases=len(seen),
        failing=len(failing),
        outside={t: sum(t in outcome.symptoms for outcome in failing) for t in ORDER},
        failure=failure,
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of running a case."""

    case: FuzzCase
    symptoms: frozenset[str]  #: the outputs outside the contract, or the type of the exception
    error: str | None = None
    differences: Mapping[str, Difference] = field(default_factory=dict[str, Difference])

    def ratio(self, symptom: str) -> float:
        """`Difference.ratio` of an output; infinite for an exception, 0 without the symptom."""
        if symptom in self.differences:
            return self.differences[symptom].ratio
        return math.inf if symptom in self.symptoms else 0.0


class _Judge:
    """Runs cases and caches their outcomes."""

    def __init__(
        self, attention_fn: Callable[..., Tensor], spec: AttentionSpec, device: torch.device
    ) -> None:
        self.attention_fn, self.spec, self.device = attention_fn, spec, device
        self._cache: dict[FuzzCase, _Outcome] = {}

    def __call__(self, case: FuzzCase) -> _Outcome:
        if case not in self._cache:
            self._cache[case] = self.run(case)
        return self._cache[case]

    def outputs(self, case: FuzzCase) -> dict[str, Tensor | None]:
        """The kernel's outputs by name."""
        outputs = case.run(self.attention_fn, self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # raises the errors of asynchronous launches
        return dict(outputs._asdict())

    def run(self, case: FuzzCase) -> _Outcome:
        """Run a case, without the cache."""
        try:
            outputs = self.outputs(case)
        except Exception as error:  # any exception of the kernel is a failure to report
            words = f"{type(error).__name__}: {error}"
            return _Outcome(case, frozenset({type(error).__name__}), error=words)
        differences = Contract(case, self.spec, self.device).compare(outputs)
        outside = frozenset(name for name, d in differences.items() if d.is_outside)
        return _Outcome(case, outside, differences=differences)


def _precedence(symptom: str) -> tuple[int, str]:
    """Sort key: exceptions first, then outputs in the order of computation."""
    return (ORDER.index(symptom), "") if symptom in ORDER else (-1, symptom)


def _describe(
    judge: _Judge,
    failing: Sequence[_Outcome],
    symptom: str,
    smallest: FuzzCase | None,
    function: str | None,
) -> Failure:
    """Diagnose the failing cases.

    smallest: a case that shows the symptom; None if shrinking found none.
    """
    first = next(outcome for outcome in failing if symptom in outcome.symptoms)
    outcome = first if smallest is None else judge(smallest)
    case, spec, device = outcome.case, judge.spec, judge.device
    is_reproducible = symptom in judge.run(case).symptoms
    text = snippet(case, function, spec, str(device))
    if outcome.error is not None:
        return Failure(
            case=case, error=outcome.error, is_reproducible=is_reproducible, snippet=text
        )
    contract = Contract(case, spec, device)
    counts = {t: sum(t in o.symptoms for o in (*failing, outcome)) for t in ORDER}
    # The smallest case rejects most explanations fast; the largest cases distinguish the rest.
    compared = [o.case for o in failing if o.differences]
    compared.sort(key=lambda c: c.batch * c.heads * c.n_q * c.n_k, reverse=True)
    explained = [(c, judge.outputs(c)) for c in [case, *compared[: _CASES_EXPLAINED - 1]]]
    return Failure(
        case=case,
        differences=outcome.differences,
        rounding={name: contract.rounding(name) for name in ORDER},
        site=infer(counts),
        explanations=explanations(spec, explained, device) if is_reproducible else (),
        cases_explained=len(explained),
        is_reproducible=is_reproducible,
        snippet=text,
    )


def _import_name(function: object) -> str | None:
    """ "package.module:name" if the function can be imported by it, otherwise None."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not isinstance(module, str) or module in ("__main__", "builtins") or "<" in name:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function else None


def _check_words(argument: str, words: Collection[str], known: Collection[str]) -> None:
    unknown = [word for word in words if word not in known]
    if unknown or (argument == "dtypes" and not words):
        raise ValueError(f"{argument}: {unknown or 'none'}; known are {', '.join(known)}")
