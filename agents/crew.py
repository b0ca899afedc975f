"""Ray actors that do the same work. Ray starts those again that end; meanwhile the others do all of it."""

import asyncio
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayActorError

from agents.engine import EngineError

LOST = (RayActorError, ObjectLostError)
"""What `Crew.ask` raises where a member ended before its answer was here."""
RETURN_SECONDS = 900.0
"""How long work waits for one of the members to come back where all are away."""
CLOSE_SECONDS = 45.0


class CrewGone(EngineError):
    """No member is left to ask."""


class Crew:
    """Actors made with `max_restarts`, that have the methods `ready` and `close`."""

    def __init__(self, members: Sequence[ActorHandle], kind: str):
        """`kind`: what they are, for messages."""
        self._members, self._kind = list(members), kind
        self._under_way: Counter[ActorHandle] = Counter()
        self._returning: dict[ActorHandle, Future] = {}
        self._failure = ""

    def __reduce__(self) -> tuple:
        return Crew, (self._members, self._kind)

    def present(self) -> list[ActorHandle]:
        """Those that are there, as far as is known."""
        for member, back in list(self._returning.items()):
            if back.done():
                del self._returning[member]
                if back.exception():  # it cannot be started any more
                    self._members.remove(member)
                    self._failure = str(back.exception())
        return [member for member in self._members if member not in self._returning]

    async def pick(self, place: int | None = None) -> ActorHandle:
        """The member with the least work, or the first one from `place` on (modulo their number) that is there.

        Raises CrewGone where none is, and none comes back.
        """
        try:
            async with asyncio.timeout(RETURN_SECONDS):
                while not (present := self.present()):
                    if not self._returning:
                        raise CrewGone(f"no {self._kind} can be started any more: {self._failure}")
                    await asyncio.wait([asyncio.wrap_future(back) for back in self._returning.values()],
                                       return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise CrewGone(f"every {self._kind} was lost, and none came back in {RETURN_SECONDS:g} s: has the cluster "
                           "room for one?") from None
        if place is None:
            return min(present, key=lambda member: self._under_way[member])
        return min(present, key=lambda member: (self._members.index(member) - place) % len(self._members))

    async def ask(self, member: ActorHandle, method: str, *arguments: Any) -> Any:
        """What the member's method answers; cancelled with this call. Raises one of `LOST`."""
        self._under_way[member] += 1
        answer = getattr(member, method).remote(*arguments)
        try:
            return await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except LOST as error:
            if member not in self._returning:
                warnings.warn(f"{self._kind} {self._members.index(member)} was lost ({type(error).__name__}); "
                              "Ray starts it again", stacklevel=2)
                self._returning[member] = member.ready.remote().future()
            raise
        finally:
            self._under_way[member] -= 1

    def close(self) -> None:
        """End all members."""
        answers = [member.close.remote() for member in self.present()]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=CLOSE_SECONDS)
        for member in self._members:
            ray.kill(member)
