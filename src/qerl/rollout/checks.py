"""What a request must satisfy before anything runs; every message holds the numbers and what to change."""

import numbers
from collections.abc import Sequence

from qerl.rollout.core import NotTokenIdsError, RequestTooLongError, SamplingParams
from qerl.rollout.kv_cache import blocks_for_tokens


def check_prompt_ids(prompt_ids: Sequence[int], num_prompts: int) -> None:
    """One distinct id for each prompt.

    Raises:
        ValueError: another number of ids, or ids that repeat.
    """
    if len(prompt_ids) != num_prompts:
        raise ValueError(f"{len(prompt_ids)} prompt_ids for {num_prompts} prompts")
    if len(set(prompt_ids)) != len(prompt_ids):
        raise ValueError(
            f"{len(prompt_ids)} prompt_ids hold only {len(set(prompt_ids))} distinct values: prompts with "
            "the same id would draw the same random numbers"
        )


def check_token_ids(prompts: Sequence[Sequence[int]]) -> None:
    """Prompts are sequences (lists, tuples) of integers, of Python or of numpy.

    Raises:
        NotTokenIdsError: texts, a flat list, tensors or what a tokenizer returns; naming what was found.
    """
    found = _not_token_ids(prompts)
    if found:
        raise NotTokenIdsError(
            f"prompts are lists of token ids, but {found}: tokenize with tokenizer.apply_chat_template(..., "
            "return_dict=False) or tokenizer(...).input_ids, and .tolist() what is a tensor"
        )


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """No prompt is empty and every token is in the vocabulary.

    Raises:
        ValueError: naming the prompts by their indices.
    """
    empty = [index for index, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise ValueError(
            f"{len(empty)} of {len(prompts)} prompts are empty (indices {_some(empty)}): start them with a BOS token"
        )
    outside = [i for i, prompt in enumerate(prompts) if min(prompt) < 0 or max(prompt) >= vocab_size]
    if outside:
        raise ValueError(
            f"{len(outside)} prompts (indices {_some(outside)}) hold token ids outside the model's "
            f"vocabulary of {vocab_size}: was another tokenizer used?"
        )


def check_lengths(prompts: Sequence[Sequence[int]], sampling: SamplingParams, max_model_len: int) -> None:
    """Prompt and completion fit the model.

    Raises:
        RequestTooLongError: naming the prompts by their indices.
    """
    too_long = [i for i, p in enumerate(prompts) if len(p) + sampling.max_tokens > max_model_len]
    if too_long:
        longest = max(len(prompts[index]) for index in too_long)
        raise RequestTooLongError(
            f"{len(too_long)} of {len(prompts)} prompts (indices {_some(too_long)}) do not fit: the longest "
            f"has {longest} tokens and max_tokens={sampling.max_tokens}, {longest + sampling.max_tokens} "
            f"together, over the limit of {max_model_len}; shorten or drop them, or lower max_tokens"
        )


def check_capacity(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, num_blocks: int, block_size: int
) -> None:
    """Each prompt with its completion fits the empty KV cache.

    Raises:
        RequestTooLongError: naming the prompts by their indices.
    """
    # The last sampled token is never fed back, so it needs no place in the cache.
    needed = [blocks_for_tokens(len(prompt) + sampling.max_tokens - 1, block_size) for prompt in prompts]
    too_large = [index for index, blocks in enumerate(needed) if blocks > num_blocks]
    if too_large:
        raise RequestTooLongError(
            f"{len(too_large)} of {len(prompts)} prompts (indices {_some(too_large)}) can never fit the KV "
            f"cache: with max_tokens={sampling.max_tokens} the largest needs {max(needed)} blocks of {block_size} "
            f"tokens, the cache has {num_blocks}; raise num_blocks or memory_bytes, or lower max_tokens"
        )


def _not_token_ids(prompts: object) -> str:
    """What keeps ``prompts`` from being lists of token ids; nothing if they are."""
    if not _is_sequence(prompts):
        return f"a {type(prompts).__name__} was given for the list of them"
    for index, prompt in enumerate(prompts):
        if not _is_sequence(prompt):
            return f"prompt {index} is a {type(prompt).__name__}"
        # Types first: a batch has few of them and hundreds of thousands of tokens.
        for kind in set(map(type, prompt)):
            if kind is bool or not issubclass(kind, numbers.Integral):
                return f"prompt {index} holds a {kind.__name__}"
    return ""


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _some(indices: list[int]) -> str:
    """The first few of ``indices`` for an error message."""
    shown = ", ".join(map(str, indices[:8]))
    return shown if len(indices) <= 8 else f"{shown}, ..."
