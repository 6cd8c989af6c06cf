"""A fixed reference for the exponentials of a forward.

P of a row is exp(S - r). Any reference r gives the same O and logsumexp. With a running maximum as
r, a kernel looks for the maximum of each block of keys, and rescales its sums at each block. So the
kernels for PV in BF16 keep one reference for most blocks: the largest logit of the blocks that they
visit first. P may then exceed 1, which BF16 represents with the same relative error.

If later logits are far larger, the sums are too large or overflow. Such a row has failed, and is
computed again with a running maximum. Which rows fail depends on their own logits and values alone.
"""

from __future__ import annotations

from triton import language as tl

MOST_SUM = tl.constexpr(2.0**40)
"""The largest sum of P of a row that has not failed."""
