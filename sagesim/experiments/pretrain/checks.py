"""Whether a run can be trained here, asked before anything is trained."""

from __future__ import annotations

from sagesim.experiments.pretrain.attention import Attention
from sagesim.experiments.pretrain.batches import Share
from sagesim.experiments.pretrain.corpus import Corpus
from sagesim.experiments.pretrain.distributed import World
from sagesim.experiments.pretrain.model import SIZES
from sagesim.experiments.pretrain.settings import DTYPES, Machine, Run
from sagesim.experiments.pretrain.trackers import check_tracker


def check(run: Run, corpus: Corpus, machine: Machine, here: World) -> None:
    """Raise ValueError where the run cannot be trained here, naming why."""
    if run.corpus != corpus.id:
        raise ValueError(f"{corpus.folder}: corpus {corpus.id}; the run is of {run.corpus}")
    if run.vocabulary < corpus.manifest.vocabulary:
        raise ValueError(
            f"vocabulary={run.vocabulary}; the corpus has {corpus.manifest.vocabulary} tokens"
        )
    for split, least in (
        ("train", 1),
        ("validation", max(run.evaluate_sequences, run.monitor_sequences if run.monitor else 0)),
    ):
        if (found := corpus.windows(split, run.context)) < least:
            raise ValueError(
                f"{corpus.folder}: {found} sequences of {run.context} tokens in {split}; "
                f"{least} needed"
            )
    share_of(run, machine, here)
    check_tracker(machine.tracker)
    if machine.checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={machine.checkpoint_every} is no number of steps")
    for name in (run.attention, *run.monitor):
        Attention.parse(name).check(
            head_size=SIZES[run.size].head_size,
            dtype=DTYPES[run.precision],
            device=here.device.type,
        )


def share_of(run: Run, machine: Machine, here: World) -> Share:
    """What this process takes of every step.

    Raises:
        ValueError: as `Share.of`.
    """
    return Share.of(
        tokens_per_step=run.tokens_per_step,
        context=run.context,
        micro_batch=machine.micro_batch,
        rank=here.rank,
        processes=here.processes,
    )
