"""The contenders, and the reasons of those that cannot run."""

import pytest
import torch

from sagesim.spec import AttentionSpec
from sagesim_kernels.bench.cases import PEERS
from sagesim_kernels.bench.contenders import contender, reason
from tests.sagesim_kernels.bench.fakes import explicit
from tests.support.assertions import assert_sqnr_at_least

CPU = torch.device("cpu")


def test_peers_and_labels():
    assert [contender(name).spec for name in PEERS] == [None] * len(PEERS)
    assert contender("sagebwd dp=int8").spec == AttentionSpec.parse("sagebwd dp=int8")
    with pytest.raises(ValueError, match="sdpa magic"):
        contender("sdpa magic")


def test_sdpa_computes_attention():
    q, k, v = torch.randn(3, 1, 2, 20, 16)
    attend = contender("sdpa flash").make(20, False, CPU)
    true = explicit(*(x.double() for x in (q, k, v)))
    assert_sqnr_at_least(actual=attend(q, k, v), exact=true, floor_db=100, what="o")


def test_sdpa_serves_groups_of_queries():
    q, k, v = torch.randn(1, 6, 20, 16), *torch.randn(2, 1, 2, 12, 16)
    attend = contender("sdpa flash").make(20, False, CPU)
    true = explicit(*(x.double() for x in (q, k, v)))
    assert_sqnr_at_least(actual=attend(q, k, v), exact=true, floor_db=100, what="o")


@pytest.mark.parametrize("name", ["sdpa cudnn", "sdpa efficient"])
def test_a_backend_that_the_device_lacks_raises(name):
    with pytest.raises(RuntimeError, match="backend"):
        contender(name).make(20, False, CPU)


def test_a_backend_is_selected_by_its_context():
    x = torch.randn(1, 1, 4, 8, requires_grad=True)
    attend = contender("sdpa flash").make(20, False, CPU)
    with contender("sdpa flash").selected():
        assert "Flash" in str(attend(x, x, x).grad_fn)
    with contender("sdpa efficient").selected(), pytest.raises(RuntimeError, match="backend"):
        attend(x, x, x)


def test_the_warnings_of_a_backend_become_part_of_its_error(monkeypatch):
    import warnings

    def refuse(*_: object, **__: object):
        warnings.warn("cuDNN attention is for compute capability 8 and up", stacklevel=2)
        raise RuntimeError("No available kernel.")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    with pytest.raises(RuntimeError, match=r"No available kernel\. cuDNN attention is for"):
        contender("sdpa cudnn").make(20, False, CPU)


def test_flash_attention_4_where_it_is_not_installed():
    with pytest.raises(ModuleNotFoundError, match="flash_attn"):
        contender("flash-attn-4").make(20, False, CPU)


def test_flash_attention_4_gets_tokens_first(monkeypatch):
    """It gets contiguous tensors in its own layout, and of its results only o is used."""

    class Module:
        @staticmethod
        def flash_attn_func(q, k, v, *, causal):
            assert causal and all(x.shape == (1, 20, 2, 16) for x in (q, k, v))
            assert all(x.is_contiguous() for x in (q, k, v))
            return explicit(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), None

    monkeypatch.setattr("importlib.import_module", lambda name: Module)
    four = contender("flash-attn-4")
    assert four.tokens_first
    q, k, v = torch.randn(3, 1, 20, 2, 16).transpose(2, 3)
    o = four.make(20, True, CPU)(q, k, v)
    true = explicit(*(x.double() for x in (q, k, v)))
    assert_sqnr_at_least(actual=o, exact=true, floor_db=100, what="o")


def test_flex_attention_is_compiled_for_each_length(monkeypatch):
    compiled = []

    def compile(function, *, dynamic):
        def attend(q, k, v, block_mask):
            return explicit(q, k, v), block_mask.shape

        compiled.append(dynamic)
        return attend

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch.compiler, "reset", lambda: compiled.append("reset"))
    attend = contender("FlexAttention").make(256, True, CPU)
    _, shape = attend(*torch.randn(3, 1, 2, 256, 16))
    assert shape == (1, 1, 256, 256) and compiled == ["reset", False]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("one\n  two"), "ValueError: one two"),
        (AssertionError(), "AssertionError:"),
    ],
)
def test_reasons_are_one_line(error, expected):
    assert reason(error) == expected


def test_a_long_reason_ends_in_dots():
    found = reason(RuntimeError("word " * 1000))
    assert len(found) == 400 and found.endswith("...")
