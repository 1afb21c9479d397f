"""A training's speed as the JSON of a speed file, and that file's name."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from perfexp.host.files import safe_name
from perfexp.statistics.estimators import Interval

#: Constants of the format that are in neither logs nor records.
MISSION = "图像分割"
UNIT = "images/s"
#: Longest part of a file name.
_LONGEST_NAME = 100
#: JSON keys in order.
KEYS = (
    *("log_file", "model_name", "mission_name", "direction_id", "run_mode", "index", "gpu_num"),
    *("FINAL_RESULT", "JOB_FAIL_FLAG", "UNIT"),
)


class Mode(StrEnum):
    """Run mode of a training: `sp` on a single GPU, `mp` on several with a process each."""

    sp = "sp"
    mp = "mp"

    @classmethod
    def of(cls, num_gpus: int) -> Mode:
        """Return the mode for this number of GPUs."""
        if num_gpus > 1:
            return cls.mp
        return cls.sp


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed of a training.

    Attributes:
        batch_size: images per GPU and step.
        images_per_second: total over all GPUs; 0 if the training failed.
        remark: how the value was obtained, or why there is none.
        label: part of the file name that distinguishes trainings with the same name, for example
            the input size; empty for a single training.
    """

    log_file: str
    model: str
    mode: Mode
    num_gpus: int
    batch_size: int
    precision: str
    images_per_second: float = 0.0
    interval: Interval | None = None
    failed: bool = False
    remark: str = ""
    label: str = ""

    def __post_init__(self) -> None:
        good = math.isfinite(self.images_per_second) and self.images_per_second >= 0
        if not good or (self.images_per_second == 0) != self.failed:
            raise ValueError(f"{self.images_per_second} images/s with failed={self.failed}")

    @property
    def file_name(self) -> str:
        """Return `MODEL_RUNMODE_bsN_PRECISION_GPUS_speed.json`, with the label after the model."""
        model = safe_name(self.model)[:_LONGEST_NAME]
        named = model
        if self.label:
            named += f"_{safe_name(self.label)}"
        precision = safe_name(self.precision)[:_LONGEST_NAME]
        return f"{named}_{self.mode}_bs{self.batch_size}_{precision}_{self.num_gpus}_speed.json"

    def document(self) -> dict[str, Any]:
        """Return the JSON content."""
        values = (
            *(self.log_file, self.model, MISSION, 0, str(self.mode), 1, self.num_gpus),
            *(float(f"{self.images_per_second:.6g}"), int(self.failed), UNIT),
        )
        return dict(zip(KEYS, values, strict=True))

    def to_json(self) -> bytes:
        """Return the JSON in UTF-8, one key per line."""
        text = json.dumps(self.document(), ensure_ascii=False, indent=0, allow_nan=False)
        return text.encode("utf-8", errors="replace") + b"\n"
