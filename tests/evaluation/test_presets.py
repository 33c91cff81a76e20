"""The presets fit together: prompts, sampling, lengths, tasks."""

import inspect

import pytest

from qerl.evaluation.presets import LIGHTEVAL_MATH_PROMPT, MAX_PROMPT_TOKENS, PRESETS, get_preset
from qerl.evaluation.runner import evaluate
from qerl.rollout.core import SamplingParams
from qerl.tasks.benchmarks import BENCHMARKS
from qerl.tasks.prompts import prompt_template


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_is_possible(name: str) -> None:
    preset = get_preset(name)
    assert preset.task in BENCHMARKS
    [message] = prompt_template(**preset.task_options()).messages("1 + {x}?")
    assert "1 + {x}?" in message["content"]
    assert "\\boxed{" in message["content"]
    sampling = preset.sampling()
    params = SamplingParams(sampling["n"], sampling["max_new_tokens"], sampling["temperature"], sampling["top_p"])
    assert not (params.n > 1 and params.greedy)
    # unlike the reference's 8192 within 6144
    assert preset.max_new_tokens + MAX_PROMPT_TOKENS == preset.max_model_len


def test_names_are_those_of_the_evaluation() -> None:
    parameters = inspect.signature(evaluate).parameters
    for preset in PRESETS.values():
        assert set(preset.sampling()) <= set(parameters)


def test_lighteval_prompt_keeps_its_braces() -> None:
    [message] = prompt_template(LIGHTEVAL_MATH_PROMPT).messages("Q")
    assert "is: $\\boxed{ANSWER}$. I hope" in message["content"]
    assert message["content"].endswith("answering.\n\nQ")


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="no preset 'gsm'; known: gsm8k, math500"):
        get_preset("gsm")
