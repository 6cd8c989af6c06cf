"""What a run of the paper's size takes, by speeds that were measured on one GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from IPython.display import Markdown
from tables import table

from sagesim.experiments.pretrain.model.llama import SIZES, Size
from sagesim.experiments.pretrain.run.log import Log

DATA: Final = Path(__file__).parents[1] / "data"

MODEL: Final = SIZES["325m"]
VOCABULARY: Final = 50304
"""Rows of the embedding: GPT-2's vocabulary of 50,257, to a multiple of 64."""
CONTEXT, STEPS, SEQUENCES = 4096, 37_500, 512
"""Of the paper's large regime. Source: arXiv 2603.02170."""
TOKENS: Final = CONTEXT * STEPS * SEQUENCES

ATTENTIONS: Final = {
    "sdpa cudnn": "16 bit, cuDNN",
    "factored_qk": "`factored_qk`, the default",
    "factored": "`factored`",
    "sagebwd": "`sagebwd`",
}
"""Contenders of docs/data/bench.json, and their names on the page."""

GPUS_OF_A_MACHINE: Final = 8
LINK: Final = 50e9
"""Bytes per second that a GPU sends to other machines: an assumption, 400 Gbit/s for each GPU."""

EXAMPLE_PRICE: Final = 2.5
"""US dollars for a GPU hour: hypothetical, no price of a provider."""


@dataclass(frozen=True, slots=True)
class Range:
    """A number at the highest and at the lowest of two measured speeds."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{_round(self.low)} to {_round(self.high)}"

    def over(self, x: float) -> Range:
        """Both numbers divided by x."""
        return Range(self.low / x, self.high / x)


def attention_seconds(contender: str, model: Size, context: int) -> float:
    """Seconds of one GPU for the attention of one token, forward and backward, by bench.json."""
    case: Mapping[str, Any] = json.loads((DATA / "bench.json").read_text())["cases"][
        f"speed d{model.head_size} causal n{context}"
    ]
    elements = case["batch"] * case["tokens"] * case["heads"] * case["head_dim"]
    seconds = case["runs"][contender]["both"]["ms"] / 1000 / elements
    return seconds * model.layers * model.width


def rest_speeds() -> Range:
    """Floating-point operations per second of all but attention, in our runs in 16 bit.

    The runs are those with QK-norm and the most tokens per step. low: by the median step, of all
    runs; a GPU was shared by two or three of them. high: by the step that 5 % are faster than, as
    when the GPU was not shared.
    """
    logs = [Log.read(path) for path in sorted((DATA / "pretraining").glob("sdpa_qknorm_*.parquet"))]
    most = max(log.run.tokens_per_step for log in logs)
    found: list[tuple[float, float]] = []
    for log in (log for log in logs if log.run.tokens_per_step == most):
        run, model = log.run, SIZES[log.run.size]
        speeds = [speed for _, speed in log.curve("train", "tokens_per_second")]
        attention = attention_seconds("sdpa flash", model, run.context)
        rest = model.flops(run.vocabulary, 0)
        low, high = (
            rest / (1 / speed - attention)
            for speed in (median(speeds), quantiles(speeds, n=20)[-1])
        )
        found.append((low, high))
    return Range(min(low for low, _ in found), max(high for _, high in found))


def gpu_hours(contender: str) -> Range:
    """GPU hours of the run: attention by bench.json, all else by `rest_speeds`."""
    attention = attention_seconds(contender, MODEL, CONTEXT)
    flops, speeds = MODEL.flops(VOCABULARY, 0), rest_speeds()
    low, high = (TOKENS * (flops / x + attention) / 3600 for x in (speeds.high, speeds.low))
    return Range(low, high)


def of_attentions() -> Markdown:
    """GPU hours of the run with each attention."""
    rows: list[list[str]] = []
    for contender, name in ATTENTIONS.items():
        attention = TOKENS * attention_seconds(contender, MODEL, CONTEXT) / 3600
        rows.append([name, _round(attention), str(gpu_hours(contender))])
    return table(["attention", "GPU hours of attention", "GPU hours of the run"], rows)


def of_machines() -> Markdown:
    """Hours of the run with the default spec by the number of machines."""
    hours = gpu_hours("factored_qk")
    moved = 4 * MODEL.parameters(VOCABULARY, qk_norm=True)
    rows: list[list[str]] = []
    for machines in (1, 2, 4, 8):
        gpus = machines * GPUS_OF_A_MACHINE
        own = SEQUENCES // gpus
        step = hours.over(gpus * STEPS / 3600)
        exchange = 2 * (gpus - 1) / gpus * moved / LINK
        rows.append(
            [
                str(machines),
                str(gpus),
                str(own),
                str(hours.over(gpus)),
                str(Range(1000 * step.low, 1000 * step.high)),
                _round(1000 * exchange) if machines > 1 else "inside of the machine",
            ]
        )
    head = ["machines", "GPUs", "sequences of a GPU", "hours", "step, ms", "exchange, ms"]
    return table(head, rows)


def text() -> Markdown:
    """The numbers of the page's sentences."""
    speeds, hours = rest_speeds(), gpu_hours("factored_qk")
    cost = hours.over(1 / EXAMPLE_PRICE)
    weights = MODEL.parameters(VOCABULARY, qk_norm=True)
    return Markdown(
        f"""The model has {weights / 1e6:,.0f}M parameters. {STEPS:,} steps of {SEQUENCES} sequences
of {CONTEXT:,} tokens are {TOKENS / 1e9:.1f}B tokens. Without attention, a token takes
{MODEL.flops(VOCABULARY, 0) / 1e9:.2f} GFLOP, and our runs of 18M parameters reached
{speeds.low / 1e12:.0f} to {speeds.high / 1e12:.0f} TFLOP/s there.

At a price p of a GPU hour, the run with the default spec costs {_round(hours.low)} p to
{_round(hours.high)} p. For example, at a hypothetical price of {EXAMPLE_PRICE:.2f} dollars, it
would cost {cost} dollars.

Weights, gradients and the two moments of AdamW, in float32, take {16 * weights / 1e9:.1f} GB of
every GPU; activations come on top. A checkpoint takes {12 * weights / 1e9:.1f} GB, and two are
kept. The corpus takes 2 bytes a token: {2 * TOKENS / 1e9:.0f} GB if no token is used twice."""
    )


def _round(x: float) -> str:
    return f"{x:,.0f}" if x >= 10 else f"{x:.1f}"
