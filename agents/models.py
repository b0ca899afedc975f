"""Loading a policy: any causal language model that transformers loads (hub name, folder, GGUF file) and its tokenizer.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from agents.adapters import NAME, has_adapter, merge_adapter, put_adapter

DTYPES = ("float32", "bfloat16", "float16", "float64")
CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HUB_SECONDS = 10.0
WHAT_TO_GIVE = ("Give a folder in transformers' format, a .gguf file, or the name of a model on the hub that this "
                "machine can reach")


class ModelError(ValueError):
    """A model cannot be loaded; the message says what was tried and what to do."""


@dataclass(frozen=True, eq=False)
class Policy:
    """A model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    autocast: bool = False
    """Compute in bfloat16 where torch.autocast deems it safe, whatever the weights' own precision."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def max_context(self) -> int:
        """Positions that the model can read."""
        return int(getattr(self.model.config, "max_position_embeddings", None) or 1_000_000)

    @property
    def end_ids(self) -> frozenset[int]:
        """Every token id that ends a response: the tokenizer's and all that the generation config names."""
        ids = self.model.generation_config.eos_token_id
        ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        return frozenset(int(i) for i in [*ids, self.tokenizer.eos_token_id] if i is not None)

    def precision(self) -> torch.autocast:
        """The context in which the model is read, by engine and learner alike: they are then one policy."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    def save(self, folder: str | Path, weights: dict[str, torch.Tensor] | None = None) -> None:
        """Write model and tokenizer in transformers' format; of a model with an adapter the adapter alone, in peft's.

        `weights`: the model's, by name, where it does not hold the whole of them.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        if has_adapter(self.model):
            # Not by the model itself, which would ask the hub each time whether the base is there.
            adapter = get_peft_model_state_dict(self.model, weights, adapter_name=NAME, save_embedding_layers=False)
            save_file({f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapter.items()},
                      Path(folder) / ADAPTER_WEIGHTS)
            self.model.peft_config[NAME].save_pretrained(str(folder))
        else:
            self.model.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)


def find_model(path: str) -> tuple[str, dict[str, str]]:
    """The name and options by which transformers' `from_pretrained` loads what is at `path`.

    Raises ModelError where nothing is there. The hub is asked once, where its model is not cached: transformers would
    try for a minute.
    """
    file = Path(path).expanduser()
    if path.endswith(".gguf"):
        if not file.is_file():
            raise ModelError(f"no GGUF file {path}")
        return str(file.parent), {"gguf_file": file.name}
    if path.startswith((".", "/", "~")) or file.exists():
        if not file.is_dir():
            raise ModelError(f"no model folder {path}")
        return str(file), {}
    try:
        if not isinstance(try_to_load_from_cache(path, CONFIG), str):
            get_hf_file_metadata(hf_hub_url(path, CONFIG), timeout=HUB_SECONDS)
    except Exception as error:  # each library below has its own
        raise ModelError(f"cannot load the model {path!r}: there is no such folder here, and "
                         f"{constants.ENDPOINT} gives none either: {type(error).__name__}: {error}\n"
                         f"{WHAT_TO_GIVE}") from error
    return path, {}


def load_policy(path: str, *, dtype: str = "float32", device: str | None = None, autocast: bool = False) -> Policy:
    """The causal language model at `path`: a hub name, a folder (perhaps of an adapter, which becomes part of the
    weights that it belongs to), or a GGUF file.

    Dropout is switched off, so that sampling, scoring and training see one and the same policy. Raises ModelError.
    """
    folder = Path(path).expanduser()
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).exists():
        policy = load_policy(_base(folder), dtype=dtype, device=device, autocast=autocast)
        load_adapter(policy.model, folder)
        merge_adapter(policy.model)
        return policy
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; one of {', '.join(DTYPES)}")
    name, options = find_model(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        model, report = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype),
                                                             output_loading_info=True, **options)
    except Exception as error:  # each part of a broken model breaks another library, with exceptions of its own
        raise ModelError(f"cannot load the model {path!r}: {type(error).__name__}: {error}\n{WHAT_TO_GIVE}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"the model {path!r} lacks {len(missing)} weights of a {type(model).__name__} "
                         f"({', '.join(missing[:3])}, ...), which would be random: give a causal language model, whole")
    if options:
        _forget_quantisation(model)
    for parameter in model.parameters():  # where a file has them they are not aligned, and kernels round differently
        parameter.data = parameter.data.clone()
    return Policy(prepare(model).to(device), tokenizer, autocast)


def load_adapter(model: PreTrainedModel, folder: str | Path) -> None:
    """Put the adapter saved in `folder` into the model that it belongs to, to be trained further. Raises ModelError."""
    try:
        put_adapter(model, PeftConfig.from_pretrained(str(folder)))
        report = set_peft_model_state_dict(model, load_file(Path(folder) / ADAPTER_WEIGHTS), NAME)
    except Exception as error:  # as for a model
        raise ModelError(f"cannot load the adapter {folder}: {type(error).__name__}: {error}") from error
    if wrong := [*(name for name in report.missing_keys if ".lora_" in name), *report.unexpected_keys]:
        raise ModelError(f"the adapter {folder} is another model's: {len(wrong)} weights do not fit ({wrong[0]}, ...)")


def _base(folder: Path) -> str:
    """The model that an adapter belongs to; a path relative to the adapter's folder becomes one from here."""
    try:
        base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot read {folder / ADAPTER_CONFIG}: {type(error).__name__}: {error}") from error
    if not base:
        raise ModelError(f"{folder / ADAPTER_CONFIG} does not say what model the adapter belongs to: put its name or "
                         "folder at base_model_name_or_path")
    return str(folder / base) if (folder / base).exists() else base


def load_outline(path: str) -> Policy:
    """The policy at `path` without its weights, for whoever has these elsewhere. Raises ModelError."""
    name, options = find_model(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name, **options))
        with suppress(OSError):  # a model need not have one of its own
            model.generation_config = GenerationConfig.from_pretrained(name)
    except Exception as error:  # as for a whole model
        raise ModelError(f"cannot load the model {path!r}: {type(error).__name__}: {error}\n{WHAT_TO_GIVE}") from error
    return Policy(model, tokenizer)


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with dropout off and in evaluation mode."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model.eval()


def _forget_quantisation(model: PreTrainedModel) -> None:
    # The weights of a GGUF file are de-quantised at loading, yet the model still says that it cannot be saved.
    model.hf_quantizer = None
    model.is_quantized = False
    for owner, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
