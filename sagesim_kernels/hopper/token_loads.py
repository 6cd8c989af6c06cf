"""Where tokens in 16 bit lie for TMA, and their loads."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.gluon_compat import reinterpret, tma_load
from sagesim_kernels.hopper.backward_structures import TokenOrigin

SEQUENCE_END = gl.constexpr(2**30)
"""TMA's coordinate of the end of each packed sequence; see `token_descriptor`."""


@gluon.jit
def origin_of(IS_COPIED: gl.constexpr, cu, b, h, start):
    """Return the `TokenOrigin` of sequence b and head h in a 16-bit tensor.

    IS_COPIED: whether the tensor lies in padded storage. cu: int32 [sequences + 1], the first token
    of each packed sequence; or None. start: the sequence's first token in padded storage.
    """
    zero = gl.program_id(1)  # opaque to the compiler
    if IS_COPIED:
        return TokenOrigin(zero, h, start)
    elif cu is None:
        return TokenOrigin(b, h, zero)
    else:
        end = gl.load(cu + b + 1)
        return TokenOrigin(end, h, SEQUENCE_END - (end - gl.load(cu + b)))


@gluon.jit
def token_coordinates(x, origin, first, FIRST_CHANNEL: gl.constexpr = 0):
    """Return TMA's coordinates of tokens from `first`.

    x: `token_descriptor`. origin: `TokenOrigin` of the sequence.
    """
    if len(x.block_shape) == 5:  # packed sequences
        return (SEQUENCE_END, origin.b, origin.h, origin.row + first, FIRST_CHANNEL)
    else:
        return (origin.b, origin.h, origin.row + first, FIRST_CHANNEL)


@gluon.jit
def load_tokens(x, origin, first, bar, buffer, FIRST_CHANNEL: gl.constexpr = 0, pred=True):
    """Load tokens from `first` to a buffer [tokens, channels] by TMA, if pred.

    The other arguments: see `token_coordinates`.
    """
    shared = reinterpret(buffer, x.dtype, x.block_shape, x.layout)
    tma_load(x, token_coordinates(x, origin, first, FIRST_CHANNEL), bar, shared, pred=pred)
