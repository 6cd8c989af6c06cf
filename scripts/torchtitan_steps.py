"""Train torchtitan's small Llama with SDPA and with the override, and compare the losses.

    make .venv/.dev .venv/.torchtitan
    .venv/bin/python scripts/torchtitan_steps.py

Writes docs/data/torchtitan_steps.json. Needs no GPU, and takes minutes on two cores. torchtitan's
`Trainer` needs one: its __init__ calls `torch.cuda.set_device`. This script does what a step of it
does on one device, with torchtitan's own parts: the config and its overrides, the masks of
documents, the loss, the clipping of gradients, the optimizer and its schedule. The text is Python's
language reference, one token a byte; its paragraphs are the documents. Every run starts from the
same weights and sees the same tokens in the same order.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

ROOT = Path(__file__).parents[1]
INSTALLED = ROOT / ".venv" / ".torchtitan"
"""Without its dependencies, which need older versions of what other frameworks need."""
sys.path.insert(0, str(ROOT))
sys.path.append(str(INSTALLED))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

try:
    import torchtitan
except ModuleNotFoundError:
    sys.exit("torchtitan_steps.py: torchtitan is not installed: make .venv/.torchtitan")
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.config import derive, override  # noqa: E402
from torchtitan.config.override import (  # noqa: E402
    OverrideConfig,
    apply_overrides,
    parse_cli_imports,
)
from torchtitan.distributed.utils import clip_grad_norm_  # noqa: E402
from torchtitan.models.common.attention import VarlenAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402

import sagesim  # noqa: E402
from sagesim.command import exit_code  # noqa: E402
from sagesim.files import check_writable, write_text  # noqa: E402

OUT = ROOT / "docs" / "data" / "torchtitan_steps.json"
STEPS, ROWS, TOKENS = 20, 2, 256
RATE, WARMUP, MAX_NORM = 8e-4, 2, 1.0
"""Those of torchtitan's configuration `llama3_debugmodel`."""
SAGEBWD = "sagesim_kernels.integrations.torchtitan.sagebwd"
RUNS = {
    "sdpa": f"{__name__}.sdpa",
    "factored_qk": SAGEBWD,
    "factored": SAGEBWD + '={"spec": "factored"}',
    "sagebwd": SAGEBWD + '={"spec": "sagebwd"}',
    "fpa": SAGEBWD + '={"spec": "fpa"}',
}
"""For SDPA and each spec, the word after --override.imports. `fpa` rounds nothing."""


class Sdpa(VarlenAttention):
    """PyTorch's SDPA inside each document: torchtitan's own attentions need a GPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Any) -> None:
        super(VarlenAttention, self).__init__()  # VarlenAttention's activates FlashAttention

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        rows, tokens = q_BLNH.shape[:2]
        ends = attention_masks.cu_seq_q[1:].long()
        document = torch.bucketize(torch.arange(rows * tokens), ends, right=True)
        document = document.view(rows, tokens)
        mask = (document[:, :, None] == document[:, None]).tril()
        heads_first = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        return F.scaled_dot_product_attention(
            *heads_first, attn_mask=mask[:, None], scale=scale, enable_gqa=enable_gqa
        ).transpose(1, 2)


@override(target=VarlenAttention.Config, description="PyTorch's SDPA")
def sdpa(config: Any) -> Any:
    return derive(config, Sdpa.Config)


def build(imports: Sequence[str]) -> nn.Module:
    """torchtitan's small Llama on this device, with the overrides of a command line."""
    config = model_registry("debugmodel", attn_backend="varlen").model
    apply_overrides(OverrideConfig(imports=parse_cli_imports(list(imports))), config)
    model = config.build()
    torch.manual_seed(0)
    model.init_states()
    return model


@dataclass(frozen=True)
class Batch:
    """Rows of documents. Each tensor is [rows, tokens]."""

    tokens: Tensor
    positions: Tensor
    """In the document; a row starts another one."""
    labels: Tensor
    """The next token; IGNORE_INDEX for the last one of a document."""


def batches(steps: int, rows: int, tokens: int) -> list[Batch]:
    """Consecutive pieces of the text."""
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    documents = [list(text.encode()) for text in paragraphs if text]
    shape, size = (steps, rows, tokens), steps * rows * tokens
    ids = torch.tensor([byte for document in documents for byte in document][:size]).view(shape)
    starts = torch.tensor([i == 0 for each in documents for i in range(len(each))][:size])
    starts = starts.view(shape)
    starts[..., 0] = True
    place = torch.arange(tokens)
    positions = place - torch.where(starts, place, 0).cummax(-1).values
    labels = ids.roll(-1, -1)
    labels[starts.roll(-1, -1)] = IGNORE_INDEX
    return [Batch(*each) for each in zip(ids, positions, labels, strict=True)]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    masks = model.get_attention_masks(positions=batch.positions)
    predicted = model(batch.tokens, positions=batch.positions, attention_masks=masks)
    known = (batch.labels != IGNORE_INDEX).sum()
    loss, _ = CrossEntropyLoss.Config().build()(predicted, batch.labels, known)
    return loss


def gradients(model: nn.Module, batch: Batch) -> Tensor:
    """Those of all weights, in one vector."""
    found = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    return torch.cat([x.flatten() for x in found]).double()


def train(model: nn.Module, data: Sequence[Batch]) -> list[float]:
    """The loss before each step, computed as torchtitan's `Trainer.train_step` does."""
    optimizers = default_adamw(lr=RATE).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(
        warmup_steps=WARMUP, decay_ratio=0.8, decay_type="linear", min_lr_factor=0.0
    ).build(optimizers=optimizers, training_steps=len(data))
    losses: list[float] = []
    for batch in data:
        optimizers.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizers.step()
        schedule.step()
        losses.append(loss.item())
        print(f"  {len(losses)}: {losses[-1]:.4f}", flush=True)
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, help="the record")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rows", type=int, default=ROWS, help="in a batch")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="in a row")
    args = parser.parse_args()
    check_writable(args.out)
    data = batches(args.steps, args.rows, args.tokens)
    reference = gradients(build([RUNS["sdpa"]]), data[0])
    runs: dict[str, Any] = {}
    for name, imports in RUNS.items():
        print(name, flush=True)
        model = build([imports])
        apart = (gradients(model, data[0]) - reference).norm() / reference.norm()
        runs[name] = {
            "gradients_apart": apart.item(),
            "losses": train(model, data),
        }
    document = {
        "command": shlex.join(["python", "scripts/torchtitan_steps.py", *sys.argv[1:]]),
        "machine": f"CPU, torch {torch.__version__}, torchtitan {torchtitan.__version__}, "
        f"sagebwd {sagesim.__version__}",
        "setting": {
            "model": "llama3 debugmodel",
            "rows": args.rows,
            "tokens": args.tokens,
            "documents": sum(int((batch.positions == 0).sum()) for batch in data),
            "text": f"pydoc_data.topics of Python {platform.python_version()}",
            "optimizer": f"AdamW, learning rate {RATE:g}",
        },
        "runs": runs,
    }
    write_text(args.out, json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("torchtitan_steps.py", main, {}))
