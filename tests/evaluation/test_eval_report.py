"""The HTML report of an evaluation folder."""

import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from qerl.evaluation.eval_report import MAX_MISSES, find_warnings, length_histogram, write_eval_report
from qerl.evaluation.result import EvalResult
from qerl.evaluation.runner import evaluate
from qerl.evaluation.storage import dump_line


class Checker(HTMLParser):
    """Counts elements, refuses scripts, handlers, outside links and unbalanced elements."""

    void = frozenset({"meta", "line", "circle"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "iframe", "img", "link", "object")
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("src", "href"), (name, value)
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def result(generator_type, tokenizer, sums, scorer, replies, tmp_path: Path) -> EvalResult:
    """Half right; the wrong ones are cut at the limit. Stored in ``tmp_path / "sums"``."""
    return evaluate(
        generator_type(replies["half"]),
        tokenizer,
        sums,
        pool=scorer,
        max_new_tokens=11,
        output_dir=tmp_path / "sums",
        model="models/tiny",
        weights="nvfp4",
    )


def store(result: EvalResult, folder: Path) -> None:
    result.save(folder)
    (folder / "samples.jsonl").write_text("".join(dump_line(asdict(record)) for record in result.records))


def test_page_has_accuracy_interval_settings_and_lengths(result: EvalResult, tmp_path: Path) -> None:
    path = write_eval_report(tmp_path / "sums")
    assert path == tmp_path / "sums" / "report.html"
    text = path.read_text()
    Checker(text)
    assert '<div class="value">50.0%</div><div class="interval">23.7% to 76.3%, 10 problems</div>' in text
    assert "1 task · models/tiny · nvfp4" in text
    assert "<tr><th>token limit</th><td>11</td></tr>" in text
    assert '<div class="value">50.0%</div><div class="name">cut by the limit</div>' in text
    # all cut completions are wrong, all finished ones right
    assert '<div class="value">100.0%</div><div class="name">right among the finished</div>' in text
    assert "50.0% of the completions were cut at 11 tokens" in text
    assert "$" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)


def test_misses_come_first_with_answer_and_gold(result: EvalResult, tmp_path: Path) -> None:
    text = write_eval_report(tmp_path / "sums").read_text()
    shown = re.findall(
        r'<div class="meta"><span>(.*?)</span><span>(.*?)</span><span>(.*?)</span><span>(.*?)</span>', text
    )
    assert [row[1] for row in shown] == ["wrong"] * 5 + ["right"] * 5
    assert shown[0] == ("sum-1", "wrong", "answer found: 100", "gold: 2")
    assert "11 tokens, cut by the limit" in text


def test_hostile_text_is_escaped(result: EvalResult, tmp_path: Path) -> None:
    evil = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>&lt;$title"
    records = tuple(
        replace(r, id=f"{evil}{i}", prompt=evil, completion=evil, extracted=evil, answer=evil, reason=evil)
        for i, r in enumerate(result.records)
    )
    settings = replace(result.settings, task=evil, model=evil, adapter=evil, first_prompt=evil)
    store(replace(result, task=evil, settings=settings, records=records), tmp_path / "evil")
    text = write_eval_report(tmp_path / "evil").read_text()
    Checker(text)
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "&amp;lt;$title" in text


def test_several_tasks_share_a_page(result: EvalResult, tmp_path: Path) -> None:
    settings = replace(result.settings, task="more", n=2)
    records = tuple(replace(r, sample=s) for r in result.records for s in range(2))
    store(replace(result, task="more", n=2, settings=settings, records=records), tmp_path / "more")
    text = write_eval_report(tmp_path, tmp_path / "out" / "all.html").read_text()
    counts = Checker(text).counts
    assert "2 tasks" in text
    assert "<h2>more</h2>" in text and "<h2>sums</h2>" in text
    assert "10 problems × 2 samples" in text
    assert "sum-1, sample 1" in text
    assert counts["svg"] == 3


def test_many_misses_are_counted_not_all_shown(result: EvalResult, tmp_path: Path) -> None:
    records = tuple(replace(result.records[1], id=f"p{i}", completion="x" * 9000) for i in range(MAX_MISSES + 7))
    store(replace(result, records=records), tmp_path / "many")
    text = write_eval_report(tmp_path / "many").read_text()
    assert f"Misses: {MAX_MISSES} of {MAX_MISSES + 7} shown" in text
    assert text.count('class="sample"') == MAX_MISSES
    assert "5,000 more characters in samples.jsonl" in text
    assert "none finished" in text
    assert "Right answers" not in text


def test_histogram_counts_every_completion(result: EvalResult) -> None:
    lengths = [0, 1, 1, 5, 99, 100, 2047]
    records = tuple(replace(result.records[i % 2], tokens=tokens) for i, tokens in enumerate(lengths))
    svg = length_histogram(replace(result, records=records))
    counted = [int(count) for count in re.findall(r"tokens: (\d+) (?:right|wrong)", svg)]
    assert sum(counted) == len(lengths)
    ranges = [(int(a), int(b)) for a, b in re.findall(r"<title>(\d+) to (\d+) tokens", svg)]
    assert max(b for _, b in ranges) >= 2047 and min(a for a, _ in ranges) == 0
    assert length_histogram(replace(result, records=(replace(result.records[0], tokens=0),))).count("<rect") == 1


def test_warnings_are_for_what_matters(result: EvalResult) -> None:
    fine = replace(result, truncated_share=0.05, no_answer_share=0.1, timeouts=0)
    assert find_warnings({"t": fine}) == []
    bad = replace(fine, no_answer_share=0.3, timeouts=2)
    assert find_warnings({"t": bad}) == [
        "t: no answer was found in 30.0% of the completions.",
        "t: scoring ran out of time or memory on 2 completions (counted wrong).",
    ]


def test_no_evaluation_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no finished evaluation"):
        write_eval_report(tmp_path)
