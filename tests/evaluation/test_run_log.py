"""The run folder: append-only, survives kills, resumes without repeated steps, reads back."""

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from qerl.evaluation.run_log import (
    METRICS,
    NotARunError,
    RunExistsError,
    RunWriter,
    read_run,
    update_summary,
)


def write_steps(writer: RunWriter, first: int, last: int) -> None:
    for step in range(first, last + 1):
        writer.write_step(step, {"reward": step / 10, "kl": None})
        writer.write_samples(step, [{"prompt": "p", "completion": f"c{step}", "reward": 1.0, "answer": "1"}])


def test_round_trip(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    writer.write_config({"model": "m", "lr": 1e-5, "targets": ["q_proj"]})
    writer.write_environment({"python": "3.11"})
    values = dict.fromkeys(METRICS, 0.5) | {"kl": None, "loss": math.nan, "grad_norm": np.float32(2.0), "extra": 3}
    writer.write_step(1, values)
    writer.write_samples(1, [{"prompt": "p", "completion": "c", "reward": 1, "answer": "2", "advantage": 0.5}])
    writer.update_summary(steps=1, seconds={"train": 2.0})
    writer.update_summary(seconds={"eval": 1.0}, notes=["n"])

    run = read_run(tmp_path / "run")
    [row] = run.metrics
    assert row["step"] == 1
    assert row["time"] > 1.7e9
    assert row["extra"] == 3
    assert run.series("grad_norm") == ([1], [2.0])
    assert run.series("kl") == ([], [])
    assert math.isnan(run.series("loss")[1][0])
    assert run.samples[0]["advantage"] == 0.5
    assert yaml.safe_load(run.config_text or "") == {"model": "m", "lr": 1e-5, "targets": ["q_proj"]}
    assert run.environment == {"python": "3.11"}
    assert run.summary == {"steps": 1, "seconds": {"train": 2.0, "eval": 1.0}, "notes": ["n"]}
    assert run.before is None


def test_every_line_is_on_disk_at_once_and_valid_json(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.write_step(1, {"loss": math.inf, "reward": math.nan, "lr": -math.inf})
    line = (tmp_path / "metrics.jsonl").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads(line, parse_constant=refuse)
    assert (row["loss"], row["reward"], row["lr"]) == ("Infinity", "NaN", "-Infinity")
    assert read_run(tmp_path).series("lr") == ([1], [-math.inf])


def test_text_of_any_kind_survives(tmp_path: Path) -> None:
    odd = 'line\u2028separator \x85 \ud83d lone surrogate \n\t"quoted" \u00e9'
    RunWriter(tmp_path).write_samples(1, [{"prompt": odd, "completion": odd, "reward": None, "answer": odd}])
    (tmp_path / "metrics.jsonl").write_text("")
    assert read_run(tmp_path).samples[0]["completion"] == odd


def test_resume_drops_the_steps_that_are_made_again(tmp_path: Path) -> None:
    write_steps(RunWriter(tmp_path), 1, 7)
    stray = tmp_path / "notes.txt"
    stray.write_text("mine")
    writer = RunWriter(tmp_path, resume_step=5)
    assert [row["step"] for row in read_run(tmp_path).metrics] == [1, 2, 3, 4, 5]
    write_steps(writer, 6, 8)
    run = read_run(tmp_path)
    assert [row["step"] for row in run.metrics] == list(range(1, 9))
    assert [row["completion"] for row in run.samples] == [f"c{step}" for step in range(1, 9)]
    assert stray.read_text() == "mine"


def test_half_written_line_is_dropped_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_steps(RunWriter(tmp_path), 1, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    with caplog.at_level(logging.WARNING):
        assert len(read_run(tmp_path).metrics) == 3
    assert "half-written last line (16 bytes)" in caplog.text
    write_steps(RunWriter(tmp_path, resume_step=3), 4, 4)
    assert [row["step"] for row in read_run(tmp_path).metrics] == [1, 2, 3, 4]


def test_new_run_does_not_mix_with_an_old_one(tmp_path: Path) -> None:
    write_steps(RunWriter(tmp_path), 1, 1)
    with pytest.raises(RunExistsError, match=r"already holds a run .*metrics\.jsonl"):
        RunWriter(tmp_path)
    with pytest.raises(NotARunError, match=r"resumed at step 3: metrics\.jsonl is missing"):
        RunWriter(tmp_path / "other", resume_step=3)
    with pytest.raises(ValueError, match="resume_step = -1"):
        RunWriter(tmp_path, resume_step=-1)


@pytest.mark.parametrize(
    ("step", "metrics", "message"),
    [
        (2, {"reward": 1.0}, "step 2 after step 2"),
        (3, {"reward": "high"}, "'reward' is a str"),
        (3, {"reward": [1.0]}, "'reward' is a list"),
        (3, {"time": 1.0}, "'time' is written by the log itself"),
    ],
)
def test_wrong_steps_are_refused_and_nothing_is_written(tmp_path, step, metrics, message) -> None:
    writer = RunWriter(tmp_path)
    write_steps(writer, 1, 2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=message):
        writer.write_step(step, metrics)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_incomplete_samples_and_odd_configs_are_refused(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    with pytest.raises(ValueError, match="sample of step 1 lacks completion, answer"):
        writer.write_samples(1, [{"prompt": "p", "reward": 1.0}])
    with pytest.raises(ValueError, match="YAML cannot"):
        writer.write_config({"device": object()})
    assert not (tmp_path / "config.yaml").exists()


def test_folder_that_is_no_run_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "stray.txt").write_text("x")
    with pytest.raises(NotARunError, match=r"metrics\.jsonl and summary\.json are both missing"):
        read_run(tmp_path)
    with pytest.raises(NotARunError, match="is not a folder"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", "{]\n", r"metrics\.jsonl, line 1: not valid JSON \([^:]*, column 2\)"),
        ("metrics.jsonl", "[1]\n", r"metrics\.jsonl, line 1: a JSON list"),
        ("metrics.jsonl", '{"reward": 1}\n', "step = None"),
        ("summary.json", "{", r"summary\.json is not valid JSON"),
        ("summary.json", "[]", "not an object"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)


def test_summary_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update_summary(tmp_path, steps=1)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        update_summary(tmp_path, steps=2)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
