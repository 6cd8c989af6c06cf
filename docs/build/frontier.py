"""Measure the errors of specs with 8-bit products in the backward; writes docs/data/frontier.json.

    python docs/build/frontier.py [--draws N] [--add]

Each figure is the geometric mean of the relative L2 error over the layers of a capture, or over the
draws of Gaussian inputs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import captures
import torch

import sagesim
from sagesim.analysis import COLUMNS, Setting
from sagesim.command import exit_code
from sagesim.emulator import ForwardSoftmax, Recorder, flatten, run_forward
from sagesim.files import check_writable, write_text

FILE: Final = Path(__file__).parents[1] / "data" / "frontier.json"
REFERENCE: Final = "sagebwd"
SIGMAS: Final = (1.0, 3.0, 5.0)
SETTING: Final = Setting(tokens=2048, draws=4)

SCHEMES: Final = (
    ("the paper's", REFERENCE),
    ("factored", "factored"),
    ("QK alone in INT8", "factored_qk"),
    ("QK in 16 bit, dP in INT8", "factored_qk16"),
    ("FP8 gradients", "fp8_gradients"),
    ("K per block in QK", "fp8_gradients qk=int8@token,block qk_recompute=int8@token,block"),
    ("Q smoothed as well", "fp8_gradients smooth=qk"),
    (
        "right operands per head",
        "fp8_gradients dv=fp8_e4m3@row_bound,head dq=fp8_e4m3@row_bound,head "
        "dk=fp8_e4m3@row_bound,head",
    ),
    ("blocks of 64 queries", "fp8_gradients block=64x64"),
    ("dV in INT8", "fp8_gradients dv=int8@row_bound,block block=64x64"),
    ("dV in INT8, dO per channel", "fp8_gradients dv=int8@row_bound,block_channel block=64x64"),
    ("dS in INT8", "fp8_gradients dq=int8@row_bound,block dk=int8@row_bound,block"),
    ("dS in E5M2", "fp8_gradients dq=fp8_e5m2 dk=fp8_e5m2"),
    ("stochastic rounding", "fp8_gradients round=stochastic@0"),
    ("PV in FP8 as well", "fp8_gradients pv=fp8_e4m3@tile_row,block"),
    ("dP in INT8 as well", "fp8_gradients dp=int8@token,token"),
    (
        "FP8 with the amax of each row",
        "fp8_gradients dv=fp8_e4m3@row,head dq=fp8_e4m3@row,head dk=fp8_e4m3@row,head",
    ),
)
"""What is measured. The last one cannot be computed by a kernel that sums codes."""

Problems = Sequence[sagesim.AttentionProblem]


def problems(draws: int) -> dict[str, Problems]:
    """The inputs, by name."""
    found: dict[str, Problems] = {
        "shipped capture": captures.shipped(),
        "SmolLM2-135M": captures.smollm2().calls,
    }
    for sigma in SIGMAS:
        for is_causal in (False, True):
            setting = replace(SETTING, is_causal=is_causal)
            mask = "causal" if is_causal else "full"
            drawn = [setting.problem(sigma, draw) for draw in range(draws)]
            found[f"sigma {sigma:g}, {mask}"] = drawn
    # The paper's scheme is more accurate where the first rows weigh more.
    short = replace(SETTING, tokens=SETTING.tokens // 2, is_causal=True)
    drawn = [short.problem(1.0, draw) for draw in range(draws)]
    found[f"sigma 1, causal, {short.tokens} tokens"] = drawn
    return found


class Reference:
    """The exact tensors of a problem, and those of the forwards that its specs run, each once."""

    def __init__(self, problem: sagesim.AttentionProblem) -> None:
        self.problem = problem
        self.exact = sagesim.exact(problem)
        self._own: dict[sagesim.AttentionSpec, sagesim.Exact] = {}

    def own(self, spec: sagesim.AttentionSpec) -> sagesim.Exact:
        """The exact gradients of the spec's own forward, of which only QK matters."""
        blocks = {"block_q": spec.block_q, "block_k": spec.block_k}
        if spec.qk.lhs is sagesim.Granularity.PerToken and not spec.smoothing.q:
            blocks["block_q"] = 64  # no block of queries shares a scale or a mean
        key = replace(sagesim.FPA, qk=spec.qk, smoothing=spec.smoothing, rounding=spec.rounding)
        key = replace(key, **blocks)
        if key not in self._own:
            x = flatten(self.problem, key)
            recorder = Recorder(x, maps=frozenset({"s"}), operands=False)
            _, found = run_forward(x, recorder)
            s, lse = recorder.maps["s"], (found.lse_smoothed, found.lse)
            self._own[key] = sagesim.exact_backward(self.problem, ForwardSoftmax.of(x, s, *lse))
        return self._own[key]


