"""Prompts reach the engine as token ids, rendered once, with one BOS."""

import logging

import pytest

from qerl.evaluation.prompts import PromptRenderer

BOS = 1


class CharTokenizer:
    """Characters as tokens; adds a BOS when asked for special tokens, as Llama's tokenizer does."""

    bos_token_id = BOS

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template
        self.options: dict[str, object] = {}

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: object) -> str:
        self.options = options
        assert self.chat_template is not None
        return self.chat_template + "".join(f"[{m['role']}]{m['content']}" for m in conversation) + "[assistant]"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = [BOS] if add_special_tokens else []
        while text.startswith("<s>"):
            ids, text = [*ids, BOS], text[3:]
        return ids + [ord(char) for char in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in token_ids if i > 2)


MESSAGES = [{"role": "user", "content": "2+2"}]


@pytest.mark.parametrize("template", ["<s>", "<s><s>"])
def test_templated_prompt_has_one_bos(template: str) -> None:
    # cases.md row 21: the template writes a BOS and the tokenizer would add another one
    prompt = PromptRenderer(CharTokenizer(template)).render(MESSAGES)
    assert prompt.token_ids.count(BOS) == 1
    assert prompt.token_ids[1:] == [ord(char) for char in "[user]2+2[assistant]"]


def test_template_without_bos_gets_none() -> None:
    assert BOS not in PromptRenderer(CharTokenizer("#")).render(MESSAGES).token_ids


def test_template_options_and_generation_prompt() -> None:
    tokenizer = CharTokenizer("#")
    PromptRenderer(tokenizer, {"enable_thinking": False}).render(MESSAGES)
    assert tokenizer.options == {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}


def test_without_template_messages_are_concatenated_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        renderer = PromptRenderer(CharTokenizer())
        prompts = [renderer.render([{"role": "system", "content": "Add."}, *MESSAGES]) for _ in range(3)]
    assert prompts[0].text == "Add.\n\n2+2"
    assert prompts[0].token_ids == [BOS, *map(ord, "Add.\n\n2+2")]
    assert sum("no chat template" in record.message for record in caplog.records) == 1


def test_raw_text_with_its_own_bos_keeps_one() -> None:
    assert PromptRenderer(CharTokenizer("#")).render_raw("<s>hi").token_ids == [BOS, ord("h"), ord("i")]


def test_real_tokenizer_gets_one_bos_and_the_ids_of_the_template(shared_dir) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_dir / "tokenizers" / "qwen2.5")
    prompt = PromptRenderer(tokenizer).render(MESSAGES)
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert prompt.token_ids == list(expected)


def test_empty_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 message"):
        PromptRenderer(CharTokenizer("#")).render([])
    tokenizer = CharTokenizer("#")
    tokenizer.encode = lambda text, add_special_tokens: []  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no tokens"):
        PromptRenderer(tokenizer).render_raw("")
