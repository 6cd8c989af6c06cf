"""Named specs. Other specs are made from these by replacing fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sagesim.spec.attention_spec import (
    SITES,
    AttentionSpec,
    Delta,
    Granularity,
    MatmulSpec,
    Precision,
    Smoothing,
)

_G = Granularity


def with_precision(spec: AttentionSpec, precision: Precision, *sites: str) -> AttentionSpec:
    """`spec` with these sites in `precision`, or all seven sites if none is named.

    >>> with_precision(SAGEBWD, Precision.INT8, "dp") == SAGEBWD_ALL_INT8
    True
    """
    for site in sites or SITES:
        spec = replace(spec, **{site: replace(spec.site(site), precision=precision)})
    return spec


SAGEBWD: Final = AttentionSpec(
    qk=MatmulSpec(Precision.INT8, _G.PerBlock, _G.PerBlock),
    pv=MatmulSpec(Precision.INT8, _G.PerTileRow, _G.PerBlock),
    qk_recompute=MatmulSpec(Precision.INT8, _G.PerBlock, _G.PerBlock),
    dv=MatmulSpec(Precision.INT8, _G.PerTile, _G.PerBlock),
    dp=MatmulSpec(Precision.INPUT16, _G.PerBlock, _G.PerBlock),
    dq=MatmulSpec(Precision.INT8, _G.PerTile, _G.PerBlock),
    dk=MatmulSpec(Precision.INT8, _G.PerTile, _G.PerBlock),
    smoothing=Smoothing(k=True),
    delta=Delta.FROM_O,
    block_q=64,
    block_k=64,
)
"""The paper's scheme: six products in INT8, dP in 16 bit, K smoothed, scales per tile and block.

Source: arXiv 2603.02170, Algorithms 1 and 2. The paper gives no block sizes; 64 x 64 is ours.
"""

SAGEBWD_ALL_INT8: Final = with_precision(SAGEBWD, Precision.INT8, "dp")
"""The paper's scheme with dP in INT8 as well (arXiv 2505.11594, Table 1c)."""

SAGE_FORWARD: Final = with_precision(
    SAGEBWD, Precision.INPUT16, "qk_recompute", "dv", "dp", "dq", "dk"
)
"""Only the forward's two products in INT8; the backward in 16 bit.

Not for training with large logits: the backward recomputes P from 16-bit logits, but normalises it
by the logsumexp of the INT8 ones. Its gradients then belong to neither forward, and their errors
grow with the logits until they exceed the gradients.
"""

FPA: Final = replace(with_precision(SAGEBWD, Precision.FP32), smoothing=Smoothing())
"""Full-precision attention: every site FP32, nothing quantized, nothing smoothed."""

FPA_FP16: Final = with_precision(FPA, Precision.FP16)
"""Every product's operands rounded to FP16."""

FPA_BF16: Final = with_precision(FPA, Precision.BF16)
"""Every product's operands rounded to BF16."""

FACTORED: Final = replace(
    SAGEBWD,
    qk=MatmulSpec(Precision.INT8, _G.PerToken, _G.PerToken),
    pv=MatmulSpec(Precision.INT8, _G.PerTileRow, _G.PerBlockChannel),
    qk_recompute=MatmulSpec(Precision.INT8, _G.PerToken, _G.PerToken),
    dv=MatmulSpec(Precision.INT8, _G.PerTileColumn, _G.PerBlockChannel),
    dp=MatmulSpec(Precision.INPUT16, _G.PerToken, _G.PerToken),
    dq=MatmulSpec(Precision.INT8, _G.PerTileRow, _G.PerBlockChannel),
    dk=MatmulSpec(Precision.INT8, _G.PerTileColumn, _G.PerBlockChannel),
    delta=Delta.FROM_P,
)
"""The paper's six INT8 products, with scales that vary only along axes of the product's output.

Such scales can be taken out of an integer sum. delta is computed from the backward's own P and dP,
so that rows of dS sum to 0.
"""

FACTORED_PV16: Final = replace(
    with_precision(FACTORED, Precision.INPUT16, "pv"), delta=Delta.FROM_O
)
"""`FACTORED` with PV in 16 bit. O then has no INT8 error of PV, and delta is computed from O."""

FACTORED_QK: Final = replace(
    with_precision(FACTORED_PV16, Precision.INPUT16, "dv", "dq", "dk"),
    qk=MatmulSpec(Precision.INT8, _G.PerToken, _G.PerBlock),
    qk_recompute=MatmulSpec(Precision.INT8, _G.PerToken, _G.PerBlock),
)
"""INT8 only in QK and its recomputation; the other products are in 16 bit.

Q has one scale per token, K one per block. The loops of a kernel quantize neither P nor dS.
"""

FACTORED_QK16: Final = with_precision(
    with_precision(FACTORED, Precision.INPUT16, "qk", "qk_recompute"), Precision.INT8, "dp"
)
"""`FACTORED` with QK and its recomputation in 16 bit, and dP in INT8: five INT8 products.

The softmax amplifies the rounding error of QK, and does not amplify that of dP.
"""

FP8_GRADIENTS: Final = replace(
    FACTORED_QK,
    qk=MatmulSpec(Precision.INT8, _G.PerToken, _G.PerToken),
    qk_recompute=MatmulSpec(Precision.INT8, _G.PerToken, _G.PerToken),
    dv=MatmulSpec(Precision.FP8_E4M3, _G.PerRowBound, _G.PerBlock),
    dq=MatmulSpec(Precision.FP8_E4M3, _G.PerRowBound, _G.PerBlock),
    dk=MatmulSpec(Precision.FP8_E4M3, _G.PerRowBound, _G.PerBlock),
    block_q=256,
)
"""Five 8-bit products: QK and its recomputation in INT8, dV, dQ, dK in FP8. PV and dP in 16 bit.

The scales of P and dS follow from bounds that are known before the loop, so that a kernel looks for
no maximum in it. The sums of dV and dK are added in float32 after every 256 queries.
"""

CAUSAL_SAFE: Final = replace(
    with_precision(FACTORED_PV16, Precision.INPUT16, "dq"), smoothing=Smoothing()
)
"""An INT8 spec that keeps causality: later tokens change no bit of earlier rows of O and dQ.

QK, its recomputation, dV and dK are in INT8, PV, dP and dQ in 16 bit. Q and K have one scale per
token and are not smoothed, so that no scale or mean on the way to O and dQ combines tokens.
"""

PRESETS: Final = {
    "fpa": FPA,
    "fpa_fp16": FPA_FP16,
    "fpa_bf16": FPA_BF16,
    "sagebwd": SAGEBWD,
    "sagebwd_all_int8": SAGEBWD_ALL_INT8,
    "sage_forward": SAGE_FORWARD,
    "factored": FACTORED,
    "factored_pv16": FACTORED_PV16,
    "factored_qk": FACTORED_QK,
    "factored_qk16": FACTORED_QK16,
    "fp8_gradients": FP8_GRADIENTS,
    "causal_safe": CAUSAL_SAFE,
}
"""Every preset by its name in labels."""
