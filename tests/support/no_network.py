"""Run a command that is killed with SIGSYS when it uses the network: `python no_network.py COMMAND...`.

A seccomp filter of the kernel does this, so it works for C++ and Rust as well as Python, for all threads and
children, and needs neither root nor namespaces. It blocks connect() and sending to an address; a DNS lookup
does one or the other. Listening is allowed.
"""

import ctypes
import os
import platform
import struct
import sys

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
KILL_PROCESS, ALLOW = 0x80000000, 0x7FFF0000
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06  # instructions of the filter
NUMBER, FIFTH_LOW, FIFTH_HIGH = 0, 48, 52  # of the system call and its fifth argument in seccomp_data
NUMBERS = {  # connect, sendmmsg, sendto
    "x86_64": (42, 307, 44),
    "aarch64": (203, 269, 206),
}


def program(connect, sendmmsg, sendto):
    """The filter: kill on connect and sendmmsg, and on sendto with an address; allow everything else."""
    steps = [
        (LOAD, 0, 0, NUMBER),
        (JUMP_EQUAL, 7, 0, connect),
        (JUMP_EQUAL, 6, 0, sendmmsg),
        (JUMP_EQUAL, 0, 4, sendto),
        (LOAD, 0, 0, FIFTH_LOW),
        (JUMP_EQUAL, 0, 3, 0),
        (LOAD, 0, 0, FIFTH_HIGH),
        (JUMP_EQUAL, 0, 1, 0),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, KILL_PROCESS),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def forbid_network():
    """Install the filter for this process and its children, irrevocably."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(steps := program(*NUMBERS[platform.machine()]), len(steps))
    filter_ = struct.pack("HxxxxxxP", len(steps) // 8, ctypes.addressof(code))
    for option, value, more in (
        (PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), ctypes.c_ulong(0)),
        (PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.c_char_p(filter_)),
    ):
        if libc.prctl(option, value, more, ctypes.c_ulong(0), ctypes.c_ulong(0)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    forbid_network()
    os.execv(sys.argv[1], sys.argv[1:])
