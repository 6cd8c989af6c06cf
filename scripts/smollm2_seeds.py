"""Fine-tune SmolLM2-135M on a GPU with several attentions and seeds, and evaluate on the way.

    python scripts/smollm2_seeds.py GGUF docs/data/smollm2_seeds [--minutes M]

GGUF is the file that scripts/smollm2.py trains; it needs the package gguf. The text is the source
of Python's standard library, without its tests. A seed is an order of the training sequences. All
weights are trained with AdamW, in float32 under bfloat16 autocast. Every evaluation computes the
loss of the same held-out sequences twice: by the run's own attention and by sdpa.

`fpa_bf16` is the twin of sdpa: another implementation of the same attention in 16 bit. What differs
between the two is chance.

Every run has a file of its own. A run whose file is there is not repeated, so the runs can be made
in pieces, on machines that are lent for minutes. All attentions have run when the first seed is
through. Several processes with the same folder share the runs: each takes the next run that no
other process makes.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402

import sagesim  # noqa: E402
from sagesim.command import exit_code  # noqa: E402
from sagesim.files import write_text  # noqa: E402
from sagesim_kernels.integrations.transformers import register  # noqa: E402
from scripts.shared_runs import claimed  # noqa: E402
from scripts.smollm2 import check_model, load  # noqa: E402
from scripts.time_budget import TimeBudget  # noqa: E402

TWIN: Final = "fpa_bf16"
SPECS: Final = (TWIN, "sagebwd", "factored", "factored_qk")
SEEDS: Final = (0, 1, 2)
TOKENS: Final = 2048
ROWS, STEPS, WARMUP = 8, 150, 10
EVALUATE_EVERY: Final = 25
HELD_OUT: Final = 64
"""Sequences."""
RATE: Final = 1e-4


def text() -> str:
    """The source files of Python's standard library, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idle_test"}
    files = sorted(f for f in root.rglob("*.py") if not skipped & {*f.relative_to(root).parts})
    return "\n\n".join(f.read_text(encoding="utf-8", errors="replace") for f in files)


