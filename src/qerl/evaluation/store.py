"""The folder of one evaluation: ``settings.json``, ``samples.jsonl`` (grows), ``result.json`` (last)."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from qerl.evaluation.result import (
    RESULT_FILE,
    SAMPLES_FILE,
    EvalResult,
    EvalSettings,
    SampleRecord,
    load_records,
)
from qerl.evaluation.storage import dump_line, read_json, write_json, write_text

logger = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"


class SettingsMismatchError(ValueError):
    """The folder holds results of an evaluation with other settings."""


class SampleStore:
    """Records of one evaluation, in memory and, where a directory is given, on disk.

    ``records`` are the completions so far, ``done`` the ids of problems with all ``n`` samples. Without a
    directory nothing is written.
    """

    def __init__(self, directory: Path | None, settings: EvalSettings, *, resume: bool) -> None:
        self.directory, self.settings = directory, settings
        self.records: list[SampleRecord] = []
        self.done: set[str] = set()
        if directory is None:
            return
        if not resume:
            for name in (RESULT_FILE, SETTINGS_FILE, SAMPLES_FILE):
                (directory / name).unlink(missing_ok=True)
        if (directory / SETTINGS_FILE).is_file():
            self._check_settings(directory)
            self._load(directory)
        else:
            self._require_empty(directory)
            write_json(directory / SETTINGS_FILE, asdict(settings))

    def finished_result(self) -> EvalResult | None:
        """The stored result when the evaluation is already complete, else ``None``."""
        if self.directory is None or not (self.directory / RESULT_FILE).is_file():
            return None
        return EvalResult.load(self.directory)

    def append(self, records: Sequence[SampleRecord]) -> None:
        """Add the completions of whole problems; on disk before this returns."""
        self.records.extend(records)
        self.done.update(record.id for record in records)
        if self.directory is None:
            return
        with (self.directory / SAMPLES_FILE).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(dump_line(asdict(record)) for record in records)
            file.flush()
            os.fsync(file.fileno())

    def finish(self, result: EvalResult) -> None:
        """Write the result: its presence marks the evaluation as complete."""
        if self.directory is not None:
            result.save(self.directory)

    def _check_settings(self, directory: Path) -> None:
        stored, wanted = read_json(directory / SETTINGS_FILE), asdict(self.settings)
        differing = [name for name in wanted if stored.get(name) != wanted[name]]
        if differing:
            shown = "; ".join(f"{name}: {stored.get(name)!r} there, {wanted[name]!r} here" for name in differing)
            raise SettingsMismatchError(
                f"{directory} holds results of other settings ({shown}). Use another output folder, or start "
                "over with resume=False (--fresh)"
            )

    def _require_empty(self, directory: Path) -> None:
        stray = [name for name in (SAMPLES_FILE, RESULT_FILE) if (directory / name).exists()]
        if stray:
            raise SettingsMismatchError(
                f"{directory} holds {' and '.join(stray)} without {SETTINGS_FILE}: whose, is unknown. "
                "Use another output folder, or start over with resume=False (--fresh)"
            )

    def _load(self, directory: Path) -> None:
        stored = load_records(directory)
        counts = Counter(record.id for record in stored)
        self.records = [record for record in stored if counts[record.id] == self.settings.n]
        self.done = {record.id for record in self.records}
        # Rewritten: a half-written line would otherwise be joined with the next record.
        write_text(directory / SAMPLES_FILE, "".join(dump_line(asdict(record)) for record in self.records))
        if self.records and not (directory / RESULT_FILE).is_file():
            logger.info(
                "%s: continuing with %d of %d problems done",
                directory,
                len(self.done),
                self.settings.problems,
            )
