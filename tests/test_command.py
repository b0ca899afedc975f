"""`turngym COMMAND` works from any folder, on a user's own files, whatever else bears our packages' names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMAND = f"import sys; sys.path.append({str(ROOT)!r}); import turngym; sys.exit(turngym.main())"

GUESS = '''
import gymnasium
import envs


class Guess(envs.TextEnv):
    """Say a digit; three tries."""

    system_prompt = "Guess the digit."
    max_turns = 3

    def tasks(self, split):
        return [envs.Task(key=f"{split} {i}", split=split, data={"secret": str(i)}) for i in range(10)]

    def _reset(self, task, rng):
        return "Which digit?"

    def _step(self, action):
        right = self.task.data["secret"] in action
        return envs.Outcome(observation="yes" if right else "no", reward=float(right), terminated=right, success=right)

    def gold(self, rng):
        return [self.task.data["secret"]]


gymnasium.register("me/Guess-v0", entry_point="guess:Guess")
'''

SIGN = '''
import numpy as np
from trainers.algorithms import GRPO


class Sign(GRPO):
    """Only the sign of the advantage counts."""

    def advantages(self, groups, scores=None, step=0):
        return self.credits(groups, [np.sign(group.rewards - group.rewards.mean()) for group in groups])
'''

SMALL = """
[environment]
id = "guess:me/Guess-v0"
[model]
hidden_size = 32
layers = 1
vocabulary = 300
[warm_start]
steps = 5
batch_size = 5
[rollout]
tasks_per_step = 2
group_size = 2
max_response_tokens = 4
[algorithm]
name = "sign:Sign"
[evaluation]
episodes = 5
[run]
steps = 2
"""


def turngym(folder, *arguments, **environment):
    return subprocess.run([sys.executable, "-c", COMMAND, *arguments], cwd=folder, capture_output=True, text=True,
                          timeout=200, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **environment})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder, with files and packages that bear the names of ours, and more of them on the path."""
    folder, elsewhere = tmp_path_factory.mktemp("mine"), tmp_path_factory.mktemp("elsewhere")
    (folder / "guess.py").write_text(GUESS)
    (folder / "sign.py").write_text(SIGN)
    (folder / "small.toml").write_text(SMALL)
    for place in (folder, elsewhere):
        for name in ("agents", "scripts", "envs", "trainers", "rewards"):
            (place / name).mkdir()
            (place / name / "__init__.py").write_text("raise RuntimeError('not the one of turngym')")
    return folder, str(elsewhere)


def test_an_environment_and_an_algorithm_of_ones_own_are_trained_and_evaluated(folder):
    folder, elsewhere = folder
    trained = turngym(folder, "train", "small.toml", "--run-dir", "run", PYTHONPATH=elsewhere)
    assert trained.returncode == 0, trained.stderr
    assert "after training" in trained.stdout and trained.stderr.startswith("run: run\n")
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert 'name = "sign:Sign"' in (folder / "run" / "config.toml").read_text()
    arguments = ["--agent", "model", "--model", "run/checkpoints/step-000002", "--episodes", "5", "--out", "f.json"]
    evaluated = turngym(folder, "evaluate", "--env", "guess:me/Guess-v0", *arguments, PYTHONPATH=elsewhere)
    assert evaluated.returncode == 0, evaluated.stderr
    found = json.loads((folder / "f.json").read_text())
    assert (found["env"], found["split"], found["n"]) == ("guess:me/Guess-v0", "heldout", 5)
    resumed = turngym(folder, "train", "--resume", "run")
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.parametrize("arguments, code", [([], 2), (["trian"], 2), (["_display"], 2), (["../train"], 2),
                                             (["--help"], 0), (["-h"], 0)])
def test_the_commands_are_the_scripts(arguments, code, tmp_path):
    found = turngym(tmp_path, *arguments)
    scripts = sorted(path.stem for path in (ROOT / "scripts").glob("[!_]*.py"))
    assert found.returncode == code and not (found.stderr if code == 0 else found.stdout)
    assert found.stdout + found.stderr == f"usage: turngym {{{','.join(scripts)}}} ...\n"


def test_a_commands_exit_code_and_name_are_its_own(tmp_path):
    found = turngym(tmp_path, "train", "--num-epochs", "3")
    assert found.returncode == 2 and "unknown setting 'num-epochs'" in found.stderr and not list(tmp_path.iterdir())
    assert turngym(tmp_path, "play", "--help").returncode == 0
