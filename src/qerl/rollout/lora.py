"""The engine's view of LoRA: compute-dtype shadows of the fp32 masters, cast in place before each generation.

A fused group needs one small matmul for all its A factors, so the shadow of A is the concatenation ``[sum(r), K]`` of
its members; the B of all members lie in one buffer (:class:`qerl.kernels.lora.PackedB`), with the scaling folded in,
and one launch adds them all. Shadows are written in place: their addresses never change, so captured graphs stay valid.
Base weights have no shadow at all. Ranks are filled up with zeros to a multiple of 8, as in the trainer's layers, so
that both add every update before they round or neither does.
"""

import torch
from torch import nn

from qerl.kernels.lora import LoraSegment, PackedB, lora_expand, lora_shrink, padded_rank
from qerl.kernels.quant_matmul import LoraUpdate
from qerl.nn.group import WeightGroup
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
        placed = [(m, start) for m, start in zip(members, starts, strict=True) if m is not None]
        self.members = [member for member, _ in placed]
        first = self.members[0]
        self._ranks = [_active(member)[0].weight.shape[0] for member in self.members]
        segments, columns = [], 0
        for (member, start), rank in zip(placed, self._ranks, strict=True):
            segments.append(LoraSegment(start, member.out_features, columns, padded_rank(rank)))
            columns += padded_rank(rank)
        device = first.base_layer.qweight.device
        self.a = torch.zeros(columns, first.in_features, dtype=dtype, device=device)
        self.b = PackedB(segments, dtype, device)
        self.b.buffer.zero_()

    def sync(self) -> None:
        """Cast the masters into the shadows (in place)."""
        for member, rank, segment, b in zip(self.members, self._ranks, self.b.segments, self.b.views, strict=True):
            lora_a, lora_b, scaling = _active(member)
            if lora_a.weight.shape[0] != rank:
                raise AdapterMismatchError(
                    f"the active adapter has rank {lora_a.weight.shape[0]}, the engine was built for {rank}: build a "
                    "new engine after set_adapter"
                )
            self.a[segment.rank_start : segment.rank_start + rank].copy_(lora_a.weight)
            b[:, :rank].copy_(lora_b.weight * scaling)

    @property
    def active(self) -> tuple[bool, ...]:
        """Which members are not disabled now."""
        return tuple(not member.disable_adapters for member in self.members)

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """``y[:, segment] += (x A^T) B^T`` for every member that is not disabled; ``y`` [T, N] is mutated."""
        active = self.active
        if any(active):
            lora_expand(y, lora_shrink(x, self.a), self.b, active)

    def update_for(self, x: torch.Tensor, group: WeightGroup) -> LoraUpdate | None:
        """What the product of ``x`` [T, K] with ``group`` adds before it rounds; None where it cannot.

        None also where no member is enabled: ``add_to`` then does nothing.
        """
        active = self.active
        if not (any(active) and x.is_cuda and group.adds_lora(x.dtype, [s.rank for s in self.b.segments])):
            return None
        places = {
            segment.out_start: (segment.rank_start, segment.rank if enabled else 0, place)
            for segment, place, enabled in zip(self.b.segments, self.b.places, active, strict=True)
        }
        ordered = tuple(places.get(start, (0, 0, 0)) for start in group.starts)
        return LoraUpdate(self.a, self.b.buffer, ordered)

    @property
    def bytes(self) -> int:
        """Bytes of the shadows."""
        return self.a.nbytes + self.b.buffer.nbytes


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
