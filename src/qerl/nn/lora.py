"""LoRA on frozen linears: PEFT's layer protocol, our arithmetic.

Adapters are plain PEFT (names, config and files), masters are fp32. Modules run in the compute dtype without autocast,
and the update is one fused multiply-add into the base output::

    y = base(x) + (x A^T) (s B)^T        A, s B cast to the dtype of x

The rollout engine computes the same on its shadows of the same masters. Where the kernels can add the update before
they round (Hopper), both sides do. The casts are inside autograd: gradients reach the fp32 masters.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from qerl.kernels.lora import padded_rank
from qerl.nn.linear import QuantLinear

# PEFT does not know our layer and says so for every one; LoraQuantLinear is registered for it.
warnings.filterwarnings("ignore", message=r"Unsupported layer type '<class 'qerl\.nn\.linear\.QuantLinear'>'")


class AdapterError(ValueError):
    """A LoRA configuration or adapter that cannot be used with frozen 4-bit weights."""


def lora_matmul(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``y + (x a^T) b^T``, rounded once into the dtype of ``y``.

    Args:
        y: base output [..., N].
        x: input [..., K].
        a: [r, K] in the dtype of ``x``.
        b: [N, r] in the dtype of ``x``, scaling included.
    """
    low_rank = F.linear(x, a)
    n = y.shape[-1]
    return torch.addmm(y.reshape(-1, n), low_rank.reshape(-1, a.shape[0]), b.t()).view(y.shape)


def padded_factors(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``a`` [r, K] and ``b`` [N, r] with zeros up to the rank that the kernels take (see ``padded_rank``): the same
    update, the same gradients."""
    missing = padded_rank(a.shape[0]) - a.shape[0]
    return (F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))) if missing else (a, b)


class LoraQuantLinear(nn.Module, LoraLayer):
    """PEFT LoRA layer over :class:`QuantLinear`; several adapters may exist, merging is refused."""

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``x`` [..., K] -> [..., N] with the active adapters added."""
        names = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]
        if len(names) == 1:
            y = self.base_layer.forward_with_lora(x, *padded_factors(*self._factors(names[0], x.dtype)))
            if y is not None:
                return y
        y = self.base_layer(x)
        for name in names:
            y = lora_matmul(y, x, *self._factors(name, x.dtype))
        return y

    def _factors(self, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A ``[r, K]`` and s B ``[N, r]`` in ``dtype``; gradients reach the fp32 masters."""
        return self.lora_A[name].weight.to(dtype), (self.lora_B[name].weight * self.scaling[name]).to(dtype)

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """``s B A`` in fp32 ``[N, K]``: for export into 16-bit weights."""
        return self.lora_B[adapter].weight @ self.lora_A[adapter].weight * self.scaling[adapter]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Always refused.

        Raises:
            AdapterError: merging would re-quantize the weights and lose most of the update.
        """
        raise AdapterError(
            "LoRA cannot be merged into frozen 4-bit weights: re-quantizing rounds away updates smaller than a "
            "quantization step. Keep the adapter separate, or merge it into 16-bit weights."
        )

    def unmerge(self) -> None:
        """Nothing is ever merged."""

    def __repr__(self) -> str:
        return "lora." + super().__repr__()


def check_lora_config(config: LoraConfig) -> None:
    """Refuse the options that the engine would not reproduce.

    Raises:
        AdapterError: naming the option and what to use instead.
    """
    refused = {
        "use_dora": config.use_dora,
        "lora_dropout > 0": config.lora_dropout > 0,
        "lora_bias": config.lora_bias,
        "target_parameters": bool(config.target_parameters),
        "modules_to_save": bool(config.modules_to_save),
        f"bias={config.bias!r}": config.bias != "none",
    }
    named = [name for name, is_set in refused.items() if is_set]
    if named:
        raise AdapterError(
            f"{', '.join(named)} in the LoRA config: not supported, because the rollout engine applies plain LoRA "
            "straight from the masters. Use lora_dropout=0 and leave these options off."
        )
    init = config.init_lora_weights
    if isinstance(init, str) and init != "gaussian":
        raise AdapterError(
            f"init_lora_weights={init!r} rewrites the base weights, which are frozen here; use True or 'gaussian'."
        )
    targets = config.target_modules
    if isinstance(targets, (list, set, tuple)) and any(t.endswith(("lm_head", "embed_tokens")) for t in targets):
        raise AdapterError("LoRA on lm_head or embed_tokens is not supported: leave them out of target_modules.")


def prepare_lora_config(config: LoraConfig, model: nn.Module) -> LoraConfig:
    """Make a user's ``LoraConfig`` apply to frozen linears (mutates and returns ``config``).

    ``target_modules="all-linear"`` (PEFT only knows ``nn.Linear``) becomes the list of projection names found.

    Raises:
        AdapterError: an unsupported option, or targets that match no frozen linear of the model.
    """
    check_lora_config(config)
    linears = [name.removesuffix(".base_layer") for name, m in model.named_modules() if isinstance(m, QuantLinear)]
    names = {name.rsplit(".", 1)[-1] for name in linears}
    if config.target_modules is None or config.target_modules == "all-linear":
        config.target_modules = set(names)
    wanted = config.target_modules
    if not isinstance(wanted, str):
        unknown = sorted(t for t in wanted if t.rsplit(".", 1)[-1] not in names)
        if unknown:
            raise AdapterError(f"target_modules {unknown} are no linears of this model; it has {sorted(names)}.")
    config._register_custom_module({QuantLinear: LoraQuantLinear})
    return config


def lora_layers(model: nn.Module) -> dict[str, LoraQuantLinear]:
    """Adapter layers by module name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraQuantLinear)}
