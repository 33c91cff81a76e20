"""The report of a run: everything its folder knows, on one page that opens anywhere, offline."""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl.evaluation import plots, report_html
from qerl.evaluation.live_line import format_duration
from qerl.evaluation.paired import Comparison, compare
from qerl.evaluation.run_log import Run, read_run
from qerl.evaluation.storage import write_text

REPORT_FILE = "report.html"
CURVES_FILE = "curves.png"
MAX_SAMPLES = 4
# The thresholds of the trainer's own alarms.
MISMATCH_LIMIT = 0.01
ESS_LIMIT = 0.3


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run and return its path.

    ``report.html`` (or ``out``) is self-contained: inline styles and SVG, no script, nothing loaded from
    anywhere. ``curves.png`` is written beside it when at least one step was logged. Runs without steps,
    evaluations, samples or configuration get a page that says so.

    Raises:
        NotARunError: the folder is no run; says what is missing.
        ValueError: a damaged file in it; names the file.
    """
    run = read_run(run_dir)
    path = run.run_dir / REPORT_FILE if out is None else Path(out)
    test = paired_test(run)
    title = str(run.summary.get("title") or run.run_dir.resolve().name)
    svgs = [plots.panel_svg(run, panel, f"p{index}") for index, panel in enumerate(plots.panels_of(run))]
    first, last = first_and_last_samples(run)
    sections = [
        report_html.header(title, _facts(run)),
        report_html.headline(_entry(run, "before"), _entry(run, "after"), test),
        report_html.tiles(_tiles(run)),
        report_html.remarks(find_warnings(run), _notes(run.summary)),
        report_html.curves(svgs),
        report_html.evaluations(
            [(name, result) for name, result in (("before", run.before), ("after", run.after)) if result is not None]
        ),
        report_html.samples(first, last),
        report_html.config(run.config_text),
        report_html.machine(run.environment),
    ]
    write_text(path, report_html.page(title, sections))
    plots.write_png(run, path.with_name(CURVES_FILE))
    return path


def paired_test(run: Run) -> Comparison | None:
    """The evaluations before and after, paired by problem; ``None`` unless both exist and share some."""
    if run.before is None or run.after is None:
        return None
    before, after = run.before.outcomes(), run.after.outcomes()
    return compare(before, after) if before.keys() & after.keys() else None


def find_warnings(run: Run) -> list[str]:
    """What a reader must know before believing the curves: each names steps and figures."""
    warnings = []
    for name in ("loss", "reward", "grad_norm"):
        steps, values = run.series(name)
        bad = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
        if bad:
            warnings.append(
                f"{name} is not a finite number in {len(bad)} of {len(steps)} steps, first in step {bad[0]}."
            )
    rewards = _finite(run, "reward")
    if len(rewards) > 1 and len(set(rewards)) == 1:
        warnings.append(
            f"The reward is {rewards[0]:g} in every step: nothing was learned. Check completions and reward."
        )
    clipped = _finite(run, "clipped_ratio")
    if clipped and min(clipped) >= 0.999:
        warnings.append("Every completion was cut by the token limit: raise max_completion_length.")
    high = [value for value in _finite(run, "mismatch_mean") if value > MISMATCH_LIMIT]
    if high:
        warnings.append(
            f"Engine and trainer log-probs differ by more than {MISMATCH_LIMIT} nats on average "
            f"in {len(high)} steps (largest {max(high):.3g})."
        )
    low = [value for value in _finite(run, "ess") if value < ESS_LIMIT]
    if low:
        warnings.append(
            f"The effective sample size is below {ESS_LIMIT} in {len(low)} steps (smallest {min(low):.2f}): "
            "importance weights are dominated by few tokens."
        )
    return warnings


def first_and_last_samples(run: Run) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Up to MAX_SAMPLES completions of the first and the last step with samples; no last one if equal."""
    steps = sorted({sample["step"] for sample in run.samples if isinstance(sample.get("step"), int)})
    if not steps:
        return [], []
    chosen = [[s for s in run.samples if s.get("step") == step][:MAX_SAMPLES] for step in (steps[0], steps[-1])]
    return chosen[0], chosen[1] if len(steps) > 1 else []


def _entry(run: Run, name: str) -> Mapping[str, Any] | None:
    """Accuracy before or after: from the evaluation itself, else from the summary."""
    result = run.before if name == "before" else run.after
    if result is not None:
        return result.summary()
    entry = run.summary.get(name)
    return entry if isinstance(entry, Mapping) else None


def _facts(run: Run) -> list[str]:
    steps = len(run.metrics)
    facts = [f"{steps} step{'' if steps == 1 else 's'}"]
    facts += [str(run.summary[name]) for name in ("model", "task") if run.summary.get(name)]
    gpus = run.environment.get("gpus")
    if isinstance(gpus, list):
        facts.append(f"{len(gpus)} × {gpus[0].get('name')}" if gpus else "CPU")
    return facts


def _tiles(run: Run) -> list[tuple[str, str]]:
    tiles = []
    rewards = _finite(run, "reward")
    if rewards:
        share = max(1, len(rewards) // 10)
        start, end = statistics.fmean(rewards[:share]), statistics.fmean(rewards[-share:])
        tiles.append(("reward, first to last tenth", f"{start:.2f} → {end:.2f}"))
    rates = _finite(run, "tokens_per_s")
    if rates:
        tiles.append(("tokens per second, median", f"{statistics.median(rates):,.0f}"))
    memory = _finite(run, "memory_gb")
    if memory:
        tiles.append(("peak memory", f"{max(memory):.1f} GB"))
    step_times = [sum(part) for part in zip(*_step_times(run), strict=True)]
    if step_times:
        tiles.append(("per step, median", format_duration(statistics.median(step_times))))
    seconds = run.summary.get("seconds")
    return tiles + (report_html.duration_tiles(seconds) if isinstance(seconds, Mapping) else [])


def _step_times(run: Run) -> list[list[float]]:
    series = [run.series(name)[1] for name in ("time_generate", "time_score", "time_train")]
    lengths = {len(values) for values in series}
    return series if len(lengths) == 1 else []


def _notes(summary: Mapping[str, Any]) -> list[str]:
    notes = summary.get("notes", [])
    return [notes] if isinstance(notes, str) else [str(note) for note in notes]


def _finite(run: Run, name: str) -> list[float]:
    return [value for value in run.series(name)[1] if math.isfinite(value)]
