"""`scripts.compare`: the same start, the same panel and the same budget for all; and it goes on where it stopped."""

import json

import numpy as np
import pytest
import tomli_w
from PIL import Image

from scripts import compare
from tests.trainers.runs import SMALL, rows, small_config, start
from trainers.algorithms import GRPO
from trainers.comparison import Comparison, panel_of, summarise
from trainers.run import Run
from trainers.settings import merge, settings
from trainers.statistics import t_interval

ID = "tests.trainers.runs:test/Parity-v0"
CONFIG = merge(SMALL, {"warm_start": {"steps": 2, "batch_size": 4}, "evaluation": {"episodes": 8, "every": 2},
                       "run": {"steps": 5}, "algorithms": {"FACTOR": {"continuations": 2, "continuation_turns": 1}}})


@settings
class Failing(GRPO):
    """Fails in its second step."""

    def advantages(self, groups, scores=None, step=0):
        if step == 1:
            raise ArithmeticError("no credit today")
        return super().advantages(groups, scores, step)


class Jobs:
    """Runs jobs in this process, as a start in another takes seconds, and remembers them."""

    def __init__(self, interrupt_before: str = "none"):
        self.names, self.interrupt_before = [], interrupt_before

    def __call__(self, jobs, processes, on_end):
        for job in jobs:
            if job.name.endswith(self.interrupt_before):
                raise KeyboardInterrupt
            self.names.append(job.name)
            try:
                job.work(job.folder)
                on_end(job, "")
            except ArithmeticError as error:
                on_end(job, str(error))


def run(folder, jobs, *arguments, algorithms="GRPO,FACTOR", seeds="0,1", code=0, config=CONFIG):
    """A comparison, with its config beside its folder."""
    file = folder.with_suffix(".toml")
    file.write_text(tomli_w.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "run_jobs", jobs)
        assert compare.main(["--env", ID, "--algorithms", algorithms, "--seeds", seeds, "--config", str(file),
                             "--out", str(folder), *arguments]) == code
    report = folder / "comparison.json"
    return json.loads(report.read_text()) if report.exists() else None


def run_folder(folder, algorithm, seed):
    return next(folder.glob(f"runs/*/{algorithm}/seed-{seed}"))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder, jobs = tmp_path_factory.mktemp("compared") / "out", Jobs()
    return folder, run(folder, jobs), jobs


def test_all_runs_of_a_seed_start_from_one_policy(compared):
    folder, _, jobs = compared
    assert jobs.names == [f"start of {ID} seed 0", f"start of {ID} seed 1", f"{ID} GRPO seed 0", f"{ID} FACTOR seed 0",
                          f"{ID} GRPO seed 1", f"{ID} FACTOR seed 1"]
    for seed in (0, 1):
        runs = [Run.open(run_folder(folder, name, seed)) for name in ("GRPO", "FACTOR")]
        assert runs[0].config.model.path == runs[1].config.model.path and not runs[0].config.warm_start.steps
        first, second = (rows(run.folder, "evaluations")[0] for run in runs)
        assert first == second and first["step"] == 0
        assert not any(run.initial.exists() for run in runs)


def test_a_run_ends_with_the_step_that_uses_its_budget_up(compared):
    folder, report, _ = compared
    found, = report["environments"].values()
    # The budget is what GRPO's run of 5 steps with seed 0 used: 5 x 2 tasks x 4 episodes x 2 turns = 80 at most.
    metrics = rows(run_folder(folder, "GRPO", 0))
    assert len(metrics) == 5
    assert found["budget"] == {name: sum(row[name] for row in metrics) for name in found["budget"]}
    assert 0 < found["budget"]["environment_steps"] <= 80
    for name, seed in (("GRPO", 1), ("FACTOR", 0), ("FACTOR", 1)):
        used = {cost: np.cumsum([row[cost] for row in rows(run_folder(folder, name, seed))])
                for cost in found["budget"]}
        over = np.any([used[cost] >= limit for cost, limit in found["budget"].items()], axis=0)
        assert over[-1] and not over[:-1].any()
        assert found["curves"][name][str(seed)][-1] | {cost: int(values[-1]) for cost, values in used.items()} \
            == found["curves"][name][str(seed)][-1]
        assert rows(run_folder(folder, name, seed), "evaluations")[-1]["step"] == len(over)


def test_what_branches_off_counts_in_the_budget(compared):
    folder, _, _ = compared
    # FACTOR's step costs up to 2 x 4 episodes x 2 branches x 1 turn more than GRPO's, so that it takes fewer steps.
    assert len(rows(run_folder(folder, "FACTOR", 0))) < 5


