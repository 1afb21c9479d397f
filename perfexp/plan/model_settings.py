"""Model settings: keys of a composition whose values depend on the model and on other keys."""

from __future__ import annotations

from typing import Any

from perfexp.errors import UserError

_MMSEG = "perfexp.models.mmseg.Mmseg"
_HUGGING_FACE = "perfexp.models.hf.HuggingFace"
_SKELETONS = "perfexp.models.clip_gesture.ClipGesture"
_TRAIN = "perfexp.modes.train.Train"
#: Batch sizes of a whole training: of small images or vectors, and of mmsegmentation's 512 × 1024 pixels.
_BATCH, _MMSEG_BATCH = 64, 2


def settle(plain: dict[str, Any]) -> None:
    """Fill in a plan, as plain data: the optimizer of an mmsegmentation model, and the columns of skeletons.

    Settings of an experiment for a phase that is not measured are removed.
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
        plain["input_size"] = (
            [_as_skeleton(size, columns) for size in sizes]
            if isinstance(sizes, list)
            else _as_skeleton(sizes, columns)
        )


def training_batch(target: str) -> int:
    """Return the batch size that the full benchmark trains a model with, by the model's `_target_`."""
    return _MMSEG_BATCH if target == _MMSEG else _BATCH


def _settings_of_trainer(node: Any) -> list[str]:
    """Return the settings of a training that a model with its own optimizer does not take, as `key=value`.

    Raises `UserError` for impossible settings.
    """
    if not isinstance(node, dict) or node.get("_target_") != _TRAIN:
        return []
    from perfexp.modes.train import Train  # which a cold start does without

    return Train(**{key: value for key, value in node.items() if key != "_target_"}).of_trainer


def _as_skeleton(size: Any, columns: int) -> Any:
    """Return FRAMES as FRAMESx75; any other size unchanged."""
    is_number = (
        isinstance(size, int | str) and not isinstance(size, bool) and str(size).strip().isdecimal()
    )
    return f"{str(size).strip()}x{columns}" if is_number else size
