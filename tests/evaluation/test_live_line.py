"""The live line and durations."""

import math

import pytest

from qerl.evaluation.live_line import format_duration, format_step


def test_full_line() -> None:
    metrics = {
        "reward": 0.4567,
        "reward_std": 0.21,
        "length": 180.4,
        "entropy": 0.31,
        "kl": 0.0123,
        "sigma": 0.01,
        "mismatch_mean": 0.0004,
        "tokens_per_s": 2310.4,
        "memory_gb": 21.34,
    }
    assert format_step(7, 200, metrics, 3725) == (
        "step   7/200  reward 0.457±0.21  length 180  entropy 0.310  KL 0.0123  sigma 1.0e-02  mismatch 4.0e-04  "
        "2,310 tok/s  21.3 GB  1 h 02 min left"
    )


def test_missing_figures_are_left_out_and_nan_is_shown() -> None:
    assert format_step(1, 5, {"reward": math.nan, "kl": None}) == "step 1/5  reward nan"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.7, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
        (276_000, "3 d 04 h"),
        (math.nan, "?"),
        (-1, "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
