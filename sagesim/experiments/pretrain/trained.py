"""What a trained model's attention is given: a capture, from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from sagesim._capture import capture
from sagesim.captured import Capture
from sagesim.experiments.pretrain import checkpoint
from sagesim.experiments.pretrain.attention import Attention, attending
from sagesim.experiments.pretrain.corpus import Corpus
from sagesim.experiments.pretrain.distributed import World
from sagesim.experiments.pretrain.evaluate import Evaluation
from sagesim.experiments.pretrain.model import Llama, token_loss
from sagesim.experiments.pretrain.runlog import Log
from sagesim.experiments.pretrain.settings import Run
from sagesim.experiments.pretrain.train import CHECKPOINTS, autocast, build

LOSS_SCALE: Final = 2.0**16
"""What the loss is multiplied by, so that float16 holds its gradients: where float16 training
begins."""


def load(folder: Path) -> tuple[Run, int, Llama]:
    """The run of a folder, the step of its newest checkpoint, and the model there, on the CPU.

    Raises:
        ValueError: naming the folder, where it has no log or no checkpoint.
    """
    run = Log.read(folder).run
    checkpoints = folder / CHECKPOINTS
    steps = checkpoint.steps_in(checkpoints)
    if not steps:
        raise ValueError(f"{folder}: has no checkpoint")
    model = build(run)
    state = checkpoint.load(checkpoint.path_of(checkpoints, steps[-1]))
    model.load_state_dict(state["model"])
    return run, steps[-1], model


def captured(
    folder: Path,
    corpus: Corpus,
    here: World,
    *,
    heads: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
) -> Capture:
    """q, k, v and dO of the first held-out sequence, by 16-bit attention, in the run's precision,
    at a loss scale of `LOSS_SCALE`.

    Raises:
        ValueError: as `load`, and for another corpus than the run's, or heads or layers that are
            not there.
    """
    run, step, model = load(folder)
    if corpus.id != run.corpus:
        raise ValueError(f"{corpus.folder}: corpus {corpus.id}; the run is of {run.corpus}")
    model = model.to(here.device)
    tokens: Tensor = Evaluation(run, corpus, here, 1).sequence(0).to(here.device)
    source = {
        "model": f"Llama {run.size}, {'with' if run.qk_norm else 'without'} QK-norm, trained by "
        f"sagesim pretrain with {run.attention}, step {step} of {run.steps}",
        "data": corpus.manifest.source,
        "loss": "mean cross-entropy of the next token",
        "run": run.to_json(),
    }
    exactly = attending(model.cores(), Attention("sdpa"))
    recorded = capture(model, heads=heads, layers=layers, loss_scale=LOSS_SCALE, source=source)
    with exactly, recorded as recording:
        with torch.enable_grad(), autocast(run, here):
            loss = token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        (loss * LOSS_SCALE).backward()
    return recording.result()
