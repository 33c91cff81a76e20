"""A scripted generator, a character tokenizer and an inline scorer: evaluation without a model."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from qerl.rollout.core import CompletionOutput, SamplingParams
from qerl.tasks.answers import AnswerTask
from qerl.tasks.base import Example
from qerl.tasks.prompts import prompt_template

EOS = 2


class CharTokenizer:
    """One token per character; token 2 is EOS."""

    bos_token_id = 1
    chat_template = "chars"

    def apply_chat_template(self, conversation: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"[{message['role']}]{message['content']}" for message in conversation) + "[assistant]"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token > EOS)


class ScriptedGenerator:
    """Answers each prompt by ``reply(question, sample)``; keeps what it was asked; dies after ``dies_after`` calls."""

    def __init__(self, reply: Callable[[str, int], str], dies_after: int | None = None) -> None:
        self.reply, self.dies_after = reply, dies_after
        self.calls: list[tuple[list[list[int]], SamplingParams, list[int]]] = []

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        *,
        step: int = 0,
        prompt_ids: Sequence[int] | None = None,
        progress: Callable[[int, int, int], None] | None = None,
    ) -> list[list[CompletionOutput]]:
        if self.dies_after is not None and len(self.calls) >= self.dies_after:
            raise KeyboardInterrupt
        assert prompt_ids is not None
        self.calls.append((prompts, sampling, list(prompt_ids)))
        groups = []
        for index, prompt in enumerate(prompts):
            question = "".join(map(chr, prompt)).removeprefix("[user]").removesuffix("[assistant]")
            groups.append([self._output(index, sample, question, sampling) for sample in range(sampling.n)])
        if progress is not None:
            progress(len(prompts) * sampling.n, len(prompts) * sampling.n, 1)
        return groups

    def _output(self, index: int, sample: int, question: str, sampling: SamplingParams) -> CompletionOutput:
        ids = [*map(ord, self.reply(question, sample)), EOS]
        reason = "stop" if len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        return CompletionOutput(index, sample, ids, [0.0] * len(ids), [0.0] * len(ids), reason)


class InlineScorer:
    """Runs the jobs of a task in this process."""

    def outcomes(self, jobs: Sequence[Any], ids: Sequence[str] | None = None) -> list[Any]:
        return [function(*arguments) for function, arguments in jobs]


@pytest.fixture
def tokenizer() -> CharTokenizer:
    return CharTokenizer()


@pytest.fixture
def scorer() -> InlineScorer:
    return InlineScorer()


@pytest.fixture
def generator_type() -> type[ScriptedGenerator]:
    return ScriptedGenerator


@pytest.fixture
def sums() -> AnswerTask:
    """Ten sums: 0+1, 1+1, ... 9+1."""
    test = [Example(f"sum-{i}", f"{i}+1", str(i + 1)) for i in range(10)]
    return AnswerTask("sums", [], test, prompt_template("{question}"))


def right(question: str, sample: int = 0) -> str:
    """The right answer of a sum."""
    return f"\\boxed{{{sum(map(int, question.split('+')))}}}"


def half(question: str, sample: int) -> str:
    """Right for even first numbers, wrong for odd ones."""
    return right(question) if int(question.split("+")[0]) % 2 == 0 else "\\boxed{100}"


@pytest.fixture
def replies() -> dict[str, Callable[[str, int], str]]:
    return {"right": right, "half": half}