def test_the_report_holds_curves_summary_and_panel(compared, capsys):
    folder, report, _ = compared
    found, = report["environments"].values()
    assert {point["panel_sha256"] for by_seed in found["curves"].values() for curve in by_seed.values()
            for point in curve} == {found["panel_sha256"]}
    assert found["summary"]["GRPO"]["seeds"] == [0, 1] and not found["summary"]["GRPO"]["differences"]
    difference = found["summary"]["FACTOR"]["differences"]["success_rate"]
    ends = [[found["curves"][name][seed][-1]["success_rate"] for seed in "01"] for name in ("FACTOR", "GRPO")]
    assert difference["values"] == pytest.approx([a - b for a, b in zip(*ends)])
    assert report["failures"] == {}
    with Image.open(folder / "curves.png") as picture:
        assert picture.width > 600 and len(picture.getcolors(1 << 24)) > 50


def test_the_same_command_runs_nothing_again_and_shows_the_same(compared, capsys):
    folder, report, _ = compared
    jobs = Jobs()
    assert run(folder, jobs) == report and jobs.names == []
    shown = capsys.readouterr().out
    assert report["environments"][ID]["panel_sha256"] in shown and "FACTOR" in shown and "±" in shown


def test_a_seed_and_an_algorithm_are_added_without_the_others_running_again(compared):
    folder, _, _ = compared
    jobs = Jobs()
    report = run(folder, jobs, algorithms="GRPO,FACTOR,RLOO", seeds="0")
    assert jobs.names == [f"{ID} RLOO seed 0"]
    found = report["environments"][ID]["summary"]
    assert found["RLOO"]["seeds"] == [0] and found["RLOO"]["success_rate"]["ci_low"] is None  # one seed: no interval


def test_other_settings_are_refused_in_the_same_folder(compared, capsys):
    folder, _, _ = compared
    run(folder, Jobs(), "--rollout.temperature", "0.5", code=2)
    assert "was made with other settings" in capsys.readouterr().err


def test_an_interrupted_comparison_goes_on_to_the_same_numbers(compared, tmp_path, capsys):
    _, report, _ = compared
    assert run(tmp_path / "out", Jobs(interrupt_before="GRPO seed 1"), code=130) is None
    assert "the same command goes on" in capsys.readouterr().err
    jobs = Jobs()
    again = run(tmp_path / "out", jobs)
    assert jobs.names == [f"{ID} GRPO seed 1", f"{ID} FACTOR seed 1"]
    assert again["environments"][ID]["summary"] == report["environments"][ID]["summary"]


def test_a_run_that_fails_is_reported_and_the_others_finish(tmp_path, capsys):
    failing = f"{__name__}:Failing"
    config = merge(CONFIG, {"algorithms": {"Bad": {"name": failing}}, "run": {"max_environment_steps": 30}})
    report = run(tmp_path / "out", Jobs(), algorithms="GRPO,Bad,RLOO", seeds="0", code=1, config=config)
    name, = report["failures"]
    assert name == f"{ID} Bad seed 0" and "no credit today" in report["failures"][name]
    assert "no credit today" in capsys.readouterr().err
    found = report["environments"][ID]
    assert found["budget"] == {"environment_steps": 30, "sampled_tokens": None}
    assert found["summary"].keys() == {"GRPO", "RLOO"} and found["curves"]["Bad"] == {}
    alone = run(tmp_path / "out", Jobs(), algorithms="Bad", seeds="0", code=1, config=config)
    assert alone["failures"].keys() == {name, ID} and alone["failures"][ID] == "no run has finished"


def test_processes_of_their_own_give_the_same_report(compared, tmp_path):
    folder, _, _ = compared
    start = next(folder.glob("starts/*/seed-0/initial"))
    arguments = ["--env", ID, "--algorithms", "GRPO,RLOO", "--seeds", "0", "--processes", "2", "--model.path",
                 str(start), "--environment.tasks", "10", "--rollout.tasks_per_step", "2", "--rollout.group_size", "4",
                 "--rollout.max_response_tokens", "5", "--rollout.concurrency", "8", "--evaluation.episodes", "8",
                 "--run.max_sampled_tokens", "30", "--out", str(tmp_path / "out")]
    assert compare.main(arguments) == 0
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())["environments"][ID]
    assert found["summary"].keys() == {"GRPO", "RLOO"}
    assert "after training" in (run_folder(tmp_path / "out", "RLOO", 0) / "output.txt").read_text()


@pytest.mark.parametrize("arguments, message", [
    (["--seeds", "0,x"], "whole numbers"), (["--seeds", "1,01"], "twice"), (["--seeds", ""], "whole numbers"),
    (["--seeds", "-1"], ""), (["--algorithms", "GRPO,GRPO"], "twice"), (["--algorithms", "GRPO,"], "nothing between"),
    (["--processes", "0"], "at least 1")])
