"""What the pool tests run in a worker."""

import time


def slow_double(number: int) -> int:
    """Twice the number after 20 ms, or never: a negative number is a poisoned item."""
    while number < 0:
        pass
    time.sleep(0.02)
    return 2 * number


def hold_interpreter() -> int:
    """One C-level computation that lets no other Python code run."""
    return len(str(7 ** (7 ** 9))) if 9**9**9 else 0


def allocate(size: int) -> int:
    return len(bytearray(size))


def fail() -> None:
    raise ValueError("a fault of the function")
