"""Interprets a classic BPF program: the result of a system call filter for a call, and the number of steps."""

from __future__ import annotations

import struct

Code = list[tuple[int, int, int, int]]


def instructions(program: bytes) -> Code:
    """The instructions (operation, jump if true, jump if false, value) of an array of `struct sock_filter`."""
    return list(struct.iter_unpack("=HBBI", program))


def run_filter(program: Code, number: int, *arguments: int, arch: int) -> tuple[int, int]:
    """The filter's answer to system call `number`, and the steps it took. Raises `ValueError` if it does not end."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(value % (1 << 64) for value in arguments[:6]), *[0] * (6 - len(arguments)))
    at = accumulator = 0
    for step in range(1, len(program) + 1):
        operation, if_true, if_false, value = program[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif operation == 0x06:
            return value, step
        elif operation == 0x05:
            at += value
        elif operation == 0x54:
            accumulator &= value
        else:
            holds = {0x15: accumulator == value, 0x45: accumulator & value != 0, 0x35: accumulator >= value}[operation]
            at += if_true if holds else if_false
    raise ValueError("the program does not end")