def test_wrong_arguments_are_named(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        compare.main(["--env", ID, "--algorithms", "GRPO", "--out", str(tmp_path / "out"), *arguments])
    assert exit.value.code == 2 and message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments, message", [
    (["--algorithms", "GRPPO"], "the nearest is 'GRPO'"), (["--run.stepss", "3"], "the nearest is 'run.steps'"),
    (["--optimizer.schedule", "cosine"], "leave it 'constant'"), (["--evaluation.episodes", "0"], "needs a panel"),
    (["--algorithms.GRPO", "3"], "a section of settings"), (["--config", "none.toml"], "no config file none.toml"),
    (["--env", "turngym/Cuntdown-v0"], "Did you mean: `Countdown`"), (["--model.device", "cuda:99"], "cuda:99")])
def test_wrong_settings_are_named_before_anything_runs(arguments, message, tmp_path, capsys):
    assert compare.main(["--env", ID, "--algorithms", "GRPO", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_settings_of_one_algorithm_and_of_one_environment_are_its_own(tmp_path):
    comparison = Comparison(
        folder=tmp_path, environment=ID, algorithms=["GRPO", "Wide"], seeds=[3], settings=merge(SMALL, {
            "algorithm": {"name": "DAPO", "kl_coefficient": 0.1}, "evaluation": {"episodes": 8},
            "algorithms": {"Wide": {"name": "GRPO", "clip_high": 0.9}},
            "environments": {ID: {"rollout": {"group_size": 3}}, "other": {"rollout": {"group_size": 5}}}}))
    plain, wide = (comparison.config(name, 3) for name in ("GRPO", "Wide"))
    assert (plain.algorithm.clip_high, wide.algorithm.clip_high) == (0.2, 0.9)
    assert type(plain.algorithm) is type(wide.algorithm) is GRPO and wide.algorithm.kl_coefficient == 0.1
    assert plain.rollout.group_size == 3 and plain.run.seed == 3 and plain.evaluation.every == 10


def curve(success_rate, panel="p"):
    return [{"step": 9, "success_rate": success_rate, "score": 0.0, "turns": 2.0, "tokens_per_turn": 3.0,
             "environment_steps": 10, "sampled_tokens": 20, "panel_sha256": panel}]


def test_differences_are_paired_by_seed():
    curves = {"GRPO": {0: curve(0.2), 1: curve(0.6), 2: curve(0.9)}, "PlanPO": {0: curve(0.3), 1: curve(0.8)}}
    found = summarise(curves, "GRPO")
    # Seeds 0 and 1 have both: 0.1 and 0.2, mean 0.15, standard deviation 0.0707, t of one degree of freedom 12.706:
    # 12.706 x 0.0707 / sqrt(2) = 0.6353.
    difference = found["PlanPO"]["differences"]["success_rate"]
    assert (difference.mean, difference.ci_low, difference.ci_high) == pytest.approx((0.15, -0.4853, 0.7853), abs=1e-4)
    assert found["GRPO"]["success_rate"].mean == pytest.approx(1.7 / 3) and found["GRPO"]["differences"] == {}
    assert summarise({"GRPO": {}, "PlanPO": {0: curve(0.3)}}, "GRPO")["PlanPO"]["differences"] == {}


def test_two_panels_are_not_compared():
    with pytest.raises(ValueError, match="2 panels"):
        panel_of({"GRPO": {0: curve(0.1)}, "PlanPO": {0: curve(0.1, "q")}})


def test_students_interval():
    # 1, 2, 3: mean 2, standard deviation 1, t of two degrees of freedom 4.303: 4.303 / sqrt(3) = 2.484.
    assert t_interval([1, 2, 3]) == pytest.approx((2 - 2.484, 2 + 2.484), abs=1e-3)
    assert t_interval([0.5, 0.5]) == (0.5, 0.5) and t_interval([0.5]) is None
    # 41 values of 0 and 1 in turn: standard deviation 0.5061 and t of 40 degrees of freedom 2.021.
    low, high = t_interval([i % 2 for i in range(41)])
    assert high - low == pytest.approx(2 * 2.021 * 0.5061 / 41**0.5, rel=1e-3)
    for values in ([], [float("nan")], [[1.0]]):
        with pytest.raises(ValueError, match="one per seed"):
            t_interval(values)


def test_a_run_that_a_limit_ends_is_evaluated_saved_and_resumed_to_its_end(tmp_path):
    sections = {"run": {"steps": 9, "max_environment_steps": 20}, "evaluation": {"episodes": 4}}
    recorder = start(tmp_path / "run", **sections)
    run = Run.open(tmp_path / "run")
    # A step takes at most 2 tasks x 4 episodes x 2 turns = 16, at least 8: two or three steps.
    assert run.done in (2, 3) and run.over(run.done) and not run.over(run.done - 1)
    assert recorder.titles == ["before training", "after training"]
    assert run.config == small_config(**sections)
