"""How a contender computes a case of windows or padded keys."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sagesim.problem import AttentionProblem
from sagesim.spec import AttentionSpec
from sagesim_kernels.api import attention, attention_varlen
from sagesim_kernels.bench.contenders import Attend, Contender, is_grouped
from sagesim_kernels.bench.masks import FLASH_2, MaskCase
from sagesim_kernels.bench.step import Step, laid_out


@dataclass(frozen=True, slots=True)
class MaskStep(Step):
    """A `Step` whose k and v may be packed, [1, heads, keys of all sequences, d]."""

    is_real: Tensor | None = None  #: bool [batch, keys], the keys that are packed; None: not packed

    def results(self) -> dict[str, Tensor]:
        """o, dq, dk and dv by name, with zeros for padded keys."""
        found = Step.results(self)
        if self.is_real is not None:
            for name in ("dk", "dv"):
                packed = found[name][0].transpose(0, 1)
                whole = packed.new_zeros((*self.is_real.shape, *packed.shape[1:]))
                whole[self.is_real] = packed
                found[name] = whole.transpose(1, 2)
        return found


def mask_contender(name: str, case: MaskCase) -> Contender:
    """The contender of a name of the case; `mask_step` prepares its inputs."""
    is_peer = name.startswith((FLASH_2, "flash-attn-4"))
    return Contender(
        name,
        lambda tokens, is_causal, device: _attend(name, case, device),
        None if is_peer else _spec(name),
        tokens_first=True,
    )


def mask_step(contender: Contender, case: MaskCase, problem: AttentionProblem) -> MaskStep:
    """A contender on a problem of the case. The values of padded keys do not count."""
    device = problem.q.device
    q, k, v, do = (laid_out(x, tokens_first=True) for x in problem.qkvdo)
    is_real = None
    if contender.name.endswith(" packed"):
        is_real = _is_real(case, device)
        k, v = (x.transpose(1, 2)[is_real][None].transpose(1, 2) for x in (k, v))
    attend = contender.make(q.shape[2], problem.is_causal, device)
    return MaskStep(attend, *(x.requires_grad_() for x in (q, k, v)), do, is_real)


def _spec(name: str) -> AttentionSpec:
    return AttentionSpec.parse(name.partition(" ")[0])


def _is_real(case: MaskCase, device: torch.device) -> Tensor:
    used = torch.tensor(case.used, device=device)
    return torch.arange(case.shape.tokens, device=device) < used[:, None]


def _attend(name: str, case: MaskCase, device: torch.device) -> Attend:
    if case.window is not None:
        return _windowed(name, case.window)
    used = torch.tensor(case.used, dtype=torch.int32, device=device)
    if name.endswith(" packed"):
        return _packed(name, case, used)
    spec = _spec(name)
    if name.endswith("seqused_k"):
        return lambda q, k, v: _only(attention(q, k, v, spec=spec, seqused_k=used))
    key_mask = _is_real(case, device)
    return lambda q, k, v: _only(attention(q, k, v, spec=spec, key_mask=key_mask))


def _windowed(name: str, window: int) -> Attend:
    left = window - 1
    if name == FLASH_2:
        return lambda q, k, v: _flash_2(q, k, v, window_size_left=left, window_size_right=0)
    if name == "flash-attn-4":
        four: Any = importlib.import_module("flash_attn.cute").flash_attn_func

        def attend_by_four(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            tokens_first = (x.transpose(1, 2) for x in (q, k, v))
            o = _only(four(*tokens_first, causal=True, window_size=(left, 0)))
            return o.transpose(1, 2)

        return attend_by_four

    spec = _spec(name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = is_grouped(q, k)
        return _only(
            attention(q, k, v, spec=spec, is_causal=True, window=(left, -1), enable_gqa=grouped)
        )

    return attend


def _packed(name: str, case: MaskCase, used: Tensor) -> Attend:
    """Attention of all queries with packed keys."""
    n, batch = case.shape.tokens, case.shape.batch
    cu_q = torch.arange(batch + 1, dtype=torch.int32, device=used.device) * n
    cu_k = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    longest = max(case.used)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = q.transpose(1, 2).flatten(0, 1)
        keys, values = (x[0].transpose(0, 1) for x in (k, v))
        if name.startswith(FLASH_2):
            args = (cu_q, cu_k, n, longest, 0.0, False, False)
            o = torch.ops.aten._flash_attention_forward(flat, keys, values, *args)[0]
        else:
            options = {"spec": _spec(name)}
            o = _only(attention_varlen(flat, keys, values, cu_q, cu_k, n, longest, **options))
        return o.unflatten(0, (batch, n)).transpose(1, 2)

    return attend


def _flash_2(q: Tensor, k: Tensor, v: Tensor, **window: int) -> Tensor:
    tokens_first = [x.transpose(1, 2) for x in (q, k, v)]
    lengths = (None, None, q.shape[2], k.shape[2])
    found = torch.ops.aten._flash_attention_forward(
        *tokens_first, *lengths, 0.0, True, False, **window
    )
    return found[0].transpose(1, 2)


def _only(result: Any) -> Tensor:
    """o, from a function that may return a tuple that starts with o."""
    return result[0] if isinstance(result, tuple) else result
