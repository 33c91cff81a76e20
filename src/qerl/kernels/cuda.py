"""CUDA C++ kernels without a compiler on the user's machine: NVRTC at first use, the binary cached on disk.

NVRTC ships with torch's CUDA packages, and ``cuda.bindings`` (a dependency of those packages) compiles and launches.
Each kernel of a source is compiled by itself when it is first asked for: one takes about a second, all a minute.
Binaries are kept under ``$XDG_CACHE_HOME/qerl`` (default ``~/.cache/qerl``) by a hash of source, options and NVRTC
version.
"""

import ctypes
import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# Set to anything, this environment variable leaves everything to the Triton kernels; NVFP4 weights then stay in rows.
DISABLE_VARIABLE = "QERL_NO_CUDA_KERNELS"


class KernelBuildError(RuntimeError):
    """NVRTC or the driver refused a kernel."""


def cache_dir() -> Path:
    """Folder of compiled kernels."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "qerl" / "kernels"


def compile_cubin(source: Path, only: str | None = None, arch: str = "sm_90a") -> bytes:
    """Machine code of a ``.cu`` file whose includes lie beside it, from the cache or from NVRTC.

    With ``only``, the macro call of one of its kernels (such as ``KERNEL(64, 2, 4, 4)``), of that kernel alone.

    Raises:
        KernelBuildError: with NVRTC's log.
        ImportError: no ``cuda.bindings``.
    """
    from cuda.bindings import nvrtc

    headers = sorted(source.parent.glob("*.cuh"))
    version = _checked(nvrtc.nvrtcVersion())
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    if only is not None:
        options.append(f"--define-macro=KERNELS={only}".encode())
    digest = hashlib.sha256(repr((version, options)).encode())
    for file in (source, *headers):
        digest.update(file.read_bytes())
    cached = cache_dir() / f"{source.stem}-{digest.hexdigest()[:24]}.cubin"
    if cached.is_file():
        return cached.read_bytes()
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            source.read_bytes(),
            source.name.encode(),
            len(headers),
            [header.read_bytes() for header in headers],
            [header.name.encode() for header in headers],
        )
    )
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise KernelBuildError(f"NVRTC {version} cannot compile {source.name}: {log.decode(errors='replace')[:2000]}")
    cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    _store(cached, cubin)
    return cubin


def _store(path: Path, data: bytes) -> None:
    """Write atomically: several processes may compile at once. A cache that cannot be written is only slower."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("compiled kernels are not cached: %s", error)


def _checked(result):  # type: ignore[no-untyped-def]
    """The value of a ``cuda.bindings`` call.

    Raises:
        KernelBuildError: the call failed.
    """
    status, *values = result
    if status.value != 0:
        raise KernelBuildError(f"CUDA call failed: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(slots=True)
class Kernel:
    """A loaded kernel of one device."""

    function: object
    threads: int

    def allow_shared_memory(self, num_bytes: int) -> None:
        """Raise the limit of dynamic shared memory a block may ask for."""
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self.function, attribute, num_bytes))


@cache
def load_kernel(
    source: Path, name: str, threads: int, dynamic_shared: bool, device_index: int, only: str | None = None
) -> Kernel:
    """Compile (or fetch), load into the context of the device, and allow all dynamic shared memory if asked.

    ``only`` as in :func:`compile_cubin`.

    Raises:
        KernelBuildError: it cannot be built or loaded.
    """
    from cuda.bindings import driver

    module = load_module(source, device_index, only)
    kernel = Kernel(_checked(driver.cuModuleGetFunction(module, name.encode())), threads)
    if dynamic_shared:
        kernel.allow_shared_memory(torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin)
    return kernel


@cache
def load_module(source: Path, device_index: int, only: str | None = None):  # type: ignore[no-untyped-def]
    """Compile (or fetch) a source, or one kernel of it, and load it into the context of the device.

    Not while a CUDA graph is captured.

    Raises:
        KernelBuildError: it cannot be built or loaded.
    """
    from cuda.bindings import driver

    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # makes torch create its context
        return _checked(driver.cuModuleLoadData(compile_cubin(source, only)))


class Launch:
    """A kernel with its grid and shared memory, ready to be launched with other arguments on any stream.

    Args:
        kernel: what to run.
        grid: blocks.
        shared_bytes: dynamic shared memory a block.
        overlap: start while the previous kernel of the stream still runs (programmatic dependent launch); the kernel
            must wait for its predecessors itself before it touches their data.
        cluster: consecutive blocks of a cluster; 1: as the kernel was compiled.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        shared_bytes: int = 0,
        overlap: bool = False,
        cluster: int = 1,
    ) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._function = kernel.function
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes = shared_bytes
        attributes = []
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        self._config = config

    def __call__(self, *arguments: ctypes.Structure | ctypes.Array) -> None:
        """Launch on torch's current stream; `arguments` are copied by the driver."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        self._config.hStream = torch.cuda.current_stream().cuda_stream
        (status,) = self._driver.cuLaunchKernelEx(self._config, self._function, ctypes.addressof(pointers), 0)
        if status.value != 0:
            raise KernelBuildError(f"launch failed: {status!r}")
