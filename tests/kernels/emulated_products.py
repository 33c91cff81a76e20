"""The products of Hopper as their host code launches them, on emulated multiprocessors."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from emulation import EMULATED, build
from kernel_cases import make_u_inside

from qerl.kernels.quant_matmul import GroupWeight, LoraUpdate, hopper, tensor_map
from qerl.kernels.quant_matmul.hopper_plan import LORA_BYTES, FewRowsPlan, ManyRowsPlan, workspace_bytes

SOURCES = Path(hopper.__file__).parent / "cuda"
HEADERS = tuple(
    f"{name}.cuh"
    for name in (
        "tiles",
        "wgmma",
        "shrink",
        "stream_k",
        "cluster_tile",
        "silu",
        "tensor_copy",
        "u_part",
        "few_rows",
        "many_rows",
    )
)
_COUNTERS = hopper.COUNTERS + hopper.LORA_COUNTERS


def build_products(folder: Path, *units: str, sources: Path = SOURCES) -> ctypes.CDLL:
    """A library of the entry points in these ``.cu`` files, and of one many-row kernel with an fp32 result."""
    ours = ("products.cpp", "wide.cu")
    emulated = ("instructions.cuh", "copies.cuh", *ours)
    files = [*(sources / name for name in (*HEADERS, *units)), *(EMULATED / name for name in emulated)]
    library = build(folder, files, [*units, *ours], before="instructions.cuh")
    library.emulate.restype = ctypes.c_char_p
    return library


def _encode(
    element: str, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: str
) -> ctypes.Array:
    """What the emulated machine takes for a tensor map (``Map``): two dimensions have a third of one."""
    sizes, strides, box = (*sizes, 1)[:3], (*strides, 0)[:2], (*box, 1)[:3]
    width = {"BFLOAT16": 2, "INT64": 8}[element]
    return (ctypes.c_uint64 * 16)(address, width, int(swizzle != "NONE"), *sizes, *strides, *box)


class EmulationError(AssertionError):
    """What the emulated machine found."""


@dataclass
class Result:
    """What a launch wrote; rows past the last one are NaN if it kept to its own."""

    y: torch.Tensor
    u: torch.Tensor | None


class Emulator:
    """Stands in for the GPU below ``hopper.run``: `multiprocessors` of them."""

    def __init__(self, library: ctypes.CDLL, multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.library, self.multiprocessors, self.seed = library, multiprocessors, 0
        sums = torch.empty(workspace_bytes(multiprocessors), dtype=torch.uint8)
        self.workspace = sums, torch.zeros(_COUNTERS, dtype=torch.int32), torch.empty(LORA_BYTES, dtype=torch.uint8)
        monkeypatch.setattr(hopper, "_workspace", lambda device: self.workspace)
        monkeypatch.setattr(hopper, "multiprocessor_count", lambda index: multiprocessors)
        monkeypatch.setattr(tensor_map, "_encode", _encode)
        monkeypatch.setattr(hopper, "kernel_launch", self._launch)
        # u is made inside the product wherever it can be, however long that takes; elsewhere by a kernel before.
        make_u_inside(monkeypatch)
        self.kernels_before = 0
        monkeypatch.setattr(hopper, "shrink_into", self._shrink)

    def _shrink(self, x: torch.Tensor, a: torch.Tensor, u: torch.Tensor) -> None:
        self.kernels_before += 1
        u.copy_(x.double() @ a.double().t())

    def _launch(
        self,
        source: str,
        name: str,
        threads: int,
        grid: tuple[int, int, int],
        shared: int,
        device: None,
        macro: str | None = None,
        cluster: int = 1,
    ) -> Callable[..., None]:
        entry = ctypes.cast(getattr(self.library, name), ctypes.c_void_p)
        if "_pair" in name:
            cluster = 2

        def launch(params: ctypes.Structure, *maps: ctypes.Array) -> None:
            joined = (ctypes.c_uint64 * (16 * len(maps)))(*(word for words in maps for word in words))
            rest = grid[0], cluster, threads, shared, self.seed
            problem = self.library.emulate(entry, ctypes.byref(params), joined if maps else None, *rest)
            if problem is not None:
                raise EmulationError(f"{name}, seed {self.seed}: {problem.decode()}")

        return launch

    def run(
        self,
        plan: FewRowsPlan | ManyRowsPlan,
        x: torch.Tensor,
        weight: GroupWeight,
        bias: torch.Tensor | None,
        lora: LoraUpdate | None,
        seed: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Result:
        """One launch into NaN, its turns drawn from `seed`.

        Raises:
            EmulationError: a deadlock, or what no GPU may be asked to do.
        """
        self.seed = seed
        sums, counters, slices = self.workspace
        sums.fill_(255), slices.fill_(255)
        columns = weight.out_features // 2 if plan.silu else weight.out_features
        y = torch.full((x.shape[0] + 1, columns), float("nan"), dtype=dtype)
        u = None if lora is None else torch.full((x.shape[0] + 1, lora.a.shape[0]), float("nan"), dtype=torch.bfloat16)
        hopper.run(plan, x, weight, bias, lora, y[:-1], None if u is None else u[:-1])
        if counters.any():
            raise EmulationError(f"{plan.name}, seed {seed}: counters are left at {counters[counters != 0].tolist()}")
        return Result(y, u)
