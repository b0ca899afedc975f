"""Runs a command and ends it, with all that it started, when whoever wants it is gone, however that ended.

    python supervise.py COMMAND ...     in a session of its own, with a pipe from the parent as standard input
"""

import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 10.0


def main() -> None:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    over = threading.Event()

    def wait(ended) -> None:
        ended()
        over.set()

    for ended in (child.wait, sys.stdin.buffer.read):  # reading ends where the parent does
        threading.Thread(target=wait, args=(ended,), daemon=True).start()
    over.wait()
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
