"""Which channels the products S and dP of Hopper's kernels multiply."""

from hypothesis import given
from hypothesis import strategies as st

from sagesim_kernels.hopper.channel_products import parts_of


@given(st.sampled_from((64, 128)), st.integers(1, 128), st.sampled_from((8, 16)))
def test_parts_have_all_channels_of_a_head_and_few_others(tile: int, channels: int, bits: int):
    channels = min(channels, tile)
    step = 256 // bits
    end = 0
    for first, size in parts_of(channels, tile, bits):
        assert first == end and first % size == 0
        assert size % step == 0 and size & (size - 1) == 0, "wgmma and Triton need these sizes"
        end = first + size
    assert channels <= end < channels + step and end <= tile


def test_parts_of_usual_head_sizes():
    assert parts_of(128, 128, 16) == ((0, 128),)
    assert parts_of(80, 128, 16) == ((0, 64), (64, 16))
    assert parts_of(80, 128, 8) == ((0, 64), (64, 32))
    assert parts_of(112, 128, 16) == ((0, 64), (64, 32), (96, 16))
    assert parts_of(40, 64, 16) == ((0, 32), (32, 16))
