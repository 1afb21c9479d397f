"""Views: saved lists of runs in the menu of MLflow's pages, each a tag of the experiment, internal to MLflow."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import msgspec

#: Time of each view, ms since 1970: the same tag each time it is sent.
_MADE_MS = 1_780_000_000_000


class View(msgspec.Struct, kw_only=True, frozen=True):
    """A list of runs.

    Attributes:
        made_with: tag of the runs that the view is made with, for example `gpu`; empty for all.
        state: filter, order and columns, as MLflow's pages keep them.
    """

    key: str
    name: str
    made_with: str
    state: dict[str, Any]

    @property
    def tag(self) -> str:
        """Name of the experiment's tag."""
        return f"mlflow.sharedViewState.{self.key}"

    def value(self) -> str:
        """Return the tag as MLflow's pages read it."""
        packed = base64.b64encode(zlib.compress(json.dumps(self.state).encode())).decode()
        content = {
            "name": self.name,
            "createdAt": _MADE_MS,
            "updatedAt": _MADE_MS,
            "state": f"deflate;{packed}",
        }
        return json.dumps(content)


VIEWS = msgspec.json.decode(Path(__file__).with_name("views.json").read_bytes(), type=list[View])
