"""The demo replaces its own runs and nothing else."""

from pathlib import Path

import pytest

from qerl.cli.demo import MARKER, _prepare_folder, _print_summary


def test_a_folder_of_the_users_is_never_removed(tmp_path: Path) -> None:
    """Not even with --force (`make demo OUT=...` passes it), and not even if it looks like a run."""
    (tmp_path / "model").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "thesis.tex").write_text("precious")
    for force in (False, True):
        with pytest.raises(FileExistsError, match="was not made by the demo; it is left alone"):
            _prepare_folder(tmp_path, force)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_its_own_run_is_replaced_only_with_force(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "demo"
    _prepare_folder(out, force=False)
    (out / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(FileExistsError, match="add --force"):
        _prepare_folder(out, force=False)
    _prepare_folder(out, force=True)
    assert [p.name for p in out.iterdir()] == [MARKER]


def test_a_stopped_run_has_a_summary_too(capsys: pytest.CaptureFixture[str]) -> None:
    before = {"accuracy": 0.25, "low": 0.1, "high": 0.4, "n": 8}
    _print_summary({"before": before, "steps": 3}, {"train": 2.0})
    printed = capsys.readouterr().out
    assert "0.250" in printed and "3 steps" in printed
