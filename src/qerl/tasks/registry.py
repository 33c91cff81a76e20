"""``load_task``: a task from its name, from a reasoning-gym data set, from a file or from a hub data set."""

from __future__ import annotations

import difflib
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.tasks.answers import AnswerTask, check_gold
from qerl.tasks.base import Example, Task
from qerl.tasks.examples import build_examples, separate
from qerl.tasks.prompts import prompt_template
from qerl.tasks.sources import FILE_SUFFIXES, Columns, HubDataset, hub_splits, read_file, read_hub

DATA_ENV = "QERL_DATA"
_GYM_PREFIX = "reasoning_gym:"


_USUAL = Columns()


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Where a named task is: file names in a local data folder, and the hub data set with its split names."""

    hub: HubDataset
    train_file: str | None = None
    test_file: str | None = None
    train_split: str | None = None
    test_split: str | None = None
    columns: Columns = _USUAL


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(
        HubDataset("openai/gsm8k", "main"), "gsm8k_train.jsonl", "gsm8k_test.jsonl", "train", "test"
    ),
    "math500": Benchmark(HubDataset("HuggingFaceH4/MATH-500"), None, "math500.jsonl", None, "test"),
    "aime24": Benchmark(HubDataset("HuggingFaceH4/aime_2024"), None, "aime2024.jsonl", None, "train"),
    "aime25": Benchmark(HubDataset("math-ai/aime25"), None, "aime2025.jsonl", None, "test"),
    "amc23": Benchmark(HubDataset("math-ai/amc23"), None, "amc23.jsonl", None, "test"),
    "math": Benchmark(
        HubDataset("DigitalLearningGmbH/MATH-lighteval"), "math_train.jsonl", None, "train", None
    ),
    "bigmath": Benchmark(
        HubDataset("SynthLabsAI/Big-Math-RL-Verified"), "bigmath_slice.jsonl", None, "train", None
    ),
    "deepmath": Benchmark(HubDataset("zwhe99/DeepMath-103K"), "deepmath_slice.jsonl", None, "train", None),
    "dapo17k": Benchmark(
        HubDataset("open-r1/DAPO-Math-17k-Processed", "en"), "dapo17k.jsonl", None, "train", None,
        Columns(question="prompt", answer="solution"),
    ),
}  # fmt: skip


def load_task(spec: str, **options: Any) -> Task:
    """Load a task.

    Args:
        spec: A name of ``BENCHMARKS``; ``reasoning_gym:NAME``; a path to a .jsonl, .json or .parquet file; or the
            id of a hub data set (``owner/name``).
        **options: For all: ``prompt`` (a style of ``prompts.STYLES`` or a text with ``{question}``), ``system``,
            ``think_opened``. For benchmarks: ``data_dir`` (default: the environment variable ``QERL_DATA``), a
            folder of JSONL files; without it the hub is asked. For reasoning-gym: ``size`` (1024), ``test_size``
            (256), ``seed`` (0), and every field of the data set's own configuration. For files and hub data
            sets: ``question``, ``answer``, ``solution`` (column names), ``split`` ("train" or "test" for a file:
            which side its rows are; a split name for the hub; default: train, and the hub's test split if there
            is one), ``test_size`` (rows held out of train for the test side, by ``seed``), ``config`` (hub).

    Raises:
        ValueError: Unknown names (with the nearest known one), unknown options, empty golds (with row numbers),
            a missing file or column, too few distinct questions.
    """
    common = {key: options.pop(key) for key in ("prompt", "system", "think_opened") if key in options}
    if spec.startswith(_GYM_PREFIX):
        from qerl.tasks.gym import load_gym_task

        return load_gym_task(spec.removeprefix(_GYM_PREFIX), common, **options)
    if spec in BENCHMARKS:
        return _load_benchmark(spec, common, **options)
    path = Path(spec).expanduser()
    if path.suffix in FILE_SUFFIXES:
        return _load_file(path, common, **options)
    if spec.count("/") == 1 and not spec.startswith((".", "/", "~")):
        return _load_hub(spec, common, **options)
    raise ValueError(f"unknown task {spec!r}{_suggestion(spec)}; known: {', '.join(BENCHMARKS)}, "
                     "reasoning_gym:NAME, a path to .jsonl/.json/.parquet, or a hub data set owner/name")  # fmt: skip


def _suggestion(spec: str) -> str:
    known = [*BENCHMARKS, _GYM_PREFIX + "chain_sum"]
    near = difflib.get_close_matches(spec.lower(), known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _refuse_unknown(where: str, options: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{where}: unknown option {key!r}{hint}; known: {', '.join(known)}")


def _make(
    name: str,
    common: dict[str, Any],
    train: list[Example],
    test: list[Example],
    unparsable: tuple[str, ...],
) -> Task:
    train, test, report = separate(train, test, unparsable, name)
    template = prompt_template(common.get("prompt", "boxed"), common.get("system"))
    return AnswerTask(name, train, test, template, report=report, think_opened=common.get("think_opened", False))


def _load_benchmark(name: str, common: dict[str, Any], **options: Any) -> Task:
    _refuse_unknown(name, options, ("data_dir",))
    benchmark = BENCHMARKS[name]
    folder = options.get("data_dir") or os.environ.get(DATA_ENV)
    sides: dict[str, list[Example]] = {"train": [], "test": []}
    unparsable: tuple[str, ...] = ()
    for side, file, split in (
        ("train", benchmark.train_file, benchmark.train_split),
        ("test", benchmark.test_file, benchmark.test_split),
    ):
        if file is None or split is None:
            continue
        if folder:
            path = Path(folder).expanduser() / file
            if not path.is_file():
                raise ValueError(
                    f"task {name}: the data folder {folder} has no {file}; add the file, or unset "
                    f"data_dir / {DATA_ENV} to read {benchmark.hub.id} from the hub"
                )
            # local files have the plain column names whatever the hub calls them
            rows, columns, where = read_file(path), Columns(), str(path)
        else:
            where = f"{benchmark.hub.id}, split {split}"
            rows, columns = read_hub(benchmark.hub, split), benchmark.columns
        sides[side], left_out = build_examples(
            rows, columns, where=where, id_prefix=f"{name}-{side}", check_gold=check_gold
        )
        unparsable += left_out
    return _make(name, common, sides["train"], sides["test"], unparsable)


_COLUMN_OPTIONS = ("question", "answer", "solution")


def _load_file(path: Path, common: dict[str, Any], **options: Any) -> Task:
    _refuse_unknown(str(path), options, (*_COLUMN_OPTIONS, "split", "test_size", "seed"))
    split = options.get("split", "train")
    if split not in ("train", "test"):
        raise ValueError(f"{path}: split={split!r}; a file is either the 'train' or the 'test' side")
    columns = Columns(**{key: options.get(key) for key in _COLUMN_OPTIONS})
    examples, unparsable = build_examples(
        read_file(path), columns, where=str(path), id_prefix=path.stem, check_gold=check_gold
    )
    train, test = (examples, []) if split == "train" else ([], examples)
    train, test = _hold_out(str(path), train, test, options)
    return _make(str(path), common, train, test, unparsable)


def _load_hub(spec: str, common: dict[str, Any], **options: Any) -> Task:
    _refuse_unknown(spec, options, (*_COLUMN_OPTIONS, "split", "test_size", "seed", "config"))
    source = HubDataset(spec, options.get("config"))
    columns = Columns(**{key: options.get(key) for key in _COLUMN_OPTIONS})
    available = hub_splits(source)
    wanted = [options["split"]] if "split" in options else [s for s in ("train", "test") if s in available]
    if not wanted or any(split not in available for split in wanted):
        raise ValueError(f"{spec}: no split {options.get('split', 'train')!r}; it has {', '.join(available)}")
    sides: dict[str, list[Example]] = {"train": [], "test": []}
    unparsable: tuple[str, ...] = ()
    for split in wanted:
        side = "train" if split.startswith("train") else "test"
        sides[side], left_out = build_examples(
            read_hub(source, split), columns, where=f"{spec}, split {split}",
            id_prefix=f"{spec}-{split}", check_gold=check_gold,
        )  # fmt: skip
        unparsable += left_out
    train, test = _hold_out(spec, sides["train"], sides["test"], options)
    return _make(spec, common, train, test, unparsable)


def _hold_out(
    where: str, train: list[Example], test: list[Example], options: dict[str, Any]
) -> tuple[list[Example], list[Example]]:
    """Move ``test_size`` random rows of train to an empty test side."""
    size = options.get("test_size", 0)
    if size == 0:
        return train, test
    if test:
        raise ValueError(f"{where}: test_size={size} but there are {len(test)} test rows already; drop one of them")
    if not 0 < size < len(train):
        raise ValueError(f"{where}: test_size={size} must lie between 1 and {len(train) - 1} (rows - 1)")
    chosen = set(random.Random(options.get("seed", 0)).sample(range(len(train)), size))
    return [e for i, e in enumerate(train) if i not in chosen], [e for i, e in enumerate(train) if i in chosen]
