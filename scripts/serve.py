"""Serve an environment: as an OpenEnv server, as Search-R1's retrieval server, or as pages for a browser.

    python -m scripts.serve turngym/Countdown-v0 --port 8000
    python -m scripts.serve turngym/Search-v0 --retrieval
    python -m scripts.serve turngym/WebShop-v0 --web --option size=10000
"""

import argparse
import socket
import sys
from functools import partial
from typing import Any

import gymnasium

import envs
from trainers.settings import SettingsError, read_overrides


def main(argv: list[str] | None = None) -> int:
    """0 after Ctrl-C; 2 where the environment cannot be made or served, or the address cannot be had."""
    parser = argparse.ArgumentParser(prog="serve", description="Serve an environment.")
    parser.add_argument("id", help="namespace/Name-v0, or module:namespace/Name-v0 for one of your own")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of its constructor")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default 8000)")
    parser.add_argument("--max-sessions", type=int, default=64, help="further clients are refused (default 64)")
    parser.add_argument("--idle-seconds", type=float, default=600.0, help="an idle session is closed (default 600)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--retrieval", action="store_true", help="offer its retriever as POST /retrieve")
    kind.add_argument("--web", action="store_true", help="offer its pages to a browser")
    arguments = parser.parse_args(argv)
    try:
        app = build_app(arguments)
        listener = bind(arguments.host, arguments.port)
    except (SettingsError, gymnasium.error.Error, ImportError, TypeError, ValueError, OSError) as error:
        print(f"cannot serve {arguments.id}: {error}", file=sys.stderr)
        return 2
    run(app, listener, arguments)
    return 0


def build_app(arguments: argparse.Namespace) -> Any:
    """The server that the arguments ask for. Raises what `envs.make` raises, and ValueError for an environment that
    does not offer it."""
    from envs.serving.host import Host  # here, so that a missing extra is one line and no traceback
    from envs.serving.openenv import openenv_app
    from envs.serving.pages import pages_app

    options = read_overrides([f"--{option}" for option in arguments.option])
    if arguments.web:
        options = {**options, "observation_mode": "html"}
    make = partial(envs.make, arguments.id, **options)
    host = Host(make, max_sessions=arguments.max_sessions, idle_seconds=arguments.idle_seconds)
    try:
        env = make()  # that it can be made is known before anybody asks
    except TypeError as error:
        if arguments.web and "observation_mode" in str(error):
            raise ValueError("--web needs an environment with pages, one that takes observation_mode=html") from error
        raise
    if arguments.retrieval and hasattr(env, "retriever"):
        from envs.serving.retrieval import retrieval_app

        return retrieval_app(host, env.retriever, bound_to=arguments.host)
    env.close()
    if arguments.retrieval:
        raise ValueError("--retrieval needs an environment with a retriever, such as turngym/Search-v0")
    if arguments.web:
        return pages_app(host, bound_to=arguments.host)
    return openenv_app(host, name=arguments.id, bound_to=arguments.host)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError that names the address."""
    if not 0 <= port < 65_536:  # getaddrinfo would wrap it
        raise OSError(f"there is no port {port}: choose a --port from 0 to 65535")
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise OSError(f"{host}:{port} cannot be bound ({error}): choose another --port or --host") from error


def run(app: Any, listener: socket.socket, arguments: argparse.Namespace) -> None:
    """Serve until Ctrl-C."""
    import uvicorn

    from envs.serving.host import BODY_BYTES, is_loopback

    host, port = listener.getsockname()[:2]
    print(f"serving {arguments.id} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    if not is_loopback(arguments.host):
        print(f"warning: {arguments.host} is reached from other machines, and there are no passwords: whoever reaches "
              "it may play", file=sys.stderr, flush=True)
    config = uvicorn.Config(app, log_level="warning", ws_max_size=BODY_BYTES, ws="websockets-sansio", lifespan="off",
                            timeout_graceful_shutdown=5)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
