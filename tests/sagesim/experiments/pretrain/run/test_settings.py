import dataclasses
import itertools

import pytest

from sagesim.experiments.pretrain.run.settings import Machine, Run, from_mapping


def test_a_run_converts_to_json_and_back(make_run):
    run = make_run(monitor=("emulator:sagebwd",), lr=3e-5, qk_norm=True)
    assert Run.from_json(run.to_json()) == run


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention": "emulator:sagebvd"}, "sagebvd"),
        ({"monitor": ("sdpa",)}, "monitor: sdpa is the reference of the errors"),
        ({"size": "300m"}, "size='300m' is not one of tiny, 8m"),
        ({"precision": "fp16"}, "precision='fp16' is not one of bf16, fp32"),
        ({"tokens_per_step": 250}, "tokens_per_step=250 is not a multiple of context=32"),
        ({"warmup": 5}, "warmup=5 is longer than steps=4"),
        ({"steps": 0}, "steps=0 is not a finite number of at least 1"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": float("inf")}, "lr=inf"),
        ({"beta1": 1.0}, r"beta1=1\.0 is not at least 0 and below 1"),
        ({"beta2": 1.0}, r"beta2=1\.0 is not at least 0 and below 1"),
        ({"beta2": -0.1}, r"beta2=-0\.1 is not at least 0 and below 1"),
        ({"final_lr": 1.5}, "final_lr=1.5 is not between 0 and 1"),
        ({"evaluate_sequences": 0}, "evaluate_sequences=0 is not a finite number of at least 1"),
    ],
)
def test_an_invalid_field_raises(changes, message, make_run):
    with pytest.raises(ValueError, match=message):
        make_run(**changes)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"micro_batches": 3}, "called 'micro_batches'; the settings are checkpoint_every"),
        ({"micro_batch": "3"}, "micro_batch='3' is not of type int"),
        ({"compile": 1}, "compile=1 is not of type bool"),
    ],
)
def test_from_mapping_checks_names_and_types(values, message):
    with pytest.raises(ValueError, match=message):
        from_mapping(Machine, values)


def test_from_mapping_names_a_missing_setting(make_run):
    values = dataclasses.asdict(make_run())
    del values["steps"]
    with pytest.raises(ValueError, match="steps"):
        from_mapping(Run, values)


def test_the_learning_rate_rises_and_falls(make_run):
    run = make_run(steps=101, warmup=10, lr=1e-2, final_lr=0.1)
    rates = [run.learning_rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(1e-3)
    assert rates[9] == rates[10] == pytest.approx(1e-2)
    assert rates[55] == pytest.approx((1e-2 + 1e-3) / 2)
    assert rates[100] == pytest.approx(1e-3)
    assert all(b <= a for a, b in itertools.pairwise(rates[10:]))


@pytest.mark.parametrize("warmup, last", [(8, 1e-3), (9, 1e-2), (10, 1e-2)])
def test_the_learning_rate_does_not_fall_in_one_step(warmup, last, make_run):
    run = make_run(steps=10, warmup=warmup, lr=1e-2, final_lr=0.1)
    assert run.learning_rate(9) == pytest.approx(last)
