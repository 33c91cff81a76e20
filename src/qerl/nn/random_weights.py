"""Models with the geometry of a config and random weights, for measurements that need no trained model.

Packed weights are made on the target device as codes and scales, never from 16-bit ones, so a model takes no more
memory than it holds in the end. The weights have the spread of a freshly initialized model (standard deviation 0.02),
which keeps activations finite and the distribution over tokens broad.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from qerl.formats.base import PackedTensor, get_format
from qerl.formats.nf4 import CODE_BOOK
from qerl.nn.group import WeightGroup
from qerl.nn.linear import QuantLinear
from qerl.nn.loading import (
    HEAD_FORMATS,
    WEIGHT_FORMATS,
    ModelLoadError,
    empty_model,
    fill_model,
    resolve_device,
    resolve_dtype,
)
from qerl.nn.lora import lora_layers, prepare_lora_config
from qerl.nn.surgery import find_projection_groups

STD = 0.02
# E4M3 codes of the random block scales: 0x58 is 16, eight codes are a factor of two, so 16 to 60.
_SCALE_CODES = (0x58, 0x68)
# Magnitudes of the eight E2M1 codes; each is as likely as any other.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _rms(values: tuple[float, ...]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values))


def _e4m3(code: int) -> float:
    """Value of a positive normal E4M3 code."""
    return 2.0 ** ((code >> 3) - 7) * (1 + (code & 7) / 8)


def random_packed(
    format: str, rows: int, columns: int, device: torch.device | str, generator: torch.Generator | None = None
) -> PackedTensor:
    """A random packed weight ``[rows, columns]`` of standard deviation 0.02, made on ``device``.

    Args:
        format: ``"nvfp4"``, ``"nf4"`` or ``"mxfp4"``; ``columns`` must be a multiple of its block size.
        generator: of ``device``; None: the global one.
    """
    block = get_format(format).block_size
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device, generator=generator)
    shape = (rows, columns // block)
    if format == "nf4":
        absmax = torch.rand(shape, device=device, generator=generator).add_(0.5).mul_(STD / _rms(CODE_BOOK))
        return PackedTensor(format, (rows, columns), codes, absmax, None)
    if format == "mxfp4":
        # The two powers of two around the wanted root mean square of the scales, mixed so that they have it.
        wanted = STD / _rms(_E2M1_MAGNITUDES)
        lower = math.floor(math.log2(wanted))
        share_of_upper = ((wanted / 2.0**lower) ** 2 - 1) / 3
        upper = torch.rand(shape, device=device, generator=generator) < share_of_upper
        scales = upper.to(torch.uint8) + (127 + lower)
        return PackedTensor(format, (rows, columns), codes, scales.view(torch.float8_e8m0fnu), None)
    scale_rms = _rms(tuple(_e4m3(code) for code in range(*_SCALE_CODES)))
    divisor = _rms(_E2M1_MAGNITUDES) * scale_rms / STD
    scales = torch.randint(*_SCALE_CODES, shape, dtype=torch.uint8, device=device, generator=generator)
    global_scale = torch.full((1,), divisor, dtype=torch.float32, device=device)
    return PackedTensor(format, (rows, columns), codes, scales.view(torch.float8_e4m3fn), global_scale)


def random_group(
    format: str,
    segments: Sequence[int],
    in_features: int,
    dtype: torch.dtype,
    device: torch.device | str,
    generator: torch.Generator | None = None,
) -> WeightGroup:
    """A fused group ``[sum(segments), in_features]`` of random weights; ``bf16`` means 16-bit (or fp32) ones."""
    group = WeightGroup(format, segments, in_features, dtype, device)
    for index, rows in enumerate(segments):
        if format == "bf16":
            values = torch.empty(rows, in_features, dtype=dtype, device=device)
            group.load_segment(index, values.normal_(0.0, STD, generator=generator))
        else:
            group.load_segment(index, random_packed(format, rows, in_features, device, generator))
    group.settle_layout()
    return group


def random_lora_handles(group: WeightGroup, rank: int, seed: int = 0) -> tuple[nn.Module, list[nn.Module]]:
    """A module with the LoRA-wrapped handles of ``group``, and these in order (random factors, B not zero)."""
    holder = nn.Module()
    holder.register_module("weights", group)
    names = [f"projection_{index}" for index in range(len(group.segments))]
    for index, name in enumerate(names):
        setattr(holder, name, QuantLinear(group, index))
    inject_adapter_in_model(prepare_lora_config(_lora_config(rank), holder), holder)
    _randomize_adapter(holder, seed)
    return holder.requires_grad_(False), [getattr(holder, name) for name in names]


class RandomWeights:
    """A source of random tensors with the names and shapes of a model.

    Args:
        shapes: name -> shape of every parameter of the model.
        packed: modules whose weights come packed.
        format: their format.
        dtype: of everything else.
        device: where the numbers are drawn.
        seed: equal seeds give equal weights on one kind of device.
    """

    path = "random weights"

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        packed: frozenset[str],
        format: str,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        self._shapes = dict(shapes)
        self._packed = packed
        self._format = format
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._shapes)

    def is_packed(self, module: str) -> bool:
        """Whether the weight of ``module`` comes packed."""
        return module in self._packed

    def load(self, name: str) -> torch.Tensor:
        """Ones for the scale of a norm, N(0, 0.02^2) for everything else."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        return values.normal_(0.0, STD, generator=self._generator)

    def load_packed(self, module: str) -> PackedTensor:
        """A random packed weight of the module's shape."""
        rows, columns = self._shapes[f"{module}.weight"]
        return random_packed(self._format, rows, columns, self._device, self._generator)


