"""CUDA C++ of the kernels built for a CPU: what the emulated tests share (see ``emulated/machine.cuh``)."""

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

EMULATED = Path(__file__).parent / "emulated"
_STRING = r'"(?:[^"\\]|\\.)*"'
_ASM = re.compile(r"\basm(?: volatile)?\s*\(")
# What a statement of several instructions is not named after.
_SIDE_LINES = ("mov", "bra", "selp", "setp")


def build(folder: Path, sources: Iterable[Path], units: list[str], before: str | None = None) -> ctypes.CDLL:
    """A library of the ``units`` among the sources, all of which are brought into `folder`, as g++ can read them.

    Every unit includes `before` first. Skips the test where no compiler can build it.
    """
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    for source in (*sources, EMULATED / "machine.cuh"):
        (folder / source.name).write_text(readable(source.read_text()))
    options = ["-std=c++17", "-O1", "-fPIC", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-w", "-Wno-psabi"]
    options += ["-ffp-contract=off", "-x", "c++", *(["-include", before] if before else [])]
    jobs = [
        subprocess.Popen([compiler, *options, "-c", unit, "-o", f"{unit}.o"], cwd=folder, stderr=subprocess.PIPE)
        for unit in units
    ]
    errors = "".join(job.communicate()[1].decode() for job in jobs)
    if "_Float16" in errors:
        pytest.skip("needs a g++ with _Float16")
    assert all(job.returncode == 0 for job in jobs), errors[:2000]
    link = [compiler, "-shared", *(f"{unit}.o" for unit in units), "-o", "emulated.so"]
    subprocess.run(link, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "emulated.so"))


def readable(text: str) -> str:
    """CUDA C++ for a C++ compiler: its own integer types, shared memory from the emulated block, no ``asm``."""
    text = re.sub(r"^typedef unsigned .*$", "", text, flags=re.M)
    text = re.sub(r"extern __shared__ .*? shared\[\];", "unsigned char* const shared = dynamic_shared();", text)
    return without_asm(text)


def without_asm(text: str) -> str:
    """The same source with a call in place of every ``asm`` statement.

    The function is named after the instruction and takes the operands in the order in which the instruction names them;
    statements without an instruction only bind the compiler, and go.
    """
    result, end = "", 0
    for match in _ASM.finditer(text):
        closing = _closing(text, match.end())
        result += text[end : match.start()] + _call(text[match.end() : closing])
        end = closing + 1
    return result + text[end:]


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that was open at `start` is closed; those in strings do not count."""
    depth = 1
    for match in re.compile(rf"{_STRING}|[()]").finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    raise ValueError(f"a parenthesis is not closed after {text[start - 20 : start]!r}")


def _call(statement: str) -> str:
    literals = re.match(rf"(\s*{_STRING})+", statement)
    assert literals is not None, statement
    template = "".join(re.findall(_STRING, literals.group())).replace('"', "")
    rest = statement[literals.end() :]
    operands = [rest[m.end() : _closing(rest, m.end())] for m in re.finditer(rf"{_STRING}\s*\(", rest)]
    lines = [re.sub(r"^@\w+ ", "", line.strip(" {}")) for line in re.split(r";|\\n", template)]
    instructions = [line for line in lines if line and not line.endswith(":") and not line.startswith(".reg")]
    instructions = [line for line in instructions if not line.startswith(_SIDE_LINES)] or instructions
    if not instructions:
        return "(void)0"
    half = re.search(r"\{(\w), \1\}", template)  # which half of a register is taken twice
    order = dict.fromkeys(int(index) for index in re.findall(r"(?<!%)%(\d+)", template))
    arguments = ", ".join(operands[index] for index in order)
    names = [re.sub(r"\W+", "_", line.split()[0]) + (f"_{half.group(1)}" if half else "") for line in instructions]
    return ", ".join(f"{name}({arguments})" for name in names)
