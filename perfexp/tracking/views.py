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
    """A list of runs.

    Attributes:
        columns: columns from the left with their widths in pixels, the first ones beside the name.
        made_with: tag of the runs that the view is made with: `gpu`, `cpu`, or one of sweeps; empty for all.
        is_ascending: whether the list begins with the smallest value of `order`.
    """

    key: str
    name: str
    query: str
    order: str
    columns: dict[str, int]
    made_with: str = ""
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
            "columnOrder": [*_FIXED, *self.columns, *_LAST],
            "columnWidths": {**_FIXED, **self.columns, **_LAST},
            "runsExpanded": {},
            "runsPinned": [],
            "runsHidden": [],
            "viewMaximized": True,
            "runListHidden": False,
        }
        packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
        content = {"name": self.name, "createdAt": _MADE_MS, "updatedAt": _MADE_MS, "state": f"deflate;{packed}"}
        return json.dumps(content)


#: Columns that every list has: those beside the names, and the duration.
_FIXED, _LAST = {"attributes.`Run Name`": 195, "runDateAndNestInfo": 75}, {"duration": 80}


def _metrics(**widths: int) -> dict[str, int]:
    return {f"metrics.`{name.replace('__', '/')}`": width for name, width in widths.items()}


def _fastest(phase: str, kind: str, device: str, title: str, **further: int) -> View:
    """The measurements of a phase on one kind of device by a time, with conditions before the interval."""
    ends = {f"{kind}__{name}": 80 for name in ("ci_low_ms", "ci_high_ms")}
    rate = {f"throughput__samples_per_second{end}": 95 for end in ("", "_low", "_high")}
    return View(
        key=f"perfexp-{title.replace(' on CPUs', '-cpu')}",
        name=f"perfexp: {title}, fastest first",
        query=f"params.phase = '{phase}' and tags.`perfexp.points` = '1 ok' and tags.`{device}` LIKE '%'",
        order=f"metrics.`{kind}/p50_ms`",
        columns={
            "params.`algorithm`": 110,
            **_metrics(**{f"{kind}__p50_ms": 80}),
            **_CONDITIONS,
            **_metrics(**ends, point__processes_count=75),
            **_SUBJECT,
            **_metrics(**rate, **further),
        },
        made_with=device,
    )


_CONDITIONS = {
    "params.`batch_size`": 60,
    "params.`precision`": 60,
    "params.`execution`": 75,
    "params.`device`": 110,
    "tags.`perfexp.doubts`": 75,
}
_SUBJECT = {"params.`model`": 90, "params.`input_size`": 70}
_STEPS = {f"train_phase__{name}_ms": 95 for name in ("forward", "backward")}
VIEWS = (
    _fastest("inference", "device", "gpu", "inference"),
    _fastest("inference", "latency", "cpu", "inference on CPUs"),
    _fastest("train", "device", "gpu", "training", **_STEPS),
    _fastest("train", "latency", "cpu", "training on CPUs", **_STEPS),
    View(
        key="perfexp-sweeps",
        name="perfexp: sweeps, which run won",
        query="tags.`perfexp.kind` = 'sweep'",
        made_with="perfexp.finished",
        order="attributes.start_time",
        is_ascending=False,
        columns={
            "tags.`perfexp.best`": 155,
            "tags.`perfexp.best_ties`": 125,
            "tags.`perfexp.best_undecided`": 125,
            "params.`input_size`": 65,
            "params.`device`": 130,
            "params.`batch_size`": 60,
            "params.`precision`": 60,
            "params.`execution`": 75,
            "params.`model`": 90,
            "tags.`perfexp.best_by`": 100,
        },
    ),
    View(
        key="perfexp-sizes",
        name="perfexp: sizes, how time grows",
        # not by exponent: a time that does not grow has none
        query="params.input_size LIKE '%, %' and tags.`perfexp.kind` != 'sweep'",
        order="metrics.`scaling/exponent`",
        columns={
            **_metrics(scaling__exponent=95, scaling__exponent_low=95, scaling__exponent_high=95),
            **_metrics(scaling__constant_ms=95, scaling__growing_ms=95),
            "params.`algorithm`": 110,
            **_CONDITIONS,
            **_SUBJECT,
        },
    ),
)


def has_views(version: str) -> bool:
    """Whether a version of MLflow, such as `3.17.2`, is known to read these tags."""
    numbers = version.split(".")[:2]
    return all(number.isdigit() for number in numbers) and _SINCE <= tuple(map(int, numbers)) < _BELOW
