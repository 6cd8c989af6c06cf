"""The record of a run: a JSON file that is valid after every case and can be continued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sagesim.files import write_text
from sagesim_kernels.bench.fields import (
    COUNT,
    FLAG,
    NAME,
    NUMBER,
    NUMBERS,
    POSITIVE,
    TEXT,
    Each,
    Every,
    Structure,
    check,
    or_null,
)

FORMAT: Final = 1
"""The version of the format. It changes if older results cannot be compared with newer ones."""

_PASS: Final = {"ms": POSITIVE, "quartiles_ms": Every(NUMBER), "host_ms": NUMBER, "waited?": NUMBER}
_WALL: Final = {"ms": POSITIVE}
_RUN: Final = {
    "forward": _PASS,
    "backward": _PASS,
    "both": _PASS,
    "saved_bytes": or_null(NUMBER),
    "added_bytes": or_null(NUMBER),
    "jobs_ms?": or_null(NUMBERS),
}
_SHAPE: Final = {
    "batch": COUNT,
    "heads": COUNT,
    "tokens": COUNT,
    "head_dim": COUNT,
    "is_causal": FLAG,
    "flop": {"forward": POSITIVE, "backward": POSITIVE, "both": POSITIVE},
}
_NOT_RUN: Final = {"not_run": Each(TEXT)}
_OF_KEYS: Final = {"kv_heads": COUNT, "keys": COUNT}
_TIMED: Final = {**_SHAPE, **_NOT_RUN, "runs": Each(_RUN)}
_PARTS: Final[dict[str, Structure]] = {
    "speed": _TIMED,
    "payoff": _TIMED,
    "masks": _TIMED | _OF_KEYS,
    "models": _TIMED | _OF_KEYS | {"runs": Each(_RUN | {"wall": _WALL})},
    "training": {**_NOT_RUN, "runs": Each({"step": {"ms": POSITIVE}, "wall": _WALL})},
    "accuracy": {
        **_NOT_RUN,
        "errors": Each(dict.fromkeys(("o", "dq", "dk", "dv"), POSITIVE)),
    },
}
"""The fields of a case that tables and figures read, for each part."""

_DOCUMENT: Final[Structure] = {
    "command": TEXT,
    "machine": {"gpu": NAME},
    "settings": {
        "specs": Every(TEXT),
        "peers": Every(TEXT),
        "dtype": TEXT,
        "code?": or_null(TEXT),
        "settling_s?": POSITIVE,  # see `timing.SETTLING`; older records have none
    },
    "cases": Each({"part": TEXT}),
    "lost": Each(Each(TEXT)),
}


class Record:
    """The document of a file.

    document:
        format, command, settings: of the run.
        machine: from `machine.describe`.
        cases: results, by the `key` of their case.
        lost: for each case, the contenders after which the device failed, with the reason.
    """

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path = path
        self.document = document

    @classmethod
    def open(
        cls, path: Path, *, machine: Mapping[str, Any], settings: Mapping[str, Any], command: str
    ) -> Record:
        """The record at a path, or a new one, which is written at once.

        Raises:
            ValueError: if the record has another machine or other settings; it names the field.
            WriteError: if the record cannot be written.
        """
        if path.exists():
            document = read(path)
            for what, now in (("machine", machine), ("settings", settings)):
                _refuse_other(path, what, document[what], json.loads(json.dumps(now)))
        else:
            document = {
                "format": FORMAT,
                "command": command,
                "machine": machine,
                "settings": settings,
                "cases": {},
                "lost": {},
            }
        record = cls(path, document)
        record.write()
        return record

    def __contains__(self, key: str) -> bool:
        return key in self.document["cases"]

    def add(self, key: str, result: Mapping[str, Any]) -> None:
        """Add the result of a case and write the record."""
        self.document["cases"][key] = result
        self.write()

    def lose(self, key: str, contender: str, why: str) -> None:
        """Note that the device failed after a contender, so that the next run leaves it out."""
        self.document["lost"].setdefault(key, {})[contender] = why
        self.write()

    def lost(self, key: str) -> Mapping[str, str]:
        """Contenders of a case after which the device failed, with the reason."""
        return self.document["lost"].get(key, {})

    def write(self) -> None:
        write_text(self.path, json.dumps(self.document, indent=1, allow_nan=False) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Read the document of a record.

    Raises:
        ValueError: if the file is not a record of this format; it names the file and the field.
        OSError: if the file cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(document, dict) or "format" not in document:
        raise ValueError(f"{path}: not a record of sagesim_kernels.bench")
    if document["format"] != FORMAT:
        raise ValueError(f"{path}: a record of format {document['format']}, not {FORMAT}")
    try:
        _check(document)
    except ValueError as error:
        raise ValueError(f"{path}: not a record of sagesim_kernels.bench: {error}") from None
    return document


def _check(document: dict[str, Any]) -> None:
    """Check the fields of a document."""
    check(document, _DOCUMENT, "")
    if document["settings"].get("code") is not None:
        check(document["machine"], {"compute_capability": TEXT}, "machine")
    for key, case in document["cases"].items():
        part = case["part"]
        if part not in _PARTS:
            known = ", ".join(_PARTS)
            raise ValueError(f"cases[{key!r}].part is {part!r}, not one of {known}")
        check(case, _PARTS[part], f"cases[{key!r}]")


def _refuse_other(path: Path, what: str, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in dict.fromkeys([*there, *now]):
        if there.get(name) != now.get(name):
            raise ValueError(
                f"{path}: {name} of the {what} is {there.get(name)!r} in the record and "
                f"{now.get(name)!r} now; results are not mixed, give another --out"
            )
