"""How long a loaded model takes to its first token: an engine over it, the kernels that it compiles, one prompt.

That time is mostly compilation where nothing is cached yet, and next to nothing afterwards, so every figure says which
of the two it is. For a cold one let both caches begin empty: ``XDG_CACHE_HOME`` (CUDA C++ kernels) and
``TRITON_CACHE_DIR`` (Triton's) set to new folders.
"""

import os
import time
from pathlib import Path

import torch

from qerl.benchmarking.results import Row
from qerl.benchmarking.subject import Subject
from qerl.benchmarking.timing import CheckFailedError, synchronize
from qerl.kernels import cuda
from qerl.rollout.core import SamplingParams
from qerl.rollout.kv_cache import blocks_for_tokens


class CompileCaches:
    """What is compiled before a measurement begins; make one before anything runs on the device.

    Args:
        device: where the kernels will run; nothing is compiled for the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_disk = any(_holds_files(folder) for folder in (cuda.cache_dir(), triton_cache_dir()))
        self._used = False

    def take_state(self) -> str:
        """``none`` (nothing is compiled), ``cold``, ``disk`` (a cache folder held files) or ``process`` (compiled for
        an earlier model of this process, as every later call is told)."""
        if self._device.type != "cuda":
            return "none"
        state = "process" if self._used else "disk" if self._on_disk else "cold"
        self._used = True
        return state


def triton_cache_dir() -> Path:
    """Folder of what Triton compiled (its environment variables, as of release 3.6)."""
    given = os.environ.get("TRITON_CACHE_DIR")
    return Path(given) if given else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def measure_first_token(subject: Subject, caches: CompileCaches, prompt: list[int]) -> Row:
    """Seconds from ``subject`` to the first token of its first ``generate`` call, construction of the engine included.

    Returns:
        ``first_token_s``, ``first_token_prompt`` (tokens) and ``compile_caches`` (see :class:`CompileCaches`).

    Raises:
        CheckFailedError: another number of tokens came.
    """
    state = caches.take_state()
    synchronize(subject.device)
    started = time.perf_counter()
    length = len(prompt) + 1
    engine = subject.engine(1, length, blocks_for_tokens(length, 16) + 1)
    ((sample,),) = engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True, seed=subject.seed))
    seconds = time.perf_counter() - started
    if len(sample.token_ids) != 1:
        raise CheckFailedError(f"the first call returned {len(sample.token_ids)} tokens, 1 was asked")
    engine.reset()
    return {"first_token_s": round(seconds, 3), "first_token_prompt": len(prompt), "compile_caches": state}


def _holds_files(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_file() for path in folder.rglob("*"))
