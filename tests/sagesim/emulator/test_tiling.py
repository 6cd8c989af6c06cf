import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagesim.emulator import tiling
from sagesim.emulator.tiling import Grid
from sagesim.problem import Band
from tests.support import examples
from tests.support.inputs import random_mask
from tests.support.strategies import blocks, lengths, seeds

CPU = torch.device("cpu")
FULL = Band(None, None)
CAUSAL = Band(None, 0)


def in_band(band: Band, n_q: int, n_k: int) -> torch.Tensor:
    """Whether each query attends to each key, bool [n_q, n_k], by the definition of a band."""
    lowest = -n_q if band.lowest is None else band.lowest
    highest = n_k if band.highest is None else band.highest
    rows = [[lowest <= j - i <= highest for j in range(n_k)] for i in range(n_q)]
    return torch.tensor(rows, dtype=torch.bool).reshape(n_q, n_k)


bands = st.builds(
    Band,
    st.none() | st.integers(-140, 140),
    st.none() | st.integers(-140, 140),
)


def attended(grid: Grid, heads: slice, count: int) -> torch.Tensor:
    """The entries that no panel masks, bool [count, n_q, n_k]."""
    out = torch.zeros(count, grid.n_q, grid.n_k, dtype=torch.bool)
    next_row = 0
    for panel in grid.panels(heads, CPU):
        assert panel.rows.start == next_row == panel.first_block * grid.block_q
        next_row = panel.rows.stop
        rows = slice(panel.rows.start, min(panel.rows.stop, grid.n_q))
        width = panel.key_blocks * grid.block_k
        height = panel.rows.stop - panel.rows.start
        valid = torch.ones(1, height, width, dtype=torch.bool)
        if panel.masked is not None:
            shape = (-1, panel.last_block - panel.first_block, grid.block_q, panel.key_blocks)
            assert panel.masked.shape[1:] == (*shape[1:], grid.block_k)
            valid = ~panel.masked.flatten(1, 2).flatten(2, 3)
        assert not bool(valid[:, rows.stop - rows.start :].any()), "padding rows are masked"
        assert not bool(valid[..., grid.n_k :].any()), "padding columns are masked"
        columns = min(width, grid.n_k)
        out[:, rows, :columns] = valid[:, : rows.stop - rows.start, :columns]
    assert next_row == grid.q_blocks * grid.block_q
    return out


@given(
    n_q=lengths, n_k=lengths, block_q=blocks, block_k=blocks, small=st.booleans(), data=st.data()
)
@examples(100)
def test_panels_cover_the_map_and_mask_its_masked_entries(n_q, n_k, block_q, block_k, small, data):
    """For panels of the usual size, and for panels of one query block."""
    kind = data.draw(st.sampled_from(["band", "one mask", "one mask per head"]))
    count = 3
    mask = key_mask = None
    band = FULL
    expected = torch.ones(count, n_q, n_k, dtype=torch.bool)
    if kind == "band":
        band = data.draw(bands)
        expected = expected & in_band(band, n_q, n_k)
        if data.draw(st.booleans()):
            heads = data.draw(st.sampled_from((1, count)))
            key_mask = random_mask(data.draw(seeds), (heads, n_k), density=0.6)
            expected = expected & key_mask[:, None]
    else:
        heads = 1 if kind == "one mask" else count
        mask = random_mask(data.draw(seeds), (heads, n_q, n_k), density=0.6)
        expected = expected & mask
    grid = Grid(n_q, n_k, block_q, block_k, band, key_mask, mask)
    valid_q, valid_k = grid.valid_tokens(CPU)
    assert torch.equal(valid_q.expand(count, -1), expected.any(2))
    assert torch.equal(valid_k.expand(count, -1), expected.any(1))
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(tiling, "_PANEL_ENTRIES", 1)
            assert all(p.last_block - p.first_block == 1 for p in grid.panels(slice(0, 3), CPU))
        assert torch.equal(attended(grid, slice(0, count), count), expected)
        if kind == "one mask per head":
            part = attended(grid, slice(1, 3), 2)
            assert torch.equal(part, expected[1:3])


@pytest.mark.parametrize("heads", [0, 1, 2, 300])
def test_groups_of_heads_partition_the_heads(heads):
    grid = Grid(64, 64, 64, 64, FULL, None, None)
    groups = list(grid.head_groups(heads, CPU))
    assert [h for g in groups for h in range(g.start, g.stop)] == list(range(heads))
    if heads == 300:
        assert len(groups) > 1, "with one group the test proves nothing"


def test_causal_panels_stop_at_the_diagonal():
    """No key block is computed in which all keys are masked."""
    grid = Grid(2048, 2048, 64, 64, CAUSAL, None, None)
    for panel in grid.panels(slice(0, 1), CPU):
        assert panel.key_blocks == panel.rows.stop // 64
