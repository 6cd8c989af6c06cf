"""Checks that a run can be trained on this machine, made before training starts."""

from __future__ import annotations

from sagesim.experiments.pretrain.model.attention import Attention
from sagesim.experiments.pretrain.model.llama import SIZES
from sagesim.experiments.pretrain.run.distributed import World
from sagesim.experiments.pretrain.run.settings import DTYPES, Machine, Run
from sagesim.experiments.pretrain.run.trackers import check_tracker
from sagesim.experiments.pretrain.text.batches import Share
from sagesim.experiments.pretrain.text.corpus import Corpus


def check_run(run: Run, corpus: Corpus, machine: Machine, world: World) -> None:
    """Check that a run can be trained on this corpus and by these processes.

    Raises:
        ValueError: if it cannot. The message gives the reason.
    """
    if run.corpus != corpus.id:
        raise ValueError(f"{corpus.folder}: corpus {corpus.id}; the run uses corpus {run.corpus}")
    if run.vocabulary < corpus.manifest.vocabulary:
        raise ValueError(
            f"vocabulary={run.vocabulary}; the corpus has {corpus.manifest.vocabulary} tokens"
        )
    for split, least in (
        ("train", 1),
        ("validation", _held_out(run)),
    ):
        if (found := corpus.windows(split, run.context)) < least:
            raise ValueError(
                f"{corpus.folder}: {found} sequences of {run.context} tokens in the {split} split; "
                f"{least} needed"
            )
    share_of(run, machine, world)
    check_tracker(machine.tracker)
    if machine.checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={machine.checkpoint_every} is below 1 step")
    for name in (run.attention, *run.monitor):
        Attention.parse(name).check(
            head_size=SIZES[run.size].head_size,
            dtype=DTYPES[run.precision],
            device=world.device.type,
        )


def share_of(run: Run, machine: Machine, world: World) -> Share:
    """The part of every step that this process computes.

    Raises:
        ValueError: if a step does not divide evenly; see `Share.of`.
    """
    return Share.of(
        tokens_per_step=run.tokens_per_step,
        context=run.context,
        micro_batch=machine.micro_batch,
        rank=world.rank,
        processes=world.processes,
    )


def _held_out(run: Run) -> int:
    """The number of held-out sequences that the run reads."""
    monitored = run.monitor_sequences if run.monitor else 0
    return max(run.evaluate_sequences, monitored, run.bias_sequences)
