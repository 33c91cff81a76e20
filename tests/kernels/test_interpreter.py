"""Runs the kernels in Triton's CPU interpreter, in a process of its own.

The interpreter must be chosen before Triton is first imported, and other tests may import it. The checks are in the
``interpreted_*.py`` files beside this one, which pytest does not collect by itself.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_triton_interpreter() -> None:
    files = sorted(map(str, _HERE.glob("interpreted_*.py")))
    assert len(files) == 8
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
