"""The aims for speed beside what the records in docs/data have. An aim's number stands only here.

A figure is rounded as it is shown, and then compared with its aim. An aim over several cases is
reached if the worst of them reaches it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import records
from records import DEFAULT

from sagesim import PRESETS, SITES, Precision
from sagesim_kernels.bench.jobs import preparation_share
from sagesim_kernels.bench.masks import FLASH_2, mask_cases
from sagesim_kernels.bench.model_tables import milliseconds, ratio
from sagesim_kernels.bench.models import MODELS, ModelCase, training_cases
from sagesim_kernels.bench.shape import Shape

FP8: Final = "fp8_gradients"
FLASH, CUDNN, FLASH_4 = "sdpa flash", "sdpa cudnn", "flash-attn-4"
HEAD_SIZES: Final = (64, 128)
LONG: Final = (4096, 8192, 16384)
REACHED, MISSED, NOT_MEASURED = "reached", "**missed**", "not measured"
EARLIER: Final = " †"
"""Marks a figure of a record with other kernels than the newest record has."""


class Found(NamedTuple):
    """A figure of one case; None: the record has none."""

    value: float | None
    is_earlier: bool = False


@dataclass(frozen=True)
class Aim:
    """What was aimed at in some cases, and what the record has of each of them."""

    case: str
    beside: str
    found: Sequence[Found]
    least: float | None = None
    most: float | None = None
    unit: str = "x"

    @property
    def values(self) -> list[float]:
        return [round(each.value, self._digits) for each in self.found if each.value is not None]

    @property
    def verdict(self) -> str:
        """Whether all cases reach the aim; how many do not, or were not measured."""
        values, count = self.values, len(self.found)
        if not values:
            return NOT_MEASURED
        behind = sum(not self._is_reached(x) for x in values)
        of = "" if count == 1 else f" at {behind} of {count}"
        verdict = f"{MISSED}{of}" if behind else REACHED
        missing = count - len(values)
        return f"{verdict}, {missing} of {count} {NOT_MEASURED}" if missing else verdict

    @property
    def row(self) -> list[str]:
        bound = f"at least {self._shown(self.least)}" if self.least is not None else ""
        if self.most is not None:
            bound = f"at most {self._shown(self.most)}"
        values = self.values
        ends = dict.fromkeys(self._shown(f(values)) for f in (min, max)) if values else ["-"]
        mark = EARLIER if any(x.is_earlier and x.value is not None for x in self.found) else ""
        return [self.case, self.beside, bound, " to ".join(ends) + mark, self.verdict]

    @property
    def _digits(self) -> int:
        return 3 if self.unit == "%" else 2

    def _is_reached(self, value: float) -> bool:
        return value >= self.least if self.least is not None else value <= (self.most or 0.0)

    def _shown(self, value: float | None) -> str:
        assert value is not None
        return f"{value:.1%}" if self.unit == "%" else f"{value:.2f}{self.unit}"


class Group(NamedTuple):
    """A table of aims, and the records that it comes from."""

    title: str
    aims: list[Aim]
    source: str

    HEAD = ("case", "beside", "aim", "found", "")

    @property
    def rows(self) -> list[list[str]]:
        return [aim.row for aim in self.aims]


Document = Mapping[str, Any]
Documents = Sequence[Document]
"""Records, the newest first."""


def groups() -> list[Group]:
    """Every table."""
    whole, code = records.load("bench"), records.load("bench_sm80")
    codes, long, int8 = (records.load(f"bench_{name}") for name in ("codes", "long", "int8"))
    newest = [records.load(f"bench_{name}") for name in ("flash4", "flash4_d128", "default")]
    cards = json.loads((records.DATA / "cards.json").read_text(encoding="utf-8"))
    models, masks = records.of_part("models"), records.of_part("masks")
    trained = records.of_part("training")
    return [
        Group(
            "long sequences, on Hopper",
            list(on_hopper(*newest, codes, long, int8, whole)),
            _source(*newest, codes, long, int8, whole),
        ),
        Group(
            "dV, dQ and dK in INT8, on Hopper",
            list(of_int8(codes, long, int8)),
            _source(codes, long, int8),
        ),
        Group("where models run", list(of_models(*models)), _source(*models)),
        Group("training steps of models", list(of_training(*trained)), _source(*trained)),
        Group("windows and padded keys", list(of_masks(*masks)), _source(*masks)),
        Group("code of an A100, on Hopper", list(of_code(code)), _source(code)),
        Group("an RTX 4090", list(of_card(cards)), f"A prediction: `{cards['command']}`."),
    ]


def summary() -> str:
    """How many aims were reached."""
    verdicts = [aim.verdict for group in groups() for aim in group.aims]
    missed = sum(verdict.startswith(MISSED) for verdict in verdicts)
    reached = sum(verdict == REACHED for verdict in verdicts)
    open_ = len(verdicts) - missed - reached
    return (
        f"Of {len(verdicts)} aims for speed, {reached} are reached, {missed} are missed, and "
        f"{open_} are not or only partly measured"
    )


def on_hopper(*documents: Document) -> Iterator[Aim]:
    """Specs beside peers that use Hopper's instructions, forward and backward and forward alone."""

    for spec, peer, lengths, *bounds in (
        (DEFAULT, "deterministic", LONG, 1.05, 1.1),
        (DEFAULT, FLASH_4, LONG, 1.0, 1.0),
        (DEFAULT, FLASH_4, LONG, 1.2, 1.2),
        (DEFAULT, CUDNN, LONG, 1.0, 1.0),
        (DEFAULT, FLASH, LONG, 1.67, 1.67),
        (DEFAULT, FLASH, (1024, 2048, *LONG, 32768), 1.0, 1.0),
        (FP8, FLASH_4, LONG, 1.05, 1.12),
        (FP8, FLASH_4, LONG, 1.2, 1.25),
        (FP8, CUDNN, LONG, 1.2, 1.2),
    ):
        for d, least in zip(HEAD_SIZES, bounds, strict=True):
            yield _both(documents, spec, peer, d, lengths, least)
    for d in HEAD_SIZES:
        found = [
            _newest_case(documents, _key(d, n, m), lambda c: _ratio(c, DEFAULT, FLASH, "forward"))
            for n in LONG
            for m in (False, True)
        ]
        yield Aim(f"forward alone, {_case(DEFAULT, d, LONG)}", _NAMES[FLASH], found, least=1.9)
    for spec, most in ((DEFAULT, 0.08), (FP8, 0.06)):
        found = [
            _newest_case(documents, _key(d, 8192, m), lambda c, s=spec: _preparation(c, s))
            for d in HEAD_SIZES
            for m in (False, True)
        ]
        case = f"preparation, `{spec}`, 8192 tokens"
        yield Aim(case, "all kernels' time", found, most=most, unit="%")


