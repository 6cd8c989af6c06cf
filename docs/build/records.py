"""Records of the benchmark in docs/data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from grid import listed

from sagesim.spec import FACTORED_QK
from sagesim_kernels.bench.cases import all_cases
from sagesim_kernels.bench.machine import card, one_line, sources_hash
from sagesim_kernels.bench.record import read

DATA = Path(__file__).parents[1] / "data"
DEFAULT: Final = FACTORED_QK.label()
"""The default spec, as records name it."""

CHANGED: Final = (
    "**Measured with earlier kernels**: their sources have changed since this record was made."
)
ALL_CHANGED: Final = (
    "**Measured with earlier kernels**: their sources have changed since these records were made."
)
SAME_LOOPS: Final = "The loops of the present kernels issue the same instructions."
_OTHER_PARTS: Final = ("models", "masks", "training")
_COUNTS: Final = ("instructions", "instructions_timed")
UNKNOWN: Final = "**Perhaps measured with earlier code**: this record does not name its sources."


def of_models() -> dict[str, Any] | None:
    """The newest record with the part "models"; None if there is none."""
    return next(iter(of_part("models")), None)


def of_models_besides() -> list[dict[str, Any]]:
    """The records besides `of_models`, each with the cases that no record before it has.

    Records of training steps come first, then earlier records of models; the newest of each first.
    """
    models, trained = of_part("models"), of_part("training")
    found: list[dict[str, Any]] = []
    known: set[str] = set()
    for document in (*models[:1], *trained, *models[1:]):
        lacking = {key: c for key, c in document["cases"].items() if key not in known}
        found += [document | {"cases": lacking}] if known and lacking else []
        known |= lacking.keys()
    return found


def of_masks() -> dict[str, Any] | None:
    """The newest record with the part "masks"; None if there is none."""
    return next(iter(of_part("masks")), None)


def of_part(part: str) -> list[dict[str, Any]]:
    """The records with a part, the newest first.

    The newest is bench.json, or the bench_PART_N.json with the largest N if the part was measured
    in runs of its own. The first of these is bench_PART.json.
    """
    found: list[dict[str, Any]] = []
    later = range(len([*DATA.glob(f"bench_{part}_*.json")]) + 1, 1, -1)
    for name in ("bench", *(f"bench_{part}_{i}" for i in later), f"bench_{part}"):
        document = load(name) if (DATA / f"{name}.json").exists() else None
        if document and any(case["part"] == part for case in document["cases"].values()):
            found.append(document)
    return found


def load(name: str) -> dict[str, Any]:
    """The record docs/data/NAME.json, with this path as its "file"."""
    return read(DATA / f"{name}.json") | {"file": f"docs/data/{name}.json"}


def made_by(document: Mapping[str, Any]) -> str:
    """The file of a record from `load`, its command and its machine."""
    return f"`{document['file']}`: `{document['command']}` on {one_line(document['machine'])}"


def described(document: Mapping[str, Any]) -> str:
    """A record's GPU and numbers of tokens in bold, how it was made, and its number of cases."""
    tokens = sorted({case["tokens"] for case in document["cases"].values() if "tokens" in case})
    ends = " to ".join(map(str, dict.fromkeys((tokens[0], tokens[-1]))))
    return (
        f"**{card(document['machine'])}, {ends} tokens:** {made_by(document)}; "
        f"{len(document['cases'])} cases."
    )


def of_cases(document: Mapping[str, Any], wanted: Sequence[str]) -> str:
    """How a record was made, which of the wanted cases it lacks, and its age."""
    lacking = [f"`{key}`" for key in wanted if key not in document["cases"]]
    text = f"{made_by(document)}; {len(wanted) - len(lacking)} of {len(wanted)} cases."
    text += f" Not in this record: {', '.join(lacking)}." if lacking else ""
    return with_age(text, document["machine"])


def of_whole(document: Mapping[str, Any]) -> str:
    """`of_cases` of a record of the whole benchmark; models and masks have records of their own."""
    settings = document["settings"]
    every = (case.key for case in all_cases(settings["specs"], settings["peers"]))
    return of_cases(document, [key for key in every if key.split()[0] not in _OTHER_PARTS])


def age(machine: Mapping[str, Any] | str) -> str:
    """A sentence on a record that was not made with the present kernels; empty otherwise.

    machine: of the record: its fields, or a line for readers.
    """
    if isinstance(machine, str):
        named = re.search(r"\bkernels ([0-9a-f]{12})\b", machine)
        machine = {"kernels": None if named is None else named[1]}
    measured = machine.get("kernels")
    if measured is None:
        return UNKNOWN
    return "" if measured == sources_hash() else CHANGED


def has_present_loops(code: str) -> bool:
    """Whether the loops of the present kernels issue the instructions of those that were timed.

    code: of a record of other code on a Hopper GPU, "sm80".
    """
    rows = (json.loads((DATA / f"{name}.json").read_text())["rows"] for name in _COUNTS)
    present, timed = ([r for r in each if r["capability"] == int(code[2:])] for each in rows)
    return present == timed


def age_of_code(document: Mapping[str, Any]) -> str:
    """`age` of a record of other code, or that its kernels issue the same instructions."""
    if age(document["machine"]) and has_present_loops(document["settings"]["code"]):
        return SAME_LOOPS
    return age(document["machine"])


def age_of_several(machines: Sequence[Mapping[str, Any]]) -> str:
    """`age` of several records; if only some are of earlier kernels, a sentence that names them."""
    old = [machine for machine in machines if age(machine)]
    if not old or len(machines) == 1:
        return age(machines[0])
    if len(old) == len(machines):
        return ALL_CHANGED
    named = listed(str(machine.get("kernels")) for machine in old)
    return f"**Partly measured with earlier kernels**: those of the records with kernels {named}."


def with_age(text: str, machine: Mapping[str, Any] | str) -> str:
    """The text, and `age` as a paragraph below it."""
    return with_paragraph(text, age(machine))


def with_paragraph(text: str, last: str) -> str:
    """The text, and a paragraph below it unless that is empty."""
    return f"{text}\n\n{last}" if last else text
