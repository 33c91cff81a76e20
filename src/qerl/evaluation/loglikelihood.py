"""Log-likelihoods of given continuations under a loaded model: no padding, every context computed once.

A batch is one packed row: the distinct contexts without their last tokens, then one segment per continuation (the
context's last token and the continuation without its own last token), as in :mod:`qerl.nn.packing`. The choices of a
multiple-choice question so share the context's forward pass, and causal attention makes that exact. The LM head runs
on segments only, a slice of rows at a time, with fp32 logits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from qerl.nn.attention import PackedSequences
from qerl.nn.head import fp32_logits
from qerl.nn.quant_head import head_weight

# Rows of the LM head at once: 1024 rows of a vocabulary of 152k are 0.6 GB of fp32 logits.
_HEAD_ROWS = 1024

TokenPair = tuple[Sequence[int], Sequence[int]]
"""A context (at least 1 token) and its continuation (at least 1 token)."""


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """``logprob`` is the sum over the continuation's tokens, in nats; ``is_greedy``: each is the most likely one."""

    logprob: float
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class _Batch:
    """A packed row of T tokens whose last R rows predict ``targets``.

    ``input_ids``, ``positions`` int64 [T]; ``targets`` int64 [R]; ``lengths``: rows of each continuation.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    lengths: tuple[int, ...]
    sequences: PackedSequences


@torch.no_grad()
def score_continuations(
    model: nn.Module,
    pairs: Sequence[TokenPair],
    *,
    max_batch_tokens: int = 8192,
    packed: bool = True,
    progress: Callable[[int], None] | None = None,
) -> list[ContinuationScore]:
    """Score each continuation given its context, in the order of ``pairs``.

    Args:
        model: from :func:`qerl.nn.loading.load_model`, PEFT-wrapped or not.
        max_batch_tokens: tokens of one forward pass; a longer pair is a pass of its own.
        packed: whether the model's attention takes packed rows, as it does for every architecture that the rollout
            runner knows. Otherwise one pair is one unpacked pass, with the model's own head.
        progress: called with the number of newly scored pairs.

    Raises:
        ValueError: an empty context or continuation.
    """
    for number, (context, continuation) in enumerate(pairs):
        if not context or not continuation:
            empty = "continuation" if context else "context"
            raise ValueError(f"pair {number} has an empty {empty}: there is nothing to score; give it a token")
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    device = causal.get_input_embeddings().weight.device
    scores: dict[int, ContinuationScore] = {}
    for indices in _plan(pairs, max_batch_tokens if packed else 1):
        batch = _pack([pairs[index] for index in indices], device)
        logprobs, hits = _score(causal, batch, packed)
        for index, part, hit in zip(indices, logprobs.split(batch.lengths), hits.split(batch.lengths), strict=True):
            scores[index] = ContinuationScore(float(part.double().sum()), bool(hit.all()))
        if progress is not None:
            progress(len(indices))
    return [scores[index] for index in range(len(pairs))]


def _plan(pairs: Sequence[TokenPair], max_tokens: int) -> Iterator[list[int]]:
    """Indices of ``pairs`` in batches: equal contexts side by side, longest first (memory runs out early or never)."""
    batch: list[int] = []
    size = 0
    for index in sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]), tuple(pairs[i][0]))):
        context, continuation = pairs[index]
        shared = bool(batch) and pairs[batch[-1]][0] == context
        if batch and size + len(continuation) + (0 if shared else len(context) - 1) > max_tokens:
            yield batch
            batch, size, shared = [], 0, False
        batch.append(index)
        size += len(continuation) + (0 if shared else len(context) - 1)
    if batch:
        yield batch


def _pack(pairs: Sequence[TokenPair], device: torch.device) -> _Batch:
    contexts: list[Sequence[int]] = []
    group: list[int] = []
    for context, _ in pairs:
        if not contexts or contexts[-1] != context:
            contexts.append(context)
        group.append(len(contexts) - 1)
    ids: list[int] = []
    positions: list[int] = []
    for context in contexts:
        ids += context[:-1]
        positions += range(len(context) - 1)
    for context, continuation in pairs:
        ids += [context[-1], *continuation[:-1]]
        positions += range(len(context) - 1, len(context) - 1 + len(continuation))
    lengths = tuple(len(continuation) for _, continuation in pairs)
    return _Batch(
        input_ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        targets=torch.tensor([token for _, continuation in pairs for token in continuation], device=device),
        lengths=lengths,
        sequences=PackedSequences.shared_prefix(
            torch.tensor([len(context) - 1 for context in contexts], device=device),
            torch.tensor(lengths, device=device),
            torch.tensor(group, device=device),
        ),
    )


def _score(causal: nn.Module, batch: _Batch, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs fp32 [R] of the targets, and whether each is the most likely token, bool [R]."""
    rows = len(batch.targets)
    if not packed:
        logits = causal(input_ids=batch.input_ids[None], use_cache=False).logits[0, -rows:]
        return _pick(logits.float(), batch.targets)
    hidden = causal.model(
        input_ids=batch.input_ids[None],
        position_ids=batch.positions[None],
        packed_sequences=batch.sequences,
        # Transformers passes 4-D masks through; any other would be expanded to [T, T] (ours ignores it).
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device),
        use_cache=False,
    ).last_hidden_state[0, -rows:]
    weight = head_weight(causal)
    parts = [
        _pick(fp32_logits(slice_, weight), targets)
        for slice_, targets in zip(hidden.split(_HEAD_ROWS), batch.targets.split(_HEAD_ROWS), strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([hits for _, hits in parts])


def _pick(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From fp32 logits [R, V] and targets [R]."""
    chosen = logits.gather(1, targets[:, None])[:, 0]
    return chosen - logits.logsumexp(-1), logits.argmax(-1) == targets
