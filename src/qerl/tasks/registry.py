"""``load_task``: a task from its name, from a reasoning-gym data set, from a file or from a hub data set."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qerl.tasks.answers import AnswerTask, check_gold
from qerl.tasks.base import Example, Excluded, Task
from qerl.tasks.benchmarks import ALIASES, BENCHMARKS
from qerl.tasks.examples import build_examples, hold_out, separate
from qerl.tasks.prompts import prompt_template
from qerl.tasks.sources import FILE_SUFFIXES, Columns, HubDataset, Rows, hub_splits, read_file, read_hub

logger = logging.getLogger(__name__)

DATA_ENV = "QERL_DATA"
_GYM_PREFIX = "reasoning_gym:"
_CODE_PREFIX = "code:"
_COMMON = ("prompt", "system", "think_opened")
_COLUMNS = ("question", "answer", "solution")
_SPLITTING = ("split", "test_size", "seed")
_CODE = ("show_tests", "max_cases", "tolerance", "scoring", "max_timeouts", "executor")


def load_task(spec: str, **options: Any) -> Task:
    """Load a task.

    Args:
        spec: A name of ``BENCHMARKS`` or ``ALIASES``; ``reasoning_gym:NAME``; a path to a .jsonl, .json or .parquet
            file; the id of a hub data set (``owner/name``); or ``code:`` before such a path or id, for programs that
            are scored on the test cases of their rows (:mod:`qerl.tasks.code`).
        **options: For all: ``prompt`` (a style of ``prompts.STYLES`` or a text with ``{question}``), ``system``,
            ``think_opened``. For benchmarks: ``data_dir`` (default: the environment variable ``QERL_DATA``), a
            folder of JSONL files; without it the hub is asked. For reasoning-gym: ``size`` (1024), ``test_size``
            (256), ``seed`` (0), and every field of the data set's own configuration. For files and hub data
            sets: ``question``, ``answer``, ``solution`` (column names), ``split`` ("train" or "test" for a file:
            which side its rows are; a split name for the hub; default: train, and the hub's test split if there
            is one), ``test_size`` (rows held out of train for the test side, by ``seed``), ``config`` (hub). For
            programs: ``question``, ``show_tests``, ``max_cases``, ``tolerance``, ``scoring``, ``max_timeouts`` and
            ``executor`` (:func:`qerl.sandbox.executors.executor_of`).

    Raises:
        ValueError: Unknown names (with the nearest known one), unknown options, empty golds (with row numbers),
            a missing file or column, too few distinct questions.
    """
    spec = ALIASES.get(spec, spec)
    if spec.startswith(_GYM_PREFIX):
        from qerl.tasks.gym import load_gym_task

        common = {key: options.pop(key) for key in _COMMON if key in options}
        return load_gym_task(spec.removeprefix(_GYM_PREFIX), common, **options)
    if spec in BENCHMARKS:
        return _load_benchmark(spec, options)
    programs = spec.startswith(_CODE_PREFIX)
    source = spec.removeprefix(_CODE_PREFIX)
    if Path(source).suffix in FILE_SUFFIXES:
        return _load_file(spec, Path(source).expanduser(), programs, options)
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return _load_hub(spec, source, programs, options)
    if programs:
        raise ValueError(f"task {spec!r}: after code: comes a path to a .jsonl, .json or .parquet file, or owner/name")
    raise ValueError(f"unknown task {spec!r}{_suggestion(spec)}; known: {', '.join((*BENCHMARKS, *ALIASES))}, "
                     "reasoning_gym:NAME, a path to .jsonl/.json/.parquet, a hub data set owner/name, or code: before "
                     "one of the last two")  # fmt: skip


def _suggestion(spec: str) -> str:
    known = [*BENCHMARKS, *ALIASES, _GYM_PREFIX + "chain_sum"]
    near = difflib.get_close_matches(spec.lower(), known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _refuse_unknown(where: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{where}: unknown option {key!r}{hint}; known: {', '.join(known)}")


def _load_benchmark(name: str, options: dict[str, Any]) -> Task:
    benchmark = BENCHMARKS[name]
    _refuse_unknown(name, options, (*_COMMON, "data_dir", *(_CODE if benchmark.programs else ())))
    folder = options.get("data_dir") or os.environ.get(DATA_ENV)
    sides: dict[str, Rows] = {}
    missing: tuple[str, ...] = ()
    if folder:
        sides, missing = _local_sides(name, Path(folder).expanduser())
    else:
        for side, _, split in benchmark.sides():
            where = f"{benchmark.hub.id}, split {split}"
            sides[side] = Rows(read_hub(benchmark.hub, split), benchmark.columns, where, f"{name}-{side}")
    return _make(name, sides, benchmark.programs, options, missing)


def _local_sides(name: str, folder: Path) -> tuple[dict[str, Rows], tuple[str, ...]]:
    """The sides whose files are in the folder, and the names of the files that are not."""
    benchmark = BENCHMARKS[name]
    sides: dict[str, Rows] = {}
    missing: list[str] = []
    for side, file, _ in benchmark.sides():
        path = folder / file
        if path.is_file():
            sides[side] = Rows(read_file(path), Columns(), str(path), f"{name}-{side}")
        else:
            missing.append(file)
    if not sides:
        raise ValueError(
            f"task {name}: the data folder {folder} has no {' and no '.join(missing)}; add one, or unset "
            f"data_dir / {DATA_ENV} to read {benchmark.hub.id} from the hub"
        )
    if missing:
        logger.info("task %s: the data folder %s has no %s; that side stays empty", name, folder, missing[0])
    return sides, tuple(missing)


def _load_file(spec: str, path: Path, programs: bool, options: dict[str, Any]) -> Task:
    _refuse_unknown(spec, options, (*_COMMON, *_SPLITTING, *(("question", *_CODE) if programs else _COLUMNS)))
    split = options.get("split", "train")
    if split not in ("train", "test"):
        raise ValueError(f"{path}: split={split!r}; a file is either the 'train' or the 'test' side")
    return _make(spec, {split: Rows(read_file(path), _columns(options), str(path), path.stem)}, programs, options)


def _load_hub(spec: str, name: str, programs: bool, options: dict[str, Any]) -> Task:
    known = (*_COMMON, *_SPLITTING, "config", *(("question", *_CODE) if programs else _COLUMNS))
    _refuse_unknown(spec, options, known)
    source = HubDataset(name, options.get("config"))
    available = hub_splits(source)
    wanted = [options["split"]] if "split" in options else [s for s in ("train", "test") if s in available]
    if not wanted or any(split not in available for split in wanted):
        raise ValueError(f"{spec}: no split {options.get('split', 'train')!r}; it has {', '.join(available)}")
    sides = {
        "train" if split.startswith("train") else "test": Rows(
            read_hub(source, split), _columns(options), f"{spec}, split {split}", f"{name}-{split}"
        )
        for split in wanted
    }
    return _make(spec, sides, programs, options)


def _columns(options: Mapping[str, Any]) -> Columns:
    return Columns(**{key: options.get(key) for key in _COLUMNS})


def _make(
    name: str, sides: Mapping[str, Rows], programs: bool, options: Mapping[str, Any], missing: tuple[str, ...] = ()
) -> Task:
    """The task of raw rows; ``options`` holds known ones only."""
    if programs:
        from qerl.tasks.code import code_task

        passed = (*_COMMON, "question", "test_size", "seed", *_CODE)
        task: Task = code_task(name, sides, **{key: options[key] for key in passed if key in options})
    else:
        task = _answer_task(name, sides, options)
    task.report = replace(task.report, missing_files=missing)
    return task


def _answer_task(name: str, sides: Mapping[str, Rows], options: Mapping[str, Any]) -> AnswerTask:
    built: dict[str, list[Example]] = {"train": [], "test": []}
    excluded: tuple[Excluded, ...] = ()
    for side, (rows, columns, where, id_prefix) in sides.items():
        built[side], left_out = build_examples(
            rows, columns, where=where, id_prefix=id_prefix, check_gold=check_gold
        )  # fmt: skip
        excluded += left_out
    train, test = hold_out(
        name, built["train"], built["test"], options.get("test_size", 0), options.get("seed", 0)
    )  # fmt: skip
    train, test, report = separate(train, test, excluded, name)
    template = prompt_template(options.get("prompt", "boxed"), options.get("system"))
    return AnswerTask(name, train, test, template, report=report, think_opened=options.get("think_opened", False))
