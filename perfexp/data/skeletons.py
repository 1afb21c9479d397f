"""Skeletons: labelled movements of joints from a folder, of subjects who are held out for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from perfexp.data import skeleton_files
from perfexp.data.loading import Loading, Samples, StoredSamples
from perfexp.errors import UserError
from perfexp.models import Session


@dataclass(kw_only=True, eq=False)
class Skeletons(Loading):
    """Repetitions of gestures in the layout of IntelliRehabDS; see `perfexp.data.skeleton_files`.

    Each is resampled to the frames of the input size. Columns are standardized by mean and deviation of the training
    subjects. Raises `UserError` without two subjects; files that cannot be used are left out.

    Args:
        gestures: number of gestures, which are numbered from 0 in the names of the files.
        joints: joints of a skeleton; a frame has three columns for each.
        val_subjects: subjects that are held out; None for every fifth.
        workers: number of processes that prepare batches; 0 prepares them between the model's calls.
        pin_memory: whether batches are in pinned memory, for asynchronous copies.
        prefetch_factor: batches that each worker prepares ahead.

    Attributes:
        problems: a line about each file that cannot be used.
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
        super().__post_init__()
        for key, least in (("gestures", 2), ("joints", 1)):
            if (value := getattr(self, key)) < least:
                raise UserError(f"data.{key}={value}: set {least} or more.")
        self._columns = 3 * self.joints
        contents = skeleton_files.read(Path(self.root).expanduser(), gestures=self.gestures, columns=self._columns)
        self._repetitions, self.problems = contents.repetitions, contents.problems
        held_out = None if self.val_subjects is None else list(map(str, self.val_subjects))
        self._train, self._val = skeleton_files.split(self._repetitions, held_out)
        self.num_classes: int | None = self.gestures
        self.num_samples: int | None = len(self._train)
        self._standardized = cache(self._standardized_in)

    def samples(self, session: Session, input_size: tuple[int, int], *, training: bool, seed: int) -> Samples:
        frames, columns = input_size
        if columns != self._columns:
            raise UserError(
                f"These skeletons have {self._columns} columns per frame, not {columns}: set "
                f"input_size=FRAMESx{self._columns}, for example 20x{self._columns}."
            )
        return StoredSamples(*self._standardized(frames, training))

    def _standardized_in(self, frames: int, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Movements in a number of frames, and their labels, of one side of the split."""
        train, val = (self._resampled(numbers, frames) for numbers in (self._train, self._val))
        mean, deviation = train.mean(axis=(0, 1), dtype=np.float64), train.std(axis=(0, 1), dtype=np.float64)
        numbers, movements = (self._train, train) if training else (self._val, val)
        values = (movements - mean) / np.where(deviation > 0, deviation, 1.0)
        labels = [self._repetitions[number].gesture for number in numbers]
        return torch.from_numpy(values.astype(np.float32)), torch.tensor(labels)

    def _resampled(self, numbers: Sequence[int], frames: int) -> skeleton_files.Frames:
        return np.stack([skeleton_files.resampled(self._repetitions[number].frames, frames) for number in numbers])
