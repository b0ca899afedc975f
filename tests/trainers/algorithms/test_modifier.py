"""Algorithms built on another: by name, in a config and back, and in Python."""

import pytest

from tests.trainers.algorithms.groups import group, played, same
from trainers.algorithms import GRPO, RLOO, STAMP, GiGPO, PlanPO, find_algorithm
from trainers.algorithms.modifier import compose
from trainers.config import build_config, config_dict
from trainers.settings import SettingsError, settings

pytestmark = pytest.mark.filterwarnings("ignore:a task of this environment has no evidence graph")


@settings
class Mine(GRPO):
    """A user's algorithm."""

    strength: float = 2.0


def test_a_composed_algorithm_has_the_settings_loss_and_defaults_of_both():
    over = find_algorithm("STAMP+RLOO")()
    assert isinstance(over, RLOO) and (over.ratio, over.kl_coefficient, over.unit_credit) == ("sequence", 1e-3, 0.03)
    assert find_algorithm("GiGPO+PlanPO")().aggregation == PlanPO().aggregation != GiGPO().aggregation
    assert find_algorithm("ADRS+GiGPO")().needs.teacher_logprobs
    assert compose(STAMP, GiGPO) is find_algorithm("STAMP+GiGPO")


def test_three_are_composed_from_the_right():
    over = find_algorithm("STAMP+GiGPO+PlanPO")(unit_credit=0.0, step_weight=0.0)
    some = group(played(1.0, (1, 2)), played(1.0, (3,)), played(0.0, (2,)))
    assert same(over.advantages([some]), PlanPO().advantages([some]))


@pytest.mark.parametrize("name", ["STAMP+GiGPO", "GiGPO+PlanPO", "ADRS+GiGPO", "STAMP+RLOO", "ADRS+STAMP+DAPO",
                                  f"STAMP+{__name__}:Mine"])
def test_a_config_names_it_in_one_line_and_reads_back_equal(name):
    config = build_config({"algorithm": {"name": name, "clip_high": 0.3}})
    written = config_dict(config)
    assert written["algorithm"]["name"] == name and written["algorithm"]["clip_high"] == 0.3
    assert build_config(written) == config and type(build_config(written).algorithm) is find_algorithm(name)


@pytest.mark.parametrize("name, message", [
    ("GRPO+GiGPO", "GRPO does not build on another algorithm"), ("PlanPO+GiGPO", "as in 'GiGPO.PlanPO'"),
    ("GiGPO+GiGPO", "GiGPO is built on GiGPO already"), ("STAMP+ADRS+STAMP", "is built on STAMP already"),
    ("STAMP+Gigpo", "the nearest is 'GiGPO'"), ("STAMP+", "unknown algorithm ''"), ("+GRPO", "unknown algorithm ''")])
def test_what_cannot_be_composed_is_named(name, message):
    with pytest.raises(SettingsError, match=message):
        find_algorithm(name)


def test_an_unknown_setting_of_a_composed_algorithm_names_the_nearest():
    with pytest.raises(SettingsError, match=r"the nearest is 'algorithm\.unit_credit'"):
        build_config({"algorithm": {"name": "STAMP+GiGPO", "unit_credt": 0.1}})
