"""The engine's view of LoRA: compute-dtype shadows of the fp32 masters, cast in place before each generation.

A fused group needs one small matmul for all its A factors, so the shadow of A is the concatenation ``[sum(r), K]`` of
its members; B stays one matrix per member, with the scaling folded in. Shadows are written in place: their addresses
never change, so captured graphs stay valid. Base weights have no shadow at all.
"""

import torch
from torch import nn

from qerl.nn.linear import QuantLinear
from qerl.nn.lora import LoraQuantLinear, lora_layers


class AdapterMismatchError(ValueError):
    """Adapter matrices of the model that the engine would not apply."""


class GroupLora:
    """LoRA of one fused group.

    Args:
        members: per projection of the group its adapter layer, or None where it has none.
        starts: first output row of each projection.
        dtype: compute dtype of the shadows.
    """

    def __init__(self, members: list[LoraQuantLinear | None], starts: tuple[int, ...], dtype: torch.dtype) -> None:
        self.parts = []
        row = 0
        device = next(m for m in members if m is not None).base_layer.qweight.device
        ranks = [_active(m)[0].weight.shape[0] for m in members if m is not None]
        in_features = next(m for m in members if m is not None).in_features
        self.a = torch.empty(sum(ranks), in_features, dtype=dtype, device=device)
        for member, start in zip(members, starts, strict=True):
            if member is None:
                continue
            rank = _active(member)[0].weight.shape[0]
            b = torch.empty(member.out_features, rank, dtype=dtype, device=device)
            self.parts.append((member, slice(row, row + rank), slice(start, start + member.out_features), b))
            row += rank

    def sync(self) -> None:
        """Cast the masters into the shadows (in place)."""
        for member, rank_rows, _, b in self.parts:
            lora_a, lora_b, scaling = _active(member)
            if lora_a.weight.shape[0] != rank_rows.stop - rank_rows.start:
                raise AdapterMismatchError(
                    f"the active adapter has rank {lora_a.weight.shape[0]}, the engine was built for "
                    f"{rank_rows.stop - rank_rows.start}: build a new engine after set_adapter"
                )
            self.a[rank_rows].copy_(lora_a.weight)
            b.copy_(lora_b.weight * scaling)

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """``y[:, segment] += (x A^T) B^T`` for every member; ``y`` [T, N] is mutated."""
        enabled = [part for part in self.parts if not part[0].disable_adapters]
        low_rank = x @ self.a.t() if enabled else None
        for _, rank_rows, out_rows, b in enabled:
            y[:, out_rows].addmm_(low_rank[:, rank_rows], b.t())

    @property
    def bytes(self) -> int:
        """Bytes of the shadows."""
        return sum(t.numel() * t.element_size() for t in (self.a, *(part[3] for part in self.parts)))


def _active(layer: LoraQuantLinear) -> tuple[nn.Linear, nn.Linear, float]:
    """A, B and scaling of the one active adapter."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1:
        raise AdapterMismatchError(f"the engine serves exactly one active adapter, found {names or 'none'}")
    return layer.lora_A[names[0]], layer.lora_B[names[0]], layer.scaling[names[0]]


class LoraShadows:
    """All group adapters of a model, and the proof that none was missed.

    Args:
        model: PEFT-wrapped or plain model (then there are no adapters).
        dtype: compute dtype.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype
        self.groups: list[GroupLora] = []
        self._served: set[int] = set()

    def for_group(self, projections: list[nn.Module]) -> GroupLora | None:
        """Adapter of the group made of ``projections`` (handles, LoRA-wrapped or not), or None."""
        members = [p if isinstance(p, LoraQuantLinear) else None for p in projections]
        if not any(members):
            return None
        handle: QuantLinear = members[[m is not None for m in members].index(True)].base_layer
        lora = GroupLora(members, handle.group.starts, self.dtype)
        self.groups.append(lora)
        self._served.update(id(m) for m in members if m is not None)
        return lora

    def check_complete(self) -> None:
        """Every adapter layer of the model is served.

        Raises:
            AdapterMismatchError: naming the layers that would be silently ignored.
        """
        missed = [name for name, layer in lora_layers(self.model).items() if id(layer) not in self._served]
        if missed:
            raise AdapterMismatchError(
                f"{len(missed)} adapter layers would not reach the engine: {', '.join(missed[:4])}"
            )

    def sync(self) -> None:
        """Cast all masters into their shadows, in place."""
        with torch.no_grad():
            for group in self.groups:
                group.sync()

    @property
    def bytes(self) -> int:
        """Bytes of all shadows."""
        return sum(group.bytes for group in self.groups)
