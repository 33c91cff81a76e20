"""Chunked log-probs and entropies: values and gradients against autograd in fp64, across chunk borders."""

import pytest
import torch

from qerl.nn import head
from qerl.nn.head import chunked_logprobs


def reference(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float):  # type: ignore[no-untyped-def]
    log_p = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("rows", [1, 3, 8, 64])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_values_and_gradients(rows: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = 37
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * vocab * rows)
    hidden = torch.randn(8, 16, requires_grad=True)
    weight, labels = torch.randn(vocab, 16) * 0.5, torch.randint(0, vocab, (8,))
    grads = torch.randn(8), torch.randn(8)
    found = chunked_logprobs(hidden, weight, labels, temperature)
    exact = hidden.detach().double().requires_grad_()
    expected = reference(exact, weight.double(), labels, temperature)
    for use in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        loss = sum(u * (g * f).sum() for u, g, f in zip(use, grads, found, strict=True))
        true_loss = sum(u * (g.double() * e).sum() for u, g, e in zip(use, grads, expected, strict=True))
        grad = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
        true_grad = torch.autograd.grad(true_loss, exact, retain_graph=True)[0]
        assert (grad - true_grad).norm() / true_grad.norm() < 1e-5
    for f, e in zip(found, expected, strict=True):
        assert (f - e).abs().max() < 1e-5


def test_bf16_logits_are_not_rounded() -> None:
    hidden = torch.randn(64, 256).to(torch.bfloat16)
    weight = torch.randn(500, 256).to(torch.bfloat16)
    labels = torch.randint(0, 500, (64,))
    found, _ = chunked_logprobs(hidden, weight, labels)
    expected, _ = reference(hidden.double(), weight.double(), labels, 1.0)
    rounded = torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, labels[:, None])[:, 0]
    assert (found - expected).abs().max() < 1e-4
    assert (rounded - expected).abs().max() > 1e-2


def test_a_trainable_head_is_refused() -> None:
    weight = torch.randn(5, 4, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient to the LM head"):
        chunked_logprobs(torch.randn(2, 4), weight, torch.tensor([0, 1]))
