"""`scripts.train`: what it refuses and how it says so, what it shows, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rich.console
import torch
from transformers import LlamaConfig

from agents.rollout import RolloutError
from envs import Outcome
from scripts import train
from scripts._display import Console, TrainingDisplay
from tests.trainers.runs import Parity, rows, small_config, start, weights
from trainers.loop import train as run_training
from trainers.run import Run, config_toml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path):
    """A config file of a run of two steps."""
    path = tmp_path / "small.toml"
    path.write_text(config_toml(small_config(environment={"id": "tests.trainers.runs:test/Parity-v0"},
                                             evaluation={"episodes": 2})))
    return str(path)


def fails(arguments, capsys, code=2):
    """What is said on standard error."""
    assert train.main(arguments) == code
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err and shown.out == ""
    return shown.err


@pytest.mark.parametrize("arguments, message", [
    (["--learning_rtae", "1"], "unknown setting 'learning_rtae'; the nearest is 'optimizer.learning_rate'"),
    (["--num-epochs", "3"], "unknown setting 'num-epochs'; the nearest is 'optimizer.epochs'"),
    (["--algo.gropu_size", "4"], "unknown setting 'algo.gropu_size'; the nearest is 'rollout.group_size'"),
    (["--a..b=1"], "--a..b has an empty part"), (["--optimizer.steps", "4"], "the nearest is 'run.steps'"),
    (["--evaluation.seed", "-1"], "evaluation.seed: Input should be greater than or equal to 0 (got -1)"),
    (["--run.steps"], "run.steps: Input should be a valid integer (got True)"), (["--run.steps", "x"], "run.steps"),
    (["--rollout.group_size", "1"], "rollout.group_size must be >= 2"), (["x.toml"], "no config file x.toml"),
    (["--run.steps", "3", "x.toml"], "unexpected argument 'x.toml'"), ([""], "cannot read the config file"),
    (["--resume", ""], "no run to resume"), (["--resume", "/no/such/run"], "/no/such/run holds no run to resume"),
    (["--resume", "x", "--run.steps", "3"], "x holds no run to resume"),
    (["--resume", "x", "--run-dir", "y"], "in its own folder"), (["y.toml", "--resume", "x"], "own settings"),
    (["--environment.id", "turngym/Cuntdown-v0"], "Did you mean: `Countdown`"),
    (["--evaluation.split", "validation"], "no split 'validation'"),
    (["--evaluation.episodes", "5000"], "holds 1,024 problems: ask for 1 to 1,024, not 5,000"),
    (["--environment.options.tol", "false"], "tol"), (["--model.device", "cuda:99"], "is not on this machine"),
    (["--rollout.learning_rate", "1"], "'rollout.learning_rate'; the nearest is 'optimizer.learning_rate'"),
    (["--cluster", "ray", "--engine.replicas", "2"], "engines are placed by cluster.replicas"),
    (["--cluster", "ray", "--engine.servers", '["http://x:1"]'], "give no engine.servers"),
    (["--cluster", "ray", "--rollout.max_staleness", "1"], "max_staleness is not there with --cluster ray"),
    (["--cluster.workers.count", "0"], "cluster.workers.count: Input should be greater than 0"),
    (["--cluster.worker.count", "2"], "the nearest is 'cluster.workers.count'"),
    (["--algorithm.name", "GRPPO"], "unknown algorithm 'GRPPO'; the nearest is 'GRPO', others are ")])
def test_wrong_arguments_end_with_2_before_anything_is_made(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert message in fails(arguments, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--run-dir"], ["--resume"]])
def test_an_option_without_its_value_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        train.main(arguments)
    assert exit.value.code == 2 and "expected one argument" in capsys.readouterr().err


def test_the_group_size_is_judged_before_any_model_is_looked_at(capsys):
    assert "must be >= 2" in fails(["--rollout.group_size", "1", "--model.path", "/no/such/model"], capsys)


def test_without_ray_a_cluster_ends_with_2_and_what_to_install(config, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    monkeypatch.delitem(sys.modules, "trainers.cluster", raising=False)
    assert "pip install 'turngym[ray]'" in fails([config, "--cluster", "ray"], capsys)


def test_the_plan_of_a_cluster_says_what_is_placed(config, capsys):
    assert train.main([config, "--cluster", "ray", "--cluster.learners.count", "4", "--cluster.replicas.gpus", "2",
                       "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for said in ("1, each with 1 CPUs and 2 GPUs", "1, each with 1 CPUs and no GPU", "memory of each of 4 ranks"):
        assert said in shown


def test_a_model_that_is_not_there_ends_with_2(config, tmp_path, capsys):
    arguments = [config, "--model.path", "/no/such/model", "--run-dir", str(tmp_path / "run")]
    assert "no model folder /no/such/model" in fails(arguments, capsys)


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit) as exit:
        train.main(["--help"])
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    assert "--optimizer.learning_rate\n" in shown and "--algorithm.name\n" in shown


def test_a_dry_run_prints_a_config_that_reads_back_and_loads_no_model(config, tmp_path, capsys, monkeypatch):
    LlamaConfig(vocab_size=500, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=128).save_pretrained(tmp_path / "model")  # and no weights
    monkeypatch.chdir(tmp_path)
    long = "a text of more than eighty characters " * 4 + ":smile: [bold]"
    arguments = [config, "--dry-run", "--model.path", str(tmp_path / "model"), "--run.steps", "7",
                 "--warm_start.options.note", long]
    before = sorted(tmp_path.rglob("*"))
    assert train.main(arguments) == 0
    shown = capsys.readouterr()
    text, _, table = shown.out.partition("\nplan")
    (tmp_path / "again.toml").write_text(text)
    again = train.load_config(tmp_path / "again.toml")
    assert (again.run.steps, again.warm_start.options["note"]) == (7, long)
    assert "8 (2 tasks x 4)" in table and "128 tokens" in table and "\x1b" not in shown.out and shown.err == ""
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "again.toml"])


def test_a_dry_run_without_the_model_says_that_memory_is_unknown(config, capsys):
    assert train.main([config, "--dry-run", "--model.path", "nobody/no-such-model"]) == 0
    assert "unknown" in capsys.readouterr().out


def test_a_dry_run_of_a_run_trains_nothing(tmp_path, capsys):
    Run.create(tmp_path, small_config())
    assert train.main(["--resume", str(tmp_path), "--dry-run"]) == 0
    assert "gradient steps" in capsys.readouterr().out and [p.name for p in tmp_path.iterdir()] == ["config.toml"]


def test_a_run_is_quiet_where_nobody_watches(config, tmp_path, capfd):
    assert train.main([config, "--run-dir", str(tmp_path / "run"), "--run.steps", "5", "--evaluation.every", "2"]) == 0
    shown = capfd.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert [line for line in shown.err.splitlines() if "run: " in line] == [f"run: {tmp_path / 'run'}"]
    titles = ("before training", "after 2 steps", "after 4 steps", "after training")
    assert all(len([line for line in shown.out.splitlines() if line.startswith(t)]) == 1 for t in titles), shown.out
    assert len(shown.out.splitlines()) == 8 and len(shown.err.splitlines()) <= 5
    assert [row["step"] for row in rows(tmp_path / "run", "evaluations")] == [0, 2, 4, 5]


def test_a_terminal_shows_success_speed_and_the_time_left(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    console = Console()
    with open(tmp_path / "shown", "w+", encoding="utf-8") as file:
        console.err = rich.console.Console(file=file, force_terminal=True)
        console.out = rich.console.Console(file=file)
        run = Run.create(tmp_path / "run", small_config(evaluation={"episodes": 2, "every": 1}, run={"steps": 3},
                                                        warm_start={"steps": 2, "batch_size": 2}))
        with TrainingDisplay(console, run.folder) as display:
            run_training(run, display)
        file.seek(0)
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.read())
    assert re.search(r"warm start .*2/2 .*loss \d", shown)
    assert re.search(r"training .*3/3 0:00:\d\d left \S+ success \d+\.\d% +[\d,]+ tokens/s", shown)
    assert "after 1 steps" in shown and "after training" in shown


def test_an_existing_run_is_not_overwritten(config, tmp_path, capsys):
    start(tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert "already holds a run: go on with --resume" in fails([config, "--run-dir", str(tmp_path / "run")], capsys)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    (tmp_path / "file").write_text("")
    assert "cannot make a run in" in fails([config, "--run-dir", str(tmp_path / "file")], capsys)


def test_a_finished_run_says_so_and_can_be_made_longer(tmp_path, capsys):
    sections = {"evaluation": {"episodes": 2}, "optimizer": {"warmup_steps": 3}, "algorithm": {"kl_coefficient": 0.1}}
    start(tmp_path / "short", run={"steps": 2}, **sections)
    start(tmp_path / "whole", run={"steps": 4}, **sections)
    assert train.main(["--resume", str(tmp_path / "short")]) == 0
    assert "finished at step 2; --run.steps N makes it longer" in capsys.readouterr().err
    before = (tmp_path / "short" / "config.toml").read_bytes()
    assert train.main(["--resume", str(tmp_path / "short"), "--run.steps", "4", "--dry-run"]) == 0
    assert "steps = 4" in capsys.readouterr().out and (tmp_path / "short" / "config.toml").read_bytes() == before
    assert train.main(["--resume", str(tmp_path / "short"), "--run.steps=4"]) == 0
    assert "finished at" not in capsys.readouterr().err
    assert (tmp_path / "short" / "config.toml").read_bytes() == (tmp_path / "whole" / "config.toml").read_bytes()
    for name in ("metrics", "trajectories"):
        assert rows(tmp_path / "short", name) == rows(tmp_path / "whole", name)
    assert [row["step"] for row in rows(tmp_path / "short", "evaluations")] == [0, 2, 4]
    assert rows(tmp_path / "short", "evaluations")[::2] == rows(tmp_path / "whole", "evaluations")
    assert torch.equal(weights(tmp_path / "short"), weights(tmp_path / "whole"))


@pytest.mark.parametrize("given, message", [
    (["--run.steps", "1"], "has done 2 steps already: give --run.steps 2 or more"),
    (["--run.steps", "0"], "run.steps: Input should be greater than 0"), (["--run.steps"], "run.steps"),
    (["--run.steps", "x"], "run.steps: Input should be a valid integer"),
    (["--run.seed", "1"], "only --run.steps N can be another, got --run.seed 1"), (["--run", "5"], "only --run.steps"),
    (["--run.steps", "5", "--run.seed", "1"], "only --run.steps"), (["--steps", "5"], "only --run.steps"),
    (["--run.steps", "5", "--optimizer.learning_rate", "1.0"], "only --run.steps"),
    (["--run.steps", "5", "--run-dir", "x"], "in its own folder")])
def test_another_change_of_a_run_is_refused(given, message, tmp_path, capsys):
    start(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert message in fails(["--resume", str(tmp_path), *given], capsys)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("sections, reason", [
    ({"optimizer": {"schedule": "linear"}}, "optimizer.schedule = 'linear'"),
    ({"optimizer": {"schedule": "cosine"}}, "optimizer.schedule = 'cosine'"),
    ({"algorithm": {"name": "PlanPO"}}, "algorithm.total_steps = 2")])
def test_a_run_in_which_something_falls_over_its_steps_is_not_made_longer(sections, reason, tmp_path, capsys):
    folder = Run.create(tmp_path, small_config(**sections, run={"steps": 2})).folder
    for steps in ("1", "3"):
        assert reason in fails(["--resume", str(folder), "--run.steps", steps], capsys)
    assert train.main(["--resume", str(folder), "--run.steps", "2", "--dry-run"]) == 0


@pytest.mark.parametrize("error, message", [
    (RolloutError("all 2 groups failed"), "all 2 groups failed"), (FloatingPointError("the loss is nan"), "is nan"),
    (train.RunError("cannot write x: No space left on device"), "No space left")])
def test_a_run_that_fails_ends_with_1_and_one_message(error, message, config, tmp_path, monkeypatch, capsys):
    def failing(run, display):
        raise error
    monkeypatch.setattr(train, "train", failing)
    assert train.main([config, "--run-dir", str(tmp_path / "run")]) == 1
    assert [line for line in capsys.readouterr().err.splitlines() if message in line] == [f"error: {error}"]


def gone(action):
    raise OSError("the world is gone")


@pytest.mark.parametrize("outcome, message", [
    (gone, "OSError: the world is gone"),
    (lambda action: Outcome(info={"board": object()}), "Parity._step: info['board'] cannot be written as JSON")])
def test_an_environment_that_always_fails_ends_with_1(outcome, message, config, tmp_path, monkeypatch, capsys):
    def step(env, action, whole=Parity._step):
        return whole(env, action) if action.startswith("gold") else outcome(action)
    monkeypatch.setattr(Parity, "_step", step)
    arguments = [config, "--run-dir", str(tmp_path / "run"), "--rollout.retries", "1", "--evaluation.episodes", "0"]
    assert train.main(arguments) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


LONG = ["--run.steps", "100000", "--run.save_every", "3", "--evaluation.episodes", "0", "--run.log_trajectories", "0"]


def launched(arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.train", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # whoever runs the tests may ignore it


def wait_for_steps(folder, count):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        log = folder / "metrics.jsonl"
        if log.exists() and log.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.02)
    pytest.fail(f"no {count} steps in two minutes")


def test_interrupted_and_killed_runs_go_on_where_they_were(config, tmp_path):
    folder = tmp_path / "run"
    first = launched([config, "--run-dir", str(folder), *LONG])
    wait_for_steps(folder, 4)
    first.send_signal(signal.SIGINT)
    shown = first.communicate(timeout=100)[1]
    assert first.returncode == 130, shown
    assert f"go on with --resume {folder}" in shown and "Traceback" not in shown
    done = [row["step"] for row in rows(folder)]
    kept = [path.name for path in Run.open(folder).checkpoints]
    assert done == list(range(1, len(done) + 1)) and kept[-1] == f"step-{len(done):06d}"
    second = launched(["--resume", str(folder)])
    wait_for_steps(folder, len(done) + 5)
    second.kill()
    second.communicate(timeout=100)
    assert second.returncode == -signal.SIGKILL
    # The run now ends three steps later, as far as both runs agree; a whole one is the measure.
    run = Run.open(folder)
    end = run.load_state()["step"] + 3
    for path in (folder, tmp_path / "whole"):
        path.mkdir(exist_ok=True)
        text = config_toml(run.config).replace("steps = 100000", f"steps = {end}")
        (path / "config.toml").write_text(text)
        assert train.main(["--resume", str(path)]) == 0
    assert rows(folder) == rows(tmp_path / "whole") and torch.equal(weights(folder), weights(tmp_path / "whole"))
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] == end
