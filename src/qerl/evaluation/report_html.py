"""The sections of a run's report as HTML.

Completions, prompts and names are untrusted text: all of it is escaped.
The page needs no script and no network. Its content security policy forbids both, should an escape ever be
missed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from qerl.evaluation.live_line import format_duration
from qerl.evaluation.paired import Comparison
from qerl.evaluation.result import EvalResult
from qerl.evaluation.storage import as_number

# A completion may be a novel; the whole text stays in samples.jsonl.
MAX_TEXT_LEN = 4000


def page(title: str, sections: Iterable[str]) -> str:
    """The whole document."""
    template = Template(files("qerl.evaluation").joinpath("report_template.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), body="\n".join(section for section in sections if section))


def header(title: str, facts: Sequence[str]) -> str:
    """Title and one line of facts."""
    return f'<h1>{escape(title)}</h1>\n<p class="sub">{escape(" · ".join(facts))}</p>'


def headline(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, test: Comparison | None) -> str:
    """Accuracy before and after with intervals, their difference and the paired test."""
    given = [(name, _accuracy(entry)) for name, entry in (("before", before), ("after", after))]
    known = [(name, entry) for name, entry in given if entry is not None]
    if not known:
        return '<p class="sub">No evaluation before or after this run.</p>'
    blocks = [
        _figure(f"accuracy {name}", f"{accuracy:.1%}", f"{low:.1%} to {high:.1%}, {count} problems")
        for name, (accuracy, low, high, count) in known
    ]
    if test is not None:
        sign = "up" if test.difference > 0 else "down" if test.difference < 0 else ""
        interval = f"{_points(test.low)} to {_points(test.high)} points"
        blocks.append(_figure("difference", _points(test.difference), interval, sign))
    parts = [f'<div class="headline">{"".join(blocks)}</div>', _interval_bars(known)]
    missing = [name for name, entry in given if entry is None]
    if missing:
        parts.append(f'<p class="sub">No evaluation {missing[0]} the run.</p>')
    if test is not None:
        parts.append(
            f'<p class="sub">95 % intervals. Of {test.pairs} problems evaluated both times, {test.gained} '
            f"went up and {test.lost} down; {escape(test.test)}: p = {_p_value(test.p_value)}.</p>"
        )
    return "\n".join(parts)


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """Key figures, each (name, value)."""
    if not values:
        return ""
    inner = "".join(
        f'<div class="tile"><div class="value">{escape(value)}</div><div class="name">{escape(name)}</div></div>'
        for name, value in values
    )
    return f'<div class="tiles">{inner}</div>'


def remarks(warnings: Sequence[str], notes: Sequence[str]) -> str:
    """Warnings about the run, then its notes."""
    lines = [f'<div class="warning">{escape(text)}</div>' for text in warnings]
    lines += [f'<div class="note">{escape(text)}</div>' for text in notes]
    return "\n".join(lines)


def curves(svgs: Sequence[str]) -> str:
    """The grid of plots (trusted SVG made by qerl.evaluation.plots)."""
    if not svgs:
        return '<h2>Curves</h2>\n<p class="sub">No optimizer step was logged.</p>'
    legend = "Bold: running mean; faint: each step. Dashed red: alarm. Red cross: not a number."
    figures = "".join(f"<div>{svg}</div>" for svg in svgs)
    return f'<h2>Curves</h2>\n<div class="plots">{figures}</div>\n<p class="sub">{legend}</p>'


def evaluations(results: Sequence[tuple[str, EvalResult]]) -> str:
    """The evaluations side by side: figures and settings."""
    if not results:
        return ""
    rows: list[tuple[str, list[str]]] = [
        ("task", [result.task for _, result in results]),
        ("problems × samples", [f"{result.problems} × {result.n}" for _, result in results]),
        ("accuracy", [f"{result.accuracy:.1%}" for _, result in results]),
        ("95 % interval", [f"{result.low:.1%} to {result.high:.1%}" for _, result in results]),
    ]
    if any(result.n > 1 for _, result in results):
        for k in sorted({k for _, result in results for k in result.pass_at_k if k > 1}):
            rows.append((f"pass@{k}", [_share(result.pass_at_k.get(k)) for _, result in results]))
            rows.append((f"maj@{k}", [_share(result.majority_at_k.get(k)) for _, result in results]))
    rows += [
        ("mean score", [f"{result.mean_score:.3f}" for _, result in results]),
        ("truncated", [f"{result.truncated_share:.1%}" for _, result in results]),
        ("without an answer", [f"{result.no_answer_share:.1%}" for _, result in results]),
        ("scoring timeouts", [str(result.timeouts) for _, result in results]),
        ("mean tokens", [f"{result.mean_tokens:.1f}" for _, result in results]),
        ("tokens per second", [_number(result.tokens_per_s, ",.0f") for _, result in results]),
        ("temperature", [f"{result.settings.temperature:g}" for _, result in results]),
        ("top-p", [f"{result.settings.top_p:g}" for _, result in results]),
        ("token limit", [str(result.settings.max_new_tokens) for _, result in results]),
        ("seed", [str(result.settings.seed) for _, result in results]),
        ("model", [result.settings.model or "" for _, result in results]),
        ("weights", [result.settings.weights or "" for _, result in results]),
        ("adapter", [result.settings.adapter or "none" for _, result in results]),
    ]
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in results)
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, cells in rows
        if any(cells)
    )
    prompt = _clip(results[0][1].settings.first_prompt)
    return (
        f'<h2>Evaluations</h2>\n<div class="scroll"><table><tr><th></th>{head}</tr>{body}</table></div>\n'
        f"<details><summary>First prompt, as the model sees it</summary><pre>{escape(prompt)}</pre></details>"
    )


def samples(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]]) -> str:
    """Completions of the first and of the last logged step, side by side."""
    if not first:
        return ""
    columns = [first] if not last else [first, last]
    inner = "".join(
        f"<div><p><strong>Step {escape(str(column[0].get('step')))}</strong></p>"
        f"{''.join(_sample(sample) for sample in column)}</div>"
        for column in columns
    )
    return f'<h2>Completions</h2>\n<div class="pair">{inner}</div>'


def config(text: str | None) -> str:
    """The resolved configuration."""
    if text is None:
        return '<h2>Configuration</h2>\n<p class="sub">config.yaml is missing.</p>'
    body = f"<summary>config.yaml</summary><pre>{escape(text)}</pre>"
    return f"<h2>Configuration</h2>\n<details open>{body}</details>"


def machine(environment: Mapping[str, Any]) -> str:
    """Machine and package versions."""
    if not environment:
        return ""
    rows = []
    for name, value in environment.items():
        for key, text in _flatten(name, value):
            rows.append(f"<tr><th>{escape(key)}</th><td>{escape(text)}</td></tr>")
    return f'<h2>Machine and versions</h2>\n<div class="scroll"><table>{"".join(rows)}</table></div>'


def _figure(name: str, value: str, interval: str, sign: str = "") -> str:
    return (
        f'<div class="figure"><div class="name">{escape(name)}</div>'
        f'<div class="value {sign}">{escape(value)}</div><div class="interval">{escape(interval)}</div></div>'
    )


def _interval_bars(known: Sequence[tuple[str, tuple[float, float, float, int]]]) -> str:
    """Accuracies with intervals on one axis from 0 to 100 %, as an SVG of the page's colours."""
    left, width, height = 60, 560, 30 * len(known) + 22
    parts = []
    for tick in (0, 25, 50, 75, 100):
        x = left + width * tick / 100
        parts.append(f'<line x1="{x}" x2="{x}" y1="0" y2="{height - 20}" stroke="var(--grid)"/>')
        parts.append(
            f'<text x="{x}" y="{height - 5}" text-anchor="middle" font-size="11" fill="var(--muted)">{tick} %</text>'
        )
    for row, (name, (accuracy, low, high, _)) in enumerate(known):
        y, colour = 30 * row + 15, "var(--muted)" if name == "before" else "var(--blue)"
        x_low, x, x_high = (left + width * value for value in (low, accuracy, high))
        parts.append(f'<text x="0" y="{y + 4}" font-size="13" fill="var(--ink)">{name}</text>')
        parts.append(
            f'<line x1="{x_low:.1f}" x2="{x_high:.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="8" '
            'stroke-linecap="round" stroke-opacity="0.35"/>'
        )
        parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="6" fill="{colour}"/>')
    label = "Accuracy with 95 % intervals"
    frame = f'class="bars" viewBox="0 0 {left + width + 24} {height}" role="img" aria-label="{label}"'
    return f"<svg {frame}>{''.join(parts)}</svg>"