def squares(reference: Reference, spec: sagesim.AttentionSpec) -> torch.Tensor:
    """Squared errors and norms, [reference, tensor of `COLUMNS`, 2]."""
    problem = reference.problem
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    o = sagesim.attention(replace(problem, q=q, k=k, v=v), spec=spec)
    o.backward(problem.gradient)
    found = [x.double() for x in (o.detach(), q.grad, k.grad, v.grad) if x is not None]
    return torch.tensor(
        [
            [
                [
                    float((x - getattr(exact, t)).square().sum()),
                    float(getattr(exact, t).square().sum()),
                ]
                for t, x in zip(COLUMNS, found, strict=True)
            ]
            for exact in (reference.exact, reference.own(spec))
        ],
        dtype=torch.float64,
    )


def measure(inputs: Problems, specs: Sequence[sagesim.AttentionSpec]) -> list[dict[str, Any]]:
    """For each spec, errors against full precision and against the own forward, by tensor."""
    by_problem: list[torch.Tensor] = []
    for problem in inputs:
        sums = torch.zeros(len(specs), 2, len(COLUMNS), 2, dtype=torch.float64)
        for group in problem.head_groups():
            reference = Reference(group)
            sums += torch.stack([squares(reference, spec) for spec in specs])
        by_problem.append((sums[..., 0] / sums[..., 1]).sqrt())
        print(".", end="", flush=True)
    means = torch.stack(by_problem).log().mean(0).exp().tolist()
    return [
        {
            "exact": dict(zip(COLUMNS, exact, strict=True)),
            "own": {t: x for t, x in zip(COLUMNS, own, strict=True) if t != "o"},
        }
        for exact, own in means
    ]


def failures(row: Mapping[str, Any], reference: Mapping[str, Any], against: str) -> list[str]:
    """The tensors whose error is larger than that of the paper's scheme."""
    return [t for t, error in row[against].items() if not error <= reference[against][t]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=SETTING.draws)
    parser.add_argument(
        "--add", action="store_true", help="keep the rows of the file, and compute the others"
    )
    args = parser.parse_args()
    check_writable(FILE)
    head = {
        "command": f"python docs/build/frontier.py --draws {args.draws}",
        "machine": f"CPU, torch {torch.__version__}, sagebwd {sagesim.__version__}",
        "setting": asdict(replace(SETTING, draws=args.draws)),
    }
    found: dict[tuple[str, str], dict[str, Any]] = {}
    if args.add:
        earlier = json.loads(FILE.read_text(encoding="utf-8"))
        if {key: earlier[key] for key in head} != head:
            parser.error(f"{FILE} was made by another command or another version")
        found = {(row["inputs"], row["label"]): row for row in earlier["rows"]}
    rows: list[dict[str, Any]] = []
    specs = [sagesim.AttentionSpec.parse(label) for _, label in SCHEMES]
    for inputs, each in problems(args.draws).items():
        left = [spec for spec in specs if (inputs, spec.label()) not in found]
        measured = dict(zip(left, measure(each, left) if left else [], strict=True))
        for (words, _), spec in zip(SCHEMES, specs, strict=True):
            if spec in measured:
                errors = measured[spec]
                reference = found.get((inputs, REFERENCE), errors)
                worse = {m: failures(errors, reference, m) for m in ("exact", "own")}
                row = {"inputs": inputs, "words": words, "label": spec.label()} | errors
                found[inputs, spec.label()] = row | {"worse": worse}
                print(inputs, "|", words, errors, worse, flush=True)
            rows.append(found[inputs, spec.label()])
    write_text(FILE, json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code("frontier.py", main, {}))
