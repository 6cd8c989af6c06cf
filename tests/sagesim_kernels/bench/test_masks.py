"""Windows and padded keys: cases, what each contender computes, and tables."""

import pytest
import torch

from sagesim import AttentionProblem
from sagesim_kernels.bench.mask_steps import mask_contender, mask_step
from sagesim_kernels.bench.mask_tables import mask_tables, padded_keys, windows
from sagesim_kernels.bench.masks import (
    FLASH_2,
    PADDED_CONTENDERS,
    WINDOW_CONTENDERS,
    MaskCase,
    mask_cases,
)
from sagesim_kernels.bench.shape import Shape
from tests.sagesim_kernels.bench.documents import document, without
from tests.sagesim_kernels.bench.fakes import FakeMeter, cpu_setup, record
from tests.support.kernels import DEVICE, HERE

WINDOW = MaskCase(Shape(2, 4, 40, 16, True, kv_heads=2), 9, ("factored_qk", FLASH_2))
PADDED = MaskCase(Shape(3, 2, 40, 16, False), None, PADDED_CONTENDERS)


def attends(case: MaskCase) -> torch.Tensor:
    """The map [batch, 1, tokens, tokens] of the entries that count."""
    n = case.shape.tokens
    if case.window is None:
        used = torch.tensor(case.used)[:, None, None, None]
        return (torch.arange(n) < used).expand(-1, 1, n, n)
    return torch.ones(n, n, dtype=torch.bool).tril().triu(1 - case.window)[None, None]


def problem(case: MaskCase) -> AttentionProblem:
    generator = torch.Generator().manual_seed(3)
    s = case.shape
    sizes = (s.q_size, s.kv_size, s.kv_size, s.q_size)
    q, k, v, do = (torch.randn(x, generator=generator).to(DEVICE) for x in sizes)
    grouped = s.kv_heads is not None
    return AttentionProblem(q=q, k=k, v=v, do=do, is_causal=s.is_causal, enable_gqa=grouped)


def test_keys_name_each_case_once_and_contenders_are_known() -> None:
    cases = mask_cases()
    assert len({case.key for case in cases}) == len(cases) == 10
    for case in cases:
        of_kind = PADDED_CONTENDERS if case.window is None else WINDOW_CONTENDERS
        assert case.contenders == of_kind


@pytest.mark.parametrize("case", [WINDOW, PADDED], ids=["window", "padded"])
def test_operations_count_the_entries_of_the_map(case: MaskCase) -> None:
    s = case.shape
    entries = int(attends(case).expand(s.batch, s.heads, -1, -1).sum())
    assert case.flop("forward") == 4 * s.head_dim * entries
    assert case.flop("both") == 3.5 * case.flop("forward")


def test_padding_is_up_to_half_of_the_keys() -> None:
    assert PADDED.used == [40, 30, 20]


OURS = [(WINDOW, "factored_qk"), *((PADDED, name) for name in PADDED_CONTENDERS[:3])]


class TestSteps:
    pytestmark = HERE

    @pytest.mark.parametrize(("case", "name"), OURS, ids=[name for _, name in OURS])
    def test_a_step_computes_attention_under_the_mask(self, case: MaskCase, name: str) -> None:
        given = problem(case)
        found = mask_step(mask_contender(name, case), case, given).results()
        leaves = [x.cpu().double().requires_grad_() for x in (given.q, given.k, given.v)]
        exact = torch.nn.functional.scaled_dot_product_attention(
            *leaves, attn_mask=attends(case), enable_gqa=given.enable_gqa
        )
        grads = torch.autograd.grad(exact, leaves, given.do.cpu().double())
        for what, x in zip(("o", "dq", "dk", "dv"), (exact.detach(), *grads), strict=True):
            off = (found[what].cpu() - x).norm() / x.norm()
            assert float(off) < 0.05, what

    def test_a_case_is_timed_and_recorded(self, tmp_path) -> None:
        from sagesim_kernels.bench.run import run

        small = MaskCase(Shape(2, 2, 16, 16, False), None, PADDED_CONTENDERS[:1])
        kept = record(tmp_path / "bench.json")
        run([small], kept, cpu_setup(FakeMeter()), lambda case, count: None)
        case = kept.document["cases"][small.key]
        assert case["part"] == "masks" and set(case["runs"]) == {"factored_qk seqused_k"}
        assert case["flop"]["forward"] == small.flop("forward")


def test_tables_have_every_case() -> None:
    """FlashAttention-2 takes twice our time, packed keys 1.5 times that of padded ones."""
    made = document()
    of_windows, of_padded = windows(made), padded_keys(made)
    assert [f"masks {row[0]}" for row in (*of_windows.rows, *of_padded.rows)] == [
        case.key for case in mask_cases()
    ]
    assert {row[3] for row in of_windows.rows} == {"2"}
    assert {tuple(row[4:]) for row in of_windows.rows} == {("-", "-")}
    for row in of_padded.rows:
        seqused_k, _, packed, _ = map(float, row[1:])
        assert packed == pytest.approx(1.5 * seqused_k, rel=0.01)
    assert mask_tables(without(made, "masks")) == []
