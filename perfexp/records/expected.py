"""Expected points: expected.json, which is written when a run is prepared."""

from __future__ import annotations

from pathlib import Path

import msgspec

from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.records.record import Key


class Expected(msgspec.Struct, kw_only=True):
    """The points that a run is going to have, in plan order: timed ones, cold starts, layers, profiles.

    `point_seconds` is the estimated time of a timed point by the plan's settings; None if they do not limit it.
    """

    keys: list[Key]
    point_seconds: float | None = None

    def to_json(self) -> bytes:
        """Return the content of expected.json."""
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def load(cls, path: Path) -> Expected | None:
        """Read expected.json; None in folders of older versions. Raises `UserError` if it cannot be read."""
        try:
            return foreign.from_json(foreign.read_bytes(path), cls)
        except FileNotFoundError:
            return None
        except (OSError, *foreign.DECODING_ERRORS) as error:
            raise UserError(f"{path.name} cannot be read: {error}.") from error
