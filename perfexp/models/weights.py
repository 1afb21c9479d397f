"""Weight files: read without running code, and loaded only if every entry fits.

Checkpoints from other programs wrap weights in several layouts, for example under the key
`state_dict` or with the prefix `module.`; these are unwrapped here.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version, parse

from perfexp.errors import PerfexpError, UserError
from perfexp.host import foreign

#: Keys for weights in a checkpoint with several state dicts; the first match counts.
_NESTED = ("state_dict", "model_state_dict", "model")
#: Checkpoint levels that are searched for state dicts.
_DEPTH = 2
#: Prefix that torch.compile puts before a module's names, at any level.
_COMPILED = "_orig_mod."
#: Prefixes from DataParallel and wrapper classes.
_PREFIXES = ("module.", "model.", "net.", "backbone.")
#: Torchvision's published DenseNets say `norm.1` for `norm1` (torchvision/models/densenet.py).
_DENSENET_NAME = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)")
#: With earlier versions a crafted file runs code in spite of weights_only=True: CVE-2025-32434.
_SAFE_TORCH = Version("2.6")
#: First bytes of files that torch.save does not write, each with cause and remedy.
_OTHERS = {
    b"version https://git-lfs": (
        "it is a pointer of Git LFS",
        "Fetch the file itself: git lfs pull",
    ),
    b"<": ("it is a web page, not the file", "Download the file itself, without a page around it"),
    b"\x93NUMPY": ("it is an array of NumPy", "Convert it with torch.from_numpy"),
    b"\x1f\x8b": ("it is compressed by gzip", "Unpack it"),
    b"\x89HDF": (
        "it is an HDF5 file, as of Keras",
        "Convert its arrays to tensors with torch.from_numpy",
    ),
}
#: First bytes of any pickle, and of a torch.save file before torch 1.6.
_PICKLE, _OLD_FILE = b"\x80", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
#: First bytes by which torch recognizes an archive.
_ARCHIVE = b"PK\x03\x04"
_FORBIDDEN = re.compile(r"GLOBAL (\S+) was not an allowed")
#: Maximum number of entries per kind in an error message.
_SHOWN = 3


def read_content(file: Path, kind: str, advice: str) -> Any:
    """Return the content of a torch.save file, in host memory.

    Raises `UserError` if the file is unreadable or would run code. Weights and checkpoints are read
    with it.

    Args:
        kind: expected content for the message, for example "weights".
        advice: last sentence of the message.
    """
    if parse(torch.__version__) < _SAFE_TORCH:
        raise UserError(
            f"Weights are read with torch {_SAFE_TORCH} or later: before, a file could run code."
        )
    try:
        _refuse_inflated(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load's errors for other files are undocumented
        cause, remedy = _cause(file, error)
        raise UserError(
            f"{file} can't be read as {kind}: {cause}. {remedy}. Code in a file of weights is "
            f"never run. {advice}"
        ) from error


def _refuse_inflated(file: Path) -> None:
    """Raise `ValueError` for an archive with compressed members.

    A small file could fill the memory when it is unpacked. torch.save does not compress, so a valid
    archive is at least as large as its members.
    """
    with file.open("rb") as opened:
        if opened.read(4) != _ARCHIVE:
            return
    with zipfile.ZipFile(file) as archive:
        if sum(member.file_size for member in archive.infolist()) > file.stat().st_size:
            raise ValueError("its members are compressed")


def _cause(file: Path, error: Exception) -> tuple[str, str]:
    """Return why torch.load refused a file, and what to do: two parts of a sentence.

    The file's first 1024 bytes identify other formats. The order matters: an archive can be
    safetensors, damaged, TorchScript or another program's.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error), "Copy it again, or choose another file"
    with file.open("rb") as opened:
        start = opened.read(1024)
    if not start:
        return "it is empty", "Copy or download it again"
    for beginning, described in _OTHERS.items():
        if start.lstrip().startswith(beginning):
            return described
    if start.startswith(_PICKLE) and not start.startswith(_OLD_FILE):
        return (
            "it is a pickle of Python, not of torch.save",
            "Save its arrays as tensors with torch.save",
        )
    message = str(error)
    if forbidden := _FORBIDDEN.search(message):
        name = forbidden[1]
        if name.startswith("torch.nn."):
            return (
                f"it is a pickled model ({name})",
                "Save its state dict where the model's code is",
            )
        content = "numbers of NumPy" if name.startswith("numpy.") else "an object of a class"
        return (
            f"it holds {content} ({name})",
            "Save its tensors alone: torch.save(checkpoint['state_dict'], FILE)",
        )
    if start[8:9] == b"{":
        return (
            "it is a safetensors file",
            "Convert it: torch.save(safetensors.torch.load_file(FILE), NEW)",
        )
    if "central directory" in message or isinstance(error, zipfile.BadZipFile):
        return "it is cut off or damaged", "Copy or download it again"
    if "TorchScript" in message:
        return (
            "it is a TorchScript archive",
            "Save its state dict: torch.jit.load(FILE).state_dict()",
        )
    if start.startswith(b"PK"):
        return (
            "it is an archive of another program, as .npz",
            "Save its arrays as tensors with torch.save",
        )
    if start.isascii() and b"\0" not in start:
        return "it is text", "Choose another file"
    # the rest is torch's advice to trust the file
    words = message.strip().partition(". ")[0].split()
    return " ".join(words) or type(error).__name__, "Copy it again, or choose another file"


