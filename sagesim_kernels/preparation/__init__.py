"""What a forward and a backward compute of their operands before they multiply them.

Importing this package imports neither `preparation.forward` nor `preparation.one_pass`, whose
kernels are in Gluon. Gluon is experimental, so `dispatch` imports it in the first call that needs
it.
"""

from sagesim_kernels.preparation.backward import (
    compute_row_scales,
    has_same_codes,
    prepare_backward,
)
from sagesim_kernels.preparation.query_rows import (
    compute_query_rows,
    logit_factors,
    start_rows,
    store_channel_scales,
)
from sagesim_kernels.preparation.support import has_one_pass

__all__ = [
    "compute_query_rows",
    "compute_row_scales",
    "has_one_pass",
    "has_same_codes",
    "logit_factors",
    "prepare_backward",
    "start_rows",
    "store_channel_scales",
]
