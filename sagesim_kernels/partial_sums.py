"""Sums over the columns of a matrix product's result, without other threads.

In the layouts of wgmma and mma.sync, a thread holds columns of a row that are 8 apart. A loop keeps
their sum, [rows, 8], and adds up the threads' sums once, after its last step.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def partial_sums(x):
    """Return the sums of columns of x [rows, columns] that are 8 apart, [rows, 8]."""
    return gl.sum(x.reshape([x.shape[0], x.shape[1] // 8, 8]), 1)


@gluon.jit
def _halves(x):
    """Split x [rows, 8, count] into the even and the odd ones of its `count` columns."""
    return gl.split(x.reshape([x.shape[0], 8, x.shape[2] // 2, 2]))


@gluon.jit
def columns_of(x):
    """Return the columns of x [rows, 64] that are 8 apart, as eight tensors [rows, 8]."""
    parts = (x.reshape([x.shape[0], 8, 8]).permute((0, 2, 1)),)
    for _ in gl.static_range(3):
        halves = ()
        for i in gl.static_range(len(parts)):
            halves += _halves(parts[i])
        parts = halves
    columns = ()
    for i in gl.static_range(8):
        columns += (parts[i].reshape([x.shape[0], 8]),)
    return columns


@gluon.jit
def add_partial_products(total, x, y):
    """Return total [rows, 8] plus the `partial_sums` of x * y, by fused multiply-adds.

    x, y: [rows, 64], with one layout.
    """
    x_columns = columns_of(x)
    y_columns = columns_of(y)
    for i in gl.static_range(8):
        factor = gl.convert_layout(x_columns[i], total.type.layout)
        total = gl.fma(factor, gl.convert_layout(y_columns[i], total.type.layout), total)
    return total
