"""The system calls that a sandboxed program may not make, as a classic BPF program for seccomp.

Namespaces hide files, processes and networks; what they leave open is closed here: new user namespaces and mounts
(kernel code that only root could reach otherwise), socket families that no network namespace contains (AF_VSOCK
reaches the host of a virtual machine, AF_NETLINK and AF_PACKET the kernel), tracing, keyrings, BPF, io_uring, and
memory that no address space limit counts (System V and POSIX queues, memfd). Everything else is allowed.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from functools import lru_cache

from qerl.sandbox.core import SandboxUnavailable

# name: number on (x86_64, aarch64), from the kernel's asm/unistd_64.h and asm-generic/unistd.h
_DENIED: dict[str, tuple[int, int]] = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "personality": (135, 92),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
}  # fmt: skip
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKET = (41, 198)
# NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NAMESPACE_FLAGS = 0x80 | 0x20000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
# linux/audit.h
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32_BIT = 0x40000000

# linux/bpf_common.h, linux/seccomp.h
_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
# offsets into struct seccomp_data; the low half of the first argument (little endian)
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16


@lru_cache(maxsize=1)
def filter_bytes() -> bytes:
    """The filter for this machine, as an array of ``struct sock_filter``.

    Raises:
        SandboxUnavailable: Another architecture than x86_64 or aarch64.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise SandboxUnavailable(
            f"no system call filter for the architecture {machine!r}; known are {', '.join(_ARCHITECTURES)}"
        )
    column, audit = _ARCHITECTURES[machine]
    code = [_step(_LOAD, _ARCHITECTURE), _step(_JUMP_EQ, audit, 1, 0), _step(_RETURN, _KILL_PROCESS)]
    code += [_step(_LOAD, _NUMBER), _step(_JUMP_GE, _X32_BIT, 0, 1), _refuse(errno.EPERM)]
    for numbers in _DENIED.values():
        code += [_step(_JUMP_EQ, numbers[column], 0, 1), _refuse(errno.EPERM)]
    # its flags are behind a pointer, out of a filter's sight; the C library then falls back to clone
    code += [_step(_JUMP_EQ, _CLONE3[column], 0, 1), _refuse(errno.ENOSYS)]
    code += [
        _step(_JUMP_EQ, _CLONE[column], 0, 4),
        _step(_LOAD, _ARGUMENT),
        _step(_JUMP_SET, _NAMESPACE_FLAGS, 0, 1),
        _refuse(errno.EPERM),
        _step(_RETURN, _ALLOW),
    ]
    code += [_step(_JUMP_EQ, _SOCKET[column], 0, len(_FAMILIES) + 2), _step(_LOAD, _ARGUMENT)]
    code += [_step(_JUMP_EQ, family, len(_FAMILIES) - i, 0) for i, family in enumerate(_FAMILIES)]
    code += [_refuse(errno.EAFNOSUPPORT), _step(_RETURN, _ALLOW)]
    return b"".join(code)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(error: int) -> bytes:
    return _step(_RETURN, _ERRNO | error)
