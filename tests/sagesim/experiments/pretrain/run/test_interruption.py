"""The first signal asks, the second one acts."""

import signal

import pytest

from sagesim.experiments.pretrain.run.interruption import SIGNALS, first_signal


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_and_the_second_one_acts(number):
    asked, acted = [], []
    before = signal.signal(number, lambda *_: acted.append("acted"))
    try:
        with first_signal(lambda: asked.append("asked")):
            signal.raise_signal(number)
            assert (asked, acted) == (["asked"], [])
            signal.raise_signal(number)
            assert (asked, acted) == (["asked"], ["acted"])
        with first_signal(lambda: None):
            pass
        signal.raise_signal(number)
        assert acted == ["acted", "acted"], "the block left its handler behind"
    finally:
        signal.signal(number, before)


def test_an_ignored_signal_stays_ignored():
    """As under nohup."""
    asked = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with first_signal(lambda: asked.append("asked")):
            signal.raise_signal(signal.SIGHUP)
        assert asked == [] and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
