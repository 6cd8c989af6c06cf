"""What a forward and a backward compute of their operands before they multiply them.

Importing this package does not import `preparation.forward`, whose kernel is in Gluon. Gluon is
experimental, so `dispatch` imports that module in the first call that needs it.
"""

from sagesim_kernels.preparation.backward import (
    compute_row_scales,
    has_same_codes,
    prepare_backward,
)
from sagesim_kernels.preparation.one_pass import has_one_pass, prepare_backward_in_one_pass
from sagesim_kernels.preparation.query_rows import (
    compute_query_rows,
    logit_factors,
    start_rows,
    store_channel_scales,
)

__all__ = [
    "compute_query_rows",
    "compute_row_scales",
    "has_one_pass",
    "has_same_codes",
    "logit_factors",
    "prepare_backward",
    "prepare_backward_in_one_pass",
    "start_rows",
    "store_channel_scales",
]
