"""Lean decoder forward for the Llama / Mistral / Qwen2 / Qwen3 family over the trainer's own storages.

No weight is copied: the runner walks the Hugging Face modules once and keeps references to their groups, norms and
biases. Every op is the one the trainer's forward uses (same norm kernel, same rotary module, same LoRA formula), so
that engine and trainer log-probs differ by summation order only.
"""

import time
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from qerl.kernels.paged_attention.rotary import rotary_decode, serves_rotary_decode
from qerl.kernels.rms_norm import add_rms_norm
from qerl.kernels.rotary import rotary_kv_write
from qerl.kernels.silu_mul import silu_mul
from qerl.nn.group import WeightGroup
from qerl.nn.head import fp32_logits
from qerl.nn.linear import QuantLinear
from qerl.nn.lora import LoraQuantLinear
from qerl.nn.mlp import GatedMLP
from qerl.nn.norm import RMSNorm
from qerl.nn.quant_head import weight_of
from qerl.rollout.attention import paged_attention
from qerl.rollout.core import ForwardBatch
from qerl.rollout.kv_cache import KVCache
from qerl.rollout.lora import GroupLora, LoraShadows

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class UnsupportedArchitectureError(ValueError):
    """A model that the runner does not know; generation falls back to transformers."""


class FusedLinear:
    """One fused group as the runner calls it: packed matmul, biases, LoRA.

    Args:
        projections: the handles (LoRA-wrapped or not) of one group, in fused order.
        shadows: registry of the LoRA shadows.
    """

    def __init__(self, projections: list[nn.Module], shadows: LoraShadows) -> None:
        handles = [p.base_layer if isinstance(p, LoraQuantLinear) else p for p in projections]
        if not all(isinstance(h, QuantLinear) for h in handles):
            raise UnsupportedArchitectureError("projections are not frozen group linears")
        self.group: WeightGroup = handles[0].group
        if any(h.group is not self.group for h in handles) or len(handles) != len(self.group.segments):
            raise UnsupportedArchitectureError("projections do not form one fused group")
        self.bias = _fused_bias(handles)
        self.lora: GroupLora | None = shadows.for_group(projections)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, K] -> [T, N]."""
        if self.lora is None:
            return self.group.matmul(x, self.bias)
        update = self.lora.update_for(x, self.group)
        y = self.group.matmul(x, self.bias, update)
        if update is None:
            self.lora.add_to(y, x)
        return y

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of a group of gate and up: ``x`` [T, K] -> [T, N / 2]."""
        update = None if self.lora is None else self.lora.update_for(x, self.group)
        if self.lora is not None and update is None and any(self.lora.active):
            return silu_mul(self(x))  # LoRA comes after the product
        return self.group.silu_matmul(x, self.bias, update)


def _fused_bias(handles: list[QuantLinear]) -> torch.Tensor | None:
    """The members' frozen biases as one [N] vector (zeros where a member has none)."""
    if all(h.bias is None for h in handles):
        return None
    like = next(h.bias for h in handles if h.bias is not None)
    return torch.cat([like.new_zeros(h.out_features) if h.bias is None else h.bias.detach() for h in handles])


@dataclass(slots=True)
class Layer:
    """References to one decoder layer's parts."""

    input_norm: RMSNorm
    qkv: FusedLinear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: FusedLinear
    post_norm: RMSNorm
    gate_up: FusedLinear
    down: FusedLinear


