"""How new weights reach vLLM: a file in shared memory, NCCL between GPUs, or a LoRA adapter's folder."""

import asyncio
import fcntl
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file

from agents.engine import EngineError
from agents.models import Policy
from agents.vllm_replica import Replica, ServerReplica
from agents.vllm_server import free_port

SHARED_MEMORY = Path("/dev/shm")


class WeightTransfer(Protocol):
    """Brings one set of weights to any number of replicas, also to one that comes back later."""

    def prepare(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Hold what `send` sends from now on."""

    async def send(self, replica: Replica) -> None:
        """Bring the weights to a replica, which is paused. Raises EngineError."""

    def forget(self, replica: Replica) -> None:
        """The replica was started anew."""

    def close(self) -> None: ...


class SharedMemoryTransfer:
    """A file that the servers of this machine read: they need our plugin (`agents/vllm_plugin`)."""

    def __init__(self, dtype: torch.dtype):
        """`dtype`: what the servers compute in."""
        self._dtype = dtype
        self._folder = SharedFolder()
        self._file = self._folder.path / "none"
        self._version = ""

    def prepare(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        tensors = {name: tensor.detach().to("cpu", self._dtype).contiguous() for name, tensor in untied(weights)}
        previous, self._version = self._file, str(version)
        self._file = self._folder.path / f"weights-{version}.safetensors"
        save_file(tensors, self._file, metadata={"version": self._version})
        if previous != self._file:
            previous.unlink(missing_ok=True)

    async def send(self, replica: Replica) -> None:
        await replica.update({"path": str(self._file), "version": self._version})

    def forget(self, replica: Replica) -> None:
        pass

    def close(self) -> None:
        self._folder.close()


class AdapterTransfer:
    """The LoRA adapter of a policy, in peft's format; the base model stays as the servers loaded it."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self._folder = SharedFolder()

    def prepare(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._policy.save(self._folder.path, dict(weights))

    async def send(self, replica: Replica) -> None:
        await replica.load_adapter(str(self._folder.path))

    def forget(self, replica: Replica) -> None:
        pass

    def close(self) -> None:
        self._folder.close()


class NCCLTransfer:
    """vLLM's own broadcast between GPUs. The trainer needs vLLM in its environment too.

    Each replica has a group of its own with the trainer, so that one can be lost and come back without the others.
    """

    def __init__(self, dtype: torch.dtype, *, copy: bool):
        """`dtype`: what the servers compute in. `copy`: for weights that may change while a replica can come back; else
        the tensors themselves are kept."""
        self._dtype, self._copy = dtype, copy
        self._weights: list[tuple[str, torch.Tensor]] = []
        self._trainers: dict[Replica, Any] = {}

    def prepare(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._weights = untied(weights)
        if self._copy:
            self._weights = [(name, tensor.detach().to(self._dtype, copy=True)) for name, tensor in self._weights]

    async def send(self, replica: ServerReplica) -> None:
        workers = await replica.world_size()
        try:
            await asyncio.to_thread(self._send, replica, workers)
        except Exception as error:  # vLLM, NCCL, requests: each has its own
            self.forget(replica)
            raise EngineError(f"sending weights to {replica.name} failed: {type(error).__name__}: {error}") from error

    def forget(self, replica: Replica) -> None:
        if trainer := self._trainers.pop(replica, None):
            trainer.shutdown()

    def close(self) -> None:
        for replica in list(self._trainers):
            self.forget(replica)

    def _send(self, replica: ServerReplica, workers: int) -> None:
        if replica not in self._trainers:
            self._trainers[replica] = self._join(replica, workers)
        self._trainers[replica].send_weights()

    def _join(self, replica: ServerReplica, workers: int) -> Any:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        transfer = self

        class Source(WeightSource):
            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(name, transfer._dtype, tuple(tensor.shape)) for name, tensor in transfer._weights]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return ((name, tensor.detach().to(transfer._dtype)) for name, tensor in transfer._weights)

        address, port = _own_address(replica.name)
        return WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=1 + workers, rank=0),
            client=HTTPVLLMWeightSyncClient(replica.name), source=Source())


def untied(weights: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Each tensor once, under its first name."""
    first: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in weights.items():
        first.setdefault((tensor.data_ptr(), tensor.shape), name)
    return [(name, weights[name]) for name in first.values()]


class SharedFolder:
    """A folder in shared memory. One whose process was killed is removed by the next that makes one here."""

    def __init__(self):
        root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        for lock in root.glob("turngym-weights-*/lock"):
            with suppress(OSError), open(lock) as file:  # the lock is held as long as its process lives
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix="turngym-weights-", dir=root))
        self._lock = open(self.path / "lock", "w")  # noqa: SIM115 (held until close)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _own_address(url: str) -> tuple[str, int]:
    """The address by which the server at `url` reaches this machine, and a free port there."""
    place = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((place.hostname, place.port or 80))  # sends nothing: it only picks the way out
        address = one.getsockname()[0]
    return address, free_port(address)
