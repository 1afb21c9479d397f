"""Architectures from Hugging Face's transformers, with random weights or a local folder's."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perfexp.devices import Device
from perfexp.errors import UserError, did_you_mean
from perfexp.models import Execution, Precision
from perfexp.models.decoding import DecodingSession
from perfexp.models.initial_weights import initialized
from perfexp.models.kinds import Classification, Kind, LanguageModel, Named, Segmentation
from perfexp.models.session import TorchSession
from perfexp.models.torchvision_import import import_torchvision
from perfexp.models.torchvision_names import HF


def _import() -> Any:
    """Return the package transformers, offline; None if it is not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported
    import_torchvision()  # transformers imports it, and fails if its operators do not fit torch
    try:
        importlib.import_module("transformers.models.auto.modeling_auto")
    except ImportError:
        return None
    return sys.modules["transformers"]


def _one_text(position_ids: torch.Tensor) -> None:
    """Return that the positions are those of a single text."""


def _mask_alike() -> None:
    """Let calls with all tokens of one text compute the same when they are captured.

    Otherwise each call reads its positions back to look for packed texts, and a captured one gets a
    mask that rules out fast attention (transformers 5.17).
    """
    masks: Any = importlib.import_module("transformers.masking_utils")
    if masks.find_packed_sequence_indices is _one_text:
        return
    is_tracing = masks.is_tracing
    masks.find_packed_sequence_indices = _one_text
    masks.is_tracing = lambda tensor=None: (
        (tensor is not None or torch.compiler.is_compiling()) and is_tracing(tensor)
    )


transformers = _import()
#: Heads by task, as in the names of transformers' auto classes. An architecture gets the first one
#: that it has.
_HEADS = {
    "seq2seq": "ForSeq2SeqLM",
    "masked": "ForMaskedLM",
    "causal": "ForCausalLM",
    "segmentation": "ForSemanticSegmentation",
    "contrastive": "ForZeroShotImageClassification",
    "classification": "ForImageClassification",
    "features": "",
}
#: Tasks with a label for each token.
_LEARNED_TOKENS = {
    "seq2seq": "encoder-decoder",
    "masked": "masked language model",
    "causal": "causal language model",
}
#: Names of the modules that hold one vector for each position of a text.
_POSITIONS = re.compile(r"^(?!.*(?:vision|visual|image)).*\b(?:wpe|\w*pos\w*)$")


