"""Steps of the forward's softmax, with and without a mask, scales of keys, and the logsumexp."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.hopper.capped_logits import logits_plus, tanh_of_sums
from sagesim_kernels.hopper.forward_tiles import BLOCK
from sagesim_kernels.operands import attends

S_FLOAT32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Layout of S and P [queries, keys] in float32."""
S_ROWS = gl.constexpr(gl.SliceLayout(1, S_FLOAT32.value))
"""Layout of one number for each row of S, a query."""
S_COLUMNS = gl.constexpr(gl.SliceLayout(0, S_FLOAT32.value))
"""Layout of one number for each column of S, a key."""


@gluon.jit
def key_indices(block, mask):
    """Return the index of each key of a block; 2^30 for keys that are padding.

    mask: `Mask`, or another structure with its `n_k` and `key_mask`.
    """
    keys = block * BLOCK + gl.arange(0, BLOCK, S_COLUMNS)
    if mask.key_mask is not None:
        is_live = gl.load(mask.key_mask + keys, mask=keys < mask.n_k, other=0) != 0
        keys = gl.where(is_live, keys, 2**30)
    return keys


@gluon.jit
def logits_of(s, factor, row_shift=None, base2=None):
    """Return the logits in base 2 of the integer sums of a key block; factor: one of each row.

    row_shift: see `tanh_of_rows`. base2: of `Softcap`; None without a softcap.
    """
    if base2 is not None:
        return tanh_of_rows(s, factor, row_shift) * base2
    else:
        return gl.convert_layout(s.to(gl.float32), S_FLOAT32) * factor[:, None]


@gluon.jit
def tanh_of_rows(s, factor, row_shift):
    """Return tanh(S / c) of the integer sums of a key block.

    factor: what S / c is of a sum, one of each row. row_shift: see `tanh_of_sums`.
    """
    if row_shift is None:
        return tanh_of_sums(s, factor[:, None], None, S_FLOAT32)
    else:
        return tanh_of_sums(s, factor[:, None], row_shift[:, None], S_FLOAT32)


@gluon.jit
def softmax_step(x, row_max, is_attended):
    """Return P of a key block under a mask, the new row maxima, and the rescaling factors.

    A row's maximum is -inf until it has attended to a key. The rescaling factor multiplies what the
    row has summed up with its previous maximum. x: see `logits_of`.
    """
    x = gl.where(is_attended, x, -float("inf"))
    new_max = gl.maximum(row_max, gl.max(x, 1))
    finite_max = gl.where(new_max == -float("inf"), 0.0, new_max)
    return gl.exp2(x - finite_max[:, None]), new_max, gl.exp2(row_max - finite_max)


@gluon.jit
def capped_softmax_step(s, factor, row_max, row_shift, base2):
    """Return what `softmax_step` does with a softcap and without a mask; see `logits_of`."""
    t = tanh_of_rows(s, factor, row_shift)
    new_max = gl.maximum(row_max, gl.max(t, 1) * base2)
    return gl.exp2(logits_plus(t, base2, -new_max[:, None])), new_max, gl.exp2(row_max - new_max)


@gluon.jit
def masked_softmax_step(s, factor, row_max, keys, mask, row_shift, base2):
    """Return what `softmax_step` does.

    keys: see `key_indices`. mask: `Mask`. row_shift, base2: see `logits_of`.
    """
    x = logits_of(s, factor, row_shift, base2)
    if mask.lowest is None:
        is_attended = attends(mask.queries[:, None], keys[None, :], mask.n_k, mask.offset)
    else:  # one comparison a side
        last = gl.minimum(mask.queries + mask.offset, mask.n_k - 1)
        is_attended = keys[None, :] <= last[:, None]
        is_attended = is_attended & (keys[None, :] >= (mask.queries + mask.lowest)[:, None])
    return softmax_step(x, row_max, is_attended)


@gluon.jit
def row_max_of_codes(s):
    """Return the maximum of each row of the int32 sums, in float32.

    One instruction compares three integers but only two floats. The factor that turns sums into
    logits is not negative, so the maximum is at the same key.
    """
    return gl.max(gl.convert_layout(s, S_FLOAT32), 1).to(gl.float32)


@gluon.jit
def upper_max(s, factor):
    """Return a little more than the greatest logit of each row, at most 2^-22 of it.

    So no exponent of the row is positive, although its product is not rounded.
    """
    return upper(row_max_of_codes(s) * factor)


@gluon.jit
def upper(x):
    """Return a little more than x, at most 2^-22 of it; x is finite."""
    step = gl.full(x.shape, 2.0**-23, gl.float32, x.type.layout)
    return gl.fma(gl.abs(x), step, x)


@gluon.jit
def exponents(s, factor, row_max):
    """Return s * factor - row_max, rounded once."""
    s = gl.convert_layout(s.to(gl.float32), S_FLOAT32)
    factor = factor[:, None].broadcast_to(s.shape)
    return gl.fma(s, factor, -row_max[:, None].broadcast_to(s.shape))


@gluon.jit
def unmasked_softmax_step(s, factor, row_max, row_shift, base2, FIXED: gl.constexpr):
    """Return what `softmax_step` does for a block without a mask.

    row_shift, base2: see `logits_of`. FIXED: whether row_max is a fixed reference, which S does not
    change; the last result then is 1.
    """
    if FIXED:
        rescale = gl.full(row_max.shape, 1.0, gl.float32, row_max.type.layout)
        return gl.exp2(exponents(s, factor, row_max)), row_max, rescale
    elif base2 is not None:
        return capped_softmax_step(s, factor, row_max, row_shift, base2)
    else:
        new_max = gl.maximum(row_max, upper_max(s, factor))
        return gl.exp2(exponents(s, factor, new_max)), new_max, gl.exp2(row_max - new_max)


@gluon.jit
def lse2_of(row_sum, row_max):
    """Return the logsumexp in base 2 of rows; infinity for those that attend to no key.

    If the magnitude of the logits is above 2^28, `upper_max` may be so much larger that all P of a
    row are 0. Its logsumexp is then the maximum.
    """
    is_empty = (row_sum == 0.0) & (row_max == -float("inf"))
    lse2 = row_max + gl.log2(gl.where(row_sum == 0.0, 1.0, row_sum))
    return gl.where(is_empty, float("inf"), lse2)


@gluon.jit
def apply_key_scales(s, buffers, stage):
    """Return S times the scales of its keys times 2^-10, or S if keys of a block share a scale."""
    if buffers.k_scale is None:
        return s
    else:
        k_scale = buffers.k_scale.index(stage).load(S_COLUMNS) * 2.0**-10
        return gl.convert_layout(s.to(gl.float32), S_FLOAT32) * k_scale[None, :]


@gluon.jit
def load_block_scale(k_ptr, block, BY_TOKEN: gl.constexpr):
    """Load the scale of a block of keys; 1 if each key has its own."""
    return gl.to_tensor(1.0) if BY_TOKEN else gl.load(k_ptr + block)
