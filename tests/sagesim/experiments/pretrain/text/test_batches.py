import numpy as np
import pytest
import torch

from sagesim.experiments.pretrain.text.batches import Share, micro_batches, step_windows
from tests.support.assertions import assert_bitwise


def share(**changes):
    arguments = {
        "tokens_per_step": 256,
        "context": 32,
        "micro_batch": 2,
        "rank": 0,
        "processes": 1,
    }
    return Share.of(**(arguments | changes))


@pytest.mark.parametrize("windows, sequences", [(7, 3), (5, 8), (64, 8)])
def test_an_epoch_uses_every_window_once(windows, sequences):
    steps = [step_windows(step, sequences, windows, seed=1) for step in range(3 * windows)]
    order = np.concatenate(steps).reshape(-1, windows)
    assert (np.sort(order, 1) == np.arange(windows)).all()
    assert not (order[0] == order[1]).all()
    assert not (order[0] == np.concatenate([step_windows(0, windows, windows, seed=2)])).all()


def test_the_order_never_changes():
    """The order of the data is the same for every version of numpy, so runs can be compared."""
    assert step_windows(0, 8, 20, seed=0).tolist() == ORDER[:8]
    assert step_windows(1, 8, 20, seed=0).tolist() == ORDER[8:16]


ORDER = [15, 0, 11, 9, 1, 6, 3, 5, 4, 13, 12, 17, 10, 2, 8, 14]


@pytest.mark.parametrize("processes, micro_batch", [(1, 8), (1, 1), (2, 2), (4, 2), (8, 1)])
def test_sharing_a_step_does_not_change_its_sequences(corpus, processes, micro_batch):
    def taken(processes, micro_batch):
        parts = []
        for rank in range(processes):
            mine = share(processes=processes, micro_batch=micro_batch, rank=rank)
            every = micro_batches(corpus, mine, step=5, sequences=8, context=32, seed=0)
            for tokens in every:
                assert tokens.shape == (micro_batch, 33)
                parts.append(tokens)
        return torch.cat(parts)

    expected = taken(1, 2)
    assert_bitwise(actual=taken(processes, micro_batch), expected=expected, what="tokens")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens_per_step": 255}, "tokens_per_step=255 is not a multiple of context=32"),
        ({"micro_batch": 3}, "8 sequences a step do not divide into micro-batches of 3"),
        ({"micro_batch": 4, "processes": 4}, "on 4 processes .16 at a time"),
        ({"micro_batch": 0}, "micro-batches of 0"),
    ],
)
def test_a_step_that_does_not_divide_raises(changes, message):
    with pytest.raises(ValueError, match=message):
        share(**changes)


def test_a_corpus_without_a_window_raises():
    with pytest.raises(ValueError, match="no window"):
        step_windows(0, 8, 0, seed=0)