def of_int8(*documents: Document) -> Iterator[Aim]:
    """Specs with all products of P and dS in INT8."""
    for spec in ("sagebwd", "factored"):
        for d in HEAD_SIZES:
            yield _both(documents, spec, FLASH, d, LONG[:2], 1.0)


def _both(
    documents: Documents, spec: str, peer: str, d: int, lengths: Sequence[int], least: float
) -> Aim:
    """Forward and backward, without a mask and causal."""
    found = [
        _newest_case(documents, _key(d, n, m), lambda case: _ratio(case, spec, peer))
        for n in lengths
        for m in (False, True)
    ]
    return Aim(_case(spec, d, lengths), _NAMES[peer], found, least=least)


def _case(spec: str, d: int, lengths: Sequence[int]) -> str:
    return f"`{spec}`, d {d}, {lengths[0]} to {lengths[-1]} tokens"


_AHEAD: Final = (*MODELS["grouped"][:3], *MODELS["long"])
_LEVEL: Final = (
    Shape(8, 16, 1024, 64, True),
    Shape(64, 16, 729, 72, False),
    Shape(32, 12, 512, 64, False),
    Shape(1, 24, 4608, 128, False, keys=512),
)


def of_models(*documents: Document) -> Iterator[Aim]:
    """The default spec at shapes of models, GPU and wall, beside the faster backend of SDPA."""
    keys = dict.fromkeys(
        key for each in documents for key, c in each["cases"].items() if c["part"] == "models"
    )
    for figure, beside, most, unit in (
        (_host_ratio, "FlashAttention-4's", 1.0, "x"),
        (_host, "", 0.6, " ms"),
    ):
        found = [_newest_case(documents, key, figure) for key in keys] or _NOTHING
        yield Aim("host's time of a call, all shapes", beside, found, most=most, unit=unit)
    for shapes, least in ((_AHEAD, 1.05), (_LEVEL, 1.0)):
        for shape in shapes:
            for figure in ("GPU", "wall"):
                found = [_of_shape(documents, shape, lambda c, f=figure: ratio(c, DEFAULT, f))]
                yield Aim(f"{_words(shape)}, {figure}", _SDPA, found, least=least)
    for spec in (DEFAULT, FP8):
        found = [_grouped(documents, shape, spec) for shape in MODELS["grouped"]]
        case = f"time with grouped queries, `{spec}`"
        yield Aim(case, "as many heads of K and V as of Q", found, most=1.03)
    for group, words in (("sizes", "d 72 to 112"), ("wide", "d 192 and 256, grouped queries")):
        found = [_of_shape(documents, shape, _beside_cudnn) for shape in MODELS[group]]
        yield Aim(f"{words}, GPU", _NAMES[CUDNN], found, least=1.0)


