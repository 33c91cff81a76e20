"""The prompt template: one place for training and evaluation, rendered later by the chat template."""

from __future__ import annotations

from dataclasses import dataclass

STYLES: dict[str, str] = {
    "boxed": "Reason step by step, and put the final answer in \\boxed{}.",
    "answer_tags": "Reason step by step, then put the final answer between <answer> and </answer>.",
    "number": "Answer with the number only.",
    "plain": "",
}


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A user message made of the question, and an optional system message.

    Attributes:
        user: Text with the placeholder ``{question}`` exactly once; other braces are plain text.
        system: System message, None for none (some chat templates then add their own).
    """

    user: str
    system: str | None = None

    def __post_init__(self) -> None:
        count = self.user.count("{question}")
        if count != 1:
            raise ValueError(f"a prompt needs the placeholder {{question}} exactly once, found {count}: {self.user!r}")

    def messages(self, question: str) -> list[dict[str, str]]:
        """Chat messages with string contents, the question inserted verbatim."""
        user = {"role": "user", "content": self.user.replace("{question}", question)}
        return [user] if self.system is None else [{"role": "system", "content": self.system}, user]


def prompt_template(prompt: str, system: str | None = None) -> PromptTemplate:
    """A template from a style name of ``STYLES`` or from a text holding ``{question}``.

    Raises:
        ValueError: Neither a known style nor a text with the placeholder.
    """
    if prompt in STYLES:
        instruction = STYLES[prompt]
        return PromptTemplate("{question}\n\n" + instruction if instruction else "{question}", system)
    if "{question}" not in prompt:
        raise ValueError(f"prompt={prompt!r} is neither a style ({', '.join(STYLES)}) nor a text with {{question}}")
    return PromptTemplate(prompt, system)
