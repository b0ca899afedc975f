"""What an agent acts in. Importing this package registers the built-in environments with Gymnasium."""

from envs.core import ActionSpan, LazyTasks, Outcome, SingleTurnEnv, Snapshot, Task, TextEnv, panel_sha256

__all__ = ["ActionSpan", "LazyTasks", "Outcome", "SingleTurnEnv", "Snapshot", "Task", "TextEnv", "panel_sha256"]
