"""Where evaluations, checkpoints and adapters are inside a folder that a user names."""

import logging
from pathlib import Path
from typing import Any

import yaml

from qerl.evaluation.result import RESULT_FILE, EvalResult
from qerl.evaluation.run_log import CONFIG_FILE

logger = logging.getLogger(__name__)

_ADAPTER_CONFIG = "adapter_config.json"


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete ``checkpoint-N``; incomplete ones (killed while saving) and stray files are skipped."""
    found = [p for p in folder.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit() and p.is_dir()]
    for path in sorted(found, key=lambda p: int(p.name.removeprefix("checkpoint-")), reverse=True):
        if (path / "trainer_state.json").is_file():  # written last
            return path
        logger.warning("%s is incomplete (no trainer_state.json) and is skipped", path)
    return None


def find_adapter(run: str | Path) -> Path:
    """The adapter of a run: the folder itself, its ``adapter`` (a finished run's), or its newest checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    root = Path(run)
    newest = newest_checkpoint(root) if root.is_dir() else None
    for folder in (root, root / "adapter", newest):
        if folder is not None and (folder / _ADAPTER_CONFIG).is_file():
            return folder
    raise FileNotFoundError(
        f"{root} holds no adapter: neither {_ADAPTER_CONFIG}, nor a folder adapter or checkpoint-N with one. Give the "
        "output_dir of a run, one of its checkpoints, or an adapter folder"
    )


def run_settings(adapter: Path) -> dict[str, Any]:
    """``config.yaml`` of the run that the adapter folder lies in (directly); empty where there is none."""
    for folder in (adapter, adapter.parent):
        if (folder / CONFIG_FILE).is_file():
            return yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return {}


def finished_evaluations(folder: str | Path) -> dict[str, EvalResult]:
    """Task name -> result, of ``folder`` itself or, where it is none, of the folders directly inside it.

    Raises:
        FileNotFoundError: there is no finished evaluation.
        ValueError: two evaluations of one task in the folder, or a damaged file.
    """
    root = Path(folder)
    single = (root / RESULT_FILE).is_file()
    found = [root] if single else sorted(path.parent for path in root.glob(f"*/{RESULT_FILE}"))
    if not found:
        raise FileNotFoundError(
            f"{root} holds no finished evaluation: neither {RESULT_FILE} nor folders with one. Give the folder that "
            "`qerl eval` printed, or one task's folder in it"
        )
    results: dict[str, EvalResult] = {}
    places: dict[str, Path] = {}
    for path in found:
        result = EvalResult.load(path)
        if result.task in results:
            raise ValueError(
                f"{root} holds two evaluations of {result.task}: {places[result.task].name} and {path.name}; name one "
                "of them instead"
            )
        results[result.task], places[result.task] = result, path
    return results
