"""`torchrun -m scripts.train`: two ranks are one run, which stops and fails as a whole."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.trainers.runs import go_on, rows, small_config, start, weights
from trainers.run import Run, config_toml

ROOT = Path(__file__).resolve().parents[2]
RUN = {"environment": {"id": "tests.trainers.runs:test/Parity-v0"},
       "warm_start": {"steps": 2, "batch_size": 3, "optimizer": "adamw", "learning_rate": 1e-3},
       "algorithm": {"kl_coefficient": 0.1}, "optimizer": {"learning_rate": 1e-3}, "evaluation": {"episodes": 2}}


def torchrun(*arguments: str, folder: Path = ROOT) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
               "scripts.train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def test_a_run_of_two_ranks_stops_together_and_is_the_run_of_one_process(tmp_path):
    config = small_config(**RUN, run={"steps": 1000, "log_trajectories": 1000})
    (tmp_path / "two.toml").write_text(config_toml(config))
    ranks = torchrun(str(tmp_path / "two.toml"), "--run-dir", str(tmp_path / "two"))
    log, deadline = tmp_path / "two" / "metrics.jsonl", time.monotonic() + 600
    while not (log.exists() and len(log.read_text().splitlines()) >= 3):
        assert ranks.poll() is None and time.monotonic() < deadline, ranks.communicate()[0]
        time.sleep(0.5)
    ranks.send_signal(signal.SIGINT)
    said, _ = ranks.communicate(timeout=300)
    stopped = Run.open(tmp_path / "two")
    assert ranks.returncode and said.count("interrupted; go on with --resume") == 1, said
    done = stopped.done
    assert done >= 3 and [row["step"] for row in rows(stopped.folder)] == list(range(1, done + 1))
    # What one process learns, in as many steps and in two more.
    for steps in (done, done + 2):
        start(tmp_path / str(steps), **RUN, run={"steps": steps, "log_trajectories": 1000, "save_every": done})
    alone = tmp_path / str(done)
    torch.testing.assert_close(weights(stopped.folder), weights(alone), rtol=0, atol=1e-5)
    for ours, its in zip(rows(alone), rows(stopped.folder), strict=True):
        assert its == pytest.approx(ours, rel=1e-4, abs=1e-5)
    assert [row["messages"] for row in rows(stopped.folder, "trajectories")] == \
        [row["messages"] for row in rows(alone, "trajectories")]
    stopped.change_steps(done + 2)
    stopped.save_config()
    go_on(stopped.folder)
    torch.testing.assert_close(weights(stopped.folder), weights(tmp_path / str(done + 2)), rtol=0, atol=1e-5)


def test_what_is_wrong_is_said_once(tmp_path):
    ranks = torchrun("--optimizer.learning_rtae", "1")
    said, _ = ranks.communicate(timeout=300)
    assert ranks.returncode and said.count("the nearest is 'optimizer.learning_rate'") == 1, said


def test_an_error_on_one_rank_ends_all_with_its_message(tmp_path):
    (tmp_path / "elsewhere.py").write_text(
        "import os\nfrom tests.trainers.runs import Parity\n\n\nclass Elsewhere(Parity):\n"
        "    def tasks(self, split):\n        if os.environ['RANK'] == '1':\n"
        "            raise OSError('no such disk on this machine')\n        return super().tasks(split)\n\n\n"
        "import gymnasium\ngymnasium.register('test/Elsewhere-v0', entry_point='elsewhere:Elsewhere')\n")
    config = small_config(**RUN | {"environment": {"id": "elsewhere:test/Elsewhere-v0"}})
    (tmp_path / "config.toml").write_text(config_toml(config))
    ranks = torchrun(str(tmp_path / "config.toml"), "--run-dir", str(tmp_path / "run"), folder=tmp_path)
    said, _ = ranks.communicate(timeout=300)
    assert ranks.returncode and "rank 1: environment elsewhere:test/Elsewhere-v0: no such disk" in said, said
