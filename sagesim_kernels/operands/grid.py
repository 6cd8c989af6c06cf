"""The programs of a launch: which tile of which head and sequence each of them computes."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_MOST_PROGRAMS: Final = 2**31 - 1
"""Of a launch on one axis."""


class Sequences(NamedTuple):
    """The lengths of queries or keys, as far as the host knows them."""

    cu: Tensor | None  #: int32 [number + 1], the first token of each; None if not packed
    number: int
    longest: int  #: tokens
    total: int  #: tokens, of packed sequences


class Grid(NamedTuple):
    """A launch of one program for each tile, head and sequence.

    All programs are on the first axis, because the other axes have at most 65,535. The tiles of
    packed sequences of unequal length follow each other, so that a short one has few programs.
    """

    tiles: Any  #: of a head of a sequence; with cu, of a head of all sequences
    heads: Any
    sequences: Any
    cu: Any = None  #: int32 [sequences + 1], the first token of each; None: all have `tiles` tiles
    TOKENS: Any = None  #: constexpr, tokens of a place of packed sequences, see `packed_place`
    PARTS: Any = None  #: constexpr, tiles of a place
    heads_per_group: Any = None  #: see `tile_and_head`; None: tiles of a head follow each other
    packed_tiles: Any = None  #: in order, see `packed_tiles.order_tiles`; None: as they lie

    @classmethod
    def of_tokens(cls, sequences: Sequences, rows: int, heads: int, *, together: int = 1) -> Grid:
        """Return the launch with tiles of `rows` tokens.

        together: the number of tiles of each sequence is a multiple of this.
        """
        tokens = rows * together
        longest, count = -(-sequences.longest // tokens), sequences.number
        places = sequences.total // tokens + count
        if sequences.cu is None or longest * count <= places:
            return cls(longest * together, heads, count)
        constants = map(tl.constexpr, (tokens, together))
        return cls(places * together, heads, count, sequences.cu, *constants)

    @property
    def all_heads(self) -> int:
        """Heads with `tiles` tiles."""
        return self.heads * (self.sequences if self.cu is None else 1)

    @property
    def programs(self) -> tuple[int]:
        """The programs of the launch.

        Raises:
            ValueError: if there are more than CUDA allows.
        """
        count = self.tiles * self.all_heads
        if count > _MOST_PROGRAMS:
            raise ValueError(
                f"{self.sequences} sequences of {self.heads} heads, with {self.tiles} tiles of "
                f"tokens, take {count} programs, and a launch has at most {_MOST_PROGRAMS}"
            )
        return (count,)


@triton.jit
def _first_place(cu, b, TOKENS: tl.constexpr):
    """Return the first place of sequence b; see `packed_place`."""
    return tl.load(cu + b) // TOKENS + b


@triton.jit
def _most(count):
    """Return the largest of some numbers, or the number."""
    if len(count.shape) == 0:
        return count
    else:
        return tl.max(count, 0)


@triton.jit
def packed_place(place, cu, sequences, TOKENS: tl.constexpr):
    """Return the number of a place in its packed sequence, and the sequence; or of several places.

    A place has TOKENS tokens. Sequence b begins at place cu[b] // TOKENS + b. Every sequence then
    has as many places as it needs, and at most one more.

    place: its number among those of all sequences. cu: int32 [sequences + 1], the first token of
        each sequence.
    """
    b = place * 0
    end = b + sequences
    while _most(end - b) > 1:
        middle = (b + end) // 2
        is_later = _first_place(cu, middle, TOKENS) <= place
        b = tl.where(is_later, middle, b)
        end = tl.where(is_later, end, middle)
    return place - _first_place(cu, b, TOKENS), b


@triton.jit
def packed_tile(tiles, i):
    """Return the number of tile i in its sequence, and the sequence. tiles: see `order_tiles`."""
    return tl.load(tiles + 2 * i), tl.load(tiles + 2 * i + 1)


@triton.jit
def programs_of(grid):
    """Return the number of programs of a `Grid`."""
    if grid.cu is None:
        return grid.tiles * grid.heads * grid.sequences
    else:
        return grid.tiles * grid.heads


@triton.jit
def tile_and_sequence(tile, all_head, grid):
    """Return the tile within its sequence, the head within its sequence, and the sequence.

    tile: among the `grid.tiles` tiles of a head. all_head: among all heads with so many tiles.
    """
    if grid.cu is None:
        return tile, all_head % grid.heads, all_head // grid.heads
    elif grid.packed_tiles is not None:
        tile, b = packed_tile(grid.packed_tiles, tile)
        return tile, all_head, b
    else:
        place, b = packed_place(tile // grid.PARTS, grid.cu, grid.sequences, grid.TOKENS)
        return place * grid.PARTS + tile % grid.PARTS, all_head, b


@triton.jit
def coordinates_of(program, grid):
    """Return the tile, head and sequence of a program of a `Grid`.

    The tiles of a head have consecutive programs.
    """
    return tile_and_sequence(program % grid.tiles, program // grid.tiles, grid)


@triton.jit
def tile_and_head(program, tiles, all_heads, heads_per_group):
    """Return the tile of a program, and its head among those of all sequences.

    Programs of a group of heads follow each other, first with the first tile of each head.
    """
    first_head = program // (tiles * heads_per_group) * heads_per_group
    program -= first_head * tiles
    group_heads = tl.minimum(heads_per_group, all_heads - first_head)
    return program // group_heads, first_head + program % group_heads


@triton.jit
def program_coordinates(grid, LAST_FIRST: tl.constexpr = False):
    """Return the tile, head and sequence of this program of a `Grid`.

    With LAST_FIRST the tiles of a head run from the last to the first: under a causal mask the last
    tile of queries attends to the most keys. Tiles that are in an order of their own stay in it.
    """
    program = tl.program_id(0)
    if grid.heads_per_group is None:
        tile, head = program % grid.tiles, program // grid.tiles
    else:
        all_heads = programs_of(grid) // grid.tiles
        tile, head = tile_and_head(program, grid.tiles, all_heads, grid.heads_per_group)
    if LAST_FIRST and grid.packed_tiles is None:
        tile = grid.tiles - 1 - tile
    return tile_and_sequence(tile, head, grid)


@triton.jit
def reversed_coordinates(grid):
    """Return the tile, head and sequence of this program; the first program has the last ones.

    Of tensors that the kernel before went through from the first tile to the last, the cache still
    holds the last tiles.
    """
    return coordinates_of(programs_of(grid) - 1 - tl.program_id(0), grid)
