"""A plan: questions, and the runs that answer them, written down before the runs are made."""

from __future__ import annotations

import hashlib
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from sagesim.experiments.pretrain.model.attention import Attention
from sagesim.experiments.pretrain.model.llama import SIZES
from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import Run, from_mapping
from sagesim.experiments.pretrain.training.checkpoint import CHECKPOINTS, steps_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """The size and the number of the steps of a run."""

    tokens_per_step: int
    steps: int

    @property
    def tokens(self) -> int:
        """The number of tokens of a run."""
        return self.tokens_per_step * self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Assumed speeds of one GPU in floating-point operations per second, to estimate times."""

    model: float  #: everything except attention
    sdpa: float
    kernels: float
    emulator: float
    overhead: float  #: seconds per run for start, compilation and measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A question and the runs that answer it: all combinations of the values of each grid."""

    question: str
    grids: tuple[Mapping[str, tuple[Any, ...]], ...]
    capture_heads: tuple[int, ...]
    """Heads to capture from the trained models of the first seed; empty captures nothing."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a plan."""

    run: Run
    capture_heads: tuple[int, ...] = ()  #: heads to capture after training; empty for none

    @property
    def folder(self) -> str:
        """The name of the run's folder. It contains a hash of all settings, so it is unique."""
        run = self.run
        slug = re.sub(r"[^a-z0-9]+", "-", run.attention).strip("-")[:48]
        norm = "qknorm" if run.qk_norm else "plain"
        digest = hashlib.sha256(run.to_json().encode()).hexdigest()[:8]
        return f"{slug}_{norm}_{run.tokens_per_step}_seed{run.seed}_{digest}"

    def is_done(self, root: Path) -> bool:
        """Whether the run in `root` did all its steps, or stopped at a non-finite number.

        The log is written before the last checkpoint. A run that was killed between the two is not
        done. A run without any checkpoint is: they may have been removed to save space.
        """
        try:
            log = Log.read(root / self.folder)
        except ValueError:
            return False
        saved = steps_in(root / self.folder / CHECKPOINTS)
        is_saved = not saved or saved[-1] == self.run.steps
        return bool(log.stop) or (log.is_finished and is_saved)


_RUN_FRACTIONS: Final = ("warmup", "evaluate_every", "monitor_every")
"""Fields of `Run` that a plan gives as fractions of the steps, from 0 to 1. 0 stays 0."""