def split(ids: Tensor, rows: int, held_out: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Training and held-out sequences, [sequences, tokens]; the held-out ones lie between others.

    Raises:
        ValueError: if the text is too short.
    """
    count = rows + held_out
    if len(ids) < count * tokens:
        raise ValueError(f"the text has {len(ids)} tokens; {count * tokens} needed")
    windows = ids[: count * tokens].view(count, tokens)
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[torch.arange(held_out) * count // held_out] = True
    return windows[~chosen], windows[chosen]


class Tuning:
    """One run: a copy of the model that is trained with one attention."""

    def __init__(self, model: Any, attention: str, steps: int) -> None:
        self.model: Any = copy.deepcopy(model)
        self.attention, self.steps = attention, steps
        self.device: str = next(self.model.parameters()).device.type
        is_cuda = self.device == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE, fused=is_cuda)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._factor)
        self.losses: list[float] = []
        self.evaluations: list[dict[str, Any]] = []

    def _factor(self, step: int) -> float:
        """A linear warmup, and then a linear decay to 0."""
        return min((step + 1) / WARMUP, (self.steps - step) / max(1, self.steps - WARMUP))

    def loss(self, ids: Tensor) -> Tensor:
        ids = ids.to(self.device)
        with torch.autocast(self.device, torch.bfloat16):
            return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def step(self, ids: Tensor) -> None:
        self.model.set_attn_implementation(self.attention)
        loss = self.loss(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    @torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
    def _losses(self, ids: Tensor) -> Tensor:
        """The mean loss of each sequence, float64 [sequences]."""
        ids = ids.to(self.device)
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(input_ids=ids, use_cache=False).logits
        pairs = zip(logits[:, :-1], ids[:, 1:], strict=True)
        each = [F.cross_entropy(x.float(), y, reduction="none").double().mean() for x, y in pairs]
        return torch.stack(each)

    def evaluate(self, held_out: Tensor) -> None:
        """By the run's own attention, and by sdpa."""
        found: dict[str, Any] = {"step": len(self.losses)}
        for name in dict.fromkeys((self.attention, "sdpa")):
            self.model.set_attn_implementation(name)
            each = torch.cat([self._losses(ids) for ids in held_out.split(ROWS)])
            found["sdpa" if name == "sdpa" else "own"] = each.tolist()
        found.setdefault("own", found["sdpa"])
        self.evaluations.append(found)


def tune(
    model: Any,
    attention: str,
    seed: int,
    train: Tensor,
    held_out: Tensor,
    *,
    rows: int = ROWS,
    steps: int = STEPS,
    every: int = EVALUATE_EVERY,
    given_up: Callable[[], bool] = bool,
) -> dict[str, Any]:
    """Train a copy of the model; see the top of this file. Returns nothing if it is given up.

    train: [at least rows * steps, tokens], of which a step takes `rows` in the order of the seed.
    """
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    run = Tuning(model, attention, steps)
    run.evaluate(held_out)
    for step in range(steps):
        if given_up():
            return {}
        run.step(train[order[step * rows : (step + 1) * rows]])
        if (step + 1) % every == 0 or step + 1 == steps:
            run.evaluate(held_out)
            mean = {n: sum(x) / len(x) for n, x in run.evaluations[-1].items() if n != "step"}
            print(f"{attention} seed {seed} step {step + 1}: {mean}", flush=True)
    return {
        "attention": attention,
        "seed": seed,
        "losses": run.losses,
        "evaluations": run.evaluations,
    }


def tokens_of(tokenizer: Any) -> Tensor:
    """The tokens of the text [tokens] that the runs need, and some more."""
    needed = (ROWS * STEPS + HELD_OUT) * TOKENS
    return tokenizer(text()[: 6 * needed], return_tensors="pt")["input_ids"][0]


def records(folder: Path) -> dict[tuple[str, int], Path]:
    """The file of every attention and seed, all attentions of a seed before those of the next."""
    return {
        (name, seed): folder / f"{name}_seed{seed}.json"
        for seed in SEEDS
        for name in ("sdpa", *SPECS)
    }


def check_setting(files: Iterable[Path], setting: Mapping[str, Any]) -> None:
    """Check that the runs that are recorded have this setting.

    Raises:
        ValueError: if one has another.
    """
    for file in files:
        if file.exists():
            recorded = json.loads(file.read_text(encoding="utf-8"))["setting"]
            if recorded != setting:
                different = {key: x for key, x in setting.items() if recorded.get(key) != x}
                raise ValueError(f"{file}: of another setting than {different}; move it away")


def main() -> int:
    from sagesim_kernels.bench.machine import describe

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="GGUF")
    parser.add_argument("records", type=Path, metavar="RECORDS")
    parser.add_argument("--minutes", type=float, default=600, help="end by then")
    parser.add_argument(
        "--first", type=float, default=1, help="minutes to expect for the first run"
    )
    args = parser.parse_args()
    check_model(args.model)
    budget = TimeBudget(args.minutes, args.first)
    setting = {
        "model": args.model.name,
        "text": f"the standard library of Python {platform.python_version()}",
        "optimizer": f"AdamW, learning rate {RATE:g}, warmup {WARMUP} steps, linear decay",
        "tokens": TOKENS,
        "rows": ROWS,
        "steps": STEPS,
        "held_out": HELD_OUT,
    }
    files = records(args.records)
    check_setting(files.values(), setting)
    head = {
        "command": "python scripts/smollm2_seeds.py GGUF docs/data/smollm2_seeds",
        "machine": describe() | {"transformers": transformers.__version__},
        "setting": setting,
    }
    for label in SPECS:
        register(label, spec=sagesim.AttentionSpec.parse(label))
    model, tokenizer = load(args.model)
    model, ids = model.to("cuda").train(), tokens_of(tokenizer)
    train, held_out = split(ids, ROWS * STEPS, HELD_OUT, TOKENS)
    for (attention, seed), file in files.items():
        with claimed(file) as is_mine:
            if not is_mine:
                continue
            if not budget.fits():
                print("another run does not fit into the time")
                break
            found = tune(model, attention, seed, train, held_out, given_up=budget.is_over)
            if not found:
                print(f"{attention} seed {seed}: given up, no time is left")
                break
            document = head | {"seconds": budget.ended()} | found
            write_text(file, json.dumps(document) + "\n")
    print(f"{sum(not file.exists() for file in files.values())} of {len(files)} runs are missing")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("smollm2_seeds.py", main, {}))