def _state_dicts(
    content: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the state dicts in a checkpoint, each with the keys that lead to it.

    A state dict is a mapping with parameters. A mapping that contains another state dict does not
    count; its own tensors are something else, for example a random state. `_read_weights` chooses
    among them.
    """
    if not isinstance(content, Mapping):
        return
    nested: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    if len(path) < _DEPTH:
        for key, value in content.items():
            nested += _state_dicts(value, (*path, str(key)))
    tensors = (value for value in content.values() if isinstance(value, torch.Tensor))
    if not nested and any(tensor.ndim and tensor.is_floating_point() for tensor in tensors):
        yield path, dict(content)
    yield from nested


def _read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Return a weight file's tensors by parameter name.

    Of several state dicts, the first under a usual key counts. Raises `UserError` if there is no
    state dict, or several and none of them is usual.
    """
    content = read_content(
        file, "weights", "Save a state dict: torch.save(model.state_dict(), FILE)."
    )
    states = dict(_state_dicts(content))
    usual = [path for path in states if path and path[-1] in _NESTED]
    usual.sort(key=lambda path: (len(path), _NESTED.index(path[-1])))
    paths = usual[:1] or list(states)
    if not paths:
        raise UserError(
            f"{file} holds no floating-point tensors by name. Save a state dict: "
            "torch.save(model.state_dict(), FILE)."
        )
    if len(paths) > 1:
        names = _first_names([".".join(path) for path in paths])
        raise UserError(
            f"{file} holds {len(paths)} state dicts: {names}. Save one of them: torch.save(…, "
            "FILE)."
        )
    return {
        _plain_name(str(name)): value
        for name, value in states[paths[0]].items()
        if isinstance(value, torch.Tensor)
    }


def _unwrapped(
    tensors: dict[str, torch.Tensor], model_names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return weights without the prefixes that all names share, until a name is the module's.

    Args:
        model_names: names in the module's state dict.
    """
    while not any(name in model_names for name in tensors):
        shared = [
            prefix for prefix in _PREFIXES if all(name.startswith(prefix) for name in tensors)
        ]
        if not shared:
            break
        tensors = {name.removeprefix(shared[0]): tensor for name, tensor in tensors.items()}
    return tensors


def load_weights(module: torch.nn.Module, file: Path) -> None:
    """Read weights from a file without running its code, check them, and copy them.

    Raises `UserError` if entries are missing, unexpected or of another shape. The module is then
    unchanged. Models call it when they open with a file.
    """
    tensors = _unwrapped(_read_weights(file), module.state_dict())
    check_fit(module, tensors, file)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise UserError(
            f"{file} holds shapes without numbers (meta tensors). Save the weights of a model on "
            "a device."
        )
    module.load_state_dict({**module.state_dict(), **tensors})


def load_trained(module: torch.nn.Module, file: Path) -> None:
    """Load the weights from this run's own training; raise `PerfexpError` if there are none.

    `TorchSession.adopt` calls it for inference after training.
    """
    if not foreign.is_regular(file):
        raise PerfexpError(
            f"there are no weights {file.name}: the training of this run did not end"
        )
    load_weights(module, file)


def check_fit(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Raise `UserError` if weights are missing, unexpected or of another shape.

    The message names the first of each kind.

    Args:
        tensors: weights by name.
        file: their file, for the message.
    """
    model_tensors = module.state_dict()
    # torch saves BatchNorm's call counter since 0.4.1; older files, some in torchvision, lack it
    missing = [
        name
        for name in model_tensors
        if name not in tensors and not name.endswith(".num_batches_tracked")
    ]
    unexpected = [name for name in tensors if name not in model_tensors]
    misshapen = [
        f"{name} (file {tuple(tensors[name].shape)}, model {tuple(model_tensors[name].shape)})"
        for name in model_tensors
        if name in tensors and tensors[name].shape != model_tensors[name].shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    if complaints := [
        f"{len(names)} {problem}: {_first_names(names)}"
        for problem, names in problems.items()
        if names
    ]:
        raise UserError(
            f"The weights in {file} do not fit the {type(module).__name__}: "
            f"{'; '.join(complaints)}. "
            "Choose the file of this model; its number of classes is model.num_classes, its "
            "other settings are "
            "model.kwargs."
        )


def _plain_name(name: str) -> str:
    """Return a parameter's name without torch.compile's prefix and in today's DenseNet spelling."""
    return _DENSENET_NAME.sub(r"\1\2", name.replace(_COMPILED, ""))


def _first_names(names: list[str]) -> str:
    """Return the first names for a message, with an ellipsis if there are more."""
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
