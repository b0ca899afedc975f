"""What an agent acts in. Importing this package registers the built-in environments with Gymnasium."""

import gymnasium

from envs.checking import CheckResult, check_text_env
from envs.core import (
    ActionSpan,
    LazyTasks,
    Mistake,
    Outcome,
    SingleTurnEnv,
    Snapshot,
    Task,
    TextEnv,
    make,
    panel_sha256,
)

__all__ = ["ActionSpan", "CheckResult", "LazyTasks", "Mistake", "Outcome", "SingleTurnEnv", "Snapshot", "Task",
           "TextEnv", "check_text_env", "make", "panel_sha256"]

gymnasium.register("turngym/Countdown-v0", entry_point="envs.countdown:Countdown", disable_env_checker=True,
                   order_enforce=False)
gymnasium.register("turngym/ReasoningGym-v0", entry_point="envs.reasoning:ReasoningGym", disable_env_checker=True,
                   order_enforce=False)
gymnasium.register("turngym/Math-v0", entry_point="envs.mathematics:Math", disable_env_checker=True,
                   order_enforce=False)
gymnasium.register("turngym/WebShop-v0", entry_point="envs.webshop.environment:WebShop", disable_env_checker=True,
                   order_enforce=False)
gymnasium.register("turngym/Search-v0", entry_point="envs.search:Search", disable_env_checker=True, order_enforce=False)
gymnasium.register("turngym/ScienceWorld-v0", entry_point="envs.scienceworld:ScienceWorld", disable_env_checker=True,
                   order_enforce=False)
gymnasium.register("turngym/ALFWorld-v0", entry_point="envs.alfworld:ALFWorld", disable_env_checker=True,
                   order_enforce=False)
gymnasium.register("turngym/SkyRL-v0", entry_point="envs.adapters.skyrl:SkyRL", disable_env_checker=True,
                   order_enforce=False)
gymnasium.register("turngym/TRL-v0", entry_point="envs.adapters.trl:TRL", disable_env_checker=True, order_enforce=False)
gymnasium.register("turngym/OpenEnv-v0", entry_point="envs.adapters.openenv:OpenEnv", disable_env_checker=True,
                   order_enforce=False)
