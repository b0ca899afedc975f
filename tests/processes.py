"""Whether other processes still run, for tests of what they leave behind."""

import time
from collections.abc import Sequence

import psutil


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # also one that ends while it is looked at
        return False


def wait_until_gone(pids: Sequence[int], seconds: float = 30.0) -> list[int]:
    """Those that still run at the end of the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(alive, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]
