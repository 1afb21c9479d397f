"""Orders: what the first rank tells the others to do, through a pipe to each; a call costs it one write of 5 bytes."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from perfexp.devices import Device
from perfexp.models import Session, Sharing
from perfexp.modes import Step
from perfexp.probes.timing import undisturbed
from perfexp.ranks import Place, Shareable, Stretch
from perfexp.records.record import Key

#: A rank that dies closes its pipe a moment after its connections, on which the others notice it first.
_DYING_SECONDS = 0.5
#: So long a rank that failed waits for the first one to fail likewise, and to write that down.
_LINGER_SECONDS = 10.0

_CALL, _FIRST, _CLOSE, _ALIVE = b"call\n", b"first\n", b"close\n", b"alive\n"


class Group(Protocol):
    """What torch.distributed does for the ranks (`perfexp.ranks.group`)."""

    def barrier(self) -> None:
        """Wait for all."""

    def gather(self, value: Any) -> list[Any]:
        """A small value of each rank, to all of them, in their order."""


@dataclass(kw_only=True)
class Worker:
    """What a rank makes its calls with.

    Attributes:
        session: the model on its device.
        device: likewise.
        group: of all ranks.
        number: of this one.
    """

    session: Session
    device: Device
    group: Group
    number: int

    def stretch(self, step: Step, calls: int, sharing: Sharing) -> list[Stretch]:
        """See `Crew.stretch`; to be called by all ranks."""
        session, device = self.session, self.device
        works = sharing is not Sharing.alone or self.number == 0
        with ExitStack() as stack:
            stack.enter_context(undisturbed())
            if isinstance(session, Shareable):
                stack.enter_context(session.sharing(sharing))
            device.synchronize()
            self.group.barrier()
            start, error = device.now_ns(), None
            try:
                for _ in range(calls if works else 0):
                    step.call()
                device.synchronize()
            except Exception as raised:
                if sharing is not Sharing.alone or device.is_lost():
                    raise
                error = f"{type(raised).__name__}: {raised}"  # the others wait for nothing but its word
            end = device.now_ns() if works else start
        found = self.group.gather((start, end, error))
        return [Stretch(start_ns=first, end_ns=last, error=why) for first, last, why in found]


class Leader:
    """The first rank's `Crew`.

    Args:
        place: of this process.
    """

    def __init__(self, place: Place) -> None:
        self.size = place.size
        self._pipes = [os.open(pipe(place.folder, number), os.O_WRONLY) for number in range(1, place.size)]
        self._plain: Step | None = None
        self._worker: Worker | None = None

    def begin(self) -> None:
        """The device is ours: all may begin to work."""
        self._order(_ALIVE)

    def works_with(self, worker: Worker) -> None:
        """Everything has been loaded.

        Args:
            worker: this rank's.
        """
        self._worker = worker

    def open(self, key: Key) -> None:
        """See `Crew`."""
        self._order(_line("open", msgspec.to_builtins(key)))

    def close(self) -> None:
        """See `Crew`."""
        self._order(_CLOSE)

    def first(self) -> None:
        """See `Crew`."""
        self._order(_FIRST)

    def joined(self, step: Step) -> Step:
        """See `Crew`."""
        self._plain = step
        return replace(
            step,
            call=self._led(_CALL, step.call),
            segments=tuple(
                (name, self._led(_line("segment", index), part)) for index, (name, part) in enumerate(step.segments)
            ),
        )

    def stretch(self, step: Step, calls: int, sharing: Sharing) -> Sequence[Stretch]:
        """See `Crew`."""
        assert self._plain is not None
        assert self._worker is not None
        self._order(_line("stretch", {"calls": calls, "sharing": sharing.value}))
        return self._worker.stretch(self._plain, calls, sharing)

    def lost(self) -> bool:
        """See `Crew`; waits half a second for one that is dying."""
        time.sleep(_DYING_SECONDS)
        try:
            self._order(_ALIVE)
        except BrokenPipeError:
            return True
        return False

    def end(self) -> None:
        """Nothing more is to be done: the others leave their loops."""
        for descriptor in self._pipes:
            os.close(descriptor)
        self._pipes = []

    def _led(self, order: bytes, call: Callable[[], object]) -> Callable[[], None]:
        pipes, write = self._pipes, os.write

        def led() -> None:
            for descriptor in pipes:
                write(descriptor, order)
            call()

        return led

    def _order(self, line: bytes) -> None:
        for descriptor in self._pipes:
            os.write(descriptor, line)


class Point(Protocol):
    """What a rank that follows does in a point."""

    def __call__(self, key: Key) -> AbstractContextManager[tuple[Step, Callable[[], object]]]:
        """The call of a point, and the forward pass that comes before its first.

        Args:
            key: of the point.
        """


class Follower:
    """Another rank's end of its pipe.

    Args:
        place: of this process.
    """

    def __init__(self, place: Place) -> None:
        self._file = pipe(place.folder, place.number).open("rb")

    def wait(self) -> bool:
        """Until the first rank begins; returns whether it does."""
        return next(self._orders(), None) is not None

    def follow(self, point: Point, worker: Worker) -> None:
        """Do what the first rank says until it has nothing more to say.

        Args:
            point: prepares a call.
            worker: makes it.
        """
        orders = self._orders()
        for order, content in orders:
            if order == "open":
                with point(msgspec.convert(content, Key)) as (step, first), undisturbed():
                    self._follow(orders, step, first, worker)

    def linger(self) -> None:
        """After an error: the first rank may have met the same and be writing it down; it ends this process then."""
        end = time.monotonic() + _LINGER_SECONDS
        while (left := end - time.monotonic()) > 0 and select.select([self._file], [], [], left)[0]:
            if not os.read(self._file.fileno(), 65536):
                return

    def close(self) -> None:
        """Nothing more is heard: the first rank learns that this one has left."""
        self._file.close()

    def _follow(
        self, orders: Iterator[tuple[str, Any]], step: Step, first: Callable[[], object], worker: Worker
    ) -> None:
        for order, content in orders:
            if order == "call":
                step.call()
            elif order == "segment":
                step.segments[content][1]()
            elif order == "first":
                first()
            elif order == "stretch":
                worker.stretch(step, content["calls"], Sharing(content["sharing"]))
            elif order == "close":
                return

    def _orders(self) -> Iterator[tuple[str, Any]]:
        for line in self._file:
            name, _, content = line.rstrip(b"\n").partition(b" ")
            yield name.decode(), json.loads(content) if content else None


def pipe(folder: Path, number: int) -> Path:
    """Where the pipe to a rank lies.

    Args:
        folder: of the ranks.
        number: of the rank.
    """
    return folder / f"orders-{number}"


def _line(name: str, content: Any) -> bytes:
    return f"{name} {json.dumps(content)}\n".encode()
