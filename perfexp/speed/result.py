"""Result: how fast a training was, as the JSON that says so and the name of its file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from perfexp.paths import safe_name

MISSION = "图像分割"
UNIT = "images/s"
#: A longer name is no file's.
_LONGEST_NAME = 100


class Mode(StrEnum):
    """On how many cards a model is trained: `sp`, one; `mp`, several, a process for each."""

    sp = "sp"
    mp = "mp"

    @classmethod
    def of(cls, cards: int) -> Mode:
        """That of a number of cards.

        Args:
            cards: ≥ 1.
        """
        return cls.mp if cards > 1 else cls.sp


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast one training was.

    Attributes:
        log_file: where it was logged.
        model: bare name.
        mode: one card or several.
        cards: number of them.
        batch_size: images per card and step.
        precision: name.
        images_per_second: over all cards; 0 where the training failed.
        failed: whether it failed.
        remark: how the figure came about, or why there is none.
        label: tells the file from that of another training of the same name; empty where there is no other.
    """

    log_file: str
    model: str
    mode: Mode
    cards: int
    batch_size: int
    precision: str
    images_per_second: float = 0.0
    failed: bool = False
    remark: str = ""
    label: str = ""

    def __post_init__(self) -> None:
        good = math.isfinite(self.images_per_second) and self.images_per_second >= 0
        if not good or (self.images_per_second == 0) != self.failed:
            raise ValueError(f"{self.images_per_second} images/s, and failed is {self.failed}")

    @property
    def file_name(self) -> str:
        """`MODEL_RUNMODE_bsN_PRECISION_GPUS_speed`; a label follows the model."""
        model = safe_name(self.model)[:_LONGEST_NAME]
        named = f"{model}_{safe_name(self.label)}" if self.label else model
        precision = safe_name(self.precision)[:_LONGEST_NAME]
        return f"{named}_{self.mode}_bs{self.batch_size}_{precision}_{self.cards}_speed"

    def document(self) -> dict[str, Any]:
        """The keys of the JSON, in their order."""
        return {
            "log_file": self.log_file,
            "model_name": self.model,
            "mission_name": MISSION,
            "direction_id": 0,
            "run_mode": str(self.mode),
            "index": 1,
            "gpu_num": self.cards,
            "FINAL_RESULT": float(f"{self.images_per_second:.6g}"),
            "JOB_FAIL_FLAG": int(self.failed),
            "UNIT": UNIT,
        }

    def to_json(self) -> bytes:
        """The JSON, a key a line, in UTF-8."""
        text = json.dumps(self.document(), ensure_ascii=False, indent=0, allow_nan=False)
        return text.encode("utf-8", errors="replace") + b"\n"
