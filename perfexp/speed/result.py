"""Result: how fast a training was, as the JSON that says so, the name of its file, and what is known as such a file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from perfexp.host.files import safe_name
from perfexp.statistics.estimators import Interval

#: Of the format, whatever the model is for: neither logs nor records say it.
MISSION = "图像分割"
UNIT = "images/s"
#: A longer name is no file's.
_LONGEST_NAME = 100
#: Of the JSON, in their order.
_KEYS = (
    *("log_file", "model_name", "mission_name", "direction_id", "run_mode", "index", "gpu_num"),
    *("FINAL_RESULT", "JOB_FAIL_FLAG", "UNIT"),
)


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
        interval: that of `images_per_second`; None where it has none, or it is not known.
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
    interval: Interval | None = None
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
        values = (
            *(self.log_file, self.model, MISSION, 0, str(self.mode), 1, self.cards),
            *(float(f"{self.images_per_second:.6g}"), int(self.failed), UNIT),
        )
        return dict(zip(_KEYS, values, strict=True))

    def to_json(self) -> bytes:
        """The JSON, a key a line, in UTF-8."""
        text = json.dumps(self.document(), ensure_ascii=False, indent=0, allow_nan=False)
        return text.encode("utf-8", errors="replace") + b"\n"


def log_file_of(content: bytes) -> str | None:
    """Where the training of a speed JSON was logged; None where the content is no speed JSON.

    Args:
        content: of any file.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return str(found["log_file"]) if isinstance(found, dict) and found.keys() == set(_KEYS) else None
