"""From the JSON body of a request to prompts and sampling parameters; everything that is not done is refused."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2

from qerl.evaluation.prompts import PromptRenderer
from qerl.rollout.core import SamplingParams
from qerl.serving.errors import ApiError
from qerl.serving.fields import number, switch, text_list, whole_number

MAX_CHOICES = 128
MAX_STOPS = 16
# OpenAI's default of /v1/completions.
DEFAULT_COMPLETION_TOKENS = 16
_SEED_RANGE = (-(1 << 63), (1 << 64) - 1)

_COMMON = {
    "model", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "logprobs", "ignore_eos",
}  # fmt: skip
_COMPLETION = _COMMON | {"prompt"}
_CHAT = _COMMON | {"messages", "max_completion_tokens", "top_logprobs"}
# Changes nothing about the answer.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# Would change the answer: taken only with the value that means "off".
_OFF: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none",),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request.

    Attributes:
        prompts: token ids; chat has one.
        sampling: for each of them.
        copies: equal choices that each sample is given out as: ``n`` where it is greedy, and ``sampling.n`` 1.
        stops: stop strings.
        logprobs: whether the log-probs of the tokens are wanted.
        stream: in pieces, as they come.
        include_usage: a last piece with the token counts.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    copies: int
    stops: tuple[str, ...]
    logprobs: bool
    stream: bool
    include_usage: bool


class RequestParser:
    """Reads request bodies for one model.

    Args:
        tokenizer: Hugging Face tokenizer of the model.
        model_name: the name it is served under.
        max_model_len: longest prompt plus completion.
        vocab_size: of the model.
    """

    def __init__(self, tokenizer: Any, model_name: str, max_model_len: int, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.renderer = PromptRenderer(tokenizer)

    def completion(self, body: Any) -> GenerationRequest:
        """A body of ``/v1/completions``.

        Raises:
            ApiError: with the field and what it may be.
        """
        self._check_fields(body, _COMPLETION)
        prompts = self._prompts(body.get("prompt"))
        if whole_number(body, "logprobs", 0, 0, 5) > 1:
            raise ApiError(
                f"logprobs must be 0 or 1, got {body['logprobs']}: only the log-prob of the sampled token is known",
                param="logprobs",
            )
        max_tokens = whole_number(body, "max_tokens", DEFAULT_COMPLETION_TOKENS, 1, self.max_model_len)
        return self._request(body, prompts, max_tokens, body.get("logprobs") is not None)

    def chat(self, body: Any) -> GenerationRequest:
        """A body of ``/v1/chat/completions``.

        Raises:
            ApiError: with the field and what it may be.
        """
        self._check_fields(body, _CHAT)
        if whole_number(body, "top_logprobs", 0, 0, 20) > 0:
            raise ApiError(
                "top_logprobs must be 0: only the log-prob of the sampled token is known", param="top_logprobs"
            )
        prompt = self._render(_messages(body.get("messages")))
        limits = [
            whole_number(body, name, None, 1, self.max_model_len) for name in ("max_completion_tokens", "max_tokens")
        ]
        room = max(1, self.max_model_len - len(prompt))
        max_tokens = next((limit for limit in limits if limit is not None), room)
        return self._request(body, [prompt], max_tokens, switch(body, "logprobs"))

    def _check_fields(self, body: Any, known: set[str]) -> None:
        if not isinstance(body, dict):
            raise ApiError(f"the body must be a JSON object, got {type(body).__name__}")
        if "model" not in body:
            raise ApiError(f"model is missing; this server has {self.model_name!r}", param="model")
        if body["model"] != self.model_name:
            raise ApiError(
                f"the model {body['model']!r} does not exist; this server has {self.model_name!r}",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip
        for name, value in body.items():
            if name in known or name in _IGNORED or value is None:
                continue
            if name not in _OFF:
                raise ApiError(f"unrecognized field {name!r}", param=name)
            if value not in _OFF[name]:
                raise ApiError(f"{name}={value!r} is not supported; leave it out", param=name)

    def _request(
        self, body: Mapping[str, Any], prompts: list[list[int]], max_tokens: int, logprobs: bool
    ) -> GenerationRequest:
        for prompt in prompts:
            if len(prompt) + max_tokens > self.max_model_len:
                raise ApiError(
                    f"this model's maximum context length is {self.max_model_len} tokens, but {len(prompt)} tokens of "
                    f"prompt and {max_tokens} of completion were requested, {len(prompt) + max_tokens} together: "
                    "shorten the prompt or lower max_tokens",
                    param="messages" if "messages" in body else "prompt",
                    code="context_length_exceeded",
                )
        seed = whole_number(body, "seed", None, *_SEED_RANGE)
        choices = whole_number(body, "n", 1, 1, MAX_CHOICES)
        temperature = number(body, "temperature", 1.0, 0.0, 2.0)
        copies = choices if temperature == 0 else 1  # drawn once: greedy samples are equal
        try:
            sampling = SamplingParams(
                n=choices // copies,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=number(body, "top_p", 1.0, 0.0, 1.0),
                top_k=whole_number(body, "top_k", 0, 0, 1 << 30),
                min_p=number(body, "min_p", 0.0, 0.0, 1.0),
                seed=secrets.randbits(63) if seed is None else seed,
                ignore_eos=switch(body, "ignore_eos"),
            )
        except ApiError:
            raise
        except ValueError as error:
            raise ApiError(str(error)) from error
        return GenerationRequest(
            prompts=tuple(map(tuple, prompts)),
            sampling=sampling,
            copies=copies,
            stops=text_list(body, "stop", MAX_STOPS),
            logprobs=logprobs,
            stream=switch(body, "stream"),
            include_usage=_include_usage(body),
        )

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        if not self.renderer.has_template:
            raise ApiError(f"{self.model_name} has no chat template: use /v1/completions", param="messages")
        try:
            return self.renderer.render(messages).token_ids
        except (jinja2.TemplateError, ValueError) as error:
            raise ApiError(f"the chat template refuses these messages: {error}", param="messages") from error

    def _prompts(self, value: Any) -> list[list[int]]:
        """A string, token ids, or a list of either."""
        if isinstance(value, str) or _is_ids(value):
            value = [value]
        if not isinstance(value, list) or not value or not all(isinstance(p, str) or _is_ids(p) for p in value):
            raise ApiError("prompt must be a string, a list of token ids, or a list of either", param="prompt")
        return [self._prompt(item) for item in value]

    def _prompt(self, item: str | list[int]) -> list[int]:
        if isinstance(item, str):
            try:
                return self.renderer.render_raw(item).token_ids
            except ValueError as error:
                raise ApiError(str(error), param="prompt") from error
        outside = [token for token in item if not 0 <= token < self.vocab_size]
        if outside:
            raise ApiError(f"token ids {outside[:4]} are outside the vocabulary of {self.vocab_size}", param="prompt")
        return list(item)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not switch(body, "stream"):
        raise ApiError("stream_options must be an object, and goes with stream=true", param="stream_options")
    return switch(options, "include_usage")


def _messages(value: Any) -> list[dict[str, str]]:
    """Messages with their text; parts of a text are joined, other parts are refused."""
    if not isinstance(value, list) or not value:
        raise ApiError("messages must be a list of at least one message", param="messages")
    messages = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(f"{where} must be an object with a role and a content", param="messages")
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise ApiError(f"{where} has parts that are not text, which this model does not take", param="messages")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise ApiError(f"the content of {where} must be text, got {content!r}", param="messages")
        messages.append({"role": message["role"], "content": content})
    return messages
