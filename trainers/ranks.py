"""The processes that train together, one *rank* each, as torchrun starts them; a process of its own is rank 0 of 1.

Rank 0 leads: it alone rolls out, evaluates and writes, and tells the others what came of it.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

TIMEOUT = timedelta(minutes=15)
"""How long a rank waits in training for one that does not come, before it ends with an error."""


def rank() -> int:
    """Which of the ranks this process is; 0 leads."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(thing: T) -> list[T]:
    """What each rank gave, in their order, on every rank."""
    found: list[Any] = [thing] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(found, thing)
    return found


@contextmanager
def joined_ranks() -> Iterator[None]:
    """Together with the other ranks where torchrun started this process, each with a GPU of its own where there are
    some; else alone."""
    if not dist.is_torchelastic_launched():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(timeout=TIMEOUT)
    yield
    dist.destroy_process_group()  # after an error torchrun ends the others


class _Interrupts:
    """Handles Ctrl-C on a rank: it is remembered until all ranks can stop together."""

    arrived = False
    """Not yet passed on to the other ranks."""
    over = False
    """The ranks are stopping: another one changes nothing."""

    def __call__(self, number: int, frame: object) -> None:
        self.arrived = True


_interrupts = _Interrupts()  # a process has one handler of a signal


@contextmanager
def stopping_together() -> Iterator[None]:
    """A Ctrl-C on any rank raises KeyboardInterrupt on all of them, at their next `from_leader`, or at once where the
    leader is at work in one. Does nothing in a process of its own."""
    if not dist.is_initialized():
        yield
        return
    _interrupts.arrived = _interrupts.over = False
    previous = signal.signal(signal.SIGINT, _interrupts)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@cache
def _control_group() -> dist.ProcessGroup:
    # Others wait here for as long as the leader rolls out; where it dies its connections close, which ends the wait.
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


def from_leader(work: Callable[[], T]) -> T:
    """What `work` returns on the leader, which alone does it, on every rank; what it raises is raised on every rank.

    On the others such an exception has `of_leader` set: the leader reports it.
    """
    if not dist.is_initialized():
        return work()
    interrupts: list[Any] = [None] * world_size()
    dist.all_gather_object(interrupts, _interrupts.arrived and not _interrupts.over, group=_control_group())
    outcome: list[Any] = [(None, KeyboardInterrupt())]
    if not any(interrupts):
        outcome = [_attempt(work) if rank() == 0 else None]
        dist.broadcast_object_list(outcome, src=0, group=_control_group())
    result, error = outcome[0]
    if error is not None:
        _interrupts.over |= isinstance(error, KeyboardInterrupt)
        error.of_leader = rank() > 0
        raise error
    return result


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """What `work` returns and raises."""
    handler = signal.getsignal(signal.SIGINT)
    interruptible = handler is _interrupts and not _interrupts.over
    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return work(), None
    except BaseException as error:
        return None, error
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, handler)
