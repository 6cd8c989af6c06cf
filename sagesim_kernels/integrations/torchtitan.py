"""torchtitan: an override for models whose attention is "varlen".

    --override.imports sagesim_kernels.integrations.torchtitan.sagebwd
    --override.imports 'sagesim_kernels.integrations.torchtitan.sagebwd={"spec": "factored"}'

torchtitan's own module activates FlashAttention-3 or -4 on Hopper and later GPUs, so that a
FlashAttention of `torch_flash` is not called; this one takes its place. On a CUDA device the
kernels compute it, elsewhere the emulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torchtitan.config import derive, override  # pyright: ignore[reportMissingImports]
from torchtitan.models.common.attention import (  # pyright: ignore[reportMissingImports]
    VarlenAttention,
    VarlenMetadata,
)

from sagesim.spec import FACTORED_QK, AttentionSpec
from sagesim_kernels.integrations.attend import Options, attend_packed

_Base: Any = VarlenAttention


class SageBwdAttention(_Base):
    """torchtitan's `VarlenAttention` under a spec."""

    @dataclass(kw_only=True, slots=True)
    class Config(_Base.Config):
        """The window of `VarlenAttention.Config`, and the label of a spec."""

        spec: str = FACTORED_QK.label()

    def __init__(self, config: Any) -> None:
        super(_Base, self).__init__()  # VarlenAttention's activates another FlashAttention
        left, right = config.window_size
        self.options = Options(spec=AttentionSpec.parse(config.spec), window=(left, right))

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Compute the attention of the documents of a batch, each as if it were alone.

        Args:
            q_BLNH, k_BLNH, v_BLNH: [batch, tokens, heads, d]; names as `local_map` looks for them.
            attention_masks: a VarlenMetadata: where the documents start in batch * tokens.
            scale: of the logits; 1/sqrt(d) by default.
            enable_gqa: whether k and v may have fewer heads than q.
            out_transform: not supported, because it needs the logsumexp.

        Returns:
            o [batch, tokens, heads, d], in the dtype of q.

        Raises:
            ValueError: if there is an out_transform, or if heads differ and enable_gqa is False.
            TypeError: if attention_masks is another mask.
        """
        if out_transform is not None:
            raise ValueError(
                "out_transform is given (for attention sinks, as in gpt_oss); it needs the "
                "logsumexp, which this override does not return"
            )
        if not isinstance(attention_masks, VarlenMetadata):
            raise TypeError(
                f"attention_masks is a {type(attention_masks).__name__}, not a VarlenMetadata; "
                "choose the attention backend 'varlen'"
            )
        if q_BLNH.shape[2] != k_BLNH.shape[2] and not enable_gqa:
            raise ValueError(
                f"q has {q_BLNH.shape[2]} heads and k {k_BLNH.shape[2]}; enable_gqa is False"
            )
        masks: Any = attention_masks
        o = attend_packed(
            *(x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH)),
            masks.cu_seq_q,
            masks.cu_seq_k,
            masks.max_q,
            masks.max_k,
            replace(self.options, scale=scale),
        )
        return o.unflatten(0, q_BLNH.shape[:2])


@override(  # pyright: ignore[reportUntypedFunctionDecorator]
    target=_Base.Config, description="trainable INT8 attention"
)
def sagebwd(config: Any, spec: str = FACTORED_QK.label()) -> Any:
    """Replace a `VarlenAttention.Config`; spec is a label, as `sagesim.AttentionSpec.parse` reads.

    Raises:
        ValueError: if the label is not that of a spec.
    """
    return derive(config, SageBwdAttention.Config, spec=AttentionSpec.parse(spec).label())
