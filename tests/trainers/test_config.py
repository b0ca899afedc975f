"""A config file and overrides become one checked config, which reads back equal."""

import math
from functools import reduce
from pathlib import Path

import pytest

from tests.trainers.runs import small_config
from trainers.algorithms import DAPO, GRPO, RLOO, RLOOpp
from trainers.config import ModelSettings, TrainConfig, build_config, config_dict, load_config
from trainers.loop import open_environment
from trainers.run import Run, config_toml
from trainers.settings import SettingsError, setting_names

MINE = '''
from trainers.algorithms import GRPO
from trainers.settings import settings


@settings
class Mine(GRPO):
    """A user's algorithm."""

    strength: float = 1.0
    powers: tuple[int, ...] = (1, 2)
    limit: int | None = None
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "config_test_algorithm.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    return "config_test_algorithm:Mine"


def test_nothing_given_is_the_default():
    model = {"path": "some/model"}
    assert build_config({"model": model}) == TrainConfig(model=ModelSettings(**model))
    assert TrainConfig().algorithm == GRPO()


def test_a_tiny_policy_has_learning_rates_of_its_own_that_settings_override():
    config = load_config()
    assert (config.optimizer.learning_rate, config.warm_start.optimizer, config.warm_start.learning_rate) == (
        1e-3, "muon", 2e-2)
    assert load_config(None, ["--optimizer.learning_rate", "0.1"]).optimizer.learning_rate == 0.1
    assert load_config(None, ["--model.path", "some/model"]).optimizer.learning_rate == 1e-6


def test_overrides_stand_above_the_file(tmp_path):
    (tmp_path / "c.toml").write_text("[run]\nsteps = 3\nseed = 4\n[algorithm]\nname = 'DAPO'\nclip_high = 0.5\n")
    config = load_config(tmp_path / "c.toml", ["--run.steps", "5", "--algorithm.clip_low=0.1"])
    assert (config.run.steps, config.run.seed) == (5, 4)
    assert config.algorithm == DAPO(clip_high=0.5, clip_low=0.1)


@pytest.mark.parametrize("content, message", [
    ("learning_rtae = 1", "unknown setting 'learning_rtae'; the nearest is 'optimizer.learning_rate'"),
    ("[optimizer]\nlearning_rtae = 1", "'optimizer.learning_rtae'; the nearest is 'optimizer.learning_rate'"),
    ("[optimizer]\ngroup_size = 1", "unknown setting 'optimizer.group_size'; the nearest is 'rollout.group_size'"),
    ("[algo]\ngropu_size = 4", "unknown setting 'algo.gropu_size'; the nearest is 'rollout.group_size'"),
    ("[rollouts]\n", "unknown setting 'rollouts'; the nearest is 'rollout"),
    ("[algorithm]\nnmae = 'GRPO'", "unknown setting 'algorithm.nmae'; the nearest is 'algorithm.name'"),
    ("[algorithm]\noverlong_length = 9", "unknown setting 'algorithm.overlong_length'"),
    ("[run.more]\nx = 1", "unknown setting 'run.more.x'"), ("rollout = 3", "rollout: "), ("[[rollout]]\n", "rollout: "),
    ("algorithm = 'DAPO'", "algorithm is a section; name one with algorithm.name = 'DAPO'"),
    ("[algorithm]\nname = 'DAP'", "unknown algorithm 'DAP'; the nearest is 'DAPO', others are "),
    ("[algorithm]\nname = ''", "unknown algorithm ''"), ("[algorithm]\nname = 3", "algorithm's name is text, got 3"),
    ("[algorithm]\nname = 'Algorithm'", "unknown algorithm 'Algorithm'"),
    ("[algorithm]\nname = 'no_such_module:X'", "no module 'no_such_module'"),
    ("[algorithm]\nname = '.x:Y'", "'.x' is no module's name"), ("[algorithm]\nname = 'json:X'", "'json' has no"),
    ("[run]\nsteps = 0", "run.steps: Input should be greater than 0"), ("[run]\nseed = -1", "run.seed"),
    ("[run]\nsteps = true", "run.steps: Input should be a valid integer (got True)"),
    ("[run]\nsteps = '3'", "run.steps: Input should be a valid integer (got '3')"),
    ("[rollout]\ntemperature = 0", "rollout.temperature: Input should be greater than 0"),
    ("[optimizer]\nlearning_rate = nan", "optimizer.learning_rate: Input should be a finite number"),
    ("[optimizer]\nlearning_rate = inf", "optimizer.learning_rate"), ("[optimizer]\nbeta1 = 1.0", "optimizer.beta1"),
    ("[optimizer]\nschedule = 'cosin'", "optimizer.schedule: Input should be 'constant', 'linear' or 'cosine'"),
    ("[algorithm]\nkl_coefficient = -0.1", "algorithm.kl_coefficient"), ("[rollout]\nwindow = 0", "rollout.window"),
    ("[evaluation]\nepisodes = -1", "evaluation.episodes"), ("[environment]\noptions = []", "environment.options"),
    ("[model]\ndevice = 'gpu'", "model.device 'gpu' names no device"), ("[model]\ndtype = 'fp32'", "model.dtype"),
    ("[model]\nhidden_size = 40", "model.hidden_size must be a multiple of 16 and of model.head_size = 16, got 40"),
    ("[engine]\nname = 'vllm'", "set model.head_size = 32, got 16"),
    ("[engine]\nname = 'vllm'\nin_process = true\n[model]\nhead_size = 32\n[rollout]\nmax_staleness = 1",
     "sleeps while the learner works"),
    ("[engine]\nname = 'vllm'\n[model]\nhead_size = 32\n[model.lora]\nrank = 513", "model.lora.rank is 513"),
    ("[engine]\nname = 'vlm'", "engine.name: Input should be 'transformers' or 'vllm'"),
    ("[engine]\nservers = ['10.0.0.1:8000']", "engine.servers: the base URL must be an address"),
    ("[engine]\nin_process = true\nreplicas = 2", "engine.in_process is one vLLM in this process"),
    ("[model]\nvocabulary = 299", "model.vocabulary must be at least 300"),
    ("[rollout]\ngroup_size = 2\ntasks_per_step = 2\n[optimizer]\nminibatches = 5", "more than the 4 episodes")])
def test_a_wrong_setting_is_refused_by_name(content, message, tmp_path):
    (tmp_path / "c.toml").write_text(content)
    with pytest.raises(SettingsError) as error:
        load_config(tmp_path / "c.toml")
    assert message in str(error.value) and "settings:" not in str(error.value)


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "RLOOpp", "DAPO"])
def test_a_group_of_one_has_nothing_to_compare(name):
    with pytest.raises(SettingsError, match=rf"rollout.group_size must be >= 2 for {name}"):
        build_config({"algorithm": {"name": name}, "rollout": {"group_size": 1}})


def test_an_algorithm_without_groups_takes_groups_of_one():
    assert build_config({"algorithm": {"name": "trainers.algorithms.sft:SFT"}, "rollout": {"group_size": 1}})


def test_what_concerns_tiny_policies_alone_is_not_asked_of_others():
    assert build_config({"model": {"path": "some/model", "hidden_size": 40, "vocabulary": 1}})


@pytest.mark.parametrize("text", ["a # b", "'", '"', "a\nb", "ünïcode 🎲", "\\", " ", "true", "3"])
def test_odd_texts_read_back_equal(text, tmp_path):
    config = small_config(model={"path": text}, environment={"options": {"x": text, text: [1, text, {"y": text}]}})
    assert Run.open(Run.create(tmp_path / "run", config).folder).config == config


@pytest.mark.parametrize("algorithm", [
    GRPO(dual_clip=3.0, ratio="turn", normalise_by_std=False), DAPO(overlong_length=9, overlong_buffer=4),
    RLOO(kl_coefficient=0.0), RLOOpp(target_std=0.1),
    GRPO(aggregation="sequence_mean_token_sum_norm", aggregation_length=7)])
def test_every_algorithm_reads_back_equal(algorithm, tmp_path):
    config = TrainConfig(algorithm=algorithm)
    (tmp_path / "c.toml").write_text(config_toml(config))
    assert load_config(tmp_path / "c.toml") == config and type(load_config(tmp_path / "c.toml").algorithm) is \
        type(algorithm)


def test_a_users_algorithm_reads_back_equal(mine, tmp_path):
    config = build_config({"algorithm": {"name": mine, "strength": 2, "powers": [3]}})
    (tmp_path / "c.toml").write_text(config_toml(config))
    found = load_config(tmp_path / "c.toml")
    assert found == config and found.algorithm.powers == (3,) and math.isclose(found.algorithm.strength, 2.0)
    assert config_dict(found)["algorithm"]["name"] == mine
    with pytest.raises(SettingsError, match=r"'algorithm.strenght'; the nearest is 'algorithm.strength'"):
        build_config({"algorithm": {"name": mine, "strenght": 2}})


def test_the_written_config_names_every_setting_that_is_not_none():
    written = config_dict(TrainConfig())
    for name in setting_names(TrainConfig):
        *sections, key = name.split(".")
        assert key in reduce(dict.__getitem__, sections, written)


@pytest.mark.parametrize("name, nearest", [
    ("rollout.learning_rate", "optimizer.learning_rate"), ("model.learning-rate", "optimizer.learning_rate"),
    ("evaluation.learning_rate", "optimizer.learning_rate"), ("learning_rate", "optimizer.learning_rate"),
    ("warmstart.learning_rate", "warm_start.learning_rate"), ("temperature", "rollout.temperature"),
    ("run.temperature", "rollout.temperature"), ("eval.temperature", "evaluation.temperature"),
    ("rollout.steps", "run.steps"), ("warm_start.group_size", "rollout.group_size"), ("seed", "run.seed"),
    ("model.options", "environment.options"), ("run.batch_size", "warm_start.batch_size"), ("env.id", "environment.id"),
    ("rollout.gropu_size", "rollout.group_size")])
def test_the_setting_of_that_name_is_proposed_first_where_it_is_usually_meant(name, nearest):
    with pytest.raises(SettingsError, match=f"unknown setting '{name}'; the nearest is '{nearest}'"):
        load_config(None, [f"--{name}", "1"])


def test_an_unknown_algorithm_lists_all_that_exist_the_nearest_first():
    with pytest.raises(SettingsError, match="the nearest is 'RLOO', others are ") as refused:
        load_config(None, ["--algorithm.name", "Rloo"])
    listed = str(refused.value).partition("others are ")[2].split(", ")
    assert {"GRPO", "DAPO", "RLOOpp"} <= set(listed) and "RLOO" not in listed and "Algorithm" not in listed


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").glob("*.toml")),
                         ids=lambda path: path.stem)
def test_every_config_of_ours_opens_its_environment_and_its_panel(path):
    config = load_config(path)
    env, tasks, panel = open_environment(config)
    env.close()
    assert len(tasks) and len(panel) == config.evaluation.episodes
