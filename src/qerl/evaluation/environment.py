"""What a result was made with: machine, accelerator and package versions. No host or user names."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("qerl", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "triton", "math-verify")


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that shape a result; absent ones are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def describe_environment() -> dict[str, Any]:
    """Python, operating system, CPU, memory, GPUs and package versions, as JSON values. Imports torch."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "memory_gb": round(properties.total_memory / 1e9, 1),
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": usable_cores(),
        "memory_gb": total_memory_gb(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "packages": package_versions(),
    }


def usable_cores() -> int:
    """Cores this process may run on (less than the machine's inside containers and under taskset)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """Model name of the CPU, or the architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def total_memory_gb() -> float | None:
    """Physical memory in GB (1e9 bytes), ``None`` where the system does not tell."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)


def free_disk_gb(path: Path) -> float:
    """Free disk space at ``path`` in GB (1e9 bytes)."""
    return round(shutil.disk_usage(path).free / 1e9, 1)
