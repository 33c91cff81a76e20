"""``qerl quantize`` as a command: summary, exit codes, nothing heavy at import time."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from qerl.cli.errors import user_errors
from qerl.cli.quantize import quantize
from qerl.formats.checkpoint import CheckpointReader


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command("quantize")(user_errors()(quantize))
    return app


def test_summary(make_llama: Callable[..., Path], tmp_path: Path, app: typer.Typer) -> None:
    out = tmp_path / "out"
    arguments = [str(make_llama()), str(out), "--keep", "o_proj", "--keep", "model.layers.0.mlp.*"]
    result = CliRunner().invoke(app, [*arguments, "--method", "mse"])
    assert result.exit_code == 0, result.output
    for text in ("nvfp4 (mse)", "SQNR down_proj", "bits per weight", "2 x kept by pattern 'o_proj'"):
        assert text in result.output
    assert len(CheckpointReader(out).packed_modules()) == 9


def test_plain_copy(make_llama: Callable[..., Path], tmp_path: Path, app: typer.Typer) -> None:
    result = CliRunner().invoke(app, [str(make_llama()), str(tmp_path / "out"), "--format", "bf16"])
    assert result.exit_code == 0, result.output
    assert CheckpointReader(tmp_path / "out").quantization is None


def test_user_errors_are_one_line_and_exit_code_two(
    make_llama: Callable[..., Path], tmp_path: Path, app: typer.Typer
) -> None:
    folder, out = str(make_llama()), str(tmp_path / "out")
    assert CliRunner().invoke(app, [folder, out]).exit_code == 0
    for arguments, text in (
        ([folder, out], "use force"),
        ([str(tmp_path / "absent"), out + "2"], "no checkpoint folder"),
        ([folder, out + "2", "--format", "int3"], "unknown weight format 'int3'"),
        ([out, out + "2"], "already quantized"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert text in result.output
        assert "Traceback" not in result.output
    assert CliRunner().invoke(app, [folder, out, "--force"]).exit_code == 0


def test_importing_the_command_does_not_import_torch() -> None:
    code = "import sys, qerl.cli.quantize; sys.exit('torch' in sys.modules or 'rich.progress' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
