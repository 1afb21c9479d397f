"""Expected points: expected.json, written when a run is prepared.

`perfexp status` compares them with points.jsonl to show how much of a run is left.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.records.record import Key


class Expected(msgspec.Struct, kw_only=True):
    """Points that a run will have, in plan order: timed points, cold starts, layers, profiles.

    Attributes:
        keys: key of each point.
        point_seconds: estimated time for a timed point; None if the plan's settings do not limit
            it.
    """

    keys: list[Key]
    point_seconds: float | None = None

    def to_json(self) -> bytes:
        """Return the content of expected.json."""
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def load(cls, path: Path) -> Expected | None:
        """Read expected.json; None in folders of older versions.

        `perfexp status` reads it.

        Raises:
            UserError: the file cannot be read.
        """
        try:
            return foreign.from_json(foreign.read_bytes(path), cls)
        except FileNotFoundError:
            return None
        except (OSError, *foreign.DECODING_ERRORS) as error:
            raise UserError(f"{path.name} cannot be read: {error}.") from error
