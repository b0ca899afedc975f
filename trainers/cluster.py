"""A run on a Ray cluster: learner ranks, engine replicas and environment workers as actors of one placement group.

The loop is that of any run. Its leading rank starts the replicas and workers; the process at the terminal places the
ranks, shows what the leader tells, and ends everything.
"""

import math
import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import transformers
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agents.crew import Crew
from agents.engine import Engine, EngineError
from agents.models import Policy, load_outline
from agents.ray_engine import EngineReplica, RayEngine
from agents.ray_rollout import EnvironmentWorker, RayRollout
from agents.rollout import Rollout
from agents.vllm_server import free_port
from trainers.acting import make_env, make_rollout
from trainers.config import ActorSettings, TrainConfig
from trainers.engines import build_engine, gap_limit
from trainers.evaluation import Evaluation
from trainers.initial import adapt, read_policy
from trainers.loop import Display, check_device, train
from trainers.ranks import joined_ranks
from trainers.run import Run, RunError
from trainers.settings import SettingsError
from trainers.told_display import Messenger, ToldDisplay
from trainers.weight_sync import WeightSync

PLACE_SECONDS = 300.0
"""How long a run waits for room that others take."""
UNDER_WAY = 100_000
"""Calls that an actor works on at once: rollouts and engines have bounds of their own."""


def train_on_ray(run: Run, display: Display) -> list[Evaluation]:
    """`train` on a cluster that runs, else on one of this machine alone, which ends with the run.

    Raises what `train` raises, SettingsError where the cluster is too small, and RunError where a learner is lost.
    """
    settings = run.config.cluster
    cpus = sum(part.count * part.cpus for part in (settings.learners, settings.replicas, settings.workers))
    with connected(cpus), placed(run.config) as placement:
        return follow(placement, Run(run.folder.resolve(), run.config), display)


@contextmanager
def connected(cpus: float) -> Iterator[None]:
    """A connection to Ray, unless there is one. `cpus`: what a cluster that is started here offers."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default whatever else runs comes before all of Ray's workers
    options = {"include_dashboard": False, "logging_level": "error"}
    try:
        try:
            ray.init(num_cpus=math.ceil(cpus), **options)
        except ValueError:  # a cluster that runs already says itself what it has
            ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RunError(f"cannot connect to Ray: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class Placement:
    """Where the parts of a run are: bundles of one placement group, in the order of `parts`."""

    group: PlacementGroup
    parts: tuple[ActorSettings, ActorSettings, ActorSettings]
    """Learners, replicas, workers; `gpus` is a number in each."""

    def start(self, cls: type, part: int, arguments: Sequence[tuple], **options: Any) -> list:
        """The actors of a part, one for each of `arguments`."""
        settings, first = self.parts[part], sum(one.count for one in self.parts[:part])
        return [ray.remote(cls).options(num_cpus=settings.cpus, num_gpus=settings.gpus, **options,
                                        scheduling_strategy=self.bundle(first + i)).remote(*one)
                for i, one in enumerate(arguments)]

    def bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)


@contextmanager
def placed(config: TrainConfig) -> Iterator[Placement]:
    """Room for all parts of a run, packed onto few machines; what is in it ends with the block.

    Raises SettingsError where the cluster is too small, RunError where others hold it.
    """
    has, settings = ray.cluster_resources(), config.cluster
    one = float(config.model.device != "cpu" and has.get("GPU", 0) > 0)
    parts = settings.learners.with_gpus(one), settings.replicas.with_gpus(one), settings.workers.with_gpus(0.0)
    bundles = [{name: amount for name, amount in (("CPU", part.cpus), ("GPU", part.gpus)) if amount}
               for part in parts for _ in range(part.count)]
    for name in ("CPU", "GPU"):
        if (asked := sum(bundle.get(name, 0) for bundle in bundles)) > has.get(name, 0):
            raise SettingsError(f"cluster: the run asks for {asked:g} {name}s in all, Ray has {has.get(name, 0):g}")
    group = placement_group(bundles)
    try:
        ray.get(group.ready(), timeout=PLACE_SECONDS)
        yield Placement(group, parts)
    except GetTimeoutError as error:
        raise RunError(f"no room for the run in {PLACE_SECONDS:g} s: it asks for {bundles}, Ray has "
                       f"{ray.available_resources()} free") from error
    finally:
        remove_placement_group(group)


class LearnerRank:
    """The actor around one rank of `train`."""

    def __init__(self, rank: int, ranks: int):
        self._rank, self._ranks = rank, ranks
        os.setpgrp()  # a terminal's Ctrl-C comes by the messenger alone, once
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which Ray blocks

    def where(self) -> tuple[str, int, int]:
        """Its machine's address, a free port there, and its process."""
        host = ray.util.get_node_ip_address()
        return host, free_port(host), os.getpid()

    def train(self, run: Run, placement: Placement, messenger: Any,
              meeting: tuple[str, int]) -> list[Evaluation] | None:
        """What `train` returns, None where it was interrupted. `meeting`: address and port for the ranks."""
        if self._ranks > 1:  # what torchrun would say; Ray shows each rank its own GPU as the first one
            os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(self._ranks), LOCAL_RANK="0",
                              MASTER_ADDR=meeting[0], MASTER_PORT=str(meeting[1]), TORCHELASTIC_RUN_ID="ray")
        transformers.utils.logging.disable_progress_bar()
        try:
            with joined_ranks():
                check_device(run.config)
                display = ToldDisplay(messenger if self._rank == 0 else None)
                return train(run, display, partial(sample_on_actors, placement))
        except KeyboardInterrupt:
            return None


