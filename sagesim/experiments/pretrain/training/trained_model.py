"""Captures of trained models: load the newest checkpoint and record its attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from sagesim.experiments.pretrain.model.attention import Attention, use_attention
from sagesim.experiments.pretrain.model.llama import Llama, token_loss
from sagesim.experiments.pretrain.run.distributed import World
from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import Run
from sagesim.experiments.pretrain.text.corpus import Corpus
from sagesim.experiments.pretrain.training import checkpoint
from sagesim.experiments.pretrain.training.evaluation import Evaluation
from sagesim.experiments.pretrain.training.trainer import autocast, build
from sagesim.models import Capture, capture

LOSS_SCALE: Final = 2.0**16
"""Factor on the loss, so that float16 can represent the gradients.

It is the initial loss scale of float16 training (torch.amp.GradScaler).
"""


def load_trained(folder: Path) -> tuple[Run, int, Llama]:
    """Load the newest checkpoint of a run's folder.

    Returns:
        The run, the step of the checkpoint, and the model, on the CPU.

    Raises:
        ValueError: if the folder has no log or no checkpoint.
    """
    run = Log.read(folder).run
    newest = checkpoint.load_newest(folder / checkpoint.CHECKPOINTS)
    if newest is None:
        raise ValueError(f"{folder}: no checkpoint in it")
    step, state = newest
    model = build(run)
    model.load_state_dict(state["model"])
    return run, step, model


def capture_trained(
    folder: Path,
    corpus: Corpus,
    world: World,
    *,
    heads: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
) -> Capture:
    """Record q, k, v and dO of a trained model on the first held-out sequence.

    The model computes 16-bit attention in the run's precision. The loss is multiplied by
    `LOSS_SCALE`.

    Args:
        heads: heads to keep; None keeps all.
        layers: layers to keep; None keeps all.

    Raises:
        ValueError: if the folder has no log or checkpoint, the corpus is not that of the run, or a
            head or layer does not exist.
    """
    run, step, model = load_trained(folder)
    if corpus.id != run.corpus:
        raise ValueError(f"{corpus.folder}: corpus {corpus.id}; the run uses corpus {run.corpus}")
    model = model.to(world.device)
    tokens: Tensor = Evaluation(run, corpus, world, 1).sequence(0, 1).to(world.device)
    source = {
        "model": f"Llama {run.size}, {'with' if run.qk_norm else 'without'} QK-norm, trained by "
        f"sagesim pretrain with {run.attention}, step {step} of {run.steps}",
        "data": corpus.manifest.source,
        "loss": "mean cross-entropy of the next token",
        "run": run.to_json(),
    }
    exactly = use_attention(model.cores(), Attention("sdpa"))
    recorded = capture(model, heads=heads, layers=layers, loss_scale=LOSS_SCALE, source=source)
    with exactly, recorded as recording:
        with torch.enable_grad(), autocast(run, world):
            loss = token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        (loss * LOSS_SCALE).backward()
    return recording.result()
