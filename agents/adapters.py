"""Low-rank adapters (LoRA, arXiv 2106.09685), by peft: W x + (alpha / rank) B A x, where A and B are trained, not W.

They are put into the model, which stays of its own class. B begins at 0: a new adapter changes nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft import LoraConfig, PeftConfig
from peft.functional import cast_adapter_dtype
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

NAME = "default"


def add_adapter(model: PreTrainedModel, *, rank: int, alpha: float, targets: Sequence[str] = (), base: str = "",
                seed: int = 0) -> None:
    """Put a new adapter into `model` and let it alone be trained, in float32 whatever the model is in.

    `targets` are names (or their last parts) of the linear layers that get one; without any, all but the head do.
    `base` is what a saved adapter names as the model that it belongs to. Raises ValueError for an unknown target.
    """
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets) or "all-linear", task_type="CAUSAL_LM",
                        base_model_name_or_path=base)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        put_adapter(model, config)


def put_adapter(model: PreTrainedModel, config: PeftConfig) -> None:
    """Put the adapter that `config` describes into `model`, to be trained."""
    base, config.inference_mode = config.base_model_name_or_path, False
    model.add_adapter(config, NAME)
    cast_adapter_dtype(model, NAME)
    model.peft_config[NAME].base_model_name_or_path = base


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether `model` holds an adapter."""
    return any(isinstance(module, LoraLayer) for module in model.modules())


@contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """In here `model` is what it was before its adapter was added."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


@torch.no_grad()
def plain_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights by the names that they have without an adapter, with the adapter added to those that it changes."""
    weights = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()
               if ".lora_" not in name}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            weight = weights[f"{name}.weight"]
            weights[f"{name}.weight"] = (weight + module.get_delta_weight(NAME)).to(weight.dtype)
    return weights


def merge_adapter(model: PreTrainedModel) -> None:
    """Make the adapter part of the weights, all of which can be trained then."""
    weights = plain_weights(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            model.set_submodule(name, module.get_base_layer())
    model.load_state_dict(weights)
    model.delete_adapter(NAME)
    model.requires_grad_(True)
