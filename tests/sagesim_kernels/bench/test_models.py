"""The cases of models: shapes, keys, and operation counts."""

import pytest

from sagesim import AttentionSpec
from sagesim_kernels import supports
from sagesim_kernels.bench.cases import PEERS
from sagesim_kernels.bench.models import (
    MODEL_PEERS,
    MODEL_SPECS,
    MODELS,
    SDPA,
    model_cases,
    training_cases,
)
from sagesim_kernels.bench.shape import Shape


def test_keys_name_each_case_once():
    cases = [*model_cases(), *training_cases()]
    assert len({case.key for case in cases}) == len(cases)


def test_contenders_have_kernels_or_are_peers():
    assert set(SDPA) < set(MODEL_PEERS) < set(PEERS)
    for label in MODEL_SPECS:
        spec = AttentionSpec.parse(label)
        assert spec.label() == label
        assert supports(spec) or "on a CPU" in str(supports(spec))
    assert all(case.contenders == (*MODEL_SPECS, *MODEL_PEERS) for case in model_cases())
    assert all(case.contenders == (*MODEL_SPECS, *SDPA) for case in training_cases())


def test_head_sizes_between_those_of_the_speed_cases():
    sizes = {(s.head_dim, s.tokens, s.is_causal) for s in MODELS["sizes"]}
    assert sizes == {
        (d, n, causal) for d in (72, 80, 96, 112) for n in (2048, 4096) for causal in (False, True)
    }


def test_ungrouped_has_the_work_of_grouped():
    for grouped, alike in zip(MODELS["grouped"], MODELS["ungrouped"], strict=True):
        assert grouped.flop("both") == alike.flop("both") and grouped.q_size == alike.q_size
        assert alike.kv_heads is None and grouped.heads % grouped.kv_size[1] == 0


def test_cross_attention_counts_its_keys():
    cross = Shape(1, 24, 4608, 128, False, keys=512)
    assert cross.kv_size == (1, 24, 512, 128)
    assert cross.flop("forward") == 4 * 24 * 4608 * 512 * 128
    with pytest.raises(ValueError, match="causal"):
        Shape(1, 24, 4608, 128, True, keys=512)


def test_a_training_step_has_as_many_tokens_as_a_speed_case():
    found = {(c.layers, c.width, c.tokens, c.is_compiled) for c in training_cases()}
    assert found == {
        (*model, is_compiled)
        for model in ((12, 768, 1024), (12, 1024, 4096), (6, 2048, 16384))
        for is_compiled in (False, True)
    }
    assert all(c.batch * c.tokens == 16384 and c.width % c.head_dim == 0 for c in training_cases())
