"""How fast the default spec is, for the first tables of docs/speed.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import records
from grid import markdown
from records import DEFAULT

from sagesim_kernels.bench import cases, tables
from sagesim_kernels.bench.machine import card
from sagesim_kernels.bench.masks import FLASH_2
from sagesim_kernels.bench.model_tables import ratio as beside_sdpa

LONG: Final = (
    "bench_flash4",
    "bench_flash4_d128",
    "bench_default",
    "bench_codes",
    "bench_long",
    "bench_int8",
    "bench_short",
    "bench",
)
"""The records of long sequences with the default spec, the newest first."""

PEERS: Final = {
    "sdpa flash": "FlashAttention-2",
    "sdpa cudnn": "cuDNN",
    "flash-attn-4": "FlashAttention-4",
    "FlexAttention": "FlexAttention",
}
"""The peers of the tables, by their names in records."""

MANY: Final = 4096
"""Tokens from which on a sequence is in the first rows of `in_short`."""

_MARKS: Final = "¹²³⁴⁵⁶⁷"

Document = Mapping[str, Any]
Case = Mapping[str, Any]


Figures = Sequence[tuple[float, Document]]
"""Ratios, each with its record."""


def in_short() -> str:
    """A table of where the default spec is faster than its peers, and by how much."""
    rows: list[list[str]] = []
    shapes = _by_shape()
    for is_long in (True, False):
        several = {key: of for key, of in shapes.items() if (key[2] >= MANY) is is_long}
        tokens = sorted({tokens for _, _, tokens in several})
        for peer, name in list(PEERS.items())[:3]:
            found = [(x, record) for of in several.values() for p, x, record in of if p == peer]
            rows.append([f"{tokens[0]} to {tokens[-1]} tokens", name, *_summed(found)])
    for part, what in (("models", "shapes of models"), ("training", "training steps")):
        for figure in ("GPU", "wall"):
            found = _found(part, lambda case, f=figure: beside_sdpa(dict(case), DEFAULT, f))
            rows.append([f"{what}, {figure} time", "the faster SDPA", *_summed(found)])
    for peer, name in ((FLASH_2, "FlashAttention-2"), ("flash-attn-4", "FlashAttention-4")):
        rows.append(
            [
                "windows under a causal mask",
                name,
                *_summed(_found("masks", lambda c, p=peer: _ratio(c, p))),
            ]
        )
    code = records.load("bench_sm80")
    foreign = [(_ratio(case, "sdpa flash"), code) for case in code["cases"].values()]
    found = [(ratio, document) for ratio, document in foreign if ratio is not None]
    rows.append(["code of an A100", "FlashAttention-2", *_summed(found)])
    head = ["calls", "beside", "times as fast", "faster at", "measured on"]
    return markdown(head, [row for row in rows if row[2]])


def by_shape() -> str:
    """A table of the default spec beside each peer at each number of tokens, and its records.

    A figure is of the newest record with the shape and the peer.
    """
    found = _by_shape()
    used = {document["file"]: document for of in found.values() for _, _, document in of}
    documents = [each for each in long_records() if each["file"] in used]
    marks = {document["file"]: mark for mark, document in zip(_MARKS, documents, strict=False)}
    rows = []
    for (head_size, is_causal, tokens), ratios in found.items():
        cells = {name: f"{ratio:.2f} {marks[of['file']]}" for name, ratio, of in ratios}
        mask = "causal" if is_causal else "full"
        shape = [str(head_size), mask, str(tokens)]
        rows.append([*shape, *(cells.get(peer, "-") for peer in PEERS)])
    legend = [f"- {marks[each['file']]} {records.made_by(each)}." for each in documents]
    text = markdown(["d", "mask", "tokens", *PEERS.values()], rows)
    age = records.age_of_several([document["machine"] for document in documents])
    return records.with_paragraph(f"{text}\n\n" + "\n".join(legend), age)


Ratios = list[tuple[str, float, Document]]


def _by_shape() -> dict[tuple[int, bool, int], Ratios]:
    """By head size, mask and tokens: each peer, the ratio to it, and the record."""
    found: dict[tuple[int, bool, int], Ratios] = {}
    for document in long_records():
        for case in tables.cases(document, "speed"):
            own = found.setdefault((case["head_dim"], case["is_causal"], case["tokens"]), [])
            known = {name for name, _, _ in own}
            new = [(peer, _ratio(case, peer)) for peer in PEERS if peer not in known]
            own += [(peer, ratio, document) for peer, ratio in new if ratio is not None]
    return dict(sorted(found.items()))


def long_records() -> list[dict[str, Any]]:
    """The records `LONG`."""
    return [records.load(name) for name in LONG]


def newest_with_all_peers() -> dict[str, Any]:
    """The newest record of long sequences in which all peers ran, each at some shape or other."""
    for document in long_records():
        ran = {name for case in tables.cases(document, "speed") for name in case["runs"]}
        if ran.issuperset(cases.PEERS):
            return document
    raise ValueError("no record has all peers")


def _found(part: str, figure: Callable[[Case], float | None]) -> Figures:
    """A figure of each case of a part, from the newest record that has it."""
    found: dict[str, tuple[float, Document]] = {}
    for document in records.of_part(part):
        for key, case in document["cases"].items():
            value = figure(case) if case["part"] == part and key not in found else None
            if value is not None:
                found[key] = (value, document)
    return [*found.values()]


def _ratio(case: Case, peer: str) -> float | None:
    """How many times as fast as a peer forward and backward are; None if one did not run."""
    if not {DEFAULT, peer} <= case["runs"].keys():
        return None
    return tables.ratio(dict(case), DEFAULT, peer)


def _summed(found: Figures) -> list[str]:
    """The worst and the best ratio, at how many cases the default spec is faster, and the GPUs."""
    if not found:
        return ["", "", ""]
    ratios = [ratio for ratio, _ in found]
    faster = f"{sum(x > 1 for x in ratios)} of {len(ratios)}"
    gpus = dict.fromkeys(card(dict(document["machine"])) for _, document in found)
    return [f"{min(ratios):.2f} to {max(ratios):.2f}", faster, ", ".join(gpus)]
