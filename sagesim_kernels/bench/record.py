"""The record of a run: a JSON file that is valid after every case and can be continued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sagesim.files import write_text

FORMAT: Final = 1
"""The version of the format. It changes if older results cannot be compared with newer ones."""

_FIELDS: Final = {"format", "command", "machine", "settings", "cases", "lost"}


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
        ValueError: if the file is not a record of this format.
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
    if missing := _FIELDS - document.keys():
        raise ValueError(f"{path}: not a record of sagesim_kernels.bench: no {min(missing)}")
    return document


def _refuse_other(path: Path, what: str, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in dict.fromkeys([*there, *now]):
        if there.get(name) != now.get(name):
            raise ValueError(
                f"{path}: {name} of the {what} is {there.get(name)!r} in the record and "
                f"{now.get(name)!r} now; results are not mixed, give another --out"
            )
