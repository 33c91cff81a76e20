"""Where the finished evaluations are inside a folder that a user names."""

from pathlib import Path

from qerl.evaluation.result import RESULT_FILE, EvalResult


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
