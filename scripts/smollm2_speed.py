"""Tokens per second of fine-tuning SmolLM2-135M on one GPU: packed, padded, sdpa beside ours.

    python scripts/smollm2_speed.py --out docs/data/smollm2_speed.json [GGUF]

GGUF is the file that scripts/smollm2.py trains; it needs the package gguf. Without it, the model
has random weights and sees random tokens: the times are the same, and the losses say nothing.

A step is forward, backward and AdamW, under bfloat16 autocast with weights in float32. It trains on
12 documents of 512 to 2048 tokens, multiples of 64: as rows of 2048 tokens with padding on the
right, or packed in one row. With fewer documents the GPU waits for the host. All attentions do each
step before any does the next, on models of their own, so that a change of clocks affects all alike.
A step's time is that of the host, which waits for the GPU at its end. The untimed steps compile the
kernels, which takes minutes if Triton's cache is empty.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import sagesim  # noqa: E402
from sagesim.command import exit_code  # noqa: E402
from sagesim.files import check_writable, write_text  # noqa: E402
from sagesim_kernels.integrations.transformers import register  # noqa: E402
from scripts import smollm2  # noqa: E402

SIZES: Final = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""Of SmolLM2-135M."""
SPECS: Final = ("factored_qk", "factored", "sagebwd")
SHORTEST, LONGEST, DOCUMENTS = 512, 2048, 12
STEPS, UNTIMED = 8, 2
RATE: Final = 5e-5


def documents(
    ids: Tensor, steps: int, longest: int = LONGEST, count: int = DOCUMENTS
) -> Iterator[list[Tensor]]:
    """The documents of each step: consecutive pieces of the text, which is read again at its end.

    ids: [tokens].
    """
    lengths, start = random.Random(0), 0
    unit = max(1, longest // 32)
    for _ in range(steps):
        step: list[Tensor] = []
        for _ in range(count):
            n = unit * lengths.randint(longest * SHORTEST // LONGEST // unit, longest // unit)
            step.append(ids[torch.arange(start, start + n) % len(ids)])
            start += n
        yield step


def padded(parts: Sequence[Tensor], longest: int = LONGEST) -> dict[str, Any]:
    """The documents as rows with padding on the right."""
    ids = torch.zeros(len(parts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, part in enumerate(parts):
        ids[row, : len(part)], mask[row, : len(part)] = part, 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def packed(parts: Sequence[Tensor], longest: int = LONGEST) -> dict[str, Any]:
    """The documents in one row. sdpa reads their limits from the positions, ours cu_seq_lens."""
    lengths = torch.tensor([len(part) for part in parts])
    ids = torch.cat(list(parts))[None]
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    labels = ids.clone()
    labels[0, ends[:-1].long()] = -100  # no document predicts the next one's first token
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.cat([torch.arange(n) for n in lengths.tolist()])[None],
        "use_cache": False,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


LAYOUTS: Final[Mapping[str, Callable[..., dict[str, Any]]]] = {"padded": padded, "packed": packed}


class Contender:
    """A copy of the model that trains with one attention."""

    def __init__(self, model: nn.Module, attention: str) -> None:
        self.model: Any = copy.deepcopy(model)
        self.model.set_attn_implementation(attention)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE, fused=True)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, inputs: dict[str, Any], device: str) -> None:
        _synchronize(device)
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = self.model(**inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        _synchronize(device)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    model: nn.Module,
    attentions: Sequence[str],
    layout: str,
    ids: Tensor,
    *,
    steps: int = STEPS,
    untimed: int = UNTIMED,
    longest: int = LONGEST,
    count: int = DOCUMENTS,
) -> dict[str, Any]:
    """Train with each attention. Returns losses and times by attention, or why it did not run."""
    device = next(model.parameters()).device.type
    contenders: dict[str, Contender] = {}
    not_run: dict[str, str] = {}
    tokens: list[int] = []
    for number, parts in enumerate(documents(ids, steps, longest, count)):
        inputs = LAYOUTS[layout](parts, longest)
        tokens.append(sum(len(part) for part in parts))
        inputs = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in inputs.items()}
        for name in attentions:
            if name in not_run:
                continue
            try:
                if number == 0:
                    contenders[name] = Contender(model, name)
                contenders[name].step(inputs, device)
            except Exception as error:  # of an attention that this machine cannot run
                not_run[name] = " ".join(f"{type(error).__name__}: {error}".split())[:400]
                contenders.pop(name, None)
        seconds = {n: f"{c.seconds[-1]:.3f} s" for n, c in contenders.items()}
        print(layout, number, tokens[-1], seconds, flush=True)
    rows = {}
    for name, contender in contenders.items():
        rates = [n / s for n, s in zip(tokens, contender.seconds, strict=True)][untimed:]
        rows[name] = {
            "tokens_per_second": statistics.median(rates),
            "quartiles": statistics.quantiles(rates, n=4)[::2] if len(rates) > 1 else rates * 2,
            "losses": contender.losses,
        }
    return {"tokens": tokens, "runs": rows, "not_run": not_run}


def load(path: Path | None) -> tuple[nn.Module, Tensor]:
    """The model in float32 on the GPU, and the text's tokens."""
    if path is None:
        torch.manual_seed(0)
        ids = torch.randint(SIZES["vocab_size"], (200_000,))
        with torch.device("cuda"):
            return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="sdpa")), ids
    model, tokenizer = smollm2.load(path)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return model.to("cuda"), tokenizer(text, return_tensors="pt")["input_ids"][0]


def _changed(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """The options that are not as by default, but for the output and the model."""
    return [
        f"--{name} {' '.join(map(str, value)) if name == 'specs' else value}"
        for name, value in vars(args).items()
        if name not in ("out", "model") and value != parser.get_default(name)
    ]


def main() -> int:
    from sagesim_kernels.bench.machine import describe

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, metavar="GGUF")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--specs", nargs="+", default=SPECS, metavar="LABEL")
    args = parser.parse_args()
    check_writable(args.out)
    model, ids = load(args.model)
    model = model.train()
    attentions = ["sdpa"]
    if importlib.util.find_spec("flash_attn") is not None:
        attentions.append("flash_attention_4")
    for label in args.specs:
        register(label, spec=sagesim.AttentionSpec.parse(label))
        attentions.append(label)
    document = {
        "command": " ".join(["python scripts/smollm2_speed.py", *_changed(parser, args)]),
        "machine": describe() | {"transformers": transformers.__version__},
        "setting": {
            "weights": "random" if args.model is None else args.model.name,
            "documents": args.documents,
            "tokens": [SHORTEST, LONGEST],
            "untimed_steps": UNTIMED,
        },
        "layouts": {
            layout: measure(model, attentions, layout, ids, steps=args.steps, count=args.documents)
            for layout in LAYOUTS
        },
    }
    write_text(args.out, json.dumps(document, indent=1) + "\n")
    for layout, found in document["layouts"].items():
        for name, row in found["runs"].items():
            print(f"{layout:8} {name:18} {row['tokens_per_second']:12,.0f} tokens/s")
        for name, why in found["not_run"].items():
            print(f"{layout:8} {name:18} not run: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("smollm2_speed.py", main, {}))
