"""Architectures from Hugging Face's transformers, with random weights or a local folder's.

`model=hf:NAME` selects an architecture, such as `hf:bert`. With `mode=decode`, a call generates one
token for each text, and `DecodingSession` supplies the cache of keys and values.
"""

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
from perfexp.models import Batch, Execution, Precision, Tokens
from perfexp.models.initial_weights import initialized
from perfexp.models.kinds import Classification, Kind, LanguageModel, Named, Segmentation
from perfexp.models.session import TorchSession
from perfexp.models.torchvision_import import import_torchvision
from perfexp.models.torchvision_names import HF


def _import() -> Any:
    """Return the package transformers, offline; None if it is not installed.

    Its hub client reads the offline setting once, at its import.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported
    import_torchvision()  # transformers imports it, and fails if its operators do not fit torch
    try:
        importlib.import_module("transformers.models.auto.modeling_auto")
    except ImportError:
        return None
    return sys.modules["transformers"]


def _no_packed_texts(position_ids: torch.Tensor) -> None:
    """Return None, which means to transformers that each row of token ids is a single text."""


def _make_masks_capturable() -> None:
    """Patch transformers so that captured calls use the same attention masks as other calls.

    Otherwise each call reads its positions back to look for packed texts, and a captured one gets a
    mask that rules out fast attention (transformers 5.17).
    """
    masks: Any = importlib.import_module("transformers.masking_utils")
    if masks.find_packed_sequence_indices is _no_packed_texts:  # already patched
        return
    is_tracing = masks.is_tracing
    masks.find_packed_sequence_indices = _no_packed_texts
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
#: Name of the cache among a model's inputs before transformers 5.20.
_CACHE = "past_key_values"


class HuggingFace:
    """An architecture, such as `hf:bert`. Nothing is downloaded, and foreign code never runs.

    The arguments are the keys of the `model` node; `plan/key_descriptions.yaml` describes them.
    """

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
        """Build the architecture or load the folder, and return its session on the device.

        Raises `UserError` if transformers is missing, the settings do not fit, or the model cannot
        decode.
        """
        if transformers is None:
            raise UserError(f"model={self.name} needs transformers: pip install 'perfexp[hf]'")
        if not self._decodes:  # a token needs its mask
            _make_masks_capturable()
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
        session = DecodingSession if self._decodes else TorchSession
        return session(
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
        """Return the architecture's configuration with the user's keys and the data's classes.

        Raises `UserError` for an unknown architecture or key, or for a folder with another
        architecture.
        """
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
            raise self._build_error(error) from error

    def _checked_folder(self) -> Path:
        """Return the folder with weights.

        Raise `UserError` unless it has a configuration and safetensors.
        """
        folder = Path(str(self._folder)).expanduser()
        if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
            raise UserError(
                f"model.weights={self._folder} is not a folder with config.json and *.safetensors; "
                "save one with save_pretrained(DIR)."
            )
        return folder

    def _head(self, config: Any) -> tuple[str, Any]:
        """Return the task and the auto class that makes its model.

        Raises `UserError` if the architecture has no head for the user's task, or no head at all.
        """
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
        """Return a model with random weights; raise `UserError` if transformers cannot build it."""
        try:
            module = auto.from_config(config, attn_implementation=_attention(auto, config))
            assert isinstance(module, torch.nn.Module)
            return module
        except Exception as error:  # from any architecture
            raise self._build_error(error) from error

    def _load(self, auto: Any, config: Any) -> torch.nn.Module:
        """Return the folder's model; raise `UserError` unless each parameter has its weights.

        Args:
            auto: auto class of transformers for the task.
            config: configuration, which may differ from the folder's own.
        """
        try:
            module, report = auto.from_pretrained(
                self._folder,
                config=config,
                attn_implementation=_attention(auto, config),
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # from files and architectures of others
            raise self._build_error(error) from error
        if missing := sorted(map(str, report["missing_keys"])):
            raise UserError(
                f"{self._folder} lacks {len(missing)} weights of {type(module).__name__}, "
                f"for example {missing[0]}; model.task chooses another head."
            )
        return module  # type: ignore[no-any-return]

    def _build_error(self, error: Exception) -> UserError:
        """Return a `UserError` with the first 300 characters of transformers' own message."""
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return UserError(f"transformers does not build {self.name} with these settings: {reason}")


def _refuse_unknown(settings: Mapping[str, Any], default: Any, path: str) -> None:
    """Raise `UserError` for a key that the configuration would silently ignore.

    Args:
        settings: the user's keys, with nested mappings for parts such as `vision_config`.
        default: configuration of the architecture, or of the part.
        path: dotted place of `settings` for the message.
    """
    keys = {*default.to_dict(), *getattr(default, "attribute_map", {})}
    for key, value in settings.items():
        if key not in keys or key.startswith("_"):
            hint = did_you_mean(key, keys)
            raise UserError(
                f"{path}.{key}: {type(default).__name__} has no such key. {hint}".rstrip()
            )
        part = getattr(default, key, None)
        if isinstance(value, Mapping) and hasattr(part, "to_dict"):
            _refuse_unknown(value, part, f"{path}.{key}")


