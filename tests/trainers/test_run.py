"""A run's folder holds whole files, comes back as it was, and says what it cannot write."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agents.tiny import make_tiny_policy
from tests.trainers.runs import Parity, Recorder, go_on, rows, small_config, start, weights
from trainers.loop import train
from trainers.run import Run, RunError


@pytest.fixture(scope="module")
def policy():
    return make_tiny_policy(Parity(), ["Task train 1. Turn 1. a b c"], vocabulary=300, hidden_size=32, layers=1)


def new_run(folder, **sections):
    return Run.create(folder, small_config(**sections))


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["initial", "checkpoints", "metrics.jsonl", "evaluations.jsonl", "trajectories.jsonl"])
def test_a_folder_that_holds_a_run_is_refused_and_untouched(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(RunError, match="already holds a run: go on with --resume"):
        new_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_config_file_of_someone_else_is_not_overwritten(tmp_path):
    (tmp_path / "config.toml").write_text("# mine\n")
    with pytest.raises(RunError, match="is there already and says something else"):
        new_run(tmp_path)
    assert (tmp_path / "config.toml").read_text() == "# mine\n" and files(tmp_path) == ["config.toml"]


def test_a_run_that_never_began_can_be_made_again(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    new_run(tmp_path)
    assert new_run(tmp_path).folder == tmp_path and files(tmp_path) == ["config.toml", "notes.txt"]


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_file_where_the_folder_should_be_is_an_error(place, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot make a run in"):
        new_run(tmp_path / place)
    assert files(tmp_path) == ["file"]


@pytest.mark.parametrize("content", [None, "", "[run]\nstesp = 1\n", "\x00"])
def test_a_folder_without_a_runs_config_cannot_be_resumed(content, tmp_path):
    if content is not None:
        (tmp_path / "config.toml").write_text(content)
    if content == "":  # an empty file is a config of defaults
        assert Run.open(tmp_path).config.run.steps == 100
    else:
        with pytest.raises(RunError, match="holds no run to resume"):
            Run.open(tmp_path)


def test_a_checkpoint_brings_state_and_weights_back(policy, tmp_path):
    run = new_run(tmp_path)
    assert run.load_state() is None
    run.save(3, policy, {"numbers": torch.arange(3.0), "position": 6}, {"a.b": torch.arange(4.0)})
    state, tensors = Run.open(tmp_path).load_state(), {"a.b": torch.zeros(4)}
    assert state["step"] == 3 and state["position"] == 6 and state["numbers"].tolist() == [0, 1, 2]
    run.load_tensors(tensors)
    assert tensors["a.b"].tolist() == [0, 1, 2, 3]
    assert torch.equal(weights(tmp_path), torch.cat([p.flatten() for _, p in sorted(policy.model.named_parameters())]))


def test_the_newest_checkpoints_stay_in_the_order_of_numbers(policy, tmp_path):
    run = new_run(tmp_path, run={"keep_checkpoints": 2})
    for step in (999_998, 999_999, 1_000_000):
        run.save(step, policy, {})
    (tmp_path / "checkpoints" / "step-2000000 (copy)").mkdir()
    assert [path.name for path in run.checkpoints] == ["step-999999", "step-1000000"]
    assert run.load_state()["step"] == 1_000_000


def test_a_damaged_checkpoint_is_named(policy, tmp_path):
    run = new_run(tmp_path)
    run.save(1, policy, {})
    for damage in (b"", b"PK\x03\x04 not a checkpoint", b"\x80\x02}q\x00."):
        (run.checkpoints[0] / "state.pt").write_bytes(damage)
        with pytest.raises(RunError, match=r"step-000001 is damaged .*move it away to go on from the one before"):
            run.load_state()
    tensors = {"a": torch.zeros(3)}
    for damaged in ("tensors/.metadata", "tensors"):  # a file that is no checkpoint's, and none at all
        path = run.checkpoints[0] / damaged
        path.write_bytes(b"damage") if path.is_file() else shutil.rmtree(path)
        with pytest.raises(RunError, match=r"step-000001 is damaged"):
            run.load_tensors(tensors)
    (run.checkpoints[0] / "state.pt").unlink()
    with pytest.raises(RunError, match="step-000001 is damaged"):
        run.load_state()


def test_nan_is_logged_as_null_and_rows_are_strict_json(tmp_path):
    run = new_run(tmp_path)
    run.log(1, {"a": float("nan"), "b": float("inf"), "c": 0.5, "d": 2})
    run.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail) == {
        "step": 1, "a": None, "b": None, "c": 0.5, "d": 2}


@pytest.mark.parametrize("tail", [b'{"step": 4, "task": "\xf0\x9f\x8e', b'{"step"', b'{"step": null}\n', b"\xff\n",
                                  b'{"step": 3}\n{"st', b"[]\n", b""])
def test_rows_after_the_checkpoint_and_half_rows_are_dropped(tail, policy, tmp_path):
    run = new_run(tmp_path)
    run.save(2, policy, {})
    whole = '{"step": 0}\n{"step": 1, "text": "ü\\u2028"}\n{"step": 2}'
    for name in ("metrics.jsonl", "trajectories.jsonl", "evaluations.jsonl"):
        (tmp_path / name).write_bytes(whole.encode() + b"\n" + tail)
    run.load_state()
    for name in ("metrics.jsonl", "trajectories.jsonl", "evaluations.jsonl"):
        assert (tmp_path / name).read_text(encoding="utf-8") == whole + "\n"
    assert run.evaluated == {0, 1, 2}


def test_what_a_crash_left_of_a_checkpoint_is_cleared(policy, tmp_path):
    run = new_run(tmp_path)
    run.save(1, policy, {})
    (tmp_path / "checkpoints" / ".step-000002").mkdir()
    (tmp_path / "checkpoints" / ".step-000002" / "model.safetensors").write_bytes(b"half")
    assert run.load_state()["step"] == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_tensorboard_reads_the_metrics(tmp_path):
    start(tmp_path / "run", evaluation={"episodes": 2})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    logged = rows(tmp_path / "run")
    assert {f"metrics/{name}" for name in logged[0] if name != "step"} <= set(events.Tags()["scalars"])
    for name in ("reward", "loss", "entropy"):
        found = [(event.step, event.value) for event in events.Scalars(f"metrics/{name}")]
        assert found == [(row["step"], pytest.approx(row[name])) for row in logged]
    assert [event.step for event in events.Scalars("evaluations/success_rate")] == [0, 2]


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, free: int):
    """Leave only so many bytes free."""
    with open(folder / "filler", "wb", buffering=0) as file:
        while True:
            try:
                file.write(b"\0" * 4096)
            except OSError:
                break
        file.truncate(max(0, file.tell() - free))


class FillingDisk(Recorder):
    """Fills the disk when a step is done."""

    def __init__(self, folder: Path, step: int, free: int):
        super().__init__()
        self.folder, self.step, self.free = folder, step, free

    def advance(self, metrics):
        super().advance(metrics)
        if self.done == self.step:
            fill(self.folder, self.free)


@pytest.mark.parametrize("free", [0, 40_000])  # no room for a row of the log; none for a checkpoint
def test_a_full_disk_is_one_error_and_the_run_goes_on_from_its_checkpoint(free, small_disk, tmp_path):
    longer = {"run": {"steps": 4, "save_every": 2, "log_trajectories": 0}}
    start(tmp_path / "reference", **longer)
    run = Run.create(small_disk / "run", small_config(**longer))
    with pytest.raises(RunError) as error:
        train(run, FillingDisk(small_disk, step=3, free=free))
    assert "No space left on device" in str(error.value)
    assert "The last complete checkpoint is" in str(error.value) and "step-000002" in str(error.value)
    assert [path.name for path in (small_disk / "run" / "checkpoints").iterdir()] == ["step-000002"]
    (small_disk / "filler").unlink()
    go_on(small_disk / "run")
    assert rows(small_disk / "run") == rows(tmp_path / "reference")
    assert torch.equal(weights(small_disk / "run"), weights(tmp_path / "reference"))


@pytest.mark.parametrize("call", ["os.replace", "torch.save", "agents.models.Policy.save"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")])
def test_a_checkpoint_that_cannot_be_written_leaves_nothing_behind(call, error, policy, tmp_path, monkeypatch):
    run = new_run(tmp_path)

    def fails(*arguments):
        raise error
    monkeypatch.setattr(call, fails)
    with pytest.raises(RunError, match=f"cannot write .*step-000001: .*{error.args[-1]}\nThere is no complete check"):
        run.save(1, policy, {})
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_read_only_disk_is_an_error(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(RunError, match="Read-only file system"):
        new_run(small_disk / "run")
