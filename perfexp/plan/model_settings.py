"""Fill in composed keys that depend on the model and on other keys.

Interpolations in conf/ cannot express them. `config.plan_of` calls `settle` on the plain plan.
"""

from __future__ import annotations

from typing import Any

from perfexp.errors import UserError

_MMSEG = "perfexp.models.mmseg.Mmseg"
_HUGGING_FACE = "perfexp.models.hf.HuggingFace"
_SKELETONS = "perfexp.models.clip_gesture.ClipGesture"
_TRAIN = "perfexp.measuring.modes.train.Train"
#: Batch sizes for a full training: for small images or vectors, and for mmsegmentation's 512 × 1024
#: pixels.
_BATCH, _MMSEG_BATCH = 64, 2


def settle(plain: dict[str, Any]) -> None:
    """Adapt a plan, as plain data, to its model, in place.

    A phase that is not measured loses its experiment settings. mmsegmentation models get their
    optimizer, skeleton models their number of columns, and Hugging Face models whether they decode.

    Raises:
        UserError: mode=decode with a model that cannot decode, or an impossible training setting.
    """
    for phase, node in plain["mode"].items():
        if isinstance(node, dict) and "_target_" not in node:
            plain["mode"][phase] = None
    model = plain["model"] if isinstance(plain["model"], dict) else {}
    if model.get("_target_") == _MMSEG and model.get("optimizer") is None:
        model["optimizer"] = "mode" if _settings_of_trainer(plain["mode"].get("train")) else "own"
    decodes = plain["mode"].get("name") == "decode"
    if model.get("_target_") == _HUGGING_FACE:
        model["decode"] = decodes
    elif decodes:
        raise UserError("mode=decode needs a causal language model, for example model=hf:llama.")
    if model.get("_target_") == _SKELETONS and model.get("backbone") == "skeleton":
        columns = 3 * int(model["joints"])
        sizes = plain["input_size"]
        if isinstance(sizes, list):
            plain["input_size"] = [_as_skeleton(size, columns) for size in sizes]
        else:
            plain["input_size"] = _as_skeleton(sizes, columns)


def training_batch(target: str) -> int:
    """Return the full benchmark's training batch size for a model's `_target_`.

    Files in conf/ call it as the resolver `perfexp_training_batch`.
    """
    if target == _MMSEG:
        return _MMSEG_BATCH
    return _BATCH


def _settings_of_trainer(node: Any) -> list[str]:
    """Return the training settings that a model with its own optimizer refuses, as `key=value`.

    Args:
        node: the plan's node mode.train.

    Raises:
        UserError: a setting is impossible.
    """
    if not isinstance(node, dict) or node.get("_target_") != _TRAIN:
        return []
    from perfexp.measuring.modes.train import Train  # deferred: a cold start does not need it

    settings = dict(node)
    del settings["_target_"]
    return Train(**settings).of_trainer


def _as_skeleton(size: Any, columns: int) -> Any:
    """Return a size FRAMES as FRAMESx75, with a skeleton's columns; other sizes stay unchanged."""
    if not isinstance(size, int | str) or isinstance(size, bool):
        return size
    frames = str(size).strip()
    if frames.isdecimal():
        return f"{frames}x{columns}"
    return size
