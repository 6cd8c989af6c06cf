"""The losses of a trained model on single held-out sequences, under several attentions.

Every sequence has its own loss, so that runs are compared in pairs. A second measurement removes
the later tokens of a sequence. Under a causal mask they should have no influence on a token's loss.
They have one through scales and means that tokens share (docs/numerics.md, "Causality"). A model
that learned to use it has a larger loss without the later tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from sagesim.experiments.pretrain.model.attention import Attention, use_attention
from sagesim.experiments.pretrain.model.llama import SIZES, Llama, token_loss
from sagesim.experiments.pretrain.run.distributed import World
from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import DTYPES, Run
from sagesim.experiments.pretrain.text.corpus import Corpus
from sagesim.experiments.pretrain.training.checkpoint import CHECKPOINTS, steps_in
from sagesim.experiments.pretrain.training.evaluation import Evaluation
from sagesim.experiments.pretrain.training.trained_model import load_trained
from sagesim.experiments.pretrain.training.trainer import autocast

_GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0
_BATCH: Final = 32
"""Sequences of one forward. It changes no number but by the order of floating-point sums."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out losses of a run's last weights under one attention, in nats."""

    run: Run
    attention: str  #: the name of the attention of this evaluation
    losses: tuple[float, ...]  #: by sequence, the mean over tokens
    whole: tuple[float, ...]  #: by sequence, the mean over the tokens after the cuts
    cut: tuple[float, ...]  #: the same, with every later token removed


def held_out_losses(
    folder: Path,
    corpus: Corpus,
    world: World,
    attentions: Sequence[Attention],
    *,
    cuts: int = 0,
) -> list[HeldOut]:
    """Evaluate the last weights of a finished run, under its own attention and others.

    Args:
        folder: the folder of the run.
        corpus: the corpus of the run.
        world: one process; its device computes.
        attentions: the other attentions.
        cuts: the number of places per sequence at which later tokens are removed; see `cut_points`.

    Raises:
        ValueError: if the run cannot be evaluated; see `check_evaluation`.
    """
    used = check_evaluation(folder, corpus, world, attentions, cuts=cuts)
    run, _, model = load_trained(folder)
    model = model.to(world.device).eval()
    sequences = Evaluation(run, corpus, world, 1).sequences()
    places = cut_points(run.context, cuts)
    found: list[HeldOut] = []
    with torch.no_grad(), autocast(run, world):
        for each in used:
            with use_attention(model.cores(), each):
                losses, whole = _losses(model, sequences, places)
                cut = _losses_of_prefixes(model, sequences, places)
            found.append(HeldOut(run, each.name, losses, whole, cut))
    return found


def check_evaluation(
    folder: Path,
    corpus: Corpus,
    world: World,
    attentions: Sequence[Attention],
    *,
    cuts: int = 0,
) -> list[Attention]:
    """Check that a run can be evaluated, without loading its weights.

    Args:
        folder, corpus, world, attentions, cuts: as of `held_out_losses`.

    Returns:
        The attentions that evaluate it: its own, and the others.

    Raises:
        ValueError: if the folder has no log or checkpoint, the run is not finished, the corpus is
            another one, an attention cannot be computed here, or there are more cuts than tokens.
    """
    log = Log.read(folder)
    run = log.run
    if log.stop:
        raise ValueError(f"{folder}: the run stopped: {log.stop}")
    if not log.is_finished:
        raise ValueError(f"{folder}: {log.last_step} of {log.run.steps} steps are done")
    steps = steps_in(folder / CHECKPOINTS)
    if not steps:
        raise ValueError(f"{folder}: no checkpoint in it")
    if steps[-1] != run.steps:
        raise ValueError(f"{folder}: the newest checkpoint is of step {steps[-1]} of {run.steps}")
    if corpus.id != run.corpus:
        raise ValueError(f"{corpus.folder}: corpus {corpus.id}; the run uses corpus {run.corpus}")
    if cuts > run.context:
        raise ValueError(f"cuts={cuts} is more than the {run.context} tokens of a sequence")
    own = Attention.parse(run.attention)
    used = [own, *(x for x in attentions if x.name != own.name)]
    for each in used:
        each.check(
            head_size=SIZES[run.size].head_size,
            dtype=DTYPES[run.precision],
            device=world.device.type,
        )
    return used


def cut_points(context: int, count: int) -> list[int]:
    """Distinct, ascending numbers of tokens that are kept, from 1 to context.

    Multiples of the golden ratio modulo the context spread evenly, also modulo a block of tokens.
    """
    chosen: set[int] = set()
    i = 0
    while len(chosen) < count:
        chosen.add(1 + int(context * ((i + 0.5) * _GOLDEN % 1.0)))
        i += 1
    return sorted(chosen)


def _losses(
    model: Llama, sequences: Tensor, places: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean loss of each sequence over all its tokens, and over those after the cuts."""
    losses: list[float] = []
    whole: list[float] = []
    for tokens in _batches(model, sequences):
        logits = model(tokens[:, :-1])
        pairs = zip(logits, tokens, strict=True)
        losses += [float(token_loss(x[None], y[None, 1:])) for x, y in pairs]
        if places:
            last = torch.tensor(places, device=tokens.device) - 1
            each = _cross_entropy(logits[:, last], tokens[:, last + 1])
            whole += each.double().mean(1).tolist()
    return tuple(losses), tuple(whole)


def _losses_of_prefixes(
    model: Llama, sequences: Tensor, places: Sequence[int]
) -> tuple[float, ...]:
    """The mean loss of each sequence over the tokens after the cuts, without later tokens."""
    if not places:
        return ()
    found: list[float] = []
    for tokens in _batches(model, sequences):
        # Longest first: each prefix fits into the memory that PyTorch keeps of the one before.
        each = [_cross_entropy(model(tokens[:, :n])[:, -1], tokens[:, n]) for n in places[::-1]]
        found += torch.stack(each[::-1], 1).double().mean(1).tolist()
    return tuple(found)


def _batches(model: Llama, sequences: Tensor) -> Iterator[Tensor]:
    """Batches of sequences on the device. Random numbers depend on the first of a batch."""
    device = next(model.parameters()).device
    for first in range(0, len(sequences), _BATCH):
        for core in model.cores():
            core.draw = first
        yield sequences[first : first + _BATCH].to(device)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of every token: logits [..., vocabulary], targets [...]."""
    flat = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="none")
    return flat.view(targets.shape)
