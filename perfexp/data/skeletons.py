"""Skeletons: labeled joint movements from a folder (data=skeletons), for gesture classifiers.

The layout follows IntelliRehabDS (Miron et al., "IntelliRehabDS (IRDS) - A Dataset of Physical
Rehabilitation Movements"): a text file per repetition, a line per frame, and comma-separated x, y
and z of each joint. Evaluation uses other subjects (people) than training.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

from perfexp.data.image_files import folder_of, visible_entries
from perfexp.data.loading import Loading, Samples
from perfexp.errors import UserError
from perfexp.host.foreign import read_bytes
from perfexp.models import Session

_LAYOUT = "SUBJECT_DATE_GESTURE_REPETITION_CORRECT_POSITION.txt"
#: Folders of the published archive that contain only coordinates.
_FOLDERS = ("SkeletonData/Simplified", "Simplified", "SkeletonData", ".")
_NAME = re.compile(r"(?P<subject>[^_]+)_[^_]+_(?P<gesture>\d{1,4})_\d+_[123]_[^_.]+\.txt")
#: Minimum frames per movement, and maximum file size. The longest published file has 1,586 frames,
#: about 1 MB.
_LEAST_FRAMES, _MOST_BYTES = 2, 1 << 24
#: One in this many subjects is held out.
_HELD_OUT = 5


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """A repetition of a gesture.

    Attributes:
        subject: name of the person.
        gesture: label, from 0.
        frames: coordinates, float32 (frames, columns); columns are x, y and z of each joint.
    """

    subject: str
    gesture: int
    frames: torch.Tensor


@dataclass(kw_only=True, eq=False)
class Skeletons(Loading):
    """Gesture repetitions in IntelliRehabDS' layout.

    Each is resampled to the number of frames in the input size. Columns are standardized with the
    training subjects' mean and standard deviation. Unusable files are left out. Raises `UserError`
    for fewer than two subjects. `plan/key_descriptions.yaml` describes the keys.

    Attributes:
        problems: a line about each unusable file, for example with too few columns.
    """

    labelled = True
    held_out = True

    root: str
    gestures: int = 9
    joints: int = 25
    val_subjects: Sequence[str] | None = None
    workers: int = 0
    pin_memory: bool = True

    def __post_init__(self) -> None:
        """Read all repetitions and split them by subject."""
        super().__post_init__()
        for key, least in (("gestures", 2), ("joints", 1)):
            if (value := getattr(self, key)) < least:
                raise UserError(f"data.{key}={value}: set {least} or more.")
        self._columns = 3 * self.joints
        root = folder_of(self.root, "skeletons")
        repetitions, self.problems = read(root, gestures=self.gestures, columns=self._columns)
        self._train, self._val = split(repetitions, self.val_subjects)
        self.num_classes: int | None = self.gestures
        self.num_samples: int | None = len(self._train)
        self._standardized = cache(self._standardized_in)

    def samples(
        self, session: Session, input_size: tuple[int, int], *, training: bool, seed: int
    ) -> Samples:
        """Return movements with the input size FRAMES × columns; see `Loading`."""
        frames, columns = input_size
        if columns != self._columns:
            raise UserError(
                f"These skeletons have {self._columns} columns per frame, not {columns}: set "
                f"input_size=FRAMESx{self._columns}, for example 20x{self._columns}."
            )
        return Samples(TensorDataset(*self._standardized(frames, training)))

    def _standardized_in(self, frames: int, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return movements, float32 (count, frames, columns), and labels, int64 (count,).

        `samples` calls it through a cache.

        Args:
            frames: number of frames to resample to.
            training: whether to return the training side, or that for evaluation.
        """
        deviation, mean = torch.std_mean(_resampled(self._train, frames), dim=(0, 1), correction=0)
        repetitions = self._train if training else self._val
        # a constant column stays 0
        scale = torch.where(deviation > 0, deviation, 1.0)
        values = (_resampled(repetitions, frames) - mean) / scale
        return values.float(), torch.tensor([repetition.gesture for repetition in repetitions])


def _resampled(repetitions: Sequence[Repetition], frames: int) -> torch.Tensor:
    return torch.stack([resampled(repetition.frames, frames) for repetition in repetitions])


def resampled(frames: torch.Tensor, count: int) -> torch.Tensor:
    """Return a movement with `count` evenly spaced frames, float64 (count, columns).

    The first and the last frame stay.
    """
    return interpolate(frames.double().T[None], count, mode="linear", align_corners=True)[0].T