def _attention(auto: Any, config: Any) -> str:
    """Return transformers' name for torch's fused attention, `sdpa`, or `eager` without support."""
    model = auto._model_mapping[type(config)]
    model = model[0] if isinstance(model, tuple) else model
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def _kind(name: str, module: torch.nn.Module, task: str) -> Kind:
    """Return the kind of a module by its head and the arguments of its `forward`.

    Raises `UserError` if it takes neither token ids nor images, for example audio.
    """
    config: Any = module.config
    arguments = inspect.signature(module.forward).parameters
    ids = [name for name in ("input_ids", "decoder_input_ids") if name in arguments]
    takes_images = "pixel_values" in arguments
    if not (ids or takes_images):
        raise UserError(
            f"{name} takes {next(iter(arguments))}; perfexp has token ids and images for a model."
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
    """Return the most tokens for which a module has learned positions; None for any number.

    Models with computed positions, such as Llama, take any number.
    """
    lengths = [
        _positions(table)
        for name, table in module.named_modules()
        if isinstance(table, torch.nn.Embedding) and _POSITIONS.search(name)
    ]
    return min(lengths, default=None)


def _positions(table: torch.nn.Embedding) -> int:
    """Return the positions in a table; its first vectors may be for padding."""
    offset = getattr(table, "offset", 0)
    return table.num_embeddings - (offset if table.padding_idx is None else table.padding_idx + 1)


class DecodingSession(TorchSession):
    """A causal model of transformers whose calls compute one token for each text.

    The static cache has room for `input_size` tokens and is full: the call writes the last one and
    attends to all. Its other content is random, which changes no time. Each call first sets the
    position back, one small kernel for all layers.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._empty_cache(1)

    def random_batch(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Batch:
        """Return one token id per text, (batch, 1), and a full cache among the named inputs.

        Raises `Unsupported` if the model has too few positions.
        """
        self._kind.length(input_size)  # type: ignore[attr-defined]
        ids = super().random_batch((1, 1), batch_size, seed).inputs
        module: Any = self.module
        name = "cache" if "cache" in inspect.signature(module.forward).parameters else _CACHE
        cache = self._empty_cache(input_size[1])
        inputs = {"input_ids": ids, name: cache, "use_cache": True}
        with torch.no_grad():
            self.eager(inputs)  # allocates the cache
            cache.last_position = input_size[1] - 1
            cache.lengths = torch.zeros(
                len(cache.layers), dtype=torch.int64, device=self.device.identifier
            )
            for layer, length in zip(cache.layers, cache.lengths, strict=True):
                layer.cumulative_length = length
                layer.keys.normal_()
                layer.values.normal_()
        return Batch(inputs=inputs, targets=None)

    def _empty_cache(self, length: int) -> Any:
        """Return a static cache for `length` tokens; its first call allocates the memory.

        Raises `UserError` if the model keeps other states, such as those of a recurrent layer.
        """
        module: Any = self.module
        cache = transformers.StaticCache(config=module.config, max_cache_len=length)
        if any(not hasattr(layer, "cumulative_length") for layer in cache.layers):
            raise UserError(
                f"{self._name} keeps other states than keys and values; choose another model for "
                "mode=decode, such as hf:llama."
            )
        return cache

    def forward(self, inputs: Any) -> Any:
        """Return the next token's scores, after setting the cache back."""
        _rewind(inputs)
        return super().forward(inputs)

    def eager(self, inputs: Any) -> Any:
        """Return the scores without the compiler, after setting the cache back."""
        _rewind(inputs)
        return super().eager(inputs)

    def tokens(self, inputs: Any) -> Tokens:
        """Return one token per text, and the bytes of weights and cache that a call reads.

        A token reads every parameter, except other tokens' embeddings.
        """
        module: Any = self.module
        weights = {parameter.data_ptr(): parameter.nbytes for parameter in module.parameters()}
        embeddings, head = module.get_input_embeddings(), module.get_output_embeddings()
        if head is None or head.weight is not embeddings.weight:
            weights.pop(embeddings.weight.data_ptr(), None)
        layers = _cache_of(inputs).layers
        return Tokens(
            count=len(inputs["input_ids"]),
            weight_bytes=sum(weights.values()),
            cache_bytes=sum(layer.keys.nbytes + layer.values.nbytes for layer in layers),
        )


def _cache_of(inputs: Any) -> Any:
    """Return the cache among a call's named inputs."""
    return inputs.get(_CACHE) or inputs["cache"]


def _rewind(inputs: Any) -> None:
    """Set the next token's position to the last one in the cache, so that calls do the same work.

    A cache without `lengths` is still empty, and its first call allocates it.
    """
    cache = _cache_of(inputs)
    if hasattr(cache, "lengths"):
        cache.lengths.fill_(cache.last_position)
        for layer in cache.layers:
            layer.cumulative_length_int = cache.last_position  # of a sliding window
