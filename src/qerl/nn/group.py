"""One resident copy of the frozen weights: a fused group of linears in one opaque buffer.

Projections that read the same input (q/k/v, gate/up) are one matmul in the rollout engine and several modules in
the Hugging Face forward. Both must multiply by the *same* bytes, so a group owns a single frozen Parameter
(``packed``) and the projections are handles on row segments of it (:class:`qerl.nn.linear.QuantLinear`). Handles
keep no views: views die in ``.to()``, ``load_state_dict(assign=True)`` and FSDP, so they are taken anew when needed.

Byte layout of the 4-bit formats, each section aligned to 16 bytes::

    codes         uint8   [N, K/2]     low nibble = even column
    block_scale   nvfp4: float8_e4m3fn [N, K/16]; nf4: float32 [N, K/64]
    global_scale  nvfp4: float32 [S], the divisor of each of the S segments; nf4: absent

On a Hopper GPU the first two sections of NVFP4 hold the same bytes in tiles, the order in which its kernels read them
(:mod:`qerl.kernels.quant_matmul.tiles`); ``layout`` says which. Nothing is kept twice, and what leaves the group (state
dicts, ``packed_tensor``) is in rows.

MXFP4 has no layout of its own: it is loaded as NVFP4 (:mod:`qerl.formats.mxfp4_as_nvfp4`).

For ``format="bf16"`` the Parameter is the plain weight ``[N, K]`` in the compute dtype.
"""

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from qerl.formats.base import PackedTensor, get_format
from qerl.kernels.quant_matmul import (
    GroupWeight,
    LoraUpdate,
    TileLayoutError,
    dequantize,
    from_tiles,
    group_fits_tiles,
    quant_matmul,
    quant_matmul_dx,
    quant_silu_matmul,
    tiles_supported,
    to_tiles,
)
from qerl.kernels.silu_mul import silu_mul

logger = logging.getLogger(__name__)

ALIGNMENT = 16
_SCALE_DTYPE = {"nvfp4": torch.float8_e4m3fn, "nf4": torch.float32}


