"""A system-call filter for the sandbox: denies calls that would give a program uncounted memory or privileges."""

import errno
import platform
import struct

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# shmget, memfd_create, memfd_secret, msgget and semget; unshare, setns, mount; ptrace, bpf, perf_event_open, userfaultfd, io_uring_setup,
# add_key, keyctl.
_DENIED = {
    "x86_64": (29, 319, 447, 68, 64, 272, 308, 165, 101, 321, 298, 323, 425, 248, 250),
    "aarch64": (194, 279, 447, 186, 190, 97, 268, 40, 117, 280, 241, 282, 425, 217, 219),
}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32 = 0x40000000


def seccomp_filter() -> bytes | None:
    """Return the filter as a classic BPF program for bubblewrap to load; None on an unknown architecture.

    Source: the kernel's documentation of seccomp filters; struct seccomp_data has the call's number first, and then the architecture.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return None
    denied = _DENIED[machine]
    count = len(denied)
    program = [
        # A process of another architecture, in whose numbering the list would deny other calls, is killed.
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        # x32 system calls jump to the last instruction, which denies; the allowing one is just before it.
        (_AT_LEAST, count + 1, 0, _X32),
        *((_EQUAL, count - i, 0, number) for i, number in enumerate(denied)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
