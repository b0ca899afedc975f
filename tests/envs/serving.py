"""A real server in a thread, for the tests of servers and of the adapter that speaks to them."""

import argparse
import json
import threading
import time
from contextlib import contextmanager

import uvicorn
from websockets.sync.client import connect

from envs.serving.host import BODY_BYTES
from scripts import serve


@contextmanager
def serving(env_id, *arguments):
    """The address of `scripts.serve`'s server of that environment."""
    namespace = argparse.Namespace(id=env_id, option=[], host="127.0.0.1", max_sessions=4, idle_seconds=60.0, web=False,
                                   retrieval=False)
    for argument in arguments:
        name, _, value = argument.partition("=")
        setattr(namespace, name, json.loads(value))
    listener = serve.bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(serve.build_app(namespace), log_level="critical", ws_max_size=BODY_BYTES,
                                           ws="websockets-sansio", lifespan="off", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


class Client:
    """One WebSocket session."""

    def __init__(self, url, **options):
        self._connection = connect(url.replace("http", "ws") + "/ws", proxy=None, **options)
        self.socket = self._connection.__enter__()

    def send(self, message):
        self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))
        return json.loads(self.socket.recv(timeout=20))

    def reset(self, **data):
        return self.send({"type": "reset", "data": data})

    def step(self, text):
        return self.send({"type": "step", "data": {"text": text}})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._connection.__exit__(None, None, None)


def eventually(condition, seconds=10):
    """Wait until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never held"
        time.sleep(0.02)
