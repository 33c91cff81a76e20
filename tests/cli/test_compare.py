"""``qerl compare`` on stored evaluations."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qerl.cli.main import app
from qerl.evaluation.comparable import NotComparableError, require_comparable, waivable
from qerl.evaluation.result import EvalResult, EvalSettings, SampleRecord, summarize
from qerl.evaluation.storage import dump_line

runner = CliRunner()


def result_of(correct: Sequence[Sequence[bool]], **settings: Any) -> EvalResult:
    """Problem i of task "sums" has the samples ``correct[i]``."""
    records = [
        SampleRecord(
            id=f"sum-{problem}",
            sample=sample,
            prompt=f"{problem}+1",
            completion="...",
            answer=str(problem + 1),
            extracted="7",
            correct=right,
            score=float(right),
            reason="",
            counter="",
            finish_reason="stop",
            tokens=3,
        )
        for problem, samples in enumerate(correct)
        for sample, right in enumerate(samples)
    ]
    values = {
        "task": "sums",
        "n": len(correct[0]),
        "temperature": 0.0,
        "max_new_tokens": 32,
        "limit": None,
        "seed": 0,
        "problems": len(correct),
        "prompts_digest": "x",
        "first_prompt": "0+1",
        "model": "m",
    }
    return summarize(records, EvalSettings(**{**values, **settings}), 1.0, 1)


def save(result: EvalResult, folder: Path) -> Path:
    from dataclasses import asdict

    result.save(folder)
    (folder / "samples.jsonl").write_text("".join(dump_line(asdict(record)) for record in result.records))
    return folder


def single(pattern: str) -> list[list[bool]]:
    return [[char == "+"] for char in pattern]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """12 problems: 9 gained, 0 lost. McNemar: 2 / 2^9."""
    before = save(result_of(single("---------+--"), weights="bf16"), tmp_path / "a")
    after = save(result_of(single("++++++++++--"), weights="nvfp4", adapter="run", fingerprint="f"), tmp_path / "b")
    return before, after


def test_table_names_the_difference_its_interval_and_the_test(folders: tuple[Path, Path]) -> None:
    result = runner.invoke(app, ["compare", *map(str, folders)])
    assert result.exit_code == 0, result.output
    line = next(line for line in result.output.splitlines() if line.startswith("sums "))
    assert line.split()[:5] == ["sums", "12", "8.3%", "83.3%", "+75.0"]
    assert line.split()[-2:] == ["9/0", "0.004"]
    assert (
        "B is better than A at the 5 % level (9 problems better, 0 worse of 12; McNemar's exact test)" in result.output
    )
    assert "A: m, weights bf16\nB: m, weights nvfp4, adapter run\n" in result.output


def test_json_holds_the_same_figures(folders: tuple[Path, Path]) -> None:
    result = runner.invoke(app, ["compare", *map(str, folders), "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    sums = values["tasks"]["sums"]
    assert (sums["pairs"], sums["gained"], sums["lost"], sums["p_value"]) == (12, 9, 0, 2 / 2**9)
    assert sums["difference"] == pytest.approx(0.75)
    assert 0 < sums["low"] < 0.75 < sums["high"] <= 1
    assert values["not_compared"] == []


def test_order_of_the_folders_flips_the_sign(folders: tuple[Path, Path]) -> None:
    output = runner.invoke(app, ["compare", *map(str, reversed(folders))]).output
    assert "-75.0" in output
    assert "B is worse than A" in output


def test_several_samples_use_the_permutation_test_and_its_seed(tmp_path: Path) -> None:
    before = save(result_of([[False, True]] * 8), tmp_path / "a")
    after = save(result_of([[False, True]] * 5 + [[True, True]] * 3), tmp_path / "b")
    arguments = ["compare", str(before), str(after), "--json"]
    first, second = (json.loads(runner.invoke(app, arguments).output)["tasks"]["sums"] for _ in range(2))
    assert first == second
    assert "permutation" in first["test"]
    # 3 equal gains of 8: 2 of 8 sign patterns are as extreme
    assert first["p_value"] == pytest.approx(0.25, abs=0.02)
    assert "no evidence of a difference" in runner.invoke(app, arguments[:-1]).output


def test_folders_of_several_tasks_are_matched_by_task(tmp_path: Path) -> None:
    for run in ("a", "b"):
        save(result_of(single("+-+-")), tmp_path / run / "sums")
        save(result_of(single("++--"), task="more"), tmp_path / run / "more")
    save(result_of(single("+"), task="extra"), tmp_path / "b" / "extra")
    result = runner.invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert result.exit_code == 0, result.output
    assert "2 tests were made; the p-values are not corrected" in result.output
    assert "in one folder only, not compared: extra" in result.output
    values = json.loads(runner.invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]).output)
    assert sorted(values["tasks"]) == ["more", "sums"]
    assert values["not_compared"] == ["extra"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "other"}, "different tasks: sums and other"),
        ({"temperature": 0.6}, "temperature: 0.0 and 0.6"),
        ({"max_new_tokens": 64}, "max_new_tokens: 32 and 64"),
        ({"seed": 1}, "accept the difference with --allow seed"),
        ({"template_options": {"enable_thinking": False}}, "template_options: {} and {'enable_thinking': False}"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    first = save(result_of(single("+-+-")), tmp_path / "a")
    second = save(result_of(single("+-+-"), **change), tmp_path / "b")
    result = runner.invoke(app, ["compare", str(first), str(second)])
    assert result.exit_code == 2
    assert message in result.output
    [name] = change
    if name != "task":
        assert runner.invoke(app, ["compare", str(first), str(second), "--allow", name]).exit_code == 0


def test_every_setting_is_either_the_subject_or_checked() -> None:
    values = {"n": 4, "temperature": 0.5, "top_p": 0.9, "max_new_tokens": 9, "seed": 9, "template_options": {"x": 1}}
    first = result_of(single("+-"))
    for name in waivable():
        if name in ("problems", "prompts"):
            continue
        # a setting added later needs a value here, which is the point of this test
        second = replace(first, settings=replace(first.settings, **{name: values[name]}))
        with pytest.raises(NotComparableError, match=f"{name}: "):
            require_comparable(first, second)
        require_comparable(first, second, [name])


def test_other_problems_and_prompts_are_refused_and_golds_always() -> None:
    first = result_of(single("+-+-"))
    fewer = result_of(single("+-+"), limit=3)
    with pytest.raises(NotComparableError, match="problems: 3 shared, 1 only in the first, 0 only in the second"):
        require_comparable(first, fewer)
    require_comparable(first, fewer, ["problems"])
    # the same problems under another limit, read by another tokenizer, are the same evaluation
    require_comparable(first, replace(first, settings=replace(first.settings, limit=4, prompts_digest="y")))
    reworded = replace(first, records=(replace(first.records[0], prompt="0 plus 1"), *first.records[1:]))
    with pytest.raises(NotComparableError, match="prompts: differ in 1 of 4 shared problems, first 'sum-0'"):
        require_comparable(first, reworded)
    require_comparable(first, reworded, ["prompts"])
    regraded = replace(first, records=(replace(first.records[0], answer="2"), *first.records[1:]))
    with pytest.raises(NotComparableError, match="1 of 4 shared problems have other gold answers"):
        require_comparable(first, regraded, waivable())
    with pytest.raises(ValueError, match="no such difference: weather"):
        require_comparable(first, first, ["weather"])


def test_folders_without_evaluations(tmp_path: Path) -> None:
    result = runner.invoke(app, ["compare", str(tmp_path), str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no finished evaluation" in result.output
    save(result_of(single("+-")), tmp_path / "a" / "one")
    save(result_of(single("+-")), tmp_path / "a" / "two")
    result = runner.invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "a")])
    assert result.exit_code == 2
    assert "holds two evaluations of sums: one and two" in " ".join(result.output.split())
    save(result_of(single("+-"), task="x"), tmp_path / "b" / "x")
    save(result_of(single("+-"), task="y"), tmp_path / "b" / "y")
    result = runner.invoke(app, ["compare", str(tmp_path / "a" / "one"), str(tmp_path / "b")])
    assert "no task in common: sums in" in result.output
