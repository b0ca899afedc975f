"""Runs inside vLLM, which finds it where this folder is on its path: new weights come through a file in shared memory.

It needs nothing but vLLM: the server may have an environment of its own.
"""

from dataclasses import dataclass

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND, HEAD = "shared_memory", "lm_head.weight"


def register() -> None:
    """Called by vLLM in each of its processes."""
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing is needed to begin with."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the weights lie."""

    path: str
    """A safetensors file with the model's checkpoint names."""
    version: str
    """What the file's metadata must give as its version."""


class SharedMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a file of weights into the running model, or raises where it is not the one meant or not whole."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._missing = {name for name, _ in self.model.named_parameters()} - ({HEAD} if self._tied else set())
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        with safe_open(update_info.path, framework="pt") as file:
            version = (file.metadata() or {}).get("version")
            if version != update_info.version:
                raise ValueError(f"{update_info.path} holds weights of version {version}, not {update_info.version}")
            names = file.keys()
            self._missing -= self.model.load_weights((name, file.get_tensor(name)) for name in names)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._renew_tied_head()
        if self._missing:
            raise ValueError(f"{len(self._missing)} weights were not sent, such as {min(self._missing)}")

    def shutdown(self) -> None:
        pass

    def _renew_tied_head(self) -> None:
        """On the CPU vLLM keeps a packed copy of a tied head, which a reload leaves as it was."""
        if self._tied and self.device.type == "cpu":
            head = getattr(self.model.lm_head, "base_layer", self.model.lm_head)
            embedding = self.model.model.embed_tokens
            head.weight = getattr(embedding, "base_layer", embedding).weight
            head.quant_method.process_weights_after_loading(head)

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
