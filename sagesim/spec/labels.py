"""The grammar of spec labels. A label is one line of words that names an `AttentionSpec`.

    sagebwd dp=int8 dq=fp16 qk=int8@token,token smooth=qk round=stochastic@7 delta=p block=128x64

The first word is a preset; each further word replaces one field:

    SITE=PRECISION               another precision, granularities as in the preset
    SITE=PRECISION@LHS,RHS       another precision and other granularities
    smooth=none|q|k|qk           which means are subtracted
    round=half_even|half_away|stochastic@SEED
    delta=o|p                    delta from O, or from the backward's own P
    block=BLOCK_QxBLOCK_K        tokens per block
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum

from sagesim.checks import check_type
from sagesim.spec.attention_spec import (
    OPERANDS,
    SITES,
    AttentionSpec,
    Delta,
    Granularity,
    Precision,
    Rounding,
    RoundingMode,
    Smoothing,
)
from sagesim.spec.presets import PRESETS

_SMOOTHING = {
    "none": Smoothing(),
    "q": Smoothing(q=True),
    "k": Smoothing(k=True),
    "qk": Smoothing(q=True, k=True),
}
_FIELDS = (*SITES, "smooth", "round", "delta", "block")


class _WordError(ValueError):
    """One word of a label is wrong."""


def parse(label: str) -> AttentionSpec:
    """The spec that `label` names; see the grammar at the top of this module."""
    check_type("label", label, str, "a str")
    words = label.split()
    if not words:
        raise ValueError(f"empty spec label; it begins with one of {', '.join(PRESETS)}")
    seen: set[str] = set()
    word = words[0]
    try:
        spec = PRESETS[_one_of("preset", word, PRESETS)]
        for word in words[1:]:
            field, equals, value = word.partition("=")
            if not equals:
                raise _WordError("expected FIELD=VALUE, such as dq=fp16")
            _one_of("field", field, _FIELDS)
            if field in seen:
                raise _WordError(f"{field} is given twice")
            seen.add(field)
            spec = _replace(spec, field, value)
    except _WordError as error:
        raise ValueError(f"spec label {label!r}, word {word!r}: {error}") from None
    return spec


def format_label(spec: AttentionSpec) -> str:
    """The label with the fewest words that parses to `spec`; of several, the first preset's."""
    candidates = (" ".join([name, *_differences(spec, PRESETS[name])]) for name in PRESETS)
    return min(candidates, key=lambda label: label.count(" "))


def _replace(spec: AttentionSpec, field: str, value: str) -> AttentionSpec:
    match field:
        case "smooth":
            return replace(spec, smoothing=_SMOOTHING[_one_of("smoothing", value, _SMOOTHING)])
        case "round":
            mode, at, seed = value.partition("@")
            mode = RoundingMode(_one_of("rounding", mode, _values(RoundingMode)))
            if (mode is RoundingMode.STOCHASTIC) != bool(at):
                raise _WordError("stochastic takes a seed (stochastic@7), the others take none")
            if not at:
                return replace(spec, rounding=Rounding(mode))
            number = _integer(seed)
            if number is None or number >= 2**32:
                raise _WordError(f"{seed!r} is not a seed; use an integer in 0..{2**32 - 1}")
            return replace(spec, rounding=Rounding.stochastic(number))
        case "delta":
            return replace(spec, delta=Delta(_one_of("delta", value, _values(Delta))))
        case "block":
            match [_integer(size) for size in value.split("x")]:
                case [int(block_q), int(block_k)] if block_q > 0 and block_k > 0:
                    return replace(spec, block_q=block_q, block_k=block_k)
                case _:
                    raise _WordError("expected two positive block sizes, such as block=128x64")
        case _:
            precision, at, scales = value.partition("@")
            matmul = replace(
                spec.site(field),
                precision=Precision(_one_of("precision", precision, _values(Precision))),
            )
            if at:
                names = scales.split(",")
                if len(names) != 2:
                    raise _WordError("expected two granularities, such as @tile_row,block_channel")
                lhs, rhs = (
                    Granularity(
                        _one_of(f"granularity of {t}", g, _values(Granularity.of(field, t)))
                    )
                    for t, g in zip(OPERANDS[field], names, strict=True)
                )
                matmul = replace(matmul, lhs=lhs, rhs=rhs)
            return replace(spec, **{field: matmul})


def _differences(spec: AttentionSpec, preset: AttentionSpec) -> list[str]:
    """The words that turn a preset into `spec`."""
    words: list[str] = []
    for site in SITES:
        matmul, of_preset = spec.site(site), preset.site(site)
        if matmul == of_preset:
            continue
        word = f"{site}={matmul.precision.value}"
        if (matmul.lhs, matmul.rhs) != (of_preset.lhs, of_preset.rhs):
            word += f"@{matmul.lhs.value},{matmul.rhs.value}"
        words.append(word)
    if spec.smoothing != preset.smoothing:
        words += [f"smooth={name}" for name, s in _SMOOTHING.items() if s == spec.smoothing]
    if spec.rounding != preset.rounding:
        seed = "" if spec.rounding.seed is None else f"@{spec.rounding.seed}"
        words.append(f"round={spec.rounding.mode.value}{seed}")
    if spec.delta != preset.delta:
        words.append(f"delta={spec.delta.value}")
    if (spec.block_q, spec.block_k) != (preset.block_q, preset.block_k):
        words.append(f"block={spec.block_q}x{spec.block_k}")
    return words


def _integer(word: str) -> int | None:
    """The number of a word of digits; None of another word, and of too many digits for Python."""
    try:
        return int(word) if word.isascii() and word.isdecimal() else None
    except ValueError:
        return None


def _values(members: Iterable[StrEnum]) -> list[str]:
    return [member.value for member in members]


def _one_of(kind: str, word: str, valid: Iterable[str]) -> str:
    """Return `word` if it is valid; else raise _WordError and suggest a similar word."""
    options = list(valid)
    if word in options:
        return word
    close = difflib.get_close_matches(word.lower(), options, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise _WordError(f"{word!r} is not a {kind}{hint}; one of {', '.join(options)}")
