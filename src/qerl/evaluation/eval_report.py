"""The report of an evaluation folder: accuracy with intervals, settings, lengths, completions; misses first.

One self-contained page, built from the parts of a run's report (:mod:`qerl.evaluation.report_html`): no script,
nothing loaded from anywhere, all text of models and data sets escaped.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from qerl.evaluation import report_html
from qerl.evaluation.folders import finished_evaluations
from qerl.evaluation.result import EvalResult, SampleRecord
from qerl.evaluation.storage import write_text

REPORT_FILE = "report.html"
MAX_MISSES = 40
MAX_HITS = 10
# Above these a reader must know before believing the accuracy.
TRUNCATED_LIMIT = 0.05
NO_ANSWER_LIMIT = 0.1
_BINS = 24


def write_eval_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of one evaluation, or of all directly inside ``folder``; returns its path.

    Args:
        out: default: ``report.html`` in the folder.

    Raises:
        FileNotFoundError: no finished evaluation there.
        ValueError: a damaged file; names it.
    """
    root = Path(folder)
    results = finished_evaluations(root)
    title = f"Evaluation: {root.resolve().name}"
    path = root / REPORT_FILE if out is None else Path(out)
    sections = [
        report_html.header(title, _facts(results)),
        accuracies(results),
        report_html.remarks(find_warnings(results), []),
        report_html.evaluations(list(results.items())),
        *(task_section(name, result) for name, result in results.items()),
    ]
    write_text(path, report_html.page(title, sections))
    return path


def find_warnings(results: Mapping[str, EvalResult]) -> list[str]:
    """What makes an accuracy say less than it seems to."""
    warnings = []
    for name, result in results.items():
        if result.truncated_share > TRUNCATED_LIMIT:
            warnings.append(
                f"{name}: {result.truncated_share:.1%} of the completions were cut at "
                f"{result.settings.max_new_tokens} tokens, so the accuracy is a lower bound. Raise the token limit."
            )
        if result.no_answer_share > NO_ANSWER_LIMIT:
            warnings.append(f"{name}: no answer was found in {result.no_answer_share:.1%} of the completions.")
        if result.timeouts:
            warnings.append(
                f"{name}: scoring ran out of time or memory on {result.timeouts} completions (counted wrong)."
            )
    return warnings


def accuracies(results: Mapping[str, EvalResult]) -> str:
    """The accuracy of each task with its 95 % interval: figures, then one axis from 0 to 100 %."""
    figures = "".join(
        f'<div class="figure"><div class="name">{escape(name)}</div><div class="value">{result.accuracy:.1%}</div>'
        f'<div class="interval">{result.low:.1%} to {result.high:.1%}, {_size(result)}</div></div>'
        for name, result in results.items()
    )
    note = "95 % Wilson intervals over problems, which are the independent draws (samples of one problem are not)."
    return f'<div class="headline">{figures}</div>\n{_interval_bars(results)}\n<p class="sub">{note}</p>'


def task_section(name: str, result: EvalResult) -> str:
    """Lengths, reasons and completions of one task."""
    lengths = sorted(record.tokens for record in result.records)
    figures = [
        ("median length, tokens", f"{lengths[len(lengths) // 2]:,}"),
        ("95th percentile", f"{lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))]:,}"),
        ("longest", f"{lengths[-1]:,}"),
        ("cut by the limit", f"{result.truncated_share:.1%}"),
        ("without an answer", f"{result.no_answer_share:.1%}"),
        ("right among the finished", _right_among_finished(result.records)),
    ]
    return "\n".join(
        [
            f"<h2>{escape(name)}</h2>",
            report_html.tiles(figures),
            length_histogram(result),
            _miss_reasons(result.records),
            _completions(result.records),
        ]
    )