def _rope_table(rotary: nn.Module, positions: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Angles of all positions as the kernel reads them, fp32 [P, D]: D / 2 cosines, then D / 2 sines.

    From the model's own rotary module, which the trainer calls: the same bits. Every frequency turns two columns that
    lie D / 2 apart, so that the module's second half repeats its first.

    Raises:
        UnsupportedArchitectureError: the module rotates a part of the head, or its halves differ.
    """
    like = torch.empty(0, dtype=torch.float32, device=device)
    cos, sin = (angles[0] for angles in rotary(like, torch.arange(positions, device=device)[None]))
    half = head_dim // 2
    if cos.shape[-1] != head_dim or not torch.equal(cos[:, :half], cos[:, half:]):
        raise UnsupportedArchitectureError(f"rotary angles {list(cos.shape)} do not pair halves of {head_dim} columns")
    return torch.cat((cos[:, :half], sin[:, :half]), dim=-1)


class DecoderRunner:
    """Implements the engine's ``Runner`` protocol.

    Args:
        model: transformers causal LM from :func:`qerl.nn.loading.load_model`, PEFT-wrapped or not.
        max_len: longest sequence that will be asked for (default: the model's own limit); bounds the rotary table.

    Attributes:
        sync_ms: wall time of the last :meth:`sync`, in milliseconds.

    Raises:
        UnsupportedArchitectureError: another architecture, or modules that were not replaced.
        AdapterMismatchError: an adapter layer that no group serves.
    """

    def __init__(self, model: nn.Module, max_len: int | None = None) -> None:
        causal: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = causal.config
        if config.model_type not in SUPPORTED_MODEL_TYPES:
            raise UnsupportedArchitectureError(
                f"model type {config.model_type!r} is not in {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        rope_type = getattr(causal.model.rotary_emb, "rope_type", "default")
        if rope_type == "longrope":
            raise UnsupportedArchitectureError(
                "longrope scales with the longest sequence of a batch, so engine and trainer would differ"
            )
        self.causal = causal
        self.decoder = causal.model
        self.embedding: nn.Embedding = causal.get_input_embeddings()
        self.output: nn.Module = causal.get_output_embeddings()
        self.dtype: torch.dtype = self.embedding.weight.dtype
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        head = self.head
        self.vocab_size: int = head.out_features if isinstance(head, WeightGroup) else head.shape[0]
        self.max_position = min(_usable_positions(config), max_len or config.max_position_embeddings)
        self.scale = self.head_dim**-0.5
        self.shadows = LoraShadows(model, self.dtype)
        with torch.no_grad():
            self.rope = _rope_table(self.decoder.rotary_emb, self.max_position, self.head_dim, self.device)
        self.layers = [self._layer(layer) for layer in self.decoder.layers]
        self.final_norm = _norm(self.decoder.norm)
        self.shadows.check_complete()
        self.sync()

    def _layer(self, layer: nn.Module) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        if not isinstance(mlp, GatedMLP):
            raise UnsupportedArchitectureError(f"{type(mlp).__name__} is no gated MLP with SiLU")
        return Layer(
            input_norm=_norm(layer.input_layernorm),
            qkv=FusedLinear([attention.q_proj, attention.k_proj, attention.v_proj], self.shadows),
            q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
            k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
            o=FusedLinear([attention.o_proj], self.shadows),
            post_norm=_norm(layer.post_attention_layernorm),
            gate_up=FusedLinear([mlp.gate_proj, mlp.up_proj], self.shadows),
            down=FusedLinear([mlp.down_proj], self.shadows),
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.weight.device

    @property
    def head(self) -> torch.Tensor | WeightGroup:
        """The trainer's output head: its weight [vocab, hidden], or the group of a packed one."""
        return weight_of(self.output)

    def sync(self) -> None:
        """Bring the LoRA shadows up to the masters (in place); base weights and norms are shared and never move."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        self.shadows.sync()
        if cuda:
            torch.cuda.synchronize(self.device)
        self.sync_ms = 1e3 * (time.perf_counter() - started)

    def capture_key(self) -> tuple[Hashable, ...]:
        """Addresses of everything that ``forward`` reads beside its arguments, which adapters are enabled, and what the
        groups pass to their kernels by value."""
        head = self.head
        weight = head.packed if isinstance(head, WeightGroup) else head
        tensors = [self.embedding.weight, weight, self.rope, self.final_norm.weight, self.final_norm.noise]
        groups: list[Hashable] = [head.capture_key()] if isinstance(head, WeightGroup) else []
        for layer in self.layers:
            norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm)
            linears = (layer.qkv, layer.o, layer.gate_up, layer.down)
            tensors += [tensor for norm in norms if norm is not None for tensor in (norm.weight, norm.noise)]
            groups += [linear.group.capture_key() for linear in linears]
            tensors += [linear.bias for linear in linears if linear.bias is not None]
        adapters = self.shadows.groups
        tensors += [tensor for group in adapters for tensor in (group.a, group.b.buffer)]
        enabled = [is_active for group in adapters for is_active in group.active]
        return (*(tensor.data_ptr() for tensor in tensors), *groups, *enabled)

    def _attend(self, layer: Layer, index: int, x: torch.Tensor, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """What attention gives before the output projection, [T, Hq D]; keys and values are written into ``kv``."""
        # AQN never perturbs the norms of heads, so that their noise slots stay empty and need not be read.
        q_norm, k_norm, eps = None, None, 0.0
        if layer.q_norm is not None:
            q_norm, k_norm, eps = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.variance_epsilon
        qkv, caches, norms = layer.qkv(x), (kv.k[index], kv.v[index]), (q_norm, k_norm)
        if batch.independent_rows and serves_rotary_decode(qkv, self.rope, *caches, *norms):
            contexts = (batch.block_table, batch.context_lens)
            out = rotary_decode(qkv, self.rope, *caches, *contexts, self.scale, *norms, eps)
        else:
            q, k, v = rotary_kv_write(qkv, self.rope, batch.positions, *caches, batch.slot_mapping, *norms, eps)
            out = paged_attention(q, k, v, kv, index, batch, self.scale)
        return out.flatten(1)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """Logits fp32 [R, vocab] of the rows that ``batch`` wants; new keys and values are written into ``kv``."""
        hidden = self.embedding(batch.token_ids)
        normed = self.layers[0].input_norm(hidden)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            attended = self._attend(layer, index, normed, batch, kv)
            if index == self.num_layers - 1:  # behind its keys and values, only these rows matter
                attended, hidden = batch.wanted(attended), batch.wanted(hidden)
            normed, hidden = _add_norm(layer.o(attended), hidden, layer.post_norm)
            normed, hidden = _add_norm(layer.down(layer.gate_up.silu_mul(normed)), hidden, next_norm)
        return fp32_logits(normed, self.head)


def _add_norm(x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(residual + x), residual + x) in one pass."""
    return add_rms_norm(x, residual, norm.weight, norm.noise, norm.variance_epsilon)


def _norm(module: nn.Module) -> RMSNorm:
    if not isinstance(module, RMSNorm):
        raise UnsupportedArchitectureError(f"norm {type(module).__name__} is not a plain RMSNorm")
    return module


def _usable_positions(config) -> int:  # type: ignore[no-untyped-def]
    """Longest sequence the runner computes as the model does (a sliding window is not implemented here)."""
    window = getattr(config, "sliding_window", None)
    uses_window = getattr(config, "use_sliding_window", True)
    limit = config.max_position_embeddings
    return min(limit, window) if window and uses_window else limit
