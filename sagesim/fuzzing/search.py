"""Find the smallest attention call on which an implementation violates its spec's contract."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from sagesim.fuzzing.calls import INPUTS
from sagesim.fuzzing.cases import DTYPES, EXTRAS, FEATURES, HEAD_SIZES, FuzzCase
from sagesim.fuzzing.judge import Outcome
from sagesim.fuzzing.report import FuzzReport
from sagesim.fuzzing.shrinking import Shrinking
from sagesim.fuzzing.tolerance import ORDER
from sagesim.fuzzing.trials import Trials
from sagesim.problem import check_spec
from sagesim.spec import AttentionSpec

ENOUGH: Final = 20
"""The search stops after this many failing cases. They show which outputs a bug reaches."""

SEARCH: Final = "comparing calls"
"""The first phase; see also `sagesim.fuzzing.shrinking`."""


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
    extras: Collection[str] = (),
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> FuzzReport:
    """Search for a call on which `attention_fn` does not compute what `spec` says.

    Hypothesis draws calls with many shapes, masks, layouts and kinds of numbers. o, dq, dk, dv
    and the gradient of sinks are compared with the emulator's, and a failing case is shrunk to the
    smallest that fails. A kernel must not write to q, k, v, dO or the memory around them.

    If an exception leaves this process in a state in which every call raises, as an illegal memory
    access on a GPU does, the search stops, and the failing case is shrunk in processes of their
    own. They import the function by its name; without one, the case is not shrunk.

    `sagesim.fuzzing.tolerance` defines which differences are allowed.

    The `FuzzCase` of the report is reproducible: it gives the same tensors in every program. The
    seed identifies the search only while the same modules are loaded, because Hypothesis also draws
    the constants of loaded modules.

    Args:
        attention_fn: called as `fn(q, k, v, is_causal=..., scale=..., enable_gqa=...)` with q
            [B, H, n_q, D] and k, v [B, H_kv, n_k, D]; differentiable by autograd. The arguments
            mean what they mean in `torch.nn.functional.scaled_dot_product_attention`.
        spec: the spec that it should compute.
        cases: number of cases to draw. The search stops early after `ENOUGH` failures.
        device: device of the tensors and of the emulator.
        seed: seed of the search; see above.
        dtypes: names of torch dtypes. By default float32 and float16, and on other devices than
            the CPU also bfloat16.
        head_sizes: the head sizes to draw from.
        max_length: largest number of tokens; by default 7/3 of the spec's larger block, or more if
            `without` leaves no length up to it.
        without: features of calls to exclude: full (calls without a causal mask), causal, cross
            (n_q different from n_k), tails, gqa, scale, strides.
        extras: arguments to draw that SDPA does not have: window (with causal_alignment), padding
            (key_mask), seqused_k, sinks and softcap, with the meaning that they have in
            `sagesim.attention`. They are passed only where they are given. Sinks need a gradient.
        name: "package.module:function", for the report. By default it is taken from the function's
            own module and name.
        progress: called with the name of the phase after each case, and when shrinking starts.

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
    _check_words("extras", extras, EXTRAS)
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
        extras=extras,
    )
    importable = name or _import_name(attention_fn)
    tell = progress or _ignore
    seen: dict[FuzzCase, Outcome] = {}
    with Trials(attention_fn, spec, torch.device(device), importable) as trials:

        def is_last(case: FuzzCase) -> bool:
            if case not in seen:  # Hypothesis runs the last case again
                seen[case] = trials(case)
                tell(SEARCH)
            return not trials.is_here or sum(bool(o.symptoms) for o in seen.values()) >= ENOUGH

        find(strategy, is_last, cases=cases, seed=seed)
        failing = [outcome for outcome in seen.values() if outcome.symptoms]
        failure = None
        if failing:

            def smallest(shows: Callable[[FuzzCase], bool]) -> FuzzCase | None:
                return find(strategy, shows, cases=cases, seed=seed, shrink=True)

            failure = Shrinking(trials, failing, smallest, importable, tell).run()
    has_sinks = any(case.sinks for case in seen)
    outputs = [name for name in ORDER if has_sinks or name != "dsinks"]
    return FuzzReport(
        function=importable or "the function",
        spec=spec,
        device=str(device),
        seed=seed,
        cases=len(seen),
        failing=len(failing),
        outside={t: sum(t in o.symptoms for o in failing) for t in (*INPUTS, *outputs)},
        failure=failure,
    )


def _ignore(phase: str) -> None:
    """The progress callback if none is given."""


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
