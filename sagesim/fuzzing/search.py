"""Find the smallest attention call on which another implementation leaves a spec's contract."""

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
"""Failing cases after which the search stops: enough to tell which outputs a bug reaches."""

_PLAIN: Final = 2.0
"""The smallest case is to be out by this factor, or by half of the largest that was met: one that
is only just out would convince nobody."""

_WITNESSES: Final = 4
"""Failing cases in which an explanation has to hold."""


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

    Draws calls of many shapes, masks, layouts and kinds of numbers with Hypothesis, compares o,
    dq, dk and dv with the emulator's, and shrinks what differs to the smallest case that does.
    What may differ is in `tolerance.py`. Repeatable: the cases depend on the arguments.

    Args:
        attention_fn: called as `fn(q, k, v, is_causal=..., scale=..., enable_gqa=...)` with q
            [B, H, n_q, D] and k, v [B, H_kv, n_k, D]; differentiable by autograd. The arguments
            mean what they mean in `torch.nn.functional.scaled_dot_product_attention`.
        spec: what it claims to compute.
        cases: to draw; fewer where `ENOUGH` have failed before.
        device: of the tensors, and of the emulator.
        dtypes: names of torch's; by default float32 and float16, and bfloat16 where device is
            not the CPU.
        max_length: of sequences; by default two and a third of the spec's larger block.
        without: names of calls that are not made: full (that is, not causal), causal, cross
            (n_q other than n_k), tails, gqa, scale, strides.
        name: "package.module:function", where a report shall say how to import it, and
            the function does not know.
        progress: called after each case.

    Returns:
        a report that prints; `report.failure` is None where nothing was found.

    Raises:
        ModuleNotFoundError: without hypothesis, which comes with `sagebwd[fuzz]`.
        ValueError, TypeError: naming the argument that is wrong.

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
        raise ValueError("without: no call is left that is neither full nor causal")
    numbers = {"cases": [cases], "head_sizes": head_sizes}
    if max_length is not None:
        numbers["max_length"] = [max_length]
    for argument, sizes in numbers.items():
        if not sizes or min(sizes) < 1:
            raise ValueError(f"{argument}: {', '.join(map(str, sizes))}; positive numbers needed")
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

    def look(case: FuzzCase) -> bool:
        seen[case] = judge(case)
        if progress is not None:
            progress()
        return sum(bool(outcome.symptoms) for outcome in seen.values()) >= ENOUGH

    find(strategy, look, cases=cases, seed=seed)
    failing = [outcome for outcome in seen.values() if outcome.symptoms]
    importable = name or _import_name(attention_fn)
    failure = None
    if failing:
        symptom = min((s for outcome in failing for s in outcome.symptoms), key=_precedence)
        plain = min(_PLAIN, max(outcome.ratio(symptom) for outcome in failing) / 2)

        def shows(case: FuzzCase) -> bool:
            outcome = judge(case)
            return symptom in outcome.symptoms and outcome.ratio(symptom) >= plain

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
    """One case, run."""

    case: FuzzCase
    symptoms: frozenset[str]  #: outputs outside the contract, or the type of the exception
    error: str | None = None
    differences: Mapping[str, Difference] = field(default_factory=dict[str, Difference])

    def ratio(self, symptom: str) -> float:
        """How far out a symptom is; infinitely, where it is an exception."""
        if symptom in self.differences:
            return self.differences[symptom].ratio
        return math.inf if symptom in self.symptoms else 0.0


class _Judge:
    """Runs cases; each once, however often it is asked about."""

    def __init__(
        self, attention_fn: Callable[..., Tensor], spec: AttentionSpec, device: torch.device
    ) -> None:
        self.attention_fn, self.spec, self.device = attention_fn, spec, device
        self._known: dict[FuzzCase, _Outcome] = {}

    def __call__(self, case: FuzzCase) -> _Outcome:
        if case not in self._known:
            self._known[case] = self.again(case)
        return self._known[case]

    def outputs(self, case: FuzzCase) -> dict[str, Tensor | None]:
        """What the kernel computes, by the output's name."""
        outputs = case.run(self.attention_fn, self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # errors of its launches are raised here
        return dict(outputs._asdict())

    def again(self, case: FuzzCase) -> _Outcome:
        """The outcome of a new run."""
        try:
            outputs = self.outputs(case)
        except Exception as error:  # whatever a kernel raises is a finding
            words = f"{type(error).__name__}: {error}"
            return _Outcome(case, frozenset({type(error).__name__}), error=words)
        differences = Contract(case, self.spec, self.device).compare(outputs)
        outside = frozenset(name for name, d in differences.items() if d.is_outside)
        return _Outcome(case, outside, differences=differences)


def _precedence(symptom: str) -> tuple[int, str]:
    """Exceptions first, then outputs in the order of computation."""
    return (ORDER.index(symptom), "") if symptom in ORDER else (-1, symptom)


def _describe(
    judge: _Judge,
    failing: Sequence[_Outcome],
    symptom: str,
    smallest: FuzzCase | None,
    function: str | None,
) -> Failure:
    """What can be said about the failing cases, of which `smallest` shows `symptom`."""
    first = next(outcome for outcome in failing if symptom in outcome.symptoms)
    outcome = first if smallest is None else judge(smallest)
    case, spec, device = outcome.case, judge.spec, judge.device
    steady = symptom in judge.again(case).symptoms
    text = snippet(case, function, spec, str(device))
    if outcome.error is not None:
        return Failure(case=case, error=outcome.error, steady=steady, snippet=text)
    contract = Contract(case, spec, device)
    counts = {t: sum(t in o.symptoms for o in (*failing, outcome)) for t in ORDER}
    # The smallest case is the cheapest to try; the largest ones tell the most apart.
    compared = [o.case for o in failing if o.differences]
    compared.sort(key=lambda c: c.batch * c.heads * c.n_q * c.n_k, reverse=True)
    witnesses = [(c, judge.outputs(c)) for c in [case, *compared[: _WITNESSES - 1]]]
    return Failure(
        case=case,
        differences=outcome.differences,
        rounding={name: contract.rounding(name) for name in ORDER},
        site=infer(counts),
        explanations=explanations(spec, witnesses, device) if steady else (),
        witnesses=len(witnesses),
        steady=steady,
        snippet=text,
    )


def _import_name(function: object) -> str | None:
    """ "package.module:name" where that is how to import the function."""
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