def dense_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x W^T + bias`` in the wider dtype of the two, rounded once to the dtype of ``x``."""
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype)).to(x.dtype)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class WeightGroup(nn.Module):
    """Frozen weights ``[sum(segments), in_features]`` of linears that share their input.

    Args:
        format: ``"bf16"`` (16-bit or fp32 weights as they are), ``"nvfp4"`` or ``"nf4"``.
        segments: output rows of each member, in order.
        in_features: columns K.
        dtype: compute dtype; the storage dtype when ``format`` is ``"bf16"``.
        device: where the buffer lives.

    Raises:
        ValueError: another format.
    """

    def __init__(
        self,
        format: str,
        segments: Sequence[int],
        in_features: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if format != "bf16" and format not in _SCALE_DTYPE:
            raise ValueError(
                f"a group holds bf16, {' or '.join(_SCALE_DTYPE)} weights, not {format!r} (mxfp4: convert by as_nvfp4)"
            )
        self.format = format
        self.layout = "rows"
        self.segments = tuple(segments)
        self.in_features = in_features
        self.out_features = sum(self.segments)
        self.starts = tuple(sum(self.segments[:i]) for i in range(len(self.segments)))
        self._dense: torch.Tensor | None = None
        # Storage address and device; the weight there; the divisors of its segments.
        self._views: tuple[tuple[int, torch.device], GroupWeight, list[float]] | None = None
        if format == "bf16":
            data = torch.empty(self.out_features, in_features, dtype=dtype, device=device)
        else:
            self._offsets = self._section_offsets()
            data = torch.zeros(self._offsets[-1], dtype=torch.uint8, device=device)
        self.packed = nn.Parameter(data, requires_grad=False)

    def _section_offsets(self) -> tuple[int, int, int, int]:
        n, k = self.out_features, self.in_features
        block = get_format(self.format).block_size
        codes = _aligned(n * k // 2)
        scales = codes + _aligned(n * k // block * _SCALE_DTYPE[self.format].itemsize)
        globals_ = scales + (_aligned(4 * len(self.segments)) if self.format == "nvfp4" else 0)
        return 0, codes, scales, globals_

    def _sections(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Views (codes, block_scale, global_scale) of the buffer in rows."""
        n, k = self.out_features, self.in_features
        block = get_format(self.format).block_size
        dtype = _SCALE_DTYPE[self.format]
        flat, offsets = self.packed.detach(), self._offsets
        codes = flat[: n * k // 2].view(n, k // 2)
        scale_bytes = n * k // block * dtype.itemsize
        scales = flat[offsets[1] : offsets[1] + scale_bytes].view(dtype).view(n, k // block)
        if self.format != "nvfp4":
            return codes, scales, None
        return codes, scales, self._global_scales()

    def _global_scales(self) -> torch.Tensor:
        start = self._offsets[2]
        return self.packed.detach()[start : start + 4 * len(self.segments)].view(torch.float32)

    def _tiles(self) -> torch.Tensor:
        """View ``[N/16, K/64, 576]`` of the first two sections."""
        n, k = self.out_features, self.in_features
        return self.packed.detach()[: n * k // 16 * 9].view(n // 16, k // 64, -1)

    def settle_layout(self) -> None:
        """Bring the buffer into the layout that the kernels of its device read fastest (mutates ``packed``)."""
        device = self.packed.device
        tiles = (
            self.format == "nvfp4"
            and device.type == "cuda"
            and group_fits_tiles(self.segments, self.in_features)
            and tiles_supported(device)
        )
        if tiles and self.layout == "rows":
            self._to_tiles()
        elif not tiles and self.layout == "tiles":
            self._to_rows()

    def _to_tiles(self) -> None:
        codes, scales, _ = self._sections()
        try:
            tiles = to_tiles(codes, scales)
        except TileLayoutError as error:
            logger.warning("a weight of %d x %d stays in rows: %s", self.out_features, self.in_features, error)
            return
        self._tiles().copy_(tiles)
        self.layout = "tiles"
        self.drop_caches()

    def _to_rows(self) -> None:
        codes, scales = from_tiles(self._tiles())
        self.layout = "rows"
        own_codes, own_scales, _ = self._sections()
        own_codes.copy_(codes)
        own_scales.view(torch.uint8).copy_(scales.view(torch.uint8))
        self.drop_caches()

    def group_weight(self) -> GroupWeight:
        """The whole group as the kernels take it; views of the resident buffer (cached per storage address)."""
        key = (self.packed.data_ptr(), self.packed.device)
        if self._views is None or self._views[0] != key:
            if self.layout == "tiles":
                codes, scales, global_scale = self._tiles(), None, self._global_scales()
            else:
                codes, scales, global_scale = self._sections()
            values = [] if global_scale is None else global_scale.tolist()
            uniform = 1.0 / values[0] if len(set(values)) == 1 else None
            weight = GroupWeight(self.format, self.segments, self.in_features, codes, scales, global_scale, uniform)
            self._views = (key, weight, values)
        return self._views[1]

    def segment_weight(self, index: int) -> GroupWeight:
        """Member ``index`` alone, as views of the resident buffer."""
        whole = self.group_weight()
        step = 16 if whole.layout == "tiles" else 1
        rows = slice(self.starts[index] // step, (self.starts[index] + self.segments[index]) // step)
        global_scale = None if whole.global_scale is None else whole.global_scale[index : index + 1]
        uniform = None if global_scale is None else 1.0 / self._views[2][index]
        return GroupWeight(
            self.format,
            (self.segments[index],),
            self.in_features,
            whole.codes[rows],
            None if whole.block_scale is None else whole.block_scale[rows],
            global_scale,
            uniform,
        )

    def load_segment(self, index: int, weight: PackedTensor | torch.Tensor) -> None:
        """Copy one member's weight into the buffer (mutates ``packed``).

        Raises:
            ValueError: format or shape differ from the segment's.
        """
        expected = (self.segments[index], self.in_features)
        found_format = weight.format if isinstance(weight, PackedTensor) else "bf16"
        if found_format != self.format or tuple(weight.shape) != expected:
            raise ValueError(
                f"segment {index} holds {self.format} weights of shape {expected}, "
                f"got {found_format} of shape {tuple(weight.shape)}"
            )
        rows = slice(self.starts[index], self.starts[index] + self.segments[index])
        in_tiles = self.layout == "tiles"
        if in_tiles:
            self._to_rows()
        with torch.no_grad():
            if isinstance(weight, torch.Tensor):
                self.packed[rows].copy_(weight)
            else:
                codes, scales, global_scale = self._sections()
                codes[rows].copy_(weight.codes)
                # Byte copies: float8 has no copy kernel on every device.
                scales[rows].view(torch.uint8).copy_(weight.block_scale.view(torch.uint8).to(scales.device))
                if global_scale is not None:
                    global_scale[index].copy_(weight.global_scale.reshape(()))
        self.drop_caches()
        if in_tiles:
            self._to_tiles()

    def packed_tensor(self, index: int) -> PackedTensor | torch.Tensor:
        """Member ``index`` in the interchange layout (exact; views where the buffer holds rows)."""
        if self.format == "bf16":
            return self.packed[self.starts[index] : self.starts[index] + self.segments[index]]
        weight = self.segment_weight(index)
        codes, block_scale = weight.codes, weight.block_scale
        if block_scale is None:
            codes, block_scale = from_tiles(codes)
        shape = (self.segments[index], self.in_features)
        return PackedTensor(self.format, shape, codes, block_scale, weight.global_scale)

    def dense(self) -> torch.Tensor:
        """Dequantized weight ``[N, K]``, global scale included, cached: the CPU path (see ``cache_bytes``).

        4-bit formats give fp32, in which code * block_scale is exact; ``bf16`` gives the storage itself.
        """
        if self.format == "bf16":
            return self.packed.detach()
        if self._dense is None or self._dense.device != self.packed.device:
            weight = self.group_weight()
            dense = dequantize(weight, dtype=torch.float32)
            if weight.global_scale is not None:
                rows = torch.tensor(self.segments, device=dense.device)
                dense /= weight.global_scale.repeat_interleave(rows)[:, None]
            self._dense = dense
        return self._dense

    def unpack(self) -> None:
        """Hold the dequantized weight in fp32 in place of the packed bytes (mutates ``packed`` and ``format``)."""
        if self.format == "bf16":
            return
        with torch.no_grad():
            dense = self.dense()
        self.format, self.layout = "bf16", "rows"
        self.packed = nn.Parameter(dense, requires_grad=False)
        self.drop_caches()

    def adds_lora(self, dtype: torch.dtype, ranks: Sequence[int]) -> bool:
        """Whether a product of activations in ``dtype`` can add LoRA factors of these ranks before it rounds."""
        return self.layout == "tiles" and dtype == torch.bfloat16 and all(rank % 8 == 0 for rank in ranks)

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None = None, lora: LoraUpdate | None = None) -> torch.Tensor:
        """``x W^T + u b^T + bias`` of the whole group, rounded once: what the engine calls (no gradient).

        Args:
            x: [T, K] in the compute dtype; ``bias``: [N] or None; ``lora``: only where :meth:`adds_lora` says so.
        """
        if self.format != "bf16" and x.is_cuda:
            return quant_matmul(x, self.group_weight(), bias, lora)
        return dense_linear(x, self.dense(), bias)

    def silu_matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, lora: LoraUpdate | None = None
    ) -> torch.Tensor:
        """``silu(gate) * up`` of :meth:`matmul` of a group of gate and up: [T, K] -> [T, N / 2] (no gradient)."""
        if self.format != "bf16" and x.is_cuda:
            return quant_silu_matmul(x, self.group_weight(), bias, lora)
        return silu_mul(self.matmul(x, bias, lora))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """``x W^T`` of the whole group in fp32, not rounded: [T, K] in the compute dtype -> [T, N] (no gradient)."""
        if self.format != "bf16" and x.is_cuda:
            return quant_matmul(x, self.group_weight(), out_dtype=torch.float32)
        return x.float() @ self.dense().float().t()

    def logits_dx(self, dy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Gradient of the input of :meth:`logits`: fp32 [T, N], rounded to ``dtype`` -> [T, K] in ``dtype``."""
        dy = dy.to(dtype)
        if self.format != "bf16" and dy.is_cuda:
            return quant_matmul_dx(dy, self.group_weight(), torch.float32).to(dtype)
        return (dy.float() @ self.dense().float()).to(dtype)

    def capture_key(self) -> tuple[int | str | float | None, ...]:
        """What a captured product of :meth:`matmul` holds: where the buffer is, how to read it, and its scale."""
        scale = None if self.format == "bf16" else self.group_weight().uniform_scale
        return self.packed.data_ptr(), self.layout, scale

    def __getstate__(self) -> dict[str, object]:
        # A copy or a pickle of the model does without views and the dequantized copy, which is eight times as large.
        return {**self.__dict__, "_dense": None, "_views": None}

    def drop_caches(self) -> None:
        """Forget views and the dequantized copy (after the buffer was written)."""
        self._dense = None
        self._views = None

    @property
    def resident_bytes(self) -> int:
        """Bytes of the packed buffer."""
        return self.packed.numel() * self.packed.element_size()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the fp32 copy that the CPU path keeps from its first use on (0 on CUDA and for 16-bit weights)."""
        keeps_copy = self.format != "bf16" and self.packed.device.type == "cpu"
        return 4 * self.out_features * self.in_features if keeps_copy else 0

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        # uint8 is no floating type, so `.to(dtype)` moves the packed bytes and never casts them.
        self.drop_caches()
        super()._apply(fn, recurse)
        self.settle_layout()
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:  # type: ignore[no-untyped-def]
        """The handles emit their segments; the buffer itself is no entry of a state dict."""

    def _load_from_state_dict(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        """Loaded through the handles (see :class:`qerl.nn.linear.QuantLinear`)."""

    def extra_repr(self) -> str:
        return f"format={self.format}, segments={self.segments}, in_features={self.in_features}"
