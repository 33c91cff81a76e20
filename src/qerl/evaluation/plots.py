"""Curves of a run as small multiples: one inline SVG per panel for the page, one PNG of all panels.

The SVGs carry no colours of their own: every colour is replaced by a CSS variable of the page, which gives
them its light and dark theme. No pyplot, hence no global state and no display.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from qerl.evaluation.run_log import Run

# CSS variable of the page -> colour in the PNG (light theme).
COLOURS = {
    "ink": "#1f2328",
    "muted": "#6b7280",
    "grid": "#e6e8eb",
    "blue": "#2563eb",
    "amber": "#d97706",
    "green": "#0d9467",
    "red": "#dc2639",
    "violet": "#7c3aed",
}
# Above this many steps the raw values fade behind their running mean.
SMOOTH_FROM = 30


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a panel: the metric, its name in the legend (empty: none), its colour."""

    metric: str
    label: str
    colour: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One small plot.

    ``band`` names a metric drawn as +- around the first line; ``limit`` a dashed alarm line."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    band: str | None = None
    limit: float | None = None
    log: bool = False
    stacked: bool = False
    percent: bool = False


PANELS = (
    Panel("Reward", "mean ± std of a group", (Line("reward", "", "blue"),), band="reward_std"),
    Panel("Completion length", "tokens", (Line("length", "", "blue"),)),
    Panel("Entropy", "nats per token", (Line("entropy", "", "blue"),)),
    Panel(
        "Engine vs trainer",
        "|Δ log-prob|, nats",
        (Line("mismatch_mean", "mean", "blue"), Line("mismatch_max", "max", "amber")),
        limit=0.01,
        log=True,
    ),
    Panel("AQN noise", "sigma", (Line("sigma", "", "violet"),)),
    Panel("Effective sample size", "share of tokens", (Line("ess", "", "blue"),), limit=0.3, percent=True),
    Panel(
        "Time per step",
        "seconds",
        (
            Line("time_generate", "generate", "blue"),
            Line("time_score", "score", "amber"),
            Line("time_train", "train", "green"),
        ),
        stacked=True,
    ),
    Panel("Generation speed", "tokens per second", (Line("tokens_per_s", "", "blue"),)),
    Panel("Peak memory", "GB", (Line("memory_gb", "", "blue"),)),
    Panel(
        "Truncated, no signal",
        "share",
        (
            Line("clipped_ratio", "truncated", "amber"),
            Line("frac_reward_zero_std", "equal rewards", "violet"),
        ),
        percent=True,
    ),
    Panel("KL to reference", "nats", (Line("kl", "", "blue"),)),
    Panel("Gradient norm", "before clipping", (Line("grad_norm", "", "blue"),)),
    Panel("Loss", "", (Line("loss", "", "blue"),)),
)


def panels_of(run: Run) -> list[Panel]:
    """The panels for which the run has at least one value."""
    return [panel for panel in PANELS if any(run.series(line.metric)[0] for line in panel.lines)]


def panel_svg(run: Run, panel: Panel, prefix: str) -> str:
    """The panel as an inline ``<svg>``, coloured by the page's CSS variables; ids start with ``prefix``."""
    with _style():
        figure = Figure(figsize=(4.4, 2.5), layout="constrained")
        _draw(figure.add_subplot(), run, panel)
        buffer = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    return _inline(buffer.getvalue(), prefix, f"{panel.title}, {panel.unit}".rstrip(", "))


