"""What can be known before step 1 is checked before step 1: prompts, adapter, memory."""

import logging
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from qerl.nn.memory import model_memory
from qerl.rollout.engine import RolloutEngine
from qerl.rollout.kv_cache import bytes_per_block, worst_case_blocks
from qerl.trainer.config import ConfigError, QeRLConfig

logger = logging.getLogger(__name__)

_GIB = 1024**3


def render_prompt(prompt: Any, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> list[int]:
    """Token ids of a prompt, exactly as TRL makes them (chat template for messages, plain text otherwise)."""
    if isinstance(prompt, str):
        return tokenizer(text=prompt)["input_ids"]
    rendered = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **template_kwargs
    )
    return rendered["input_ids"]


def check_prompts(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, args: QeRLConfig, tools: list[Any] | None = None
) -> tuple[Dataset, int]:
    """Drop or refuse prompts over ``max_prompt_length`` tokens; show the first rendered prompt.

    Args:
        tools: rendered into the prompts by the chat template, and counted.

    Returns:
        the dataset without overlong prompts, and the longest prompt left (tokens).

    Raises:
        ConfigError: overlong prompts with ``overlong_prompts="error"``, or none left.
    """
    if len(dataset) == 0:
        raise ConfigError("the training data set is empty")
    if "prompt" not in dataset.column_names:
        raise ConfigError(f"the data set has no column 'prompt'; it has {', '.join(dataset.column_names)}")
    kwargs = {**(args.chat_template_kwargs or {}), "tools": tools or None}
    first = dataset[0]["prompt"]
    if isinstance(first, str) and tokenizer.chat_template:
        logger.warning(
            "prompts are plain strings, so the model's chat template is NOT applied; give lists of messages "
            "([{'role': 'user', 'content': ...}]) if this is a chat model"
        )
    lengths = [len(render_prompt(row["prompt"], tokenizer, kwargs)) for row in dataset.select_columns("prompt")]
    logger.info("first prompt as the model sees it:\n%s", tokenizer.decode(render_prompt(first, tokenizer, kwargs)))
    if min(lengths) == 0:
        raise ConfigError(f"prompt {lengths.index(0)} is empty: nothing to continue from")
    limit = args.max_prompt_length
    if limit is None:
        return dataset, max(lengths)
    overlong = [row for row, length in enumerate(lengths) if length > limit]
    if not overlong:
        return dataset, max(lengths)
    found = (
        f"{len(overlong)} of {len(lengths)} prompts are longer than max_prompt_length={limit} tokens "
        f"(longest {max(lengths)}, first at row {overlong[0]})"
    )
    if args.overlong_prompts == "error" or len(overlong) == len(lengths):
        raise ConfigError(f"{found}. Raise max_prompt_length, or set overlong_prompts='drop'.")
    logger.warning("%s: dropped", found)
    drop = set(overlong)
    kept = dataset.select([row for row in range(len(lengths)) if row not in drop])
    return kept, max(length for row, length in enumerate(lengths) if row not in drop)


def longest_eval_prompt(
    datasets: Any, tokenizer: PreTrainedTokenizerBase, args: QeRLConfig, tools: list[Any] | None
) -> int:
    """Longest prompt (tokens) of the evaluation data: one set, a dict of sets, or none; streams count as 0.

    Raises:
        ConfigError: a prompt over ``max_prompt_length``; dropping it would change what is measured.
    """
    kwargs = {**(args.chat_template_kwargs or {}), "tools": tools or None}
    parts = datasets.values() if isinstance(datasets, dict) else [datasets]
    lengths = [
        len(render_prompt(row["prompt"], tokenizer, kwargs))
        for part in parts
        if isinstance(part, Dataset)
        for row in part.select_columns("prompt")
    ]
    longest = max(lengths, default=0)
    if args.max_prompt_length is not None and longest > args.max_prompt_length:
        raise ConfigError(
            f"the longest evaluation prompt has {longest} tokens, over max_prompt_length={args.max_prompt_length}: "
            "raise it, or shorten the evaluation set"
        )
    return longest


def warn_of_skipped_stages(args: QeRLConfig) -> None:
    """Warn where a run with noise has fewer updates than noise stages."""
    if args.aqn_schedule not in ("none", "constant") and 0 < args.max_steps < args.num_stages:
        logger.warning(
            "max_steps=%d is less than num_stages=%d: some noise stages are skipped, the first (no noise) too",
            args.max_steps, args.num_stages,
        )  # fmt: skip


def kv_cache_bytes(engine: RolloutEngine, rows: int, prompt_len: int, max_model_len: int) -> int:
    """Bytes of the KV cache that a rollout of ``rows`` samples takes at most (every sample at full length)."""
    runner, config = engine.runner, engine.config
    per_block = bytes_per_block(
        runner.num_layers, config.block_size, runner.num_kv_heads, runner.head_dim, runner.dtype
    )
    running = min(rows, config.max_num_seqs)
    completion = max_model_len - prompt_len
    return per_block * worst_case_blocks([prompt_len] * running, 1, completion, config.block_size, running)


def memory_table(model: nn.Module, shadow_bytes: int, kv_bytes: int) -> list[tuple[str, float]]:
    """(label, GiB) rows of what is held before the first step."""
    rows = model_memory(model).rows()
    trainable = next(size for label, size in rows if label.startswith("trainable"))
    rows += [
        ("gradients and AdamW states (at most)", 3 * trainable),
        ("LoRA shadows of the engine", shadow_bytes),
        ("KV cache (at most, every sample at full length)", kv_bytes),
    ]
    return [(label, size / _GIB) for label, size in rows]


def format_memory_table(rows: list[tuple[str, float]]) -> str:
    """Aligned text, GiB with a total."""
    total = sum(size for _, size in rows)
    width = max(len(label) for label, _ in rows)
    lines = [f"  {label:<{width}}  {size:8.3f} GiB" for label, size in (*rows, ("total", total))]
    return "\n".join(["memory before step 1:", *lines])


def try_worst_case(trainer: Any, prompt_len: int, table: str) -> None:
    """One forward and backward at the largest batch the run can see (CUDA only), so that OOM comes now, not late.

    Raises:
        ConfigError: it does not fit; the message holds the memory table.
    """
    if trainer.accelerator.device.type != "cuda":
        return
    args, model = trainer.args, trainer.model
    completion_len = trainer.max_completion_length
    shape = (args.per_device_train_batch_size, prompt_len + completion_len)
    # Different first tokens, so that no two rows share a prompt.
    ids = torch.zeros(shape, dtype=torch.long, device=trainer.accelerator.device)
    ids[:, 0] = torch.arange(shape[0], device=ids.device) % model.config.vocab_size
    was_training = model.training
    model.train()
    try:
        logps, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), completion_len)
        logps.sum().backward()
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            f"a batch of {shape[0]} x {shape[1]} tokens does not fit in memory ({error}). Lower "
            f"per_device_train_batch_size or max_completion_length, or set gradient_checkpointing.\n{table}"
        ) from error
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
        torch.cuda.empty_cache()
