"""A small server of chat completions on the loopback that answers what a test tells it to, and who asks it."""

import asyncio
import json
import select
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from agents.openai_engine import ChatAgent, OpenAIEngine
from agents.rollout import Rollout
from envs.core import Outcome, Task, TextEnv
from tests.http_servers import running


@dataclass(frozen=True, kw_only=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    missing: int = 0
    """Bytes that are announced and never sent."""
    hang_up: bool = False
    """Close the connection without a word."""
    wait: float = 0.0
    """Seconds before the answer, unless the client gives up."""


def said(content, finish_reason="stop", *, message=None, **choice):
    """The answer of a server whose model said `content`."""
    message = {"role": "assistant", "content": content, **(message or {})}
    choices = [{"index": 0, "message": message, "finish_reason": finish_reason, **choice}]
    return Reply(body=json.dumps({"object": "chat.completion", "choices": choices}).encode())


def failed(status, message="no", headers=None, **error):
    """The answer of a server that fails."""
    return Reply(status=status, body=json.dumps({"error": {"message": message, **error}}).encode(),
                 headers=headers or {})


class ChatServer(ThreadingHTTPServer):
    """Answers request number n (from 1) with `answer(n, body)`; counts connections, requests at once and clients that
    gave up."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer, port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer, self.lock = answer, threading.Lock()
        self.bodies, self.paths, self.authorizations = [], [], []
        self.opened = self.open = self.now = self.most = 0
        self.given_up = threading.Event()

    def reply(self, number, path, body):
        return self.answer(number, body)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open
    wbufsize = -1  # an answer is one packet, which nothing delays

    def setup(self):
        super().setup()
        with self.server.lock:
            self.server.open += 1
            self.server.opened += 1

    def finish(self):
        with self.server.lock:
            self.server.open -= 1
        super().finish()

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        with server.lock:
            server.now += 1
            server.most = max(server.most, server.now)
            server.paths.append(self.path)
            server.authorizations.append(self.headers["Authorization"])
            server.bodies.append(body)
            number = len(server.bodies)
        reply = server.reply(number, self.path, body)
        if reply.wait and select.select([self.connection], [], [], reply.wait)[0]:
            server.given_up.set()  # nothing more is sent on a request's connection: it was closed
            reply = Reply(hang_up=True)
        with server.lock:
            server.now -= 1
        if reply.hang_up:
            self.close_connection = True
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body) + reply.missing))
        self.end_headers()
        self.wfile.write(reply.body)
        self.close_connection = self.close_connection or bool(reply.missing)

    do_GET = do_POST

    def log_message(self, *_):
        pass


def serving(answer):
    return running(ChatServer(answer))


MESSAGES = [{"role": "user", "content": "Hi"}]


def ask(server, *, stop=(), count=1, engine=None, **options):
    """What `count` requests at once are answered; for one, that alone."""
    engine = engine or OpenAIEngine(server.url, "m", **options)

    async def all_of_them():
        return await asyncio.gather(*[
            engine.complete(MESSAGES, max_tokens=9, temperature=0.5, seed=2**62 + 3, stop=stop) for _ in range(count)])
    answers = asyncio.run(all_of_them())
    return answers if count > 1 else answers[0]


class Talk(TextEnv):
    """Three turns of `<do>x</do>`; what was done is kept."""

    system_prompt = "Rules."
    max_turns = 3
    action_tags = ("do",)
    stop = ("</do>",)

    def tasks(self, split):
        return [Task(key=str(i)) for i in range(4)]

    def _reset(self, task, rng):
        self.done = []
        return "start"

    def _step(self, action):
        self.done.append(action)
        return Outcome(observation=f"seen {len(self.done)}", reward=float(action == "x"), valid=bool(action))


def play(server, *, tasks=1, env=Talk, retries=0, engine_options=None, concurrency=8, episode_seconds=60.0, **options):
    agent = ChatAgent(OpenAIEngine(server.url, "m", **engine_options or {}), **options)
    rollout = Rollout(env, retries=retries, concurrency=concurrency, episode_seconds=episode_seconds)
    return rollout.run(agent, [Task(key=str(i)) for i in range(tasks)], 1, seed=5)
