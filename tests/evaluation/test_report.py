"""The report: complete, self-contained, safe with untrusted text, and there for runs that went wrong."""

import math
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from qerl.evaluation.plots import PANELS, panels_of, running_mean
from qerl.evaluation.report import find_warnings, write_report
from qerl.evaluation.run_log import METRICS, NotARunError, RunWriter, read_run
from qerl.evaluation.runner import evaluate

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks nesting; collects ids, tags, attributes and visible text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("href", "src", "xlink:href"):
                self.links.append(str(value))
            assert not name.startswith("on")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


FEW = ("reward", "reward_std", "time_generate", "time_score", "time_train")


def make_run(
    path: Path, steps: int, text: str = "fine", names: Iterable[str] = FEW, **changes: float | None
) -> RunWriter:
    """A run with few metrics (each panel takes a tenth of a second to draw) unless ``names`` asks for more."""
    writer = RunWriter(path)
    writer.write_config({"model": "tiny", "note": text})
    for step in range(1, steps + 1):
        row = {name: 0.01 * step + 0.1 for name in names} | {"kl": None}
        writer.write_step(step, row | {"mismatch_mean": 1e-4, "ess": 0.9} | changes)
        samples = [{"prompt": text, "completion": f"{text} {step}", "reward": 0.5, "answer": text}]
        writer.write_samples(step, samples)
    return writer


@pytest.fixture
def evaluated(generator_type, tokenizer, sums, scorer, replies):
    """Evaluate into the two folders of a run: half right before, all right after."""

    def into(path: Path) -> None:
        for name, reply in (("eval-before", "half"), ("eval-after", "right")):
            evaluate(generator_type(replies[reply]), tokenizer, sums, pool=scorer, output_dir=path / name)

    return into


def test_full_report(tmp_path: Path, evaluated) -> None:
    writer = make_run(tmp_path, 40, names=METRICS)
    evaluated(tmp_path)
    writer.write_environment({"python": "3.11.7", "gpus": [], "packages": {"torch": "2.13"}})
    writer.update_summary(
        title="My run", notes=["weights come from a Q4_1 file"], seconds={"train": 231.0, "install": 96}
    )
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    page = Page(path)
    for expected in (
        "My run",
        "40 steps",
        "50.0%",
        "100.0%",
        "+50.0",
        "McNemar's exact test: p = 0.062",
        "5 went up",
        "weights come from a Q4_1 file",
        "3 min 51 s",
        "1 min 36 s",
        "fine 1",
        "fine 40",
        "model: tiny",
        "3.11.7",
        "[user]0+1[assistant]",
    ):
        assert expected in page.text, expected
    titles = [panel.title for panel in panels_of(read_run(tmp_path))]
    assert titles == [panel.title for panel in PANELS if panel.title != "KL to reference"]
    assert all(title in page.text for title in titles)
    assert page.tags.count("svg") == len(titles) + 1
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_loaded_and_nothing_runs(tmp_path: Path, evaluated) -> None:
    make_run(tmp_path, 3)
    evaluated(tmp_path)
    path = write_report(tmp_path)
    page = Page(path)
    assert "http" not in path.read_text().replace("http-equiv", "")
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert "default-src 'none'" in path.read_text()
    # every colour follows the theme of the page
    assert "#2563eb" not in path.read_text().partition("<body>")[2]


def test_untrusted_text_is_escaped(tmp_path: Path) -> None:
    evil = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> $body ${title} & \"'"
    writer = make_run(tmp_path, 2, text=evil)
    writer.update_summary(title=evil, notes=[evil], model=evil)
    writer.write_environment({evil: evil, "gpus": [{"name": evil}]})
    page = Page(write_report(tmp_path))
    assert "script" not in page.tags
    assert "img" not in page.tags
    # title and heading, model, note, machine (4), two samples with three texts each, config (quoted by YAML)
    assert page.text.count(evil) >= 10


def test_very_long_completion_is_clipped_and_said(tmp_path: Path) -> None:
    make_run(tmp_path, 1, text="x" * 10_000)
    assert "more characters in samples.jsonl" in Page(write_report(tmp_path)).text


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_short_runs(tmp_path: Path, steps: int) -> None:
    make_run(tmp_path, steps).update_summary(steps=steps)
    page = Page(write_report(tmp_path))
    assert "No evaluation before or after this run." in page.text
    assert ("No optimizer step was logged." in page.text) == (steps == 0)
    assert (tmp_path / "curves.png").exists() == (steps > 0)


def test_one_evaluation_is_missing(tmp_path: Path, evaluated) -> None:
    make_run(tmp_path, 2)
    evaluated(tmp_path)
    for file in (tmp_path / "eval-after").iterdir():
        file.unlink()
    page = Page(write_report(tmp_path))
    assert "No evaluation after the run." in page.text
    assert "difference" not in page.text


def test_accuracies_from_the_summary_alone(tmp_path: Path) -> None:
    entry = {"accuracy": 0.25, "low": 0.2, "high": 0.3, "n": 128}
    make_run(tmp_path, 2).update_summary(before=entry, after={"accuracy": math.nan, "low": 0, "high": 1, "n": 0})
    page = Page(write_report(tmp_path))
    assert "25.0%" in page.text
    assert "20.0% to 30.0%, 128 problems" in page.text
    assert "No evaluation after the run." in page.text


def test_nan_is_drawn_and_warned_about(tmp_path: Path) -> None:
    writer = make_run(tmp_path, 3, loss=0.1)
    writer.write_step(4, {"loss": math.nan, "reward": math.inf, "entropy": math.nan, "time_train": math.nan})
    page = Page(write_report(tmp_path))
    assert "loss is not a finite number in 1 of 4 steps, first in step 4." in page.text
    assert "reward is not a finite number in 1 of 4 steps" in page.text


def test_all_nan_run(tmp_path: Path) -> None:
    make_run(tmp_path, 3, **dict.fromkeys([*FEW, "mismatch_mean", "ess"], math.nan))
    assert "3 of 3 steps" in Page(write_report(tmp_path)).text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": 0.0}, "The reward is 0 in every step"),
        ({"clipped_ratio": 1.0}, "Every completion was cut"),
        ({"mismatch_mean": 0.05}, "more than 0.01 nats on average in 3 steps (largest 0.05)"),
        ({"ess": 0.2}, "below 0.3 in 3 steps (smallest 0.20)"),
    ],
)
def test_sick_runs_are_called_sick(tmp_path: Path, changes: dict[str, float], message: str) -> None:
    # cases.md row 35 among others
    make_run(tmp_path, 3, **changes)
    [warning] = find_warnings(read_run(tmp_path))
    assert message in warning


def test_healthy_run_has_no_warnings(tmp_path: Path) -> None:
    make_run(tmp_path, 3)
    assert find_warnings(read_run(tmp_path)) == []


def test_other_output_file_and_no_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 1)
    out = tmp_path / "pages" / "a.html"
    assert write_report(tmp_path / "run", out) == out
    assert (out.parent / "curves.png").exists()
    with pytest.raises(NotARunError):
        write_report(tmp_path)


def test_running_mean_by_hand() -> None:
    assert running_mean([1.0, 2.0, 6.0, math.nan, 4.0], 3).tolist() == [1.5, 3.0, 4.0, 5.0, 4.0]
    assert math.isnan(running_mean([math.nan], 3)[0])