def _accuracy(entry: Mapping[str, Any] | None) -> tuple[float, float, float, int] | None:
    if entry is None:
        return None
    values = [as_number(entry.get(name)) for name in ("accuracy", "low", "high", "n")]
    if any(value is None or not math.isfinite(value) for value in values):
        return None
    accuracy, low, high, count = (float(value) for value in values if value is not None)
    return accuracy, low, high, int(count)


def _sample(sample: Mapping[str, Any]) -> str:
    reward = as_number(sample.get("reward"))
    meta = [f"reward {'none' if reward is None else f'{reward:g}'}", f"gold answer {sample.get('answer')}"]
    tags = "".join(f"<span>{escape(text)}</span>" for text in meta)
    prompt, completion = _clip(sample.get("prompt")), _clip(sample.get("completion"))
    return (
        f'<div class="sample"><div class="meta">{tags}</div>'
        f'<pre class="prompt">{escape(prompt)}</pre><pre>{escape(completion)}</pre></div>'
    )


def _clip(value: Any) -> str:
    text = "" if value is None else str(value)
    if len(text) <= MAX_TEXT_LEN:
        return text
    return f"{text[:MAX_TEXT_LEN]} … ({len(text) - MAX_TEXT_LEN:,} more characters in samples.jsonl)"


def _flatten(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [(key, str(item)) for key, item in value.items()]
    if isinstance(value, list):
        texts = [", ".join(str(v) for v in item.values()) if isinstance(item, Mapping) else str(item) for item in value]
        return [(name, "; ".join(texts))] if texts else []
    return [] if value is None else [(name.replace("_", " "), str(value))]


def _points(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


def _p_value(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def duration_tiles(seconds: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The parts of a run's ``seconds`` as tiles: install, quantize, train, eval, whatever is there."""
    known = [(name, as_number(value)) for name, value in seconds.items()]
    return [(f"{name} time", format_duration(value)) for name, value in known if value is not None]