def random_model(
    config: PretrainedConfig,
    *,
    weights: str = "nvfp4",
    head: str = "bf16",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    seed: int = 0,
) -> PreTrainedModel:
    """A frozen causal LM of this geometry with random weights, as :func:`qerl.nn.loading.load_model` builds one.

    Linears whose width is no multiple of the format's block stay in 16 bit, as in a real model.

    Args:
        config: of the model; its ``dtype`` is set.
        weights: ``bf16``, ``nvfp4``, ``nf4`` or ``mxfp4``.
        head: ``bf16`` (the compute dtype) or ``nvfp4``; of a tied embedding, as in ``load_model``.
        dtype, device: as in ``load_model``.
        seed: of the weights.

    Raises:
        ModelLoadError: an unknown format.
    """
    if head not in HEAD_FORMATS[1:]:
        raise ModelLoadError(f"head={head!r} is unknown; choose from {', '.join(HEAD_FORMATS[1:])}.")
    if weights not in WEIGHT_FORMATS:
        raise ModelLoadError(f"weights={weights!r} is unknown; choose from {', '.join(WEIGHT_FORMATS)}.")
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    model = empty_model(config, dtype)
    # A tied head is one parameter under two names, which named_parameters lists once.
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    packed: frozenset[str] = frozenset()
    if weights != "bf16":
        block = get_format(weights).block_size
        packed = frozenset(
            name
            for found in find_projection_groups(model)
            for name, linear in zip(found.full_names, found.linears, strict=True)
            if linear.in_features % block == 0
        )
    source = RandomWeights(shapes, packed, weights, dtype, device, seed)
    fill_model(model, source, weights, dtype, device, head)
    return model


def add_random_adapter(model: PreTrainedModel, rank: int, seed: int = 0, scale: float = 0.1) -> nn.Module:
    """Wrap ``model`` with LoRA of ``rank`` on every linear, both factors random (B is not zero).

    The update has a spread of ``scale`` for inputs of spread 1: at 0.1 about a tenth of what the base weights give, so
    it cannot be left out unnoticed.
    """
    wrapped = get_peft_model(model, prepare_lora_config(_lora_config(rank), model))
    _randomize_adapter(wrapped, seed, scale)
    return wrapped.requires_grad_(False).eval()


def _lora_config(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")


@torch.no_grad()
def _randomize_adapter(module: nn.Module, seed: int, scale: float = 0.1) -> None:
    """Draw both factors of every adapter layer anew: low-rank values of spread 1, an update of spread ``scale``."""
    for index, layer in enumerate(lora_layers(module).values()):
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        generator = torch.Generator(a.device).manual_seed((seed << 20) + index)
        a.normal_(0.0, a.shape[1] ** -0.5, generator=generator)
        b.normal_(0.0, scale * b.shape[1] ** -0.5, generator=generator)
