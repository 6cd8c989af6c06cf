"""The record of a run: one JSON file, complete whenever it is read, and continued by the next."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sagesim._atomic import replacing

FORMAT: Final = 1
"""Raised where results of before can no longer be put beside later ones."""

_FIELDS: Final = {"format", "command", "machine", "settings", "cases", "lost"}


class Record:
    """The document of a file.

    document: format; command; machine, of `machine.describe`; settings; cases, results by the
    `key` of their case; and lost, the contenders that a device did not survive, by case, with why.
    """

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path = path
        self.document = document

    @classmethod
    def open(
        cls, path: Path, *, machine: Mapping[str, Any], settings: Mapping[str, Any], command: str
    ) -> Record:
        """The record to continue, or a new one, written at once.

        Raises:
            ValueError: naming what differs, for a record of another machine or other settings.
            OSError: where it cannot be written.
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
        """Keep a case's result, on disk."""
        self.document["cases"][key] = result
        self.write()

    def lose(self, key: str, contender: str, why: str) -> None:
        """Keep that a contender cost the device, so that a next run goes on without it."""
        self.document["lost"].setdefault(key, {})[contender] = why
        self.write()

    def lost(self, key: str) -> Mapping[str, str]:
        """Contenders of a case that are not to be run again, and why."""
        return self.document["lost"].get(key, {})

    def write(self) -> None:
        with replacing(self.path) as file:
            text = json.dumps(self.document, indent=1, allow_nan=False)
            file.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """The document of a record.

    Raises:
        ValueError: naming the path, where it is no record, or one of another format.
        OSError: where it cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(document, dict) or "format" not in document:
        raise ValueError(f"{path}: not a record of sagesim_kernels.bench")
    if document["format"] != FORMAT:
        raise ValueError(f"{path}: a record of format {document['format']}, not {FORMAT}")
    if missing := _FIELDS - document.keys():
        raise ValueError(f"{path}: not a record of sagesim_kernels.bench: no {min(missing)}")
    return document


def _refuse_other(path: Path, what: str, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in dict.fromkeys([*there, *now]):
        if there.get(name) != now.get(name):
            raise ValueError(
                f"{path}: made with another {what}: {name} {there.get(name)!r} there, "
                f"{now.get(name)!r} now; results are not mixed, give another --out"
            )