def of_training(*documents: Document) -> Iterator[Aim]:
    """A training step beside the faster backend of SDPA, with the host's time."""
    least = {1024: 1.0, 4096: 1.15, 16384: 1.25}
    for case in training_cases():
        found = _newest_case(documents, case.key, lambda c: ratio(c, DEFAULT, "wall"))
        words = case.key.removeprefix("training ")
        yield Aim(words, _SDPA, [found], least=least[case.tokens])


def of_masks(*documents: Document) -> Iterator[Aim]:
    """Windows beside FlashAttention with the same window; padded keys beside packed ones."""
    wanted = mask_cases()
    windows = [case for case in wanted if case.window is not None]
    for peer, least in ((FLASH_4, 1.0), (FLASH_2, 1.5)):
        for tokens in dict.fromkeys(case.shape.tokens for case in windows):
            own = [case for case in windows if case.shape.tokens == tokens]
            found = [
                _newest_case(documents, case.key, lambda c, p=peer: _ratio(c, DEFAULT, p))
                for case in own
            ]
            words = f"window of {own[0].window}, {tokens} tokens"
            yield Aim(words, _NAMES[peer], found, least=least)
    padded = [case for case in wanted if case.window is None]
    for how in ("seqused_k", "key_mask"):
        found = [
            _newest_case(documents, case.key, lambda c, h=how: _padded(c, h)) for case in padded
        ]
        yield Aim(f"time of padded keys by `{how}`", "the same keys, packed", found, most=1.05)


def of_code(record: Document) -> Iterator[Aim]:
    """The code of an A100 on a Hopper GPU, beside FlashAttention-2."""
    least = {"fpa_bf16": 0.95, DEFAULT: 1.15, "sagebwd": 1.0, "factored_pv16": 1.0, "factored": 0.9}
    for spec, bound in least.items():
        for d in HEAD_SIZES:
            yield _both([record], spec, FLASH, d, LONG[:2], bound)


def of_card(record: Document, card: str = "RTX 4090") -> Iterator[Aim]:
    """The best spec of six INT8 products that is at least as accurate as the paper's."""
    for d in HEAD_SIZES:
        by_spec: dict[str, list[float]] = {}
        for p in record["predictions"]:
            if (p["card"], p["head_size"]) == (card, d) and _has_six(p["spec"], record["accurate"]):
                by_spec.setdefault(p["spec"], []).append(p["ratios"][0])
        best = max(by_spec, key=lambda spec: min(by_spec[spec]), default="")
        found = [Found(x) for x in by_spec.get(best, [])] or _NOTHING
        for least in (1.67, 2.0):
            case = f"best spec of six INT8 products, `{best}`, d {d}"
            yield Aim(case, _NAMES[FLASH], found, least=least)


_NOTHING: Final = [Found(None)]
_SDPA: Final = "FlashAttention-2 or cuDNN"
_NAMES: Final = {
    "deterministic": "FlashAttention-4, deterministic",
    FLASH_4: "FlashAttention-4",
    CUDNN: "cuDNN",
    FLASH: "FlashAttention-2",
    FLASH_2: "FlashAttention-2",
}


