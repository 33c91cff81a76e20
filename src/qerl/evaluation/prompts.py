"""From chat messages to the token ids of a prompt: rendered once, exactly one BOS, ids from here on."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that evaluation needs."""

    chat_template: Any
    bos_token_id: int | None

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the model sees it: ``text`` for people, ``token_ids`` for the engine."""

    text: str
    token_ids: list[int]


class PromptRenderer:
    """Renders messages with the tokenizer's chat template, or by plain concatenation where it has none.

    The template writes the special tokens itself, so its text is encoded without adding any; plain text gets
    the tokenizer's own. Either way a doubled BOS at the start is reduced to one (vllm#27486, open-r1#462).
    """

    def __init__(self, tokenizer: Tokenizer, template_options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template_options = dict(template_options or {})
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        if not self.has_template:
            logger.warning("the tokenizer has no chat template: messages are concatenated as plain text")

    def render(self, messages: Sequence[Mapping[str, str]]) -> RenderedPrompt:
        """Render chat ``messages`` (role, content) with the prompt for the assistant's turn at the end.

        Raises:
            ValueError: no messages, or the prompt renders to no tokens.
        """
        if not messages:
            raise ValueError("a prompt needs at least 1 message, got 0")
        if not self.has_template:
            return self.render_raw("\n\n".join(message["content"] for message in messages))
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=True,
            **self.template_options,
        )
        return self._encode(text, add_special_tokens=False)

    def render_raw(self, text: str) -> RenderedPrompt:
        """Encode ``text`` as it is, with the special tokens the tokenizer adds by itself.

        Raises:
            ValueError: the text renders to no tokens.
        """
        return self._encode(text, add_special_tokens=True)

    def _encode(self, text: str, *, add_special_tokens: bool) -> RenderedPrompt:
        ids = [int(token) for token in self.tokenizer.encode(text, add_special_tokens=add_special_tokens)]
        bos = self.tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        if not ids:
            raise ValueError(f"the prompt {text!r} has no tokens; give it some text")
        return RenderedPrompt(text, ids)
