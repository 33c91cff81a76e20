"""What an engine assumed about its model when it was built, and whether that still holds.

The runner shares the model's storages, but its LoRA shadows, fused biases and KV cache have the dtype and device of
the day they were made, and its list of adapters is that of the model then. Casting or moving the model, adding an
adapter or resizing the embedding afterwards would end in a bare error inside a kernel, or, worse, in an engine that
samples from another policy than the trainer's without any error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from qerl.nn.lora import lora_layers
from qerl.rollout.checks import check_token_ids
from qerl.rollout.core import CompletionOutput, SamplingParams
from qerl.rollout.engine import EngineConfig, RolloutEngine
from qerl.rollout.runner import DecoderRunner
from qerl.rollout.session import EngineSession


class StaleEngineError(ValueError):
    """The model was changed after its engine was built."""


class ModelGuard:
    """Remembers shape, dtype and device of every parameter and buffer, and the active adapters.

    Args:
        model: the model an engine was just built over, PEFT-wrapped or not.
    """

    def __init__(self, model: nn.Module) -> None:
        # An adapter may be put into the model later by wrapping it; the decoder itself stays the same object.
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._tensors = _tensors(self.model)
        self._active: list[tuple[str, ...]] | None = _active_adapters(self.model)

    def check(self) -> None:
        """Raise `StaleEngineError` if a tensor was cast, moved, resized, added or removed since."""
        found = _tensors(self.model)
        if found == self._tensors:
            return
        for name in sorted(found.keys() | self._tensors.keys()):
            before, now = self._tensors.get(name), found.get(name)
            if before != now:
                raise StaleEngineError(
                    f"the model was changed after its engine was built: {name} was {_describe(before)} and is "
                    f"{_describe(now)}. Cast, move and wrap the model first (load_model(..., dtype=, device=), "
                    "get_peft_model), then build the engine or the trainer over it."
                )

    def follow_adapters(self, sync: Callable[[], None]) -> None:
        """Call ``sync`` if other adapters are active than at its last success (or at the start)."""
        active = _active_adapters(self.model)
        if active != self._active:
            self._active = None  # a sync that fails may have replaced some shadows: the next call must sync again
            sync()
            self._active = active


class GuardedEngine(RolloutEngine):
    """A :class:`RolloutEngine` that refuses to sample from a model that changed under it.

    Args:
        model: what ``runner`` was built from.
        runner, eos_token_ids, config: see :class:`RolloutEngine`.
    """

    def __init__(
        self, model: nn.Module, runner: DecoderRunner, eos_token_ids: Sequence[int], config: EngineConfig | None = None
    ) -> None:
        super().__init__(runner, eos_token_ids, config)
        self.guard = ModelGuard(model)

    def generate(
        self, prompts: list[list[int]], sampling: SamplingParams, **options: Any
    ) -> list[list[CompletionOutput]]:
        """See :meth:`RolloutEngine.generate`; an adapter switched by ``set_adapter`` is taken over first.

        Raises:
            StaleEngineError: the model was cast, moved, resized or given another adapter since the engine was built.
            AdapterMismatchError: the active adapter does not fit the engine (another rank, several, none).
        """
        check_token_ids(prompts)
        self._follow_model("generate")
        return super().generate(prompts, sampling, **options)

    def open_session(self) -> EngineSession:
        """See :meth:`RolloutEngine.open_session`; the model is compared, and a switched adapter taken over, as the
        session opens and not again while it is open.

        Raises:
            StaleEngineError, AdapterMismatchError: as in :meth:`generate`.
        """
        self._follow_model("open_session")
        return super().open_session()

    def _follow_model(self, method: str) -> None:
        # A call that is refused must not put another adapter under the session that is open.
        self._require_idle(method)
        self.guard.check()
        self.guard.follow_adapters(self.runner.sync)


def _tensors(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype, torch.device]]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (tuple(tensor.shape), tensor.dtype, tensor.device) for name, tensor in named}


def _active_adapters(model: nn.Module) -> list[tuple[str, ...]]:
    return [tuple(layer.active_adapters) for layer in lora_layers(model).values()]


def _describe(tensor: tuple[tuple[int, ...], torch.dtype, torch.device] | None) -> str:
    if tensor is None:
        return "not there"
    shape, dtype, device = tensor
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"