def _source(*documents: Document) -> str:
    """The records of a table, newest first, and how old they are."""
    parts: list[str] = []
    for i, document in enumerate(documents):
        line = f"{records.made_by(document)}."
        is_earlier = _is_earlier(document, documents[0])
        parts.append(f"{EARLIER.strip()} {line}" if is_earlier else line)
        if i == 0:
            is_foreign = document["settings"].get("code") is not None
            parts.append(
                records.age_of_code(document) if is_foreign else records.age(document["machine"])
            )
    return "\n\n".join(filter(None, parts))


def _run(case: Document | None, name: str) -> Any:
    """The run of a contender; "deterministic" is the peer with this word in its name."""
    if case is None:
        return None
    if name == "deterministic":
        name = next((run for run in case["runs"] if name in run.lower()), "")
    return case["runs"].get(name)


def _ratio(case: Document | None, name: str, peer: str, which: str = "both") -> float | None:
    own, other = _run(case, name), _run(case, peer)
    return None if own is None or other is None else other[which]["ms"] / own[which]["ms"]


def _key(d: int, tokens: int, is_causal: bool) -> str:
    return f"speed d{d} {'causal' if is_causal else 'full'} n{tokens}"


def _preparation(case: Document, spec: str) -> float | None:
    jobs = (_run(case, spec) or {}).get("jobs_ms")
    return preparation_share(jobs) if jobs else None


def _is_earlier(document: Document, newest: Document) -> bool:
    """Whether a record has other kernels than the newest one."""
    mine, other = (each["machine"].get("kernels") for each in (document, newest))
    return document is not newest and (mine is None or mine != other)


def _newest_case(
    documents: Documents, key: str, figure: Callable[[Document], float | None]
) -> Found:
    """A figure of a case, from the newest record that has it."""
    for document in documents:
        case = document["cases"].get(key)
        value = None if case is None else figure(case)
        if value is not None:
            return Found(value, is_earlier=_is_earlier(document, documents[0]))
    return Found(None)


def _words(shape: Shape) -> str:
    return " ".join(ModelCase("", shape, ()).key.split()[1:])


def _of_shape(
    documents: Documents, shape: Shape, figure: Callable[[Document], float | None]
) -> Found:
    """A figure of a shape, in whichever group it is."""
    for group, shapes in MODELS.items():
        if shape in shapes:
            return _newest_case(documents, ModelCase(group, shape, ()).key, figure)
    raise ValueError(f"the benchmark does not time {shape}")


def _beside_cudnn(case: Document) -> float | None:
    return _ratio(case, DEFAULT, CUDNN)


def _host(case: Document) -> float | None:
    run = _run(case, DEFAULT)
    return None if run is None else run["both"]["host_ms"]


def _host_ratio(case: Document) -> float | None:
    own, other = _run(case, DEFAULT), _run(case, FLASH_4)
    return (
        None if own is None or other is None else own["both"]["host_ms"] / other["both"]["host_ms"]
    )


def _grouped(documents: Documents, shape: Shape, spec: str) -> Found:
    """The time on the GPU over that with as many heads of K and V as of Q."""
    alike = Shape(*shape.q_size, shape.is_causal)

    def ms(case: Document) -> float | None:
        run = _run(case, spec)
        return None if run is None else milliseconds(run, "GPU")

    grouped, other = _of_shape(documents, shape, ms), _of_shape(documents, alike, ms)
    if grouped.value is None or other.value is None:
        return Found(None)
    return Found(grouped.value / other.value, grouped.is_earlier or other.is_earlier)


def _padded(case: Document, how: str) -> float | None:
    speed = _ratio(case, f"{DEFAULT} {how}", f"{DEFAULT} packed")
    return None if speed is None else 1 / speed


def _has_six(spec: str, accurate: Iterable[str]) -> bool:
    """Whether a spec has six INT8 products and no larger errors than the paper's scheme."""
    if spec not in {*accurate, "sagebwd"}:
        return False
    return sum(PRESETS[spec].site(s).precision is Precision.INT8 for s in SITES) == 6