def write_png(run: Run, path: Path) -> Path | None:
    """Write all panels into one PNG, three in a row; ``None`` without any step to draw."""
    panels = panels_of(run)
    if not panels:
        return None
    rows = math.ceil(len(panels) / 3)
    with _style():
        figure = Figure(figsize=(13.2, 2.7 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        for index, panel in enumerate(panels, start=1):
            _draw(figure.add_subplot(rows, 3, index), run, panel)
        figure.savefig(path, dpi=130, facecolor="white")
    return path


def running_mean(values: Sequence[float], window: int) -> np.ndarray:
    """Mean of the ``window`` values around each one, NaN and infinity left out; float64 [len(values)]."""
    array = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(array)
    totals = np.concatenate([[0.0], np.cumsum(np.where(finite, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    middle = np.arange(len(array))
    starts = np.maximum(middle - window // 2, 0)
    ends = np.minimum(middle + window // 2 + 1, len(array))
    number = counts[ends] - counts[starts]
    return np.where(number > 0, (totals[ends] - totals[starts]) / np.maximum(number, 1), np.nan)


def _draw(axes: Axes, run: Run, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontweight="bold", color=COLOURS["ink"])
    if panel.unit:
        axes.set_title(panel.unit, loc="right", color=COLOURS["muted"], fontsize=8)
    if panel.stacked:
        _draw_stack(axes, run, panel)
    else:
        for line in panel.lines:
            _draw_line(axes, run, panel, line)
    if panel.limit is not None:
        axes.axhline(panel.limit, color=COLOURS["red"], linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    if panel.percent:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    elif panel.log and _has_positive(run, panel):
        axes.set_yscale("log")
    elif panel.stacked or _never_negative(run, panel):
        axes.set_ylim(bottom=0)
    axes.set_xlabel("step", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    if sum(bool(line.label) for line in panel.lines) > 1:
        if panel.stacked:
            # Head room: the legend has no place over the filled areas.
            axes.set_ylim(top=1.25 * axes.get_ylim()[1])
        place = {"loc": "upper left", "ncols": 3} if panel.stacked else {"loc": "best"}
        axes.legend(fontsize=7.5, frameon=False, labelcolor=COLOURS["ink"], handlelength=1.2, **place)


def _draw_line(axes: Axes, run: Run, panel: Panel, line: Line) -> None:
    steps, values = run.series(line.metric)
    if not steps:
        return
    array = np.asarray(values)
    finite = np.isfinite(array)
    colour = COLOURS[line.colour]
    x, shown = np.asarray(steps), np.where(finite, array, np.nan)
    smooth = len(steps) > SMOOTH_FROM and line.metric != "sigma"
    if panel.band is not None:
        _draw_band(axes, run, panel.band, dict(zip(steps, shown.tolist(), strict=True)), colour)
    # A single step, and single values between NaNs, have no line: markers keep them visible.
    marker = "o" if len(steps) <= SMOOTH_FROM else None
    axes.plot(
        x,
        shown,
        color=colour,
        linewidth=0.8 if smooth else 1.5,
        alpha=0.35 if smooth else 1.0,
        marker=marker,
        markersize=2.8,
        label=None if smooth else line.label or None,
        drawstyle="steps-post" if line.metric == "sigma" else "default",
    )
    if smooth:
        mean = running_mean(values, max(5, len(values) // 20))
        axes.plot(x, mean, color=colour, linewidth=1.7, label=line.label or None)
    if not finite.all():
        bottom = axes.get_xaxis_transform()
        axes.plot(x[~finite], np.zeros((~finite).sum()), "x", color=COLOURS["red"], transform=bottom, clip_on=False)


def _draw_band(axes: Axes, run: Run, metric: str, centre: dict[int, float], colour: str) -> None:
    steps, spread = run.series(metric)
    rows = [(s, centre[s], d) for s, d in zip(steps, spread, strict=True) if s in centre and math.isfinite(d)]
    if len(rows) > 1:
        x, mid, half = (np.asarray(column) for column in zip(*rows, strict=True))
        axes.fill_between(x, mid - half, mid + half, color=colour, alpha=0.12, linewidth=0)


def _draw_stack(axes: Axes, run: Run, panel: Panel) -> None:
    known = [dict(zip(*run.series(line.metric), strict=True)) for line in panel.lines]
    steps = sorted(set().union(*known))
    rows = [[_finite_or_zero(series.get(step)) for step in steps] for series in known]
    colours = [COLOURS[line.colour] for line in panel.lines]
    labels = [line.label for line in panel.lines]
    if len(steps) == 1:
        bottom = 0.0
        for row, colour, label in zip(rows, colours, labels, strict=True):
            axes.bar(steps, row, bottom=bottom, color=colour, alpha=0.85, width=0.4, label=label)
            bottom += row[0]
        return
    axes.stackplot(steps, rows, colors=colours, alpha=0.85, labels=labels, linewidth=0)


def _finite_or_zero(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _values(run: Run, panel: Panel) -> list[float]:
    return [value for line in panel.lines for value in run.series(line.metric)[1] if math.isfinite(value)]


def _has_positive(run: Run, panel: Panel) -> bool:
    return any(value > 0 for value in _values(run, panel))


def _never_negative(run: Run, panel: Panel) -> bool:
    values = _values(run, panel)
    return bool(values) and min(values) >= 0


def _style() -> object:
    return matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "qerl",
            "font.size": 8.5,
            "axes.titlesize": 10,
            "axes.titlepad": 7,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.spines.left": False,
            "axes.edgecolor": COLOURS["muted"],
            "axes.labelcolor": COLOURS["muted"],
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "axes.xmargin": 0.02,
            "axes.ymargin": 0.1,
            "grid.color": COLOURS["grid"],
            "grid.linewidth": 0.8,
            "xtick.color": COLOURS["muted"],
            "ytick.color": COLOURS["muted"],
            "ytick.major.size": 0,
            "ytick.minor.size": 0,
            "text.color": COLOURS["ink"],
        }
    )


def _inline(svg: str, prefix: str, title: str) -> str:
    """Make matplotlib's SVG file part of a page: no header, no namespaces, own ids, colours of the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    head = re.match(r"<svg[^>]*>", svg)
    assert head is not None
    view = re.search(r'viewBox="[^"]*"', head.group(0))
    assert view is not None
    return f'<svg {view.group(0)} role="img" aria-label="{title}">' + svg[head.end() :].strip()
