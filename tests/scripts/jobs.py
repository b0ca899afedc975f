"""Work for `scripts._jobs`, in a module that is quick to import in a new process."""

import os
import signal
import time
from pathlib import Path


def write(folder: Path) -> None:
    """Leave word of when the work began and ended."""
    began = time.time()
    print("at work", flush=True)
    time.sleep(0.2)
    (folder / "done").write_text(f"{began} {time.time()}")


def fail(folder: Path) -> None:
    raise ValueError("the reason\nin two lines")


def die(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait(folder: Path) -> None:
    """Until interrupted."""
    try:
        (folder / "begun").touch()
        time.sleep(60)
    except KeyboardInterrupt:
        (folder / "interrupted").touch()
        raise
