"""A fake engine behind ``build_engine`` for the commands that generate."""

from collections.abc import Sequence
from typing import Any

import pytest

from qerl.rollout.core import CompletionOutput, SamplingParams


class CharTokenizer:
    """One token per character."""

    bos_token_id = None
    chat_template = "chars"

    def apply_chat_template(self, conversation: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"[{message['role']}]{message['content']}" for message in conversation) + "[assistant]"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


class EchoEngine:
    """Completes a prompt with itself and the sample's number."""

    max_model_len = 4096

    def __init__(self) -> None:
        self.sampling: SamplingParams | None = None

    def generate(self, prompts: list[list[int]], sampling: SamplingParams, **_: Any) -> Any:
        self.sampling = sampling
        return [
            [self._output(index, prompt, sample) for sample in range(sampling.n)]
            for index, prompt in enumerate(prompts)
        ]

    def _output(self, index: int, prompt: list[int], sample: int) -> CompletionOutput:
        ids = [*prompt, ord(str(sample))]
        return CompletionOutput(index, sample, ids, [0.0] * len(ids), [0.0] * len(ids), "stop")


class FakeBuild:
    """Stands in for ``build_engine``; keeps its arguments."""

    def __init__(self) -> None:
        self.engine, self.tokenizer = EchoEngine(), CharTokenizer()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, model_path: str, **options: Any) -> tuple[EchoEngine, CharTokenizer, None]:
        self.calls.append((model_path, options))
        return self.engine, self.tokenizer, None


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    fake = FakeBuild()
    monkeypatch.setattr("qerl.rollout.build.build_engine", fake)
    # sets up logging for the whole process, which a test must not
    monkeypatch.setattr("qerl.cli.progress.quiet_libraries", lambda: None)
    return fake
