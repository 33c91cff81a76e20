"""Generation through ``transformers.generate``, for architectures the engine's runner does not know.

Same interface and same outputs as :class:`qerl.rollout.engine.RolloutEngine`; slower (static batches, no shared
prefix). LoRA and noise act because the model's own modules run.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import GenerationConfig

from qerl.rollout.checks import check_token_ids
from qerl.rollout.core import CompletionOutput, SamplingParams
from qerl.rollout.engine import EngineStats


class TransformersEngine:
    """Static-batch generation over the trainer's own model.

    Args:
        model: transformers causal LM, PEFT-wrapped or not.
        eos_token_ids: ids that end a sample.
        max_model_len: longest prompt + completion.
        max_num_seqs: rows per batch.
    """

    def __init__(
        self, model: nn.Module, eos_token_ids: Sequence[int], max_model_len: int, max_num_seqs: int = 64
    ) -> None:
        self.model = model
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.stats = EngineStats()

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        *,
        step: int = 0,
        prompt_ids: Sequence[int] | None = None,
        progress: Callable[[int, int, int], None] | None = None,
    ) -> list[list[CompletionOutput]]:
        """Sample ``sampling.n`` completions per prompt, in order; see the engine for the arguments.

        Raises:
            NotTokenIdsError: texts, tensors or a flat list instead of lists of token ids.
            ValueError: a prompt that does not fit ``max_model_len``.
        """
        check_token_ids(prompts)
        longest = max((len(p) for p in prompts), default=0)
        if longest + sampling.max_tokens > self.max_model_len:
            raise ValueError(
                f"prompt of {longest} + max_tokens {sampling.max_tokens} exceeds max_model_len {self.max_model_len}"
            )
        start = time.perf_counter()
        rows = [(p, s) for p in range(len(prompts)) for s in range(sampling.n)]
        outputs: list[list[CompletionOutput]] = [[] for _ in prompts]
        was_training = self.model.training
        self.model.eval()
        try:
            for first in range(0, len(rows), self.max_num_seqs):
                batch = rows[first : first + self.max_num_seqs]
                for output in self._generate_batch(prompts, batch, sampling, step, prompt_ids):
                    outputs[output.prompt_index].append(output)
                if progress is not None:
                    done = [o for group in outputs for o in group]
                    progress(len(done), len(rows), sum(len(o.token_ids) for o in done))
        finally:
            self.model.train(was_training)
        generated = sum(len(o.token_ids) for group in outputs for o in group)
        self.stats = EngineStats(
            generated_tokens=generated,
            prompt_tokens=sum(len(p) for p in prompts),
            seconds=time.perf_counter() - start,
        )
        return outputs

    def _generate_batch(
        self,
        prompts: list[list[int]],
        rows: list[tuple[int, int]],
        sampling: SamplingParams,
        step: int,
        prompt_ids: Sequence[int] | None,
    ) -> list[CompletionOutput]:
        device = next(self.model.parameters()).device
        width = max(len(prompts[p]) for p, _ in rows)
        pad = self.eos_token_ids[0] if self.eos_token_ids else 0
        ids = torch.full((len(rows), width), pad)
        mask = torch.zeros_like(ids)
        for row, (p, _) in enumerate(rows):
            ids[row, width - len(prompts[p]) :] = torch.tensor(prompts[p])
            mask[row, width - len(prompts[p]) :] = 1
        key = [(prompt_ids[p] if prompt_ids is not None else p, s) for p, s in rows]
        digest = hashlib.blake2b(repr((sampling.seed, step, key)).encode(), digest_size=8).digest()
        stop = [*(() if sampling.ignore_eos else self.eos_token_ids), *sampling.stop_token_ids]
        greedy = sampling.temperature == 0
        config = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=not greedy,
            temperature=None if greedy else sampling.temperature,
            top_p=None if greedy else sampling.top_p,
            top_k=None if greedy else sampling.top_k,
            min_p=None if greedy or sampling.min_p == 0 else sampling.min_p,
            eos_token_id=stop or None,
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
        )
        rng = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with rng, torch.no_grad(), _neutral_generation_config(self.model):
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            result = self.model.generate(ids.to(device), attention_mask=mask.to(device), generation_config=config)
        tokens = result.sequences[:, width:]
        temperature = 1.0 if greedy else sampling.temperature
        plain = _picked_logprobs(result.logits, tokens, temperature)
        processed = plain if greedy else _picked_logprobs(result.scores, tokens, 1.0)
        return [
            _output(p, s, tokens[i].tolist(), processed[i].tolist(), plain[i].tolist(), set(stop))
            for i, (p, s) in enumerate(rows)
        ]


@contextmanager
def _neutral_generation_config(model: nn.Module) -> Iterator[None]:
    """Without the model's own sampling defaults (repetition penalties, n-gram bans), which fill unset fields."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    owners = {id(m): m for m in (model, base)}.values()
    saved = [(owner, owner.generation_config) for owner in owners]
    for owner, _ in saved:
        owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for owner, config in saved:
            owner.generation_config = config


def _picked_logprobs(logits: tuple[torch.Tensor, ...], tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs [B, C] of ``tokens`` under each step's ``logits`` [B, V] divided by ``temperature``."""
    columns = [
        torch.log_softmax(step.float() / temperature, dim=-1).gather(1, tokens[:, i : i + 1])
        for i, step in enumerate(logits)
    ]
    return torch.cat(columns, dim=1).cpu()


def _output(
    prompt: int, sample: int, tokens: list[int], processed: list[float], plain: list[float], stop: set[int]
) -> CompletionOutput:
    """Cut at the first stop token (kept)."""
    end = next((i + 1 for i, t in enumerate(tokens) if t in stop), len(tokens))
    reason = "stop" if tokens[:end] and tokens[end - 1] in stop else "length"
    return CompletionOutput(prompt, sample, tokens[:end], processed[:end], plain[:end], reason)
