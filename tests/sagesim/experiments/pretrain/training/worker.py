"""One process of test_distributed, started by torchrun: trains runs with DDP and FSDP.

Arguments: the folder of the corpus, a folder for the runs, and a run as JSON.
"""

import contextlib
import os
import sys
from pathlib import Path

import torch

from sagesim.experiments.pretrain.run.distributed import join_processes
from sagesim.experiments.pretrain.run.settings import Machine, Run
from sagesim.experiments.pretrain.text.corpus import Corpus
from sagesim.experiments.pretrain.training.trainer import Trainer, train
from sagesim.files import locked


class Killed(Exception):
    pass


def killed(step: int, _loss: float, _speed: float) -> None:
    if step == 3:
        raise Killed


def main() -> None:
    corpus, root, run = Corpus(Path(sys.argv[1])), Path(sys.argv[2]), Run.from_json(sys.argv[3])
    torch.set_num_threads(1)
    plain = Machine(micro_batch=2, checkpoint_every=2)
    sharded = Machine(micro_batch=2, checkpoint_every=2, fsdp=True)
    with join_processes() as world:
        train(run, root / "ddp", corpus, plain, world)
        train(run, root / "fsdp", corpus, sharded, world)
        try:
            train(run, root / "cut", corpus, sharded, world, progress=killed)
        except Killed:
            train(run, root / "cut", corpus, sharded, world)

        # Only one process is asked to stop, and only one of them tries to lock the folder.
        calls = iter(range(9))
        outcome = train(
            run,
            root / "stopped",
            corpus,
            plain,
            world,
            interrupted=lambda: next(calls) == 2 and not world.is_first,
        )
        assert (outcome.step, outcome.is_interrupted) == (3, True)
        train(run, root / "stopped", corpus, plain, world)
        with locked(root / "held") if world.is_first else contextlib.nullcontext():
            try:
                train(run, root / "held", corpus, plain, world)
            except BlockingIOError as error:
                assert str(error) == f"{root / 'held'}: another process trains there"
            else:
                raise AssertionError("a folder that another process uses was not refused")

        gradient = Trainer.gradient

        def poisoned(trainer: Trainer) -> tuple[float, float]:
            if trainer.step == 2:
                with torch.no_grad():
                    for name, weight in trainer.model.named_parameters():
                        if name == "layers.0.feed_forward.gate_up.weight":
                            weight *= 1e30
            return gradient(trainer)

        Trainer.gradient = poisoned
        for name, machine in (("bad-ddp", plain), ("bad-fsdp", sharded)):
            outcome = train(run, root / name, corpus, machine, world)
            assert outcome.step == 2


if __name__ == "__main__":
    main()
    # FSDP keeps the process group until the interpreter ends. The group's threads sometimes abort
    # the interpreter then, after all files are saved. DDP does not keep it: see leaver.py.
    sys.stdout.flush()
    os._exit(0)
