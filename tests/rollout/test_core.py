"""SamplingParams refuses what cannot be sampled, with the numbers in the message."""

import dataclasses
import math

import pytest

from qerl.rollout.core import MIN_TEMPERATURE, GreedySamplesError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("max_tokens", 0),
        ("temperature", -0.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", MIN_TEMPERATURE / 2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -3),
        ("min_p", -0.1),
        ("min_p", 1.25),
        ("min_p", math.nan),
        ("stop_token_ids", (5, -7)),
    ],
)
def test_value_outside_its_range_is_named(field: str, value: object) -> None:
    shown = "-7" if field == "stop_token_ids" else str(value)
    with pytest.raises(ValueError, match=f"{field}.*{shown}"):
        SamplingParams(**{field: value})


def test_several_greedy_samples_are_refused() -> None:
    with pytest.raises(GreedySamplesError, match=r"n=3 at temperature 0 makes 3 equal samples: set temperature above"):
        SamplingParams(n=3, temperature=0.0)
    assert SamplingParams(n=1, temperature=0.0).greedy


def test_sampling_params_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 2.0


@pytest.mark.parametrize(
    ("params", "greedy", "truncates"),
    [
        (SamplingParams(), False, False),
        (SamplingParams(temperature=MIN_TEMPERATURE), False, False),
        (SamplingParams(temperature=0.0, top_k=5), True, False),
        (SamplingParams(top_k=5), False, True),
        (SamplingParams(top_p=0.9), False, True),
        (SamplingParams(min_p=0.1), False, True),
    ],
)
def test_derived_flags(params: SamplingParams, greedy: bool, truncates: bool) -> None:
    assert (params.greedy, params.truncates) == (greedy, truncates)
