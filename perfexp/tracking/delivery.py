"""Delivery: one replay and where it goes, as it passes from the process that measures to the one that sends."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import msgspec

from perfexp.errors import PerfexpError
from perfexp.tracking.replay import Replay


class TrackingFailed(PerfexpError):
    """A record could not be sent; it is on disk and can be sent again."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One replay and where it goes.

    Attributes:
        uri: tracking store, from `store_uri`.
        experiment: name of the experiment.
        artifacts: URI of the folder for the artifacts of a new experiment; None where the server decides.
        request_timeout_seconds: limit of one request to a server, which is tried twice.
        deadline: end of the wait for other processes, on the clock `time.monotonic`.
        content: the replay.
    """

    uri: str
    experiment: str
    artifacts: str | None
    request_timeout_seconds: int
    deadline: float
    content: Replay

    def to_line(self) -> bytes:
        """One line of JSON, for another process of this machine."""
        return json.dumps(asdict(self), default=lambda path: str(path.absolute())).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Delivery:
        """The reverse of `to_line`."""
        return msgspec.convert(json.loads(line), cls, dec_hook=lambda kind, value: kind(value))
