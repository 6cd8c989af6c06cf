"""Which channels of a tile the kernels for Hopper and for mma.sync multiply."""

from hypothesis import given
from hypothesis import strategies as st

from sagesim_kernels.ampere.device import chunk_size
from sagesim_kernels.channel_ranges import parts_of


@given(st.sampled_from((16, 64, 128)), st.integers(1, 128), st.sampled_from((8, 16)))
def test_parts_have_all_channels_of_a_head_and_few_others(most: int, channels: int, bits: int):
    step = 256 // bits
    most = max(most, step)
    end = 0
    for first, size in parts_of(channels, most, bits):
        assert first == end and first % size == 0 and size <= most
        assert size % step == 0 and size & (size - 1) == 0, "tensor cores and Triton need this"
        end = first + size
    assert channels <= end < channels + step


def test_parts_of_usual_head_sizes():
    assert parts_of(128, 128, 16) == ((0, 128),)
    assert parts_of(80, 128, 16) == ((0, 64), (64, 16))
    assert parts_of(80, 128, 8) == ((0, 64), (64, 32))
    assert parts_of(112, 128, 16) == ((0, 64), (64, 32), (96, 16))
    assert parts_of(40, 64, 16) == ((0, 32), (32, 16))


@given(st.integers(65, 128), st.sampled_from((16, 32, 64)))
def test_two_chunks_have_all_channels_of_a_head(channels: int, least: int):
    first, rest = (chunk_size(channels, c, least) for c in range(2))
    assert first == 64 and least <= rest <= 64
    assert channels <= first + rest
    assert rest == least or first + rest // 2 < channels


def test_chunks_of_usual_head_sizes():
    assert [chunk_size(d, 0) for d in (40, 64, 80, 128)] == [64] * 4
    assert [chunk_size(d, 1) for d in (72, 80, 88, 96, 112, 128)] == [16, 16, 32, 32, 64, 64]