def read(root: Path, *, gestures: int, columns: int) -> tuple[list[Repetition], list[str]]:
    """Return all repetitions in and below a folder by name, and a line about each unusable file.

    `Skeletons` calls it when the worker builds it.

    Args:
        gestures: number of gestures; labels are smaller.
        columns: columns per frame.

    Raises:
        UserError: there are no repetitions.
    """
    folder = next(root / name for name in _FOLDERS if (root / name).is_dir())
    repetitions, problems, names = [], [], set()
    for file in sorted(_files(folder, root), key=lambda path: (path.name, path)):
        try:
            if file.name in names:
                raise _Unusable(f"another file has the name {file.name}")
            names.add(file.name)
            repetitions.append(_repetition(file, gestures=gestures, columns=columns))
        except _Unusable as reason:
            problems.append(f"{file.relative_to(root)}: {reason}")
    if not repetitions:
        looked_for = (
            f"The first of {len(problems)} problems: {problems[0]}."
            if problems
            else f"Looked for {_LAYOUT}."
        )
        trial = "perfexp make-data skeletons DIR makes a small set to try out."
        raise UserError(f"There are no skeletons in {folder.absolute()}. {looked_for} {trial}")
    return repetitions, problems


def split(
    repetitions: Sequence[Repetition], held_out: Sequence[str] | None
) -> tuple[list[Repetition], list[Repetition]]:
    """Return training and evaluation repetitions, by subject.

    `Skeletons` calls it when the worker builds it.

    Args:
        held_out: evaluation subjects. None selects every fifth by name, or the last if there are
            fewer.

    Raises:
        UserError: a subject is unknown, or either side is empty.
    """
    subjects = sorted(
        {repetition.subject for repetition in repetitions}, key=lambda name: (len(name), name)
    )
    chosen = (
        subjects[_HELD_OUT - 1 :: _HELD_OUT] or subjects[-1:]
        if held_out is None
        else list(map(str, held_out))
    )
    if unknown := sorted(set(chosen) - set(subjects)):
        raise UserError(
            f"data.val_subjects: there is no {', '.join(unknown)}; the subjects are "
            f"{', '.join(subjects)}."
        )
    train = [repetition for repetition in repetitions if repetition.subject not in chosen]
    val = [repetition for repetition in repetitions if repetition.subject in chosen]
    if not train or not val:
        raise UserError(
            f"Subjects are split into training and evaluation, and there are {len(subjects)}: two "
            "or more."
        )
    return train, val


class _Unusable(Exception):
    """Raised with the reason why a file is unusable."""


def _files(folder: Path, root: Path) -> Iterator[Path]:
    """Yield the text files in and below a folder."""
    for entry in visible_entries(folder, root):
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path), root)
        elif entry.name.endswith(".txt") and entry.is_file():
            yield Path(entry.path)


def _repetition(file: Path, *, gestures: int, columns: int) -> Repetition:
    """Read one file; raise `_Unusable` if its name or content is not in the layout."""
    match = _NAME.fullmatch(file.name)
    if match is None:
        raise _Unusable(f"its name is not {_LAYOUT}")
    gesture = int(match["gesture"])
    if gesture >= gestures:
        raise _Unusable(f"gesture {gesture} is not one from 0 to {gestures - 1}")
    return Repetition(subject=match["subject"], gesture=gesture, frames=_frames(file, columns))


def _frames(file: Path, columns: int) -> torch.Tensor:
    """Return a file's coordinates, float32 (frames, columns), all finite.

    Raises:
        _Unusable: the file has another layout.
    """
    try:
        lines = [
            line.rstrip(", ")
            for line in read_bytes(file.resolve(), _MOST_BYTES).decode().splitlines()
        ]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise _Unusable(f"it can't be read: {reason}") from error
    lines = list(filter(None, lines))
    if len(lines) < _LEAST_FRAMES:
        raise _Unusable(f"number of frames: {len(lines)}, {_LEAST_FRAMES} or more are needed")
    for number, line in enumerate(lines, 1):
        if (count := line.count(",") + 1) != columns:
            raise _Unusable(f"frame {number} has {count} columns instead of {columns}")
    try:
        frames = np.loadtxt(
            io.StringIO("\n".join(lines)), np.float32, delimiter=",", ndmin=2, comments=None
        )
    except ValueError as error:
        raise _Unusable(str(error).rstrip(".")) from error
    if len(wrong := np.argwhere(~np.isfinite(frames))):
        frame, column = wrong[0] + 1
        raise _Unusable(f"frame {frame}, column {column} is not finite, the first of {len(wrong)}")
    return torch.from_numpy(frames)
