"""How much of the machine's memory is left for this process."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes that can be taken without swapping: of the machine, or of the container's limit where that leaves less.

    Files that the container has read count against its limit until their cache is needed for something else, so the
    part that the kernel would drop first (``inactive_file``) is free.

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
    taken = int(used.read_text(encoding="ascii")) - _inactive_file_bytes(cgroup)
    return min(machine, max(0, int(allowed) - taken))


def _inactive_file_bytes(cgroup: Path) -> int:
    """Cache of files that were not read lately, as the group's ``memory.stat`` counts it; 0 where there is none."""
    stat = cgroup / "memory.stat"
    lines = stat.read_text(encoding="ascii").splitlines() if stat.is_file() else []
    return sum(int(value) for name, value in map(str.split, lines) if name == "inactive_file")
