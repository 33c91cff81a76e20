"""``qerl report`` and ``qerl doctor``."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from qerl.cli.doctor import gpu_problems
from qerl.cli.main import app
from qerl.evaluation.run_log import RunWriter

runner = CliRunner()


def test_report_prints_its_path(tmp_path: Path) -> None:
    RunWriter(tmp_path).write_step(1, {"reward": 0.5})
    result = runner.invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert Path(result.output.replace("\n", "")) == tmp_path / "report.html"
    assert (tmp_path / "report.html").is_file()


def test_report_of_no_run_is_one_line(tmp_path: Path) -> None:
    result = runner.invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "metrics.jsonl and summary.json are both missing" in result.output


def test_doctor_lists_the_machine() -> None:
    result = runner.invoke(app, ["doctor"])
    assert "torch" in result.output
    assert "usable cores" in result.output
    assert result.exit_code == 0, result.output


def test_doctor_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.evaluation.environment.package_versions", dict)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "torch is not installed" in result.output


def test_gpu_problems() -> None:
    old = {"name": "T4", "memory_gb": 15.8, "capability": "7.5"}
    new = {"name": "H200", "memory_gb": 150.0, "capability": "9.0"}
    assert gpu_problems({"gpus": [], "packages": {}}) == []
    assert gpu_problems({"gpus": [new], "packages": {"triton": "3.9"}}) == []
    [problem] = gpu_problems({"gpus": [old], "packages": {"triton": "3.9"}})
    assert "T4 has compute capability 7.5" in problem
    [problem] = gpu_problems({"gpus": [new], "packages": {}})
    assert "triton" in problem
