"""The Python interpreter as a sandboxed program gets it: this environment's, its files, its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from qerl.sandbox.core import SandboxUnavailable

# Isolated like -I (no user site, no script folder on sys.path, an environment of our own); but -I would also ignore
# PYTHONHASHSEED, and the same completion must get the same reward every time.
FLAGS = ("-s", "-P", "-B")
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter to mount.

    Attributes:
        executable: Its path, the same inside and outside.
        mounts: Folders besides the system's that it needs, read-only.
        hidden: Folders within those to cover with empty ones (installed packages).
    """

    executable: str
    mounts: tuple[str, ...]
    hidden: tuple[str, ...]


@lru_cache(maxsize=2)
def interpreter(site_packages: bool) -> Interpreter:
    """The running interpreter; with ``site_packages`` the packages of its environment can be imported.

    Without, a virtual environment is left out and the packages of the base installation are covered.

    Raises:
        SandboxUnavailable: The base interpreter is not where it should be.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_exec_prefix, "bin", name)
    if not base.exists():
        raise SandboxUnavailable(f"no interpreter at {base}; the sandbox needs the base installation of this Python")
    prefixes = [sys.base_prefix, sys.base_exec_prefix]
    if site_packages:
        return Interpreter(sys.executable, _outside_system([*prefixes, sys.prefix]), ())
    question = "import json, site; print(json.dumps(site.getsitepackages()))"
    answer = subprocess.run([base, "-I", "-c", question], capture_output=True, text=True, check=True)
    folders = [folder for folder in json.loads(answer.stdout) if Path(folder).is_dir()]
    # a folder reached through a symbolic link (lib64 -> lib) is covered with its target
    hidden = tuple(sorted({str(Path(folder).resolve()) for folder in folders}))
    return Interpreter(str(base), _outside_system(prefixes), hidden)


def _outside_system(prefixes: list[str]) -> tuple[str, ...]:
    folders = {path for prefix in prefixes for path in (prefix, str(Path(prefix).resolve()))}
    return tuple(
        folder
        for folder in sorted(folders)
        if not any(Path(folder).is_relative_to(system) for system in SYSTEM_FOLDERS)
    )
