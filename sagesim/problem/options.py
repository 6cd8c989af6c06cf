"""The options of an attention call besides its tensors of tokens: masks, sinks, softcap, scale."""

from __future__ import annotations

from typing import Final, Literal, TypedDict

from torch import Tensor

CausalAlignment = Literal["upper_left", "lower_right"]

NO_WINDOW: Final = (-1, -1)
"""The window without a limit on either side."""


class AttentionOptions(TypedDict, total=False):
    """The options of an attention call; each may be omitted.

    is_causal: query i attends to no key after the diagonal, see causal_alignment.
    causal_alignment: where the diagonal of is_causal and of window is. "upper_left": at key i for
        query i, as in SDPA. "lower_right": at key i + n_k - n_q, so that the last query is at the
        last key, as in FlashAttention. None, the default: "upper_left"; a window needs one of the
        two names if n_q and n_k differ.
    window: (left, right): a query attends to at most `left` keys before the diagonal, the key on
        it, and at most `right` keys after it. -1: no limit on this side.
    attn_mask: boolean, broadcastable to [*heads, n_q, n_k]; True attends. Excludes is_causal,
        window, key_mask and seqused_k.
    key_mask: boolean [*batch, n_k], the leading shape of q without its heads; False: padding, no
        query of the sequence attends to the key.
    seqused_k: integers [*batch], the keys of each sequence; later ones are padding. The same as
        key_mask = arange(n_k) < seqused_k, also for causal_alignment "lower_right", which is that
        of n_k. Excludes key_mask.
    sinks: floating [heads], a further logit in the sum of each row's exponentials; differentiable.
    softcap: c, from 2^-7 to 2^126, replaces each logit S by c tanh(S / c), after the scale.
    scale: factor of the logits, from -2^100 to 2^100; None is 1/sqrt(d).
    enable_gqa: each head of k and v serves a group of consecutive heads of q.
    """

    is_causal: bool
    causal_alignment: CausalAlignment | None
    window: tuple[int, int]
    attn_mask: Tensor | None
    key_mask: Tensor | None
    seqused_k: Tensor | None
    sinks: Tensor | None
    softcap: float | None
    scale: float | None
    enable_gqa: bool