def length_histogram(result: EvalResult) -> str:
    """Completion lengths as stacked bars, right ones below, as an SVG of the page's colours."""
    top = max(record.tokens for record in result.records)
    width = max(1, -(-(top + 1) // _BINS))
    right: Counter[int] = Counter(record.tokens // width for record in result.records if record.correct)
    wrong: Counter[int] = Counter(record.tokens // width for record in result.records if not record.correct)
    bins = top // width + 1
    highest = max(right[index] + wrong[index] for index in range(bins))
    plot_width, plot_height = 560, 120
    step, parts = plot_width / bins, []
    for index in range(bins):
        y = float(plot_height)
        for count, colour, kind in ((right[index], "var(--green)", "right"), (wrong[index], "var(--red)", "wrong")):
            if count:
                height = plot_height * count / highest
                y -= height
                tip = f"{index * width} to {(index + 1) * width - 1} tokens: {count} {kind}"
                parts.append(
                    f'<rect x="{index * step:.1f}" y="{y:.1f}" width="{max(1.0, step - 1):.1f}" height="{height:.1f}" '
                    f'fill="{colour}" fill-opacity="0.75"><title>{tip}</title></rect>'
                )
    for position, anchor, label in ((0, "start", "0"), (plot_width, "end", f"{bins * width:,} tokens")):
        parts.append(
            f'<text x="{position}" y="{plot_height + 15}" text-anchor="{anchor}" font-size="11" '
            f'fill="var(--muted)">{label}</text>'
        )
    frame = f'class="bars" viewBox="0 0 {plot_width} {plot_height + 20}" role="img" aria-label="Completion lengths"'
    legend = f"Completion lengths: right green, wrong red; the highest bar is {highest:,} completions."
    return f'<svg {frame}>{"".join(parts)}</svg>\n<p class="sub">{legend}</p>'


def _interval_bars(results: Mapping[str, EvalResult]) -> str:
    width, row_height = 560, 34
    height = row_height * len(results) + 22
    parts = []
    for tick in (0, 25, 50, 75, 100):
        x = 12 + width * tick / 100
        parts.append(f'<line x1="{x}" x2="{x}" y1="0" y2="{height - 20}" stroke="var(--grid)"/>')
        parts.append(
            f'<text x="{x}" y="{height - 5}" text-anchor="middle" font-size="11" fill="var(--muted)">{tick} %</text>'
        )
    for row, (name, result) in enumerate(results.items()):
        y = row_height * row + 24
        low, middle, high = (12 + width * value for value in (result.low, result.accuracy, result.high))
        parts.append(f'<text x="14" y="{y - 10}" font-size="12" fill="var(--ink)">{escape(name)}</text>')
        parts.append(
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" stroke="var(--blue)" stroke-width="8" '
            'stroke-linecap="round" stroke-opacity="0.35"/>'
        )
        parts.append(f'<circle cx="{middle:.1f}" cy="{y}" r="5" fill="var(--blue)"/>')
    frame = f'class="bars" viewBox="0 0 {width + 36} {height}" role="img" aria-label="Accuracy with 95 % intervals"'
    return f"<svg {frame}>{''.join(parts)}</svg>"


def _miss_reasons(records: Sequence[SampleRecord]) -> str:
    reasons = Counter(record.reason for record in records if not record.correct)
    if not reasons:
        return '<p class="sub">No misses.</p>'
    rows = "".join(
        f'<tr><td class="number">{count:,}</td><td>{escape(reason)}</td></tr>'
        for reason, count in reasons.most_common(8)
    )
    head = '<tr><th class="number">misses</th><th>reason</th></tr>'
    return f'<div class="scroll"><table>{head}{rows}</table></div>'


def _completions(records: Sequence[SampleRecord]) -> str:
    """Misses, then hits; all of them are in samples.jsonl."""
    misses = [record for record in records if not record.correct]
    hits = [record for record in records if record.correct]
    parts = []
    for label, group, limit in (("Misses", misses, MAX_MISSES), ("Right answers", hits, MAX_HITS)):
        if group:
            shown = f"{min(limit, len(group)):,} of {len(group):,} shown" if len(group) > limit else f"{len(group):,}"
            body = "".join(_completion(record) for record in group[:limit])
            state = " open" if label == "Misses" else ""
            parts.append(f"<details{state}><summary>{label}: {shown}</summary>{body}</details>")
    return "\n".join(parts)


def _completion(record: SampleRecord) -> str:
    cut = record.finish_reason == "length"
    facts = [
        record.id if record.sample == 0 else f"{record.id}, sample {record.sample}",
        "right" if record.correct else "wrong" if record.score == 0 else f"score {record.score:g}",
        f"answer found: {'none' if record.extracted is None else record.extracted}",
        f"gold: {record.answer}",
        record.reason,
        f"{record.tokens:,} tokens{', cut by the limit' if cut else ''}",
    ]
    tags = "".join(f"<span>{escape(_clip(fact))}</span>" for fact in facts if fact)
    return (
        f'<div class="sample"><div class="meta">{tags}</div><pre class="prompt">{escape(_clip(record.prompt))}</pre>'
        f"<pre>{escape(_clip(record.completion))}</pre></div>"
    )


def _clip(text: str) -> str:
    limit = report_html.MAX_TEXT_LEN
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters in samples.jsonl)"


def _right_among_finished(records: Sequence[SampleRecord]) -> str:
    finished = [record.correct for record in records if record.finish_reason != "length"]
    return f"{sum(finished) / len(finished):.1%}" if finished else "none finished"


def _size(result: EvalResult) -> str:
    return f"{result.problems:,} problems" + (f" × {result.n} samples" if result.n > 1 else "")


def _facts(results: Mapping[str, EvalResult]) -> list[str]:
    """Model, weights and adapter where all tasks agree on them."""
    facts = [f"{len(results)} task{'' if len(results) == 1 else 's'}"]
    for name in ("model", "weights", "head", "adapter"):
        values = {getattr(result.settings, name) for result in results.values()}
        if len(values) == 1 and (value := values.pop()):
            facts.append(f"head {value}" if name == "head" else str(value))
    return facts
