"""mmsegmentation configurations, read and changed so that building models needs no downloads.

A model node is the part of a configuration that describes the model: nested mappings with a `type`.
The pipelines in a configuration make `HostImages`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from perfexp.errors import UserError
from perfexp.models.mmseg_names import CONFIGS, INSTALL, find
from perfexp.models.torchvision_import import import_torchvision

#: Distributions with the package mmseg: the maintained fork and the original.
_DISTRIBUTIONS = ("onedl-mmsegmentation", "mmsegmentation")
#: Configuration keys for files that building the model would download or read.
_DOWNLOADS = ("init_cfg", "pretrained")


@functools.cache
def import_mmseg() -> Any:
    """Return the package mmseg with its models registered.

    Raises `UserError` if it is missing or has the wrong version.
    """
    import_torchvision()
    try:
        with warnings.catch_warnings():
            # warns about operators that models here do not need
            warnings.simplefilter("ignore", UserWarning)
            import mmseg
            import mmseg.models
    except ImportError as error:
        raise UserError(
            f"This model needs mmsegmentation, which can't be imported: {error}. {INSTALL}"
        ) from error
    except AssertionError as error:  # mmsegmentation refuses this mmcv or mmengine version
        raise UserError(
            f"The installed mmsegmentation does not fit what is beside it: {error} {INSTALL}"
        ) from error
    return mmseg


def read_config(name: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return a configuration that builds without downloads, and its source.

    Entries for pretrained files are removed, because weights come from `model.weights` alone.

    Args:
        name: configuration name in mmsegmentation, with or without `.py`, or a path.
        options: settings to change, by dotted key.

    Raises:
        UserError: the configuration cannot be read.
    """
    folder = Path(import_mmseg().__file__).parent / CONFIGS
    from mmengine.config import Config

    path = find(name, folder)
    try:
        config = Config.fromfile(path)
        config.merge_from_dict(dict(options))
    except Exception as error:  # a configuration is code
        raise UserError(
            f"{path} can't be read as a configuration: {type(error).__name__}: {error}"
        ) from error
    if "model" not in config:
        raise UserError(f"{path} describes no model.")
    for node in _nodes(config.model):
        for key in _DOWNLOADS:
            node.pop(key, None)
    with suppress(ValueError):
        return config, path.relative_to(folder).as_posix()
    return config, str(path)


def build(described: Any, name: str) -> torch.nn.Module:
    """Return the model for a configuration's model node, on the CPU.

    Raises `UserError` if it cannot be built or is not a segmentation model.

    Args:
        described: model node.
        name: name of the configuration for messages.
    """
    from mmengine.registry import DefaultScope
    from mmseg.registry import MODELS

    with DefaultScope.overwrite_default_scope("mmseg"):
        try:
            module = MODELS.build(described)
        except (
            KeyError,
            TypeError,
            ValueError,
            AssertionError,
            ImportError,
            AttributeError,
        ) as error:
            raise UserError(f"The model of {name} can't be built: {error}") from error
    if not hasattr(module, "decode_head"):
        raise UserError(
            f"{name} describes a {type(module).__name__}, which is not a segmentor with a decode "
            "head."
        )
    assert isinstance(module, torch.nn.Module)
    return module


def _nodes(node: Any) -> Iterator[Any]:
    """Yield a configuration node and all mappings inside it, each a part with its own settings."""
    if isinstance(node, Mapping):
        yield node
        for value in node.values():
            yield from _nodes(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _nodes(value)


def _heads(model: Any) -> Iterator[Any]:
    """Yield a model node's decode and auxiliary heads, which carry the number of classes."""
    for key in ("decode_head", "auxiliary_head"):
        head = model.get(key)
        yield from head if isinstance(head, list | tuple) else [head] if head else []


def classes_of(model: Any) -> int:
    """Return a model node's number of classes; raise `UserError` if no head has `num_classes`."""
    heads = [head for head in _heads(model) if "num_classes" in head]
    if not heads:
        raise UserError("The configuration's heads have no num_classes; set it with model.options.")
    return int(heads[0]["num_classes"])


def set_classes(model: Any, classes: int) -> None:
    """Set the number of classes for all heads in a model node."""
    for head in _heads(model):
        head["num_classes"] = classes


def without_sync_batch_norm(model: Any) -> bool:
    """Replace synchronized batch norms in a model node and return whether there were any.

    Synchronized batch norms need several GPUs. `Mmseg.open` calls it unless several CUDA ranks
    train.
    """
    replaced = [node for node in _nodes(model) if node.get("type") == "SyncBN"]
    for node in replaced:
        node["type"] = "BN"
    return bool(replaced)


def version() -> str:
    """Return the name and version of the installed distribution, for the record."""
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return "unknown"


@dataclass
class HostImages:
    """Images from an mmsegmentation pipeline, on the host.

    In training, smaller images are padded to `size`.

    Attributes:
        tensors: one image each, (3, height, width); sizes may differ.
        size: height and width in pixels.
    """

    tensors: list[torch.Tensor]
    size: tuple[int, int]
    training: bool

    def __len__(self) -> int:
        return len(self.tensors)

    def pin_memory(self) -> HostImages:
        """Return the same images in pinned memory; torch's DataLoader calls it."""
        return replace(self, tensors=[tensor.pin_memory() for tensor in self.tensors])
