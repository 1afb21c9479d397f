"""Views: saved lists of runs in the menu of MLflow's pages, each a tag of the experiment, internal to MLflow."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass

#: Versions of MLflow with views of this form: from the first, and below the second.
_SINCE, _BELOW = (3, 17), (4, 0)
_TAG = "mlflow.sharedViewState."
#: Time of each view, ms since 1970: the same tag each time it is sent.
_MADE_MS = 1_780_000_000_000


@dataclass(frozen=True, kw_only=True)
class View:
    """A list of runs."""

    key: str
    name: str
    query: str
    order: str
    columns: tuple[str, ...]
    is_ascending: bool = True

    @property
    def tag(self) -> str:
        """Name of the experiment's tag."""
        return f"{_TAG}{self.key}"

    def value(self) -> str:
        """Return the tag as MLflow's pages read it."""
        state = {
            "searchFilter": self.query,
            "orderByKey": self.order,
            "orderByAsc": self.is_ascending,
            "startTime": "ALL",
            "lifecycleFilter": "Active",
            "datasetsFilter": [],
            "modelVersionFilter": "All Runs",
            "selectedColumns": list(self.columns),
            "runsExpanded": {},
            "runsPinned": [],
            "runsHidden": [],
            "viewMaximized": True,
            "runListHidden": False,
        }
        packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
        content = {"name": self.name, "createdAt": _MADE_MS, "updatedAt": _MADE_MS, "state": f"deflate;{packed}"}
        return json.dumps(content)


_DEVICE, _RATE = (f"metrics.`{name}`" for name in ("device/p50_ms", "throughput/samples_per_second"))
_NAMED = tuple(f"params.`{name}`" for name in ("model", "algorithm", "precision", "input_size", "batch_size"))
#: MLflow shows metrics before parameters: more than three would push the algorithm out of the window.
_ENDS = ("tags.`gpu`", "tags.`perfexp.doubts`")
VIEWS = (
    View(
        key="perfexp-inference",
        name="perfexp: inference, fastest first",
        query="params.phase = 'inference' and tags.`perfexp.kind` != 'sweep'",
        order=_DEVICE,
        columns=(*_NAMED, _DEVICE, _RATE, *_ENDS),
    ),
    View(
        key="perfexp-training",
        name="perfexp: training, fastest first",
        query="params.phase = 'train' and tags.`perfexp.kind` != 'sweep'",
        order=_DEVICE,
        columns=(
            *_NAMED,
            _DEVICE,
            _RATE,
            "metrics.`train_phase/forward_ms`",
            "metrics.`train_phase/backward_ms`",
            *_ENDS,
        ),
    ),
    View(
        key="perfexp-sizes",
        name="perfexp: sizes, how time grows",
        query="metrics.`scaling/exponent` > 0",
        order="metrics.`scaling/exponent`",
        columns=(*_NAMED, "metrics.`scaling/exponent`", "metrics.`scaling/constant_ms`", _DEVICE, *_ENDS),
    ),
)


def has_views(version: str) -> bool:
    """Whether a version of MLflow, such as `3.17.2`, is known to read these tags."""
    numbers = version.split(".")[:2]
    return all(number.isdigit() for number in numbers) and _SINCE <= tuple(map(int, numbers)) < _BELOW