def follow(placement: Placement, run: Run, display: Display) -> list[Evaluation]:
    """Train on ranks placed there, showing what the leader tells."""
    count = placement.parts[0].count
    ranks = placement.start(LearnerRank, 0, [(rank, count) for rank in range(count)])
    messenger = ray.remote(Messenger).options(num_cpus=0, scheduling_strategy=placement.bundle(0)).remote()
    try:
        host, port, leader = ray.get(ranks[0].where.remote())
        work = [rank.train.remote(run, placement, messenger, (host, port)) for rank in ranks]
        try:
            evaluations = results(work, messenger, display)
        except KeyboardInterrupt:
            ray.get(messenger.interrupt.remote(leader))
            evaluations = results(work, messenger, display)
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise RunError(f"a learner was lost, which ends the run; go on with --resume {run.folder}\n{error}") from error
    if evaluations is None:
        raise KeyboardInterrupt
    return evaluations


def results(work: Sequence[ray.ObjectRef], messenger: Any, display: Display) -> list[Evaluation] | None:
    """What the leader returns once all have; raises the first error that is a rank's own."""
    waiting = list(work)
    while waiting:
        done, waiting = ray.wait(waiting, timeout=0)
        for news in ray.get(messenger.news.remote(1.0 if waiting else 0.0)):
            name, *arguments = pickle.loads(news)
            getattr(display, name)(*arguments)
        for one in done:
            try:
                ray.get(one)
            except RayTaskError as error:
                if not getattr(error.cause, "of_leader", False):
                    raise
    return ray.get(work[0])


def sample_on_actors(placement: Placement, run: Run, policy: Policy) -> tuple[Engine, WeightSync, Rollout]:
    """What a run's leader samples with: new replicas, kept on the weights of `policy`, and new workers.

    Raises EngineError where one does not start.
    """
    config, (_, replicas, workers) = run.config, placement.parts
    options = {"max_restarts": -1, "max_concurrency": UNDER_WAY}
    share = math.ceil(config.rollout.concurrency / workers.count)
    of_worker = partial(make_rollout, config, concurrency=share)
    engines = placement.start(EngineReplica, 1, [(partial(replica_engine, run, i),) for i in range(replicas.count)],
                              **options)
    players = placement.start(EnvironmentWorker, 2, [(of_worker,)] * workers.count, **options)
    try:
        ray.get([actor.ready.remote() for actor in (*engines, *players)])
    except RayActorError as error:
        raise EngineError(f"an actor does not start: {error}") from error
    engine = RayEngine(Crew(engines, "engine replica"))
    rollout = RayRollout(Crew(players, "environment worker"), partial(make_env, config), retries=config.rollout.retries)
    return engine, WeightSync(engine, policy, gap_limit=gap_limit(config)), rollout


def replica_engine(run: Run, index: int) -> Engine:
    """The engine of one replica, in its actor, as training starts from it; weights come with the first request."""
    transformers.utils.logging.disable_progress_bar()
    config = run.config
    model = str(run.initial if run.initial.exists() else config.model.path)
    folder = run.folder / f"replica-{index}"
    if config.engine.name == "vllm":  # which reads the weights itself
        folder.mkdir(exist_ok=True)
        policy = load_outline(model)
    else:
        policy = read_policy(config, model)
    if config.model.lora.rank:
        adapt(config, policy)
    return build_engine(config, policy, model, folder)
