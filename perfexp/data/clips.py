"""Clips: short videos from folders of frames, for video models (data=clips)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from perfexp.data.image_files import (
    LOOKED_FOR,
    center_crop,
    find_images,
    folder_of,
    listing,
    read_image,
    visible_entries,
)
from perfexp.data.loading import Loading, Sample, Samples, to_tensor
from perfexp.errors import UserError
from perfexp.models import Session


@dataclass(kw_only=True, eq=False)
class Clips(Loading):
    """A folder of frames, or with a subfolder of frames per video, in name order.

    A video is cut into clips with a fixed number of frames. A shorter video repeats its last frame;
    a shorter rest is left out. Frames are resized and cropped at their center. There are no labels.
    Raises `UserError` if the folder cannot be read or has no images.
    """

    labelled = False
    held_out = False

    root: str
    frames: int = 10

    def __post_init__(self) -> None:
        """Find all videos and cut them into clips."""
        super().__post_init__()
        if self.frames < 1:
            raise UserError(f"data.frames={self.frames}: set 1 or more.")
        self._clips = [
            clip
            for video in _videos(folder_of(self.root, "frames"))
            for clip in _cut(video, self.frames)
        ]
        self.num_classes: int | None = None
        self.num_samples: int | None = len(self._clips)

    def samples(
        self, session: Session, input_size: tuple[int, int], *, training: bool, seed: int
    ) -> Samples:
        """Return the clips for inference; see `Loading`."""
        if training:
            raise UserError("data=clips has no classes to learn: use mode=inference.")
        return Samples(self._clips, partial(_stacked, size=input_size))


def _stacked(clip: Sequence[Path], *, size: tuple[int, int]) -> Sample:
    """Load a clip: normalized float32 (3, frames, height, width), without a target."""
    return torch.stack(
        [to_tensor(center_crop(read_image(file), size)) for file in clip], dim=1
    ), None


def _videos(root: Path) -> list[list[Path]]:
    """Return each video's frames, sorted by name; raise `UserError` if there are none.

    Each subfolder is a video. Without subfolders the folder itself is one.
    """
    with listing():
        folders = sorted(
            Path(entry.path) for entry in visible_entries(root, root) if entry.is_dir()
        ) or [root]
        videos = [sorted(find_images(folder, root)) for folder in folders]
    if not any(videos):
        raise UserError(f"There are no frames in {root}. {LOOKED_FOR}")
    return list(filter(None, videos))


def _cut(video: Sequence[Path], frames: int) -> Iterator[list[Path]]:
    """Yield a video's clips of `frames` frames; see `Clips`."""
    if len(video) < frames:
        yield [*video, *[video[-1]] * (frames - len(video))]
    for start in range(0, len(video) - frames + 1, frames):
        yield list(video[start : start + frames])
