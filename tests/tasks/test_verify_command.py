"""``qerl verify``."""

import json

import typer
from typer.testing import CliRunner

from qerl.cli.verify import verify


def run(*arguments):
    app = typer.Typer()
    app.command()(verify)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_one_line_a_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"gold": "1/2", "prediction": r"so \boxed{0.5}"}, {"id": "b", "gold": "18", "prediction": "19"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(file, "--workers", 1)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines == [
        {"id": 1, "equal": True, "reason": "equal as exact numbers"},
        {"id": "b", "equal": False, "reason": "different exact numbers"},
    ]
    assert "1 of 2 equal" in result.stderr


def test_missing_column(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"gold": "1"}\n')
    result = run(file)
    assert isinstance(result.exception, ValueError) and "row 1: the column 'prediction'" in str(result.exception)
