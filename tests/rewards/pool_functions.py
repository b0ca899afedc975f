"""What the pool tests run in a worker."""

import os
import time


def slow_double(number: int) -> int:
    """Twice the number after 20 ms, or never: a negative number is a poisoned item."""
    while number < 0:
        pass
    time.sleep(0.02)
    return 2 * number


def slow_pids(_: int) -> list[int]:
    """The worker's processes, after long enough for another worker to start beside it."""
    time.sleep(0.5)
    return [os.getpid(), os.getppid()]


def hold_interpreter() -> int:
    """One C-level computation that lets no other Python code run."""
    return (7 ** (7 ** 12)).bit_length()


def allocate(size: int) -> int:
    return len(bytearray(size))


def fail() -> None:
    raise ValueError("a fault of the function")
