"""Builders: records for the tests of the sinks, with seeded samples."""

from __future__ import annotations

import random
from typing import Any

from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import (
    Key,
    Metric,
    Point,
    Record,
    Series,
    Status,
    Stop,
    SweepMembership,
    overall_status,
)
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.statistics.prior import Prior

PLAN: dict[str, Any] = {
    "model": {"_target_": "perfexp.models.torchvision.Torchvision", "name": "resnet50"},
    "algorithm": {"_target_": "perfexp.convolution.default.Default", "name": "default"},
    "mode": {"name": "inference"},
    "precision": {"name": "fp32"},
    "execution": {"compile": None, "channels_last": False, "threads": 2},
    "percentiles": [50, 95, 99],
}
ENVIRONMENT: dict[str, Any] = {
    "device": {"kind": "cpu", "name": "Example CPU @ 2.00GHz", "cores": 2},
    "python": "3.11.7",
    "os": "Debian",
    "packages": {"torch": "2.11.0", "numpy": "2.3.0"},
    "git": {"commit": "0123abc", "dirty": True},
}


#: Processes of a machine on which they do not differ, so that an interval is that of the calls.
ALIKE = dict.fromkeys(
    ("device", "latency", "rate", "host-bound", "memory"), Prior(variance=1e-12, degrees=1e6)
)


class Builder:
    """Makes points, records and sweeps."""

    def samples(
        self, seconds: float, n: int = 80, noise: float = 0.01, warmup: int = 10, seed: int = 1
    ) -> list[float]:
        source = random.Random(seed)
        slow = [seconds * (1.5 - 0.05 * index) for index in range(warmup)]
        return slow + [seconds * (1 + noise * source.gauss(0, 1)) for _ in range(n)]

    def point(
        self,
        seconds: float = 0.0624,
        *,
        size: int | tuple[int, int] = 224,
        batch: int = 1,
        phase: str = "inference",
        precision: str = "fp32",
        replicate: int = 0,
        n: int = 80,
        noise: float = 0.01,
        kinds: tuple[str, ...] = ("latency",),
        **extra: Any,
    ) -> Point:
        key = Key(
            phase=phase,
            input_size=size if isinstance(size, tuple) else (size, size),
            batch_size=batch,
            precision=precision,
            replicate=replicate,
        )
        series = [
            Series(
                name=kind,
                samples=self.samples(
                    seconds * (1 + index), n, noise, seed=batch + key.pixels + index
                ),
                warmup=10,
                stop=Stop(reason="precision", target=0.01, achieved=0.005),
            )
            for index, kind in enumerate(kinds)
        ]
        memory = Metric(name="memory/peak_bytes", value=(512 + batch) * 2**20, unit="bytes")
        return Point(
            key=key,
            status=Status.OK,
            series=series + extra.pop("series", []),
            metrics=[memory, *extra.pop("metrics", [])],
            **extra,
        )

    def independent(self, *, n: int) -> Point:
        """Samples that leap to and fro, so that each is worth a whole one."""
        point = self.point(n=n)
        point.series[0].samples[10:] = [
            0.0624 * (1 + 0.01 * (-1) ** i + 1e-4 * (7 * i % n)) for i in range(n)
        ]
        return point

    def failed(
        self,
        status: Status = Status.OOM,
        *,
        size: int = 224,
        batch: int = 1,
        error: str = "no memory left",
        **key: Any,
    ) -> Point:
        found = Key(
            **{
                "phase": "inference",
                "precision": "fp32",
                "input_size": (size, size),
                "batch_size": batch,
                **key,
            }
        )
        return Point(key=found, status=status, error=error)

    def training(self, seconds: float = 0.2, **key: Any) -> Point:
        shares = {"data": 0.1, "forward": 0.3, "loss": 0.02, "backward": 0.5, "optimizer": 0.08}
        series = [
            Series(name=f"phase/{name}", samples=self.samples(seconds * share), warmup=10)
            for name, share in shares.items()
        ]
        metrics = [
            Metric(name="data_share", value=0.1, unit="1"),
            Metric(name="train/loss_last", value=0.6931, unit="1"),
            Metric(name="epoch_seconds", value=12.5, unit="seconds", estimated=True),
            Metric(name="accuracy", value=None, unit="1", reason="the labels are random"),
        ]
        return self.point(seconds, phase="train", series=series, metrics=metrics, **key)

    def first_prediction(self) -> Point:
        key = Key(phase="ttfp", input_size=(224, 224), batch_size=1, precision="fp32")
        parts = {
            "process": 0.1,
            "imports": 2.5,
            "context": 0.01,
            "weights": 0.4,
            "first_call": 0.29,
            "second_call": 0.06,
        }
        series = [Series(name=f"ttfp/{name}", samples=[seconds]) for name, seconds in parts.items()]
        return Point(key=key, status=Status.OK, series=series)

    def record(self, *points: Point, plan: dict[str, Any] | None = None, **extra: Any) -> Record:
        return Record(
            **{
                "uid": "0" * 32,
                "name": "resnet50-default-inference",
                "perfexp_version": "0.1.0",
                "status": overall_status(points),
                "started": "2026-01-01T10:00:00+00:00",
                "ended": "2026-01-01T10:05:00+00:00",
                "command": ["model=resnet50", "input_size=[224,256]"],
                "plan": PLAN | (plan or {}),
                "plan_hash": "f" * 64,
                "environment": ENVIRONMENT,
                "points": list(points),
                "priors": ALIKE,
                **extra,
            }
        )

    def sizes(self, *, failing: bool = False) -> Record:
        points = [self.point(0.01 * (size / 224) ** 2, size=size) for size in range(224, 513, 32)]
        points[3].doubts.append(
            Diagnostic(
                code="busy_host", message="load average 3.1 on 2 cores", help="end other work"
            )
        )
        if failing:
            points[-2] = self.failed(size=480)
            points[-1] = self.failed(
                Status.UNSUPPORTED, size=512, error="the model takes up to 500 pixels"
            )
        return self.record(*points, self.first_prediction())

    def batches(self, *, failing: bool = False) -> Record:
        points = [
            self.point(0.008 + 0.004 * batch, batch=batch)
            for batch in (1, 2, 4, 8, 16, 32, 64, 128)
        ]
        if failing:
            points[-1] = self.failed(batch=128)
        return self.record(*points)

    def sweep(
        self, axes: list[dict[str, str]], points: list[list[Point] | None]
    ) -> tuple[Sweep, list[Record]]:
        """A run for each combination; None for one that left no record."""
        sweep = Sweep(
            uid="s1", name="resnet50 sweep", started="2026-01-01T10:00:00+00:00", jobs=len(axes)
        )
        records = []
        for job, (values, known) in enumerate(zip(axes, points, strict=True)):
            status = overall_status(known) if known is not None else Status.FAILED
            error = None if known is not None else "the worker died"
            name = f"resnet50-{job}"
            child = SweepChild(
                job=job, name=name, directory=str(job), status=status, axes=values, error=error
            )
            sweep.children.append(child)
            if known is not None:
                membership = SweepMembership(uid="s1", job=job, axes=values)
                algorithm = {"algorithm": {"name": values.get("algorithm", "default")}}
                records.append(
                    self.record(
                        *known, plan=algorithm, sweep=membership, name=name, uid=f"{job:032x}"
                    )
                )
        return sweep, records
