"""The emulator's errors on the Gaussian inputs of the benchmark, for docs/data/errors_on_cpu.json.

The benchmark measures the errors of kernels on a GPU. Kernels are held to the emulator's numbers,
so the emulator's errors stand for those of a spec that bench.json lacks.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

import sagesim
from sagesim import AttentionProblem, AttentionSpec
from sagesim_kernels.bench.accuracy import OUTPUTS, errors, mean_errors, problems
from sagesim_kernels.bench.cases import PEERS, GaussianCase, all_cases

SPECS: Final = ("fp8_gradients", "factored_qk16")
"""The presets that bench.json lacks. Minutes for each."""


def _results(problem: AttentionProblem, spec: AttentionSpec) -> dict[str, Tensor]:
    """The emulator's results in the dtype of the inputs."""
    trace = sagesim.trace(problem, spec=spec)
    return {name: getattr(trace, name).to(problem.q.dtype) for name in OUTPUTS}


def errors_on_cpu() -> dict[str, Any]:
    """Relative L2 errors of O, dQ, dK and dV by case, in the form of the benchmark's record."""
    specs = [AttentionSpec.parse(spec) for spec in SPECS]
    found: dict[str, Any] = {}
    for case in all_cases(SPECS, PEERS):
        if not isinstance(case, GaussianCase):
            continue
        several = list(problems(case, torch.device("cpu"), torch.bfloat16))
        rows = [errors(x, [_results(x, spec) for spec in specs]) for x in several]
        means = [mean_errors(of_spec) for of_spec in zip(*rows, strict=True)]
        found[case.key] = {
            "part": "accuracy",
            "shape": list(several[0].q.shape),
            "problems": len(several),
            "is_causal": several[0].is_causal,
            "errors": dict(zip(SPECS, means, strict=True)),
        }
    return {"cases": found}
