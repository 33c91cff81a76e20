"""One line per training step for the terminal: the figures that tell whether a run is healthy."""

import math
from collections.abc import Mapping

from qerl.evaluation.storage import as_number


def format_step(step: int, total_steps: int, metrics: Mapping[str, object], seconds_left: float | None = None) -> str:
    """The live line of ``step``. Missing figures are left out, NaN is shown.

    Example: ``step  12/200  reward 0.45±0.21  length 180  entropy 0.310  sigma 1.0e-02  2,310 tok/s  21.3 GB
        ...``
    """
    value = {name: as_number(item) for name, item in metrics.items()}
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    reward, spread = value.get("reward"), value.get("reward_std")
    if reward is not None:
        parts.append(f"reward {reward:.3f}" + (f"±{spread:.2f}" if spread is not None else ""))
    for name, label, form in (
        ("length", "length", ".0f"),
        ("entropy", "entropy", ".3f"),
        ("kl", "KL", ".4f"),
        ("sigma", "sigma", ".1e"),
        ("mismatch_mean", "mismatch", ".1e"),
    ):
        if (figure := value.get(name)) is not None:
            parts.append(f"{label} {figure:{form}}")
    if (rate := value.get("tokens_per_s")) is not None:
        parts.append(f"{rate:,.0f} tok/s")
    if (memory := value.get("memory_gb")) is not None:
        parts.append(f"{memory:.1f} GB")
    if seconds_left is not None:
        parts.append(f"{format_duration(seconds_left)} left")
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """Seconds as people say them: ``42 s``, ``3 min 05 s``, ``2 h 07 min``, ``3 d 04 h``."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60:02d} h"
