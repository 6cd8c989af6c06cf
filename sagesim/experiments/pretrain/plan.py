"""A plan: which runs answer which question, written down before any of them is made."""

from __future__ import annotations

import hashlib
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sagesim.experiments.pretrain.attention import Attention
from sagesim.experiments.pretrain.model import SIZES
from sagesim.experiments.pretrain.runlog import Log
from sagesim.experiments.pretrain.settings import Run, from_mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is trained on."""

    tokens: int  #: a run; a multiple of both regimes
    small: int  #: tokens a step
    large: int

    def steps(self, tokens_per_step: int) -> int:
        """Of a run."""
        steps, rest = divmod(self.tokens, tokens_per_step)
        if rest or not steps:
            raise ValueError(f"tokens={self.tokens} is no multiple of {tokens_per_step} a step")
        return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Assumed floating-point operations a second of one GPU, for estimates of time."""

    model: float  #: everything but attention
    sdpa: float
    kernels: float
    emulator: float
    overhead: float  #: seconds a run: start, compilation, measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A question, and the runs that answer it: every combination of each grid's values."""

    question: str
    grids: tuple[Mapping[str, tuple[Any, ...]], ...]
    capture_heads: tuple[int, ...]  #: of the first seed's trained models, to be recorded; or none


@dataclass(frozen=True, slots=True)
class Planned:
    """A run, and the folder that is its own in any plan."""

    run: Run
    capture_heads: tuple[int, ...] = ()

    @property
    def folder(self) -> str:
        """A name from what it is, unique by a hash of everything it is."""
        run = self.run
        slug = re.sub(r"[^a-z0-9]+", "-", run.attention).strip("-")[:48]
        norm = "qknorm" if run.qk_norm else "plain"
        digest = hashlib.sha256(run.to_json().encode()).hexdigest()[:8]
        return f"{slug}_{norm}_{run.tokens_per_step}_seed{run.seed}_{digest}"

    def is_done(self, root: Path) -> bool:
        """Whether it is trained to its end, or was stopped by a number that is not finite."""
        try:
            log = Log.read(root / self.folder)
        except ValueError:
            return False
        return log.is_finished or bool(log.stop)


_RUN_FRACTIONS: Final = ("warmup", "evaluate_every", "monitor_every")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a plan's file says."""

    corpus: str  #: the id of the one that it is about; empty for any
    margin: float  #: nats; a smaller difference of held-out losses is called none
    seeds: tuple[int, ...]
    base: Mapping[str, Any]  #: fields of `Run`, those of `_RUN_FRACTIONS` as fractions of the steps
    scales: Mapping[str, Scale]
    speed: Speed
    parts: Mapping[str, Part]

    @classmethod
    def read(cls, path: Path) -> Plan:
        """The plan of a TOML file.

        Raises:
            ValueError: naming the file and what is wrong in it.
        """
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
            return cls._of(data)
        except (OSError, ValueError, TypeError, KeyError) as error:
            missing = "lacks " if isinstance(error, KeyError) else ""
            raise ValueError(f"{path}: not a readable plan: {missing}{error}") from error

    @classmethod
    def _of(cls, data: dict[str, Any]) -> Plan:
        known = {"corpus", "margin", "seeds", "base", "scale", "speed", "part"}
        if unknown := sorted(data.keys() - known):
            raise ValueError(f"a plan has no {unknown[0]!r}; it has {', '.join(sorted(known))}")
        return cls(
            corpus=data.get("corpus", ""),
            margin=float(data["margin"]),
            seeds=tuple(data["seeds"]),
            base=data["base"],
            scales={name: from_mapping(Scale, x) for name, x in data["scale"].items()},
            speed=from_mapping(Speed, data["speed"]),
            parts={name: _part(x) for name, x in data["part"].items()},
        )

    def runs(self, part: str, scale: str, *, corpus: str, vocabulary: int) -> list[Planned]:
        """The runs of a part, all seeds of one setting together.

        Raises:
            ValueError: for another corpus than the plan's; naming the part or scale that is
                unknown, or the field that cannot be.
        """
        if self.corpus not in ("", corpus):
            raise ValueError(f"the plan is about corpus {self.corpus}, and this one is {corpus}")
        if part not in self.parts:
            raise ValueError(f"no part is called {part!r}; there are {', '.join(self.parts)}")
        if scale not in self.scales:
            raise ValueError(f"no scale is called {scale!r}; there are {', '.join(self.scales)}")
        size, heads = self.scales[scale], self.parts[part].capture_heads
        found: dict[Run, tuple[int, ...]] = {}
        for values, seed in itertools.product(_settings(self.parts[part].grids), self.seeds):
            run = self._run(values, seed, size, corpus, vocabulary)
            found[run] = heads if seed == self.seeds[0] else ()
        return [Planned(run, captured) for run, captured in found.items()]

    def _run(
        self, values: Mapping[str, Any], seed: int, scale: Scale, corpus: str, vocabulary: int
    ) -> Run:
        fields = {**self.base, **values}
        regime = fields.pop("regime")
        if regime not in ("small", "large"):
            raise ValueError(f"regime={regime!r}; there are small and large")
        per_step: int = getattr(scale, regime)
        steps = scale.steps(per_step)
        for name in _RUN_FRACTIONS:
            fields[name] = max(1, round(fields[name] * steps))
        fields["attention"] = Attention.parse(fields["attention"]).name
        fields["monitor"] = tuple(Attention.parse(name).name for name in fields["monitor"])
        fixed = {"corpus": corpus, "vocabulary": vocabulary, "seed": seed}
        return from_mapping(Run, {**fields, **fixed, "tokens_per_step": per_step, "steps": steps})

    def seconds(self, run: Run) -> float:
        """Estimated, on one GPU."""
        size, speed = SIZES[run.size], self.speed
        whole, none = (size.flops(run.vocabulary, n) for n in (run.context, 0))
        attention: float = getattr(speed, Attention.parse(run.attention).family)
        return run.tokens * (none / speed.model + (whole - none) / attention) + speed.overhead


def union(planned: Iterable[Planned]) -> list[Planned]:
    """Every run once, to be captured where any of its entries asks for it."""
    found: dict[Run, tuple[int, ...]] = {}
    for each in planned:
        found[each.run] = each.capture_heads or found.get(each.run, ())
    return [Planned(run, heads) for run, heads in found.items()]


def on_device(planned: Sequence[Planned], families: Mapping[str, str]) -> list[Planned]:
    """The same runs with other families of attention: where there is no GPU, the emulator for the
    kernels, which compute the same."""

    def renamed(name: str) -> str:
        attention = Attention.parse(name)
        return replace(attention, family=families.get(attention.family, attention.family)).name

    return [
        replace(
            each,
            run=replace(
                each.run,
                attention=renamed(each.run.attention),
                monitor=tuple(map(renamed, each.run.monitor)),
            ),
        )
        for each in planned
    ]


def _part(data: Mapping[str, Any]) -> Part:
    if unknown := sorted(data.keys() - {"question", "grid", "capture_heads"}):
        raise ValueError(f"a part has no {unknown[0]!r}")
    return Part(
        question=data["question"],
        grids=tuple(
            {name: tuple(x) if isinstance(x, list) else (x,) for name, x in grid.items()}
            for grid in data["grid"]
        ),
        capture_heads=tuple(data.get("capture_heads", ())),
    )


def _settings(grids: Sequence[Mapping[str, tuple[Any, ...]]]) -> Iterator[dict[str, Any]]:
    for grid in grids:
        for values in itertools.product(*grid.values()):
            yield dict(zip(grid, values, strict=True))
