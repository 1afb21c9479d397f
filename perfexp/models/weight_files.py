"""Search for a model's weight file, by name or in the user's folder; the file is not read here."""

from __future__ import annotations

import re
from pathlib import Path

from perfexp.errors import UserError, did_you_mean

SUFFIXES = (".pth", ".pt")


def find_weights(model: str, weights: str | None, weights_dir: str | None) -> Path | None:
    """Return a model's weight file; None, meaning random weights, without file and folder.

    Plans are checked with it before a process starts, and models load the file.

    Args:
        weights: file name or path. None selects `MODEL.pth` or `MODEL-….pth` (or `.pt`) in the
            folder.
        weights_dir: folder for relative names; None for the current folder.

    Raises:
        UserError: not exactly one file matches. The message lists the candidates.
    """
    if weights is None and weights_dir is None:
        return None
    folder = Path(weights_dir or ".").expanduser()
    if not folder.is_dir():
        raise UserError(
            f"model.weights_dir is not a folder: {folder}. Name the folder of the weights."
        )
    candidates = sorted(file.name for file in folder.iterdir() if file.suffix in SUFFIXES)
    if weights is not None:
        file = folder / Path(weights).expanduser()
        if not file.is_file():
            similar = did_you_mean(Path(weights).name, candidates)
            hint = similar or f"It holds no {' or '.join(SUFFIXES)} file."
            raise UserError(f"There are no weights {weights} in {folder.resolve()}. {hint}")
        return file
    fitting = [
        name for name in candidates if re.fullmatch(rf"{re.escape(model)}(-.*)?\.pth?", name)
    ]
    if len(fitting) == 1:
        return folder / fitting[0]
    if fitting:
        content, hint = f"{len(fitting)} files for {model}: {', '.join(fitting)}", ""
    else:
        content, hint = f"no {model}.pth", did_you_mean(f"{model}.pth", candidates)
    raise UserError(
        f"{folder.resolve()} holds {content}. Name the file by model.weights=FILE. {hint}".strip()
    )
