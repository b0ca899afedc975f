"""What a run on a cluster tells the process at the terminal, and hears from it; light, since a process imports it."""

import asyncio
import os
import pickle
import signal
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from trainers.evaluation import Evaluation


class Messenger:
    """An actor beside the leading rank: it takes the leader's news to the terminal, and Ctrl-C back."""

    def __init__(self):
        self._news: asyncio.Queue[bytes] = asyncio.Queue()

    async def tell(self, news: bytes) -> None:
        """A display's method and its arguments, pickled: this process knows nothing of what they are."""
        self._news.put_nowait(news)

    async def news(self, seconds: float) -> list[bytes]:
        """What was told since the last call, waited for so long."""
        try:
            async with asyncio.timeout(seconds):
                found = [await self._news.get()]
        except TimeoutError:
            return []
        return found + [self._news.get_nowait() for _ in range(self._news.qsize())]

    async def interrupt(self, pid: int) -> None:
        os.kill(pid, signal.SIGINT)


class ToldDisplay:
    """A `Display` whose calls are shown elsewhere."""

    def __init__(self, messenger: Any | None):
        """None: nowhere."""
        self._messenger = messenger

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self._tell("phase", name, total, done)

    def advance(self, metrics: dict[str, float]) -> None:
        self._tell("advance", metrics)

    def evaluation(self, title: str, evaluation: "Evaluation") -> None:
        self._tell("evaluation", title, evaluation)

    def _tell(self, *news: Any) -> None:
        if self._messenger is not None:
            ray.get(self._messenger.tell.remote(pickle.dumps(news)))
