"""Find a file of weights, read it without running code, and load it only if every entry fits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version, parse

from perfexp.errors import PerfexpError, UserError, did_you_mean
from perfexp.host import untrusted

_SUFFIXES = (".pth", ".pt")
#: Keys of the weights in a checkpoint that holds more.
_NESTED = ("state_dict", "model_state_dict", "model")
#: Prefixes of the wrappers DataParallel and torch.compile.
_PREFIXES = ("module.", "_orig_mod.")
#: Torchvision's published DenseNets have the name `norm.1` for `norm1` (torchvision/models/densenet.py).
_DENSENET_NAME = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)")
#: With earlier versions a crafted file runs code in spite of weights_only=True: CVE-2025-32434.
_SAFE_TORCH = Version("2.6")
#: Maximum number of entries per kind in an error.
_SHOWN = 3


def find_weights(model: str, weights: str | None, weights_dir: str | None) -> Path | None:
    """The file of a model's weights; None for random weights, where neither file nor folder is given.

    Without a name or path (`weights`) it is `MODEL.pth` or `MODEL-….pth` (or `.pt`) in the folder. Relative names begin
    in `weights_dir`, or in the current folder. Raises `UserError`, with the candidates, unless there is one such file.
    """
    if weights is None and weights_dir is None:
        return None
    folder = Path(weights_dir or ".").expanduser()
    if not folder.is_dir():
        raise UserError(f"model.weights_dir is not a folder: {folder}. Name the folder of the weights.")
    candidates = sorted(file.name for file in folder.iterdir() if file.suffix in _SUFFIXES)
    if weights is not None:
        file = folder / Path(weights).expanduser()
        if not file.is_file():
            hint = did_you_mean(Path(weights).name, candidates) or f"It holds no {' or '.join(_SUFFIXES)} file."
            raise UserError(f"There are no weights {weights} in {folder.resolve()}. {hint}")
        return file
    fitting = [name for name in candidates if re.fullmatch(rf"{re.escape(model)}(-.*)?\.pth?", name)]
    if len(fitting) == 1:
        return folder / fitting[0]
    content = f"{len(fitting)} files for {model}: {', '.join(fitting)}" if fitting else f"no {model}.pth"
    hint = "" if fitting else did_you_mean(f"{model}.pth", candidates)
    raise UserError(f"{folder.resolve()} holds {content}. Name the file by model.weights=FILE. {hint}".strip())


def read_content(file: Path, kind: str, advice: str) -> Any:
    """The content of a file of torch.save, on the host; `UserError` for one that is unreadable, or would run code."""
    if parse(torch.__version__) < _SAFE_TORCH:
        raise UserError(f"Weights are read with torch {_SAFE_TORCH} or later: before, a file could run code.")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load's errors for other files are undocumented
        words = str(error).strip().partition(". ")[0].split()  # the rest is torch's advice to trust the file
        reason = re.sub(r"\x1b\[[0-9;]*m", "", " ".join(words)) or type(error).__name__
        raise UserError(
            f"{file} can't be read as {kind}: {reason}. Code in a file of weights is never run. {advice}"
        ) from error


def _read_weights(file: Path) -> dict[str, torch.Tensor]:
    content = read_content(file, "weights", "Save a state dict: torch.save(model.state_dict(), FILE).")
    for key in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    entries = content.items() if isinstance(content, dict) else ()
    tensors = {_plain_name(str(name)): value for name, value in entries if isinstance(value, torch.Tensor)}
    if not tensors:
        raise UserError(f"{file} holds no tensors by name. Save a state dict: torch.save(model.state_dict(), FILE).")
    return tensors


def load_weights(module: torch.nn.Module, file: Path) -> None:
    """Read weights from a file without running its code, and copy them after all names and shapes have been checked.

    Raises `UserError`, and leaves the module as it is, if entries are missing, unexpected or of another shape.
    """
    tensors = _read_weights(file)
    check_fit(module, tensors, file)
    module.load_state_dict({**module.state_dict(), **tensors})


def load_trained(module: torch.nn.Module, file: Path) -> None:
    """Load the weights that a run's own training wrote; raises `PerfexpError` if there are none."""
    if not untrusted.is_regular(file):
        raise PerfexpError(f"there are no weights {file.name}: the training of this run did not end")
    load_weights(module, file)


def check_fit(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Raise `UserError` if entries of a module's weights are missing, unexpected or of another shape."""
    own = module.state_dict()
    # BatchNorm's call counter has been saved since torch 0.4.1; older files, some of torchvision's too, lack it.
    missing = [name for name in own if name not in tensors and not name.endswith(".num_batches_tracked")]
    unexpected = [name for name in tensors if name not in own]
    misshapen = [
        f"{name} (file {tuple(tensors[name].shape)}, model {tuple(own[name].shape)})"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    complaints = [f"{len(names)} {what}: {_first(names)}" for what, names in problems.items() if names]
    if complaints:
        raise UserError(
            f"The weights in {file} do not fit the {type(module).__name__}: {'; '.join(complaints)}. "
            "Choose the file of this model; its number of classes is model.num_classes, its other settings are "
            "model.kwargs."
        )


def _plain_name(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return _DENSENET_NAME.sub(r"\1\2", name)


def _first(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