_NEEDED: Final = ("regime", "attention", "monitor", *_RUN_FRACTIONS)
"""What the base or the grid of every run has, beside fields of `Run` without a default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The content of a plan's TOML file."""

    corpus: str  #: `Manifest.id` of the plan's corpus; empty for any corpus
    margin: float  #: nats; smaller differences of held-out losses do not count
    seeds: tuple[int, ...]
    base: Mapping[str, Any]  #: fields of `Run`; those of `_RUN_FRACTIONS` as fractions of the steps
    scales: Mapping[str, Mapping[str, Regime]]
    """The regimes of each scale by their names, which the grids of parts use."""
    speed: Speed
    parts: Mapping[str, Part]

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read a plan from a TOML file.

        Raises:
            ValueError: if the file is not a valid plan. The message names the file and the fault.
        """
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
            return cls._of(data)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            missing = "lacks " if isinstance(error, KeyError) else ""
            raise ValueError(f"{path}: not a readable plan: {missing}{error}") from error

    @classmethod
    def _of(cls, data: dict[str, Any]) -> Plan:
        known = {"corpus", "margin", "seeds", "base", "scale", "speed", "part"}
        if unknown := sorted(data.keys() - known):
            raise ValueError(
                f"a plan has no {unknown[0]!r}; its keys are {', '.join(sorted(known))}"
            )
        if not isinstance(data["base"], dict) or not data["scale"]:
            raise ValueError("base and scale must be tables with an entry")
        return cls(
            corpus=data.get("corpus", ""),
            margin=float(data["margin"]),
            seeds=tuple(data["seeds"]),
            base=data["base"],
            scales={
                scale: {name: from_mapping(Regime, x) for name, x in regimes.items()}
                for scale, regimes in data["scale"].items()
            },
            speed=from_mapping(Speed, data["speed"]),
            parts={name: _part(x) for name, x in data["part"].items()},
        )

    def check_corpus(self, corpus: str) -> None:
        """Check that the plan's runs may be trained on a corpus, given its `Manifest.id`.

        Raises:
            ValueError: if the plan is for another corpus.
        """
        if self.corpus not in ("", corpus):
            raise ValueError(f"the plan is for corpus {self.corpus}; this corpus is {corpus}")

    def runs(self, part: str, scale: str, *, corpus: str, vocabulary: int) -> list[PlannedRun]:
        """The runs of one part at one scale, those of the first seed first.

        A plan that is stopped before its end has then compared all settings for some seeds. Before
        runs are trained, `check_corpus` must hold. Without it the runs only show what the plan
        would train.

        Args:
            corpus: the corpus' `Manifest.id`.
            vocabulary: rows of the embedding.

        Raises:
            ValueError: if the part or scale is unknown, or a run has an invalid setting or lacks a
                head that is to be captured.
        """
        if part not in self.parts:
            raise ValueError(f"no part is called {part!r}; the parts are {', '.join(self.parts)}")
        if scale not in self.scales:
            raise ValueError(
                f"no scale is called {scale!r}; the scales are {', '.join(self.scales)}"
            )
        regimes, heads = self.scales[scale], self.parts[part].capture_heads
        found: dict[Run, tuple[int, ...]] = {}
        for seed, values in itertools.product(self.seeds, _settings(self.parts[part].grids)):
            run = self._run(values, seed, regimes, corpus, vocabulary)
            count = SIZES[run.size].heads
            for head in heads:
                if type(head) is not int or not 0 <= head < count:
                    raise ValueError(
                        f"capture_heads: {head!r} is no head of a model with {count} heads"
                    )
            found[run] = heads if seed == self.seeds[0] else ()
        return [PlannedRun(run, captured) for run, captured in found.items()]

    def _run(
        self,
        values: Mapping[str, Any],
        seed: int,
        regimes: Mapping[str, Regime],
        corpus: str,
        vocabulary: int,
    ) -> Run:
        fields = {**self.base, **values}
        if missing := [name for name in _NEEDED if name not in fields]:
            raise ValueError(f"a run lacks {missing[0]!r}")
        if (name := _text("regime", fields.pop("regime"))) not in regimes:
            raise ValueError(f"regime={name!r} is not one of {', '.join(regimes)}")
        regime = regimes[name]
        for name in _RUN_FRACTIONS:
            fields[name] = _steps(name, fields[name], regime.steps)
        fields["attention"] = Attention.parse(_text("attention", fields["attention"])).name
        if not isinstance(fields["monitor"], list | tuple):
            raise ValueError(f"monitor={fields['monitor']!r} is not a list of attentions")
        fields["monitor"] = tuple(
            Attention.parse(_text("monitor", name)).name for name in fields["monitor"]
        )
        fixed = {"corpus": corpus, "vocabulary": vocabulary, "seed": seed}
        return from_mapping(Run, {**fields, **fixed, **asdict(regime)})

    def seconds(self, run: Run) -> float:
        """The estimated time of a run on one GPU, in seconds."""
        size, speed = SIZES[run.size], self.speed
        total, rest = (size.flops(run.vocabulary, n) for n in (run.context, 0))
        attention: float = getattr(speed, Attention.parse(run.attention).family)
        return run.tokens * (rest / speed.model + (total - rest) / attention) + speed.overhead


def merge_runs(planned: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Each run once. A run is captured if any of its entries asks for a capture."""
    found: dict[Run, tuple[int, ...]] = {}
    for each in planned:
        found[each.run] = each.capture_heads or found.get(each.run, ())
    return [PlannedRun(run, heads) for run, heads in found.items()]


def with_families(planned: Sequence[PlannedRun], families: Mapping[str, str]) -> list[PlannedRun]:
    """The same runs with the attention families renamed.

    {"kernels": "emulator"} replaces the kernels, which need a GPU, by the emulator, which computes
    the same.
    """

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


def _steps(name: str, fraction: Any, steps: int) -> int:
    """The steps of a field of `_RUN_FRACTIONS`: at least one if the fraction is not 0."""
    if type(fraction) not in (int, float) or not 0 <= fraction <= 1:
        raise ValueError(f"{name}={fraction!r} is not a fraction of the steps, from 0 to 1")
    return max(1, round(fraction * steps)) if fraction else 0


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: {value!r} is not a text")
    return value


def _settings(grids: Sequence[Mapping[str, tuple[Any, ...]]]) -> Iterator[dict[str, Any]]:
    for grid in grids:
        for values in itertools.product(*grid.values()):
            yield dict(zip(grid, values, strict=True))
