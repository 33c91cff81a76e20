"""Per-token log-probs and entropies without logits in memory, in fp32 from the matmul on.

The head's matmul takes bf16 operands (or packed weights) and gives fp32 logits, as the rollout engine's does: a logit
rounded to bf16 (8 significant bits) is off by 0.03 at a size of 16, more than everything else on the way. Rows are
scored in chunks and the chunk is computed again in the backward pass, so memory holds one chunk of ``[rows, vocab]`` at
a time.

With z = logits / T, p = softmax(z), H = -sum p log p:  d log p_y / dz = onehot(y) - p  and  dH / dz = -p (log p + H).
"""

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

from qerl.nn.group import WeightGroup
from qerl.nn.quant_head import head_weight

# One chunk of fp32 logits.
CHUNK_BYTES = 128 << 20


def fp32_logits(hidden: torch.Tensor, weight: torch.Tensor | WeightGroup) -> torch.Tensor:
    """``hidden`` [T, H] times ``weight`` [V, H] transposed, fp32 [T, V] without a rounding in between.

    ``weight`` is what :func:`qerl.nn.quant_head.head_weight` gives: a tensor, or the group of a packed head.
    """
    if isinstance(weight, WeightGroup):
        return weight.logits(hidden)
    if hidden.dtype == torch.float32:
        return hidden @ weight.t()
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.t().float()


def _hidden_gradient(grad: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor | WeightGroup) -> torch.Tensor:
    """Gradient of ``hidden`` from that of its logits, fp32 [T, V], which enters the matmul in the compute dtype."""
    if isinstance(weight, WeightGroup):
        return weight.logits_dx(grad, hidden.dtype)
    return grad.to(weight.dtype) @ weight


class _ChunkedLogprobs(torch.autograd.Function):
    """(log-probs, entropies) of labels; gradient to the hidden states only."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor | WeightGroup, labels: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunk by chunk; keeps the normalizers and entropies, never the logits."""
        ctx.temperature = temperature
        ctx.group = weight if isinstance(weight, WeightGroup) else None
        vocab = weight.shape[0] if ctx.group is None else ctx.group.out_features
        ctx.rows = max(1, CHUNK_BYTES // (4 * vocab))
        logprobs, entropies, normalizers = (hidden.new_empty(labels.shape, dtype=torch.float32) for _ in range(3))
        for start in range(0, labels.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = fp32_logits(hidden[part], weight).div_(temperature)
            normalizers[part] = torch.logsumexp(logits, dim=-1)
            logprobs[part] = logits.gather(1, labels[part, None])[:, 0] - normalizers[part]
            probs = (logits - normalizers[part, None]).exp_()
            entropies[part] = normalizers[part] - (probs * logits).sum(-1)
        saved = weight if ctx.group is None else None
        ctx.save_for_backward(hidden, saved, labels, normalizers, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropies: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        """Computes each chunk's logits again; the gradient enters the matmul in the compute dtype."""
        hidden, saved, labels, normalizers, entropies = ctx.saved_tensors
        weight = saved if ctx.group is None else ctx.group
        grad_hidden = torch.empty_like(hidden)
        uses_entropy = bool(grad_entropies.any())
        for start in range(0, labels.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            log_p = fp32_logits(hidden[part], weight).div_(ctx.temperature).sub_(normalizers[part, None])
            grad = log_p.exp()
            if uses_entropy:
                log_p.add_(entropies[part, None]).mul_(grad_entropies[part, None]).add_(grad_logprobs[part, None])
                grad.mul_(log_p).neg_()
            else:
                grad.mul_(-grad_logprobs[part, None])
            grad.scatter_add_(1, labels[part, None], grad_logprobs[part, None])
            grad_hidden[part] = _hidden_gradient(grad.div_(ctx.temperature), hidden, weight)
        return grad_hidden, None, None, None


def chunked_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor | WeightGroup, labels: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of ``labels`` and entropies under ``softmax(hidden weight^T / temperature)``.

    Args:
        hidden: [T, H] in the compute dtype.
        weight: frozen head [V, H], or the group of a packed one.
        labels: int64 [T], all valid.
        temperature: positive.

    Returns:
        fp32 [T] each, differentiable in ``hidden``.

    Raises:
        ValueError: the head requires a gradient, which this op does not give.
    """
    if isinstance(weight, torch.Tensor) and weight.requires_grad:
        raise ValueError("chunked_logprobs gives no gradient to the LM head; freeze it (requires_grad_(False))")
    return _ChunkedLogprobs.apply(hidden, weight, labels, temperature)


def _scoring_forward(self: PreTrainedModel, *args: Any, score_labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
    if score_labels is None:
        return type(self).forward(self, *args, **kwargs)
    hidden = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state[0]
    wanted = score_labels >= 0
    return chunked_logprobs(hidden[wanted], head_weight(self), score_labels[wanted], self.qerl_temperature)


def install_scoring_head(model: PreTrainedModel, temperature: float) -> None:
    """Let ``model(..., score_labels=[T])`` return (log-probs, entropies) of the rows with a label >= 0.

    Other calls are unchanged. The forward of this one instance is wrapped (in place of TRL's fused head), so that
    wrappers around the model (PEFT, data parallel) see an ordinary forward call; copies of the model run their own
    weights.
    """
    model.qerl_temperature = temperature
    model.forward = MethodType(_scoring_forward, model)
