"""AQN schedules against values computed by hand."""

import math

import pytest

from qerl.rl.schedule import SCHEDULES, NoiseSchedule


def make(kind: str, updates: int = 100, stages: int = 10) -> NoiseSchedule:
    return NoiseSchedule(kind, sigma_start=1e-2, sigma_end=5e-4, num_stages=stages, total_updates=updates)


def test_exponential_by_hand() -> None:
    schedule = make("exponential")
    assert [schedule.stage(t) for t in (1, 9, 10, 19, 20, 89, 90, 99, 100)] == [0, 0, 1, 1, 2, 8, 9, 9, 9]
    assert schedule.sigma(9) == 0.0
    assert schedule.sigma(10) == 1e-2
    assert schedule.sigma(90) == pytest.approx(5e-4, rel=1e-12)
    # stage 5: 1e-2 * (1/20)^(4/8) = 1e-2 / sqrt(20)
    assert schedule.sigma(50) == pytest.approx(1e-2 / math.sqrt(20), rel=1e-12)


def test_paper_by_hand() -> None:
    schedule = make("paper")
    assert [schedule.stage(t) for t in (1, 10, 11, 20, 21, 91, 100)] == [0, 0, 1, 1, 2, 9, 9]
    assert schedule.sigma(10) == 0.0
    assert schedule.sigma(11) == 1e-2
    # last stage 9: exponent 8/9, above sigma_end
    assert schedule.sigma(100) == pytest.approx(1e-2 * (1 / 20) ** (8 / 9), rel=1e-12)
    assert schedule.sigma(100) > 5e-4


@pytest.mark.parametrize(
    ("kind", "middle"),
    [
        ("linear", (1e-2 + 5e-4) / 2),
        ("cosine", (1e-2 + 5e-4) / 2),
        ("logarithmic", 1e-2 + (5e-4 - 1e-2) * math.log(1 + 0.5 * (math.e - 1))),
    ],
)
def test_other_shapes_meet_the_same_ends(kind: str, middle: float) -> None:
    schedule = make(kind)
    assert schedule.sigma(1) == 0.0
    assert schedule.sigma(10) == pytest.approx(1e-2)
    assert schedule.sigma(50) == pytest.approx(middle)
    assert schedule.sigma(100) == pytest.approx(5e-4)


def test_constant_and_none() -> None:
    assert make("constant").sigma(1) == 1e-2
    assert make("none").sigma(100) == 0.0


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("updates", [1, 2, 7, 10, 11, 1000])
def test_never_increases_after_the_first_stage_and_stays_in_range(kind: str, updates: int) -> None:
    schedule = make(kind, updates)
    sigmas = [schedule.sigma(t) for t in range(1, updates + 1)]
    noisy = [s for s in sigmas if s > 0]
    assert noisy == sorted(noisy, reverse=True)
    assert all(5e-4 * (1 - 1e-12) <= s <= 1e-2 for s in noisy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "exponentail"}, "exponentail"),
        ({"sigma_start": 0.0}, "sigma_start=0.0"),
        ({"sigma_end": math.nan}, "sigma_end=nan"),
        ({"num_stages": 2}, "num_stages=2"),
        ({"total_updates": 0}, "total_updates=0"),
    ],
)
def test_bad_values_are_refused(change: dict, words: str) -> None:
    values = {
        "kind": "exponential",
        "sigma_start": 1e-2,
        "sigma_end": 5e-4,
        "num_stages": 10,
        "total_updates": 5,
    }
    with pytest.raises(ValueError, match=words):
        NoiseSchedule(**{**values, **change})
