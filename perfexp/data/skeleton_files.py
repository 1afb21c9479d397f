"""Files of IntelliRehabDS: repetitions of gestures as frames of joint coordinates, by subject.

Miron et al., "IntelliRehabDS (IRDS) - A Dataset of Physical Rehabilitation Movements": a text file for each repetition,
a line for each frame, comma-separated x, y and z of each joint.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfexp.data.image_files import visible_entries
from perfexp.errors import UserError
from perfexp.host.untrusted import read_bytes

Frames = np.ndarray[Any, np.dtype[np.float32]]

NAME = "SUBJECT_DATE_GESTURE_REPETITION_CORRECT_POSITION.txt"
#: Folders of the published archive with the coordinates alone.
_FOLDERS = ("SkeletonData/Simplified", "Simplified", "SkeletonData", ".")
_NAME = re.compile(
    r"(?P<subject>[^_]+)_(?P<date>[^_]+)_(?P<gesture>\d{1,4})_(?P<repetition>\d+)_(?P<correct>[123])_"
    r"(?P<position>[^_.]+)\.txt"
)
#: Fewest frames of a movement, and limit on a file: the longest published one has 1,586 frames, about 1 MB.
_LEAST_FRAMES, _MOST_BYTES = 2, 1 << 24
#: One of so many subjects is held out.
_HELD_OUT = 5


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """One repetition of a gesture, with frames (frames, columns)."""

    file: Path
    subject: str
    gesture: int
    frames: Frames


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Repetitions of a folder in the order of their names, and a line about each file that cannot be used."""

    repetitions: list[Repetition]
    problems: list[str]


def read(root: Path, *, gestures: int, columns: int) -> Contents:
    """Read all repetitions in and below a folder; raises `UserError` if there are none.

    Args:
        gestures: number of gestures; labels are below it.
        columns: columns of a frame.
    """
    if not root.is_dir():
        raise UserError(f"data.root is not a folder: {root.absolute()}. Set it to the folder of the skeletons.")
    folder = next(root / name for name in _FOLDERS if (root / name).is_dir())
    repetitions, problems, names = [], [], set()
    for file in sorted(_files(folder, root), key=lambda path: (path.name, path)):
        problem = f"another file has the name {file.name}" if file.name in names else None
        names.add(file.name)
        try:
            repetitions.append(_repetition(file, problem, gestures=gestures, columns=columns))
        except _Unusable as reason:
            problems.append(f"{file.relative_to(root)}: {reason}")
    if not repetitions:
        looked_for = f"The first of {len(problems)} problems: {problems[0]}." if problems else f"Looked for {NAME}."
        trial = "perfexp make-data skeletons DIR makes a small set to try out."
        raise UserError(f"There are no skeletons in {folder.absolute()}. {looked_for} {trial}")
    return Contents(repetitions=repetitions, problems=problems)


def split(repetitions: Sequence[Repetition], held_out: Collection[str] | None) -> tuple[list[int], list[int]]:
    """Numbers of the repetitions for training, and of those of the subjects that are held out.

    Raises `UserError` if there are no repetitions on one side.

    Args:
        held_out: subjects; None for every fifth, by name, or the last of fewer.
    """
    subjects = sorted({repetition.subject for repetition in repetitions}, key=lambda name: (len(name), name))
    chosen = set(held_out) if held_out is not None else set(subjects[_HELD_OUT - 1 :: _HELD_OUT] or subjects[-1:])
    if unknown := sorted(chosen - set(subjects)):
        raise UserError(f"data.val_subjects: there is no {', '.join(unknown)}; the subjects are {', '.join(subjects)}.")
    sides: tuple[list[int], list[int]] = [], []
    for number, repetition in enumerate(repetitions):
        sides[repetition.subject in chosen].append(number)
    if not all(sides):
        raise UserError(f"Subjects are split into training and evaluation, and there are {len(subjects)}: two or more.")
    return sides


def resampled(frames: Frames, count: int) -> Frames:
    """A movement in a number of frames at equal distances from the first to the last, by linear interpolation."""
    places = np.linspace(0, len(frames) - 1, count)
    before = np.minimum(places.astype(int), len(frames) - 2)
    share = (places - before)[:, None]
    values: Frames = ((1 - share) * frames[before] + share * frames[before + 1]).astype(np.float32)
    return values


class _Unusable(Exception):
    """Raised with the reason why a file cannot be used."""


def _files(folder: Path, root: Path) -> Iterator[Path]:
    for entry in visible_entries(folder, root):
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path), root)
        elif entry.name.endswith(".txt") and entry.is_file():
            yield Path(entry.path)


def _repetition(file: Path, problem: str | None, *, gestures: int, columns: int) -> Repetition:
    match = _NAME.fullmatch(file.name)
    if match is None:
        problem = f"its name is not {NAME}"
    elif int(match["gesture"]) >= gestures:
        problem = f"gesture {match['gesture']} is not one from 0 to {gestures - 1}"
    if problem or match is None:
        raise _Unusable(problem)
    frames = _frames(file, columns)
    return Repetition(file=file, subject=match["subject"], gesture=int(match["gesture"]), frames=frames)


def _frames(file: Path, columns: int) -> Frames:
    """The numbers of a file, all finite, in a fixed number of columns."""
    try:
        lines = [line.rstrip(", ") for line in read_bytes(file.resolve(), _MOST_BYTES).decode().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise _Unusable(f"it can't be read: {reason}") from error
    lines = [line for line in lines if line]
    if len(lines) < _LEAST_FRAMES:
        raise _Unusable(f"number of frames: {len(lines)}, {_LEAST_FRAMES} or more are needed")
    for number, line in enumerate(lines, 1):
        if (count := line.count(",") + 1) != columns:
            raise _Unusable(f"frame {number} has {count} columns instead of {columns}")
    try:
        frames = np.loadtxt(io.StringIO("\n".join(lines)), np.float32, delimiter=",", ndmin=2, comments=None)
    except ValueError as error:
        raise _Unusable(str(error).rstrip(".")) from error
    if len(wrong := np.argwhere(~np.isfinite(frames))):
        frame, column = wrong[0] + 1
        raise _Unusable(f"frame {frame}, column {column} is not finite, the first of {len(wrong)}")
    return frames