class HuggingFace:
    """An architecture, such as `hf:bert`. Nothing is downloaded, and foreign code never runs."""

    def __init__(
        self,
        *,
        name: str,
        config: dict[str, Any] | None = None,
        task: str | None = None,
        weights: str | None = None,
        decode: bool = False,
    ) -> None:
        self.name, self._config, self._decodes = name, dict(config or {}), decode
        self._task, self._folder = task, weights
        if task is not None and task not in _HEADS:
            raise UserError(f"model.task={task}: set one of {', '.join(_HEADS)}.")

    def open(
        self,
        *,
        device: Device,
        precision: Precision,
        execution: Execution,
        num_classes: int | None,
        seed: int,
    ) -> TorchSession:
        if transformers is None:
            raise UserError(f"model={self.name} needs transformers: pip install 'perfexp[hf]'")
        if not self._decodes:  # a token needs its mask
            _mask_alike()
        config = self._configuration(num_classes)
        task, auto = self._head(config)
        module: torch.nn.Module
        if self._folder is None:
            identity = self.name, task, self._config, num_classes
            module = initialized(partial(self._build, auto, config), *identity, seed=seed)
        else:
            module = self._load(auto, config)
        # otherwise each call of an encoder reads its tokens back to look for padding
        module.config.pad_token_id = None  # type: ignore[union-attr]
        kind = _kind(self.name, module, task)
        if self._decodes and task != "causal":
            raise UserError(
                f"mode=decode needs a causal language model; {self.name} is for {kind.name}. "
                "Choose for example model=hf:llama."
            )
        return (DecodingSession if self._decodes else TorchSession)(
            module,
            kind=kind,
            name=self.name,
            device=device,
            precision=precision,
            execution=execution,
            facts={
                "weights": self._folder or f"random, seed {seed}",
                "transformers": transformers.__version__,
                "attention": getattr(module.config, "_attn_implementation", None),
            },
        )

    def _configuration(self, num_classes: int | None) -> Any:
        """Return the architecture's configuration with the user's keys and the data's classes."""
        name, auto = self.name.removeprefix(HF), transformers.AutoConfig
        if self._folder is None:
            if name not in (names := transformers.CONFIG_MAPPING):
                raise UserError(
                    f"transformers has no architecture {name!r}. "
                    f"{did_you_mean(name, names)}".rstrip()
                )
            make = partial(auto.for_model, name)
        else:
            make = partial(auto.from_pretrained, self._checked_folder(), local_files_only=True)
        try:
            default = make()
            if default.model_type != name and self._folder is not None:
                raise UserError(
                    f"{self._folder} holds a {default.model_type}: model=hf:{default.model_type}"
                )
            _refuse_unknown(self._config, default, "model.config")
            classes = {} if num_classes is None else {"num_labels": num_classes}
            # a model for a benchmark has no earlier call whose keys and values it needs
            return make(**{"use_cache": False, **classes, **self._config})
        except UserError:
            raise
        except Exception as error:  # each configuration has its own
            raise self._refused(error) from error

    def _checked_folder(self) -> Path:
        folder = Path(str(self._folder)).expanduser()
        if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
            raise UserError(
                f"model.weights={self._folder} is not a folder with config.json and *.safetensors; "
                "save one with save_pretrained(DIR)."
            )
        return folder

    def _head(self, config: Any) -> tuple[str, Any]:
        """Return the task and the auto class that makes its model."""
        autos = {task: getattr(transformers, f"AutoModel{head}") for task, head in _HEADS.items()}
        offered = {
            task: auto for task, auto in autos.items() if type(config) in auto._model_mapping
        }
        if self._task is not None and self._task not in offered:
            raise UserError(
                f"{self.name} has no head for model.task={self._task}, only for "
                f"{', '.join(offered)}."
            )
        if not offered:
            raise UserError(f"{self.name} is a part of other models; choose one of those.")
        task = self._task or next(iter(offered))
        return task, offered[task]

    def _build(self, auto: Any, config: Any) -> torch.nn.Module:
        try:
            module = auto.from_config(config, attn_implementation=_attention(auto, config))
            assert isinstance(module, torch.nn.Module)
            return module
        except Exception as error:  # from any architecture
            raise self._refused(error) from error

    def _load(self, auto: Any, config: Any) -> torch.nn.Module:
        """Return the folder's model; raise `UserError` unless each parameter has its weights."""
        try:
            module, found = auto.from_pretrained(
                self._folder,
                config=config,
                attn_implementation=_attention(auto, config),
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # from files and architectures of others
            raise self._refused(error) from error
        if missing := sorted(map(str, found["missing_keys"])):
            raise UserError(
                f"{self._folder} lacks {len(missing)} weights of {type(module).__name__}, "
                f"for example {missing[0]}; model.task chooses another head."
            )
        return module  # type: ignore[no-any-return]

    def _refused(self, error: Exception) -> UserError:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return UserError(f"transformers does not build {self.name} with these settings: {reason}")


def _refuse_unknown(given: Mapping[str, Any], default: Any, path: str) -> None:
    """Raise `UserError` for a key that the configuration ignores."""
    known = {*default.to_dict(), *getattr(default, "attribute_map", {})}
    for key, value in given.items():
        if key not in known or key.startswith("_"):
            hint = did_you_mean(key, known)
            raise UserError(
                f"{path}.{key}: {type(default).__name__} has no such key. {hint}".rstrip()
            )
        part = getattr(default, key, None)
        if isinstance(value, Mapping) and hasattr(part, "to_dict"):
            _refuse_unknown(value, part, f"{path}.{key}")


def _attention(auto: Any, config: Any) -> str:
    model = auto._model_mapping[type(config)]
    model = model[0] if isinstance(model, tuple) else model
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def _kind(name: str, module: torch.nn.Module, task: str) -> Kind:
    """Return the kind of a module by its head and the inputs that its code takes."""
    config: Any = module.config
    taken = inspect.signature(module.forward).parameters
    ids = [one for one in ("input_ids", "decoder_input_ids") if one in taken]
    takes_images = "pixel_values" in taken
    if not (ids or takes_images):
        raise UserError(
            f"{name} takes {next(iter(taken))}; perfexp has token ids and images for a model."
        )
    inputs: dict[str, Any] = {
        "vocabulary": config.get_text_config().vocab_size if ids else None,
        "names": ids if config.is_encoder_decoder else ids[:1],
        "longest": _longest(module) if ids else None,
        "takes_images": takes_images,
    }
    kind: Kind
    if task in _LEARNED_TOKENS and not takes_images:
        kind = LanguageModel(_LEARNED_TOKENS[task], shifted=task == "causal", **inputs)
    elif task == "classification":
        kind = Classification(config.num_labels)
    elif task == "segmentation":
        kind = Segmentation(config.num_labels)
    else:
        kind = Named(f"{task} of images and texts" if ids and takes_images else task, **inputs)
    kind.channels = getattr(getattr(config, "vision_config", config), "num_channels", 3)
    if hasattr(config, "image_size"):
        kind.inputs_help = " Set model.config.image_size to the input_size."
    return kind


def _longest(module: torch.nn.Module) -> int | None:
    """Return the most tokens for which a module has learned positions; None for any number."""
    tables = (
        one
        for name, one in module.named_modules()
        if isinstance(one, torch.nn.Embedding) and _POSITIONS.search(name)
    )
    return min(map(_positions, tables), default=None)


def _positions(table: torch.nn.Embedding) -> int:
    """Return the positions in a table; its first vectors may be for padding."""
    offset = getattr(table, "offset", 0)
    return table.num_embeddings - (offset if table.padding_idx is None else table.padding_idx + 1)
