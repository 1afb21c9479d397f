"""Views: saved run lists in the menu of MLflow's pages, stored as experiment tags.

The sending process adds them to an experiment, and `perfexp ui` prints links to them. The list is
in views.json.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import msgspec

#: Creation time for every view, in ms since 1970: constant, so that the tag never changes.
_MADE_MS = 1_780_000_000_000


class View(msgspec.Struct, kw_only=True, frozen=True):
    """A saved run list.

    Attributes:
        made_with: tag that runs must have for the view to be added, for example `gpu`; empty for
            all.
        state: filter, order and columns, in the format of MLflow's pages.
    """

    key: str
    name: str
    made_with: str
    state: dict[str, Any]

    @property
    def tag(self) -> str:
        """Return the experiment tag's name."""
        return f"mlflow.sharedViewState.{self.key}"

    def value(self) -> str:
        """Return the tag's value as MLflow's pages read it."""
        packed = base64.b64encode(zlib.compress(json.dumps(self.state).encode())).decode()
        content = {
            "name": self.name,
            "createdAt": _MADE_MS,
            "updatedAt": _MADE_MS,
            "state": f"deflate;{packed}",
        }
        return json.dumps(content)


VIEWS = msgspec.json.decode(Path(__file__).with_name("views.json").read_bytes(), type=list[View])
