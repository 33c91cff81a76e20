"""``qerl quantize`` as a command: summary, exit codes, nothing heavy at import time."""

import signal
import subprocess
import sys
import time
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
        ([folder, out], "use --force"),
        ([str(tmp_path / "absent"), out + "2"], "no checkpoint folder"),
        ([folder, out + "2", "--format", "int3"], "unknown weight format 'int3'; supported: nvfp4, nf4, mxfp4, bf16"),
        ([out, out + "2"], "already quantized"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert text in " ".join(result.output.split())
        assert "Traceback" not in result.output
    assert CliRunner().invoke(app, [folder, out, "--force"]).exit_code == 0


def test_mxfp4_takes_its_own_bits(make_llama: Callable[..., Path], tmp_path: Path, app: typer.Typer) -> None:
    folder, out = str(make_llama()), tmp_path / "out"
    result = CliRunner().invoke(app, [folder, str(out), "--format", "mxfp4"])
    assert result.exit_code == 0, result.output
    assert "mxfp4 (rtn)" in result.output and "4.250" in result.output
    refused = CliRunner().invoke(app, [folder, str(out) + "2", "--format", "mxfp4", "--method", "mse"])
    assert refused.exit_code == 2 and "mxfp4 has no method 'mse'" in refused.output


def test_importing_the_command_does_not_import_torch() -> None:
    code = "import sys, qerl.cli.quantize; sys.exit('torch' in sys.modules or 'rich.progress' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Where the tests run in a shell's background, SIGINT is ignored and children inherit that.
_SLOW = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from qerl.formats.nvfp4 import NVFP4
def slow(self, weights, method="rtn"):
    pathlib.Path(sys.argv[3]).touch()
    time.sleep(60)
NVFP4.quantize = slow
sys.argv.insert(1, "quantize")
from qerl.cli.main import main
main()
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_stopped_command_leaves_nothing_beside_the_target(
    signum: signal.Signals, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """SIGTERM left a hidden folder with everything written so far."""
    place, started = tmp_path / "models", tmp_path / "started"
    place.mkdir()
    code = _SLOW.replace("sys.argv[3]", repr(str(started)))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(make_llama()), str(place / "out")], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert any(path.name.startswith(".out.incomplete") for path in place.iterdir()), "nothing was under way"
    process.send_signal(signum)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "Traceback" not in errors
    assert list(place.iterdir()) == []
