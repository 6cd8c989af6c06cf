"""A complete record with known numbers, made without running anything."""

from typing import Any

from sagesim_kernels.bench.cases import (
    PASSES,
    PEERS,
    SPECS,
    CaptureCase,
    GaussianCase,
    TimedCase,
    all_cases,
)
from sagesim_kernels.bench.masks import MaskCase
from sagesim_kernels.bench.models import ModelCase, TrainingCase
from sagesim_kernels.bench.record import FORMAT

FACTOR = {
    "sdpa flash": 2.0,
    "sdpa cudnn": 1.25,
    "sdpa efficient": 4.0,
    "FlashAttention-2": 2.0,
    "factored_qk packed": 1.5,
}
"""The time of each peer relative to our specs. flash-attn-4 is not installed."""

JOBS = {"forward": 3.0, "dq": 3.0, "dk and dv": 3.0, "quantizing": 0.75, "other": 0.25}


def document() -> dict[str, Any]:
    """A record in which our specs take one millisecond for 10^12 operations, host included.

    INT8 saves 10 % of the time at each site of the base, and 20 % in dP, where it doubles the
    errors. FlexAttention runs only the causal mask.
    """
    cases = {}
    for case in all_cases(SPECS, PEERS):
        if isinstance(case, TimedCase | ModelCase | MaskCase):
            cases[case.key] = _timed(case)
        elif isinstance(case, TrainingCase):
            cases[case.key] = _trained(case)
        else:
            cases[case.key] = _errors(case)
    return {
        "format": FORMAT,
        "command": "python -m sagesim_kernels.bench",
        "machine": {"gpu": "Fake 1", "torch": "2.0", "triton": "3.0", "driver": None},
        "settings": {
            "specs": list(SPECS),
            "peers": list(PEERS),
            "rounds": 15,
            "quick": False,
            "dtype": "bfloat16",
        },
        "cases": cases,
        "lost": {},
    }


def of_other_code() -> dict[str, Any]:
    """The record as one of sm_80 code on a Hopper GPU."""
    made = document()
    made["settings"]["code"] = "sm80"
    made["machine"]["compute_capability"] = "9.0"
    return made


def _not_run(case) -> dict[str, str]:
    missing = "ModuleNotFoundError: No module named 'flash_attn'"
    reasons = dict.fromkeys(("flash-attn-4", "flash-attn-4 deterministic"), missing)
    if isinstance(case, TimedCase | ModelCase) and not case.shape.is_causal:
        reasons["FlexAttention"] = "RuntimeError: no room"
    return {name: why for name, why in reasons.items() if name in case.contenders}


def without(document: dict[str, Any], *parts: str) -> dict[str, Any]:
    """The record without some parts."""
    cases = document["cases"].items()
    return document | {"cases": {key: c for key, c in cases if c["part"] not in parts}}


def _timed(case: TimedCase | ModelCase | MaskCase) -> dict[str, Any]:
    shape, not_run, runs = case.shape, _not_run(case), {}
    flop = case.flop if isinstance(case, MaskCase) else shape.flop
    for name in case.contenders:
        if name in not_run:
            continue
        factor = FACTOR.get(name, 1.0)
        if case.part == "payoff" and name not in PEERS:
            factor = {"factored": 1.0, "factored dp=int8": 0.8}.get(name, 1 / 0.9)
        run: dict[str, Any] = {}
        for which in PASSES:
            ms = factor * flop(which) / 1e12
            run[which] = {"ms": ms, "quartiles_ms": [ms, ms], "host_ms": 0.5}
        run |= {"saved_bytes": 200_000_000, "added_bytes": 900_000_000, "apart": 0.01}
        if name not in PEERS:
            run["jobs_ms"] = JOBS
        if isinstance(case, ModelCase):
            run["wall"] = run["both"] | {"calls": 3}
        runs[name] = run
    return {
        "part": case.part,
        "batch": shape.batch,
        "heads": shape.heads,
        "kv_heads": shape.kv_size[1],
        "tokens": shape.tokens,
        "keys": shape.kv_size[2],
        "head_dim": shape.head_dim,
        "is_causal": shape.is_causal,
        "flop": {which: flop(which) for which in PASSES},
        "sm_clock_mhz": 1980,
        "runs": runs,
        "not_run": not_run,
    }


def _trained(case: TrainingCase) -> dict[str, Any]:
    times = {name: {"ms": 100 * FACTOR.get(name, 1.0), "host_ms": 5.0} for name in case.contenders}
    return {
        "part": "training",
        "layers": case.layers,
        "runs": {name: {"step": ms, "wall": ms, "apart": 0.01} for name, ms in times.items()},
        "not_run": {},
    }


def _errors(case: GaussianCase | CaptureCase) -> dict[str, Any]:
    not_run = _not_run(case)
    ran = [name for name in case.contenders if name not in not_run]
    size = {name: 0.02 if name == "factored dp=int8" else 0.01 for name in ran}
    return {
        "part": "accuracy",
        "shape": [16, 1, 2048, 64],
        "problems": 1,
        "is_causal": False,
        "errors": {name: dict.fromkeys(("o", "dq", "dk", "dv"), e) for name, e in size.items()},
        "not_run": not_run,
    }
