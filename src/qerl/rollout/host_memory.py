"""How much of the machine's memory is left for this process."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes that can be taken without swapping: of the machine, or of the container's limit where that leaves less.

    Args:
        cgroup: folder of the process's control group, version 2 (its root, as containers see it).
    """
    machine = psutil.virtual_memory().available
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if not (limit.is_file() and used.is_file()):
        return machine
    allowed = limit.read_text(encoding="ascii").strip()
    if allowed == "max":
        return machine
    return min(machine, max(0, int(allowed) - int(used.read_text(encoding="ascii"))))
