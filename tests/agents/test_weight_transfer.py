"""What weights leave behind: nothing, once their process is gone."""

import os
import subprocess
import sys
from pathlib import Path

from agents import weight_transfer
from agents.weight_transfer import SharedFolder

ROOT = Path(__file__).parents[2]


def test_a_folder_is_gone_after_close_and_that_of_a_killed_process_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_transfer, "SHARED_MEMORY", tmp_path)
    code = (f"import os, signal; from pathlib import Path; from agents import weight_transfer as w; "
            f"w.SHARED_MEMORY = Path({str(tmp_path)!r}); folder = w.SharedFolder(); "
            "os.kill(os.getpid(), signal.SIGKILL)")
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    (killed,) = tmp_path.iterdir()
    first, second = SharedFolder(), SharedFolder()
    assert not killed.exists() and first.path.is_dir() and second.path.is_dir(), "only what nobody holds is removed"
    first.close()
    second.close()
    assert not list(tmp_path.iterdir())
