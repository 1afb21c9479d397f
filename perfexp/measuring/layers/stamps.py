"""Stamps: layer times on a synchronous device, from consecutive host clock readings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import itemgetter

import msgspec
import numpy as np
import torch

from perfexp.cost.tape import nodes_behind
from perfexp.devices import Device
from perfexp.measuring.layers import Key, LayerTimes, Pass, TimeSource
from perfexp.measuring.layers.attribution import in_no_module
from perfexp.measuring.layers.closure import close
from perfexp.measuring.layers.events import RangeMark, Scope
from perfexp.measuring.layers.marking import Marker, Opaque, marking, outline_of
from perfexp.measuring.layers.partition import CallTimes, Spent
from perfexp.measuring.layers.table import times_of
from perfexp.measuring.modes import Step
from perfexp.timing.collecting import undisturbed

#: Default number of calls with times for every row.
CALLS = 10


class Stamps:
    """Credits the time between two clock readings to the current row.

    See `measuring.layers.marking.Watch`. The marker's own work lies between two readings and is
    counted separately. The backward pass is followed from node to node in autograd's graph. A node
    belongs to the row that was current when the node was made. Its time ends when the next node
    begins, so it includes autograd's overhead.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.spent: dict[Key, int] = {}
        self.own_ns = 0
        self._now = now_ns
        self._last = 0
        self._rows: list[Key] = []
        # autograd's number for the next node when a row became current, and the row, in order
        self._made_in: list[tuple[int, Key]] = []

    def start(self) -> None:
        """Begin a call; time before it is the marker's own work."""
        self.spent, self.own_ns, self._rows, self._made_in = {}, 0, [], []
        self._last = self._now()

    def begin_overhead(self) -> None:
        now, row = self._now(), self._row
        self.spent[row] = self.spent.get(row, 0) + now - self._last
        self._last = now

    def end_overhead(self) -> None:
        now = self._now()
        self.own_ns += now - self._last
        self._last = now

    @contextmanager
    def around(self, mark: RangeMark | None) -> Iterator[None]:
        self._rows.append(self._key(mark) if mark else self._row)
        self._note()
        self.end_overhead()
        try:
            yield
        finally:
            self.begin_overhead()
            self._rows.pop()
            self._note()

    @contextmanager
    def following(self, loss: torch.Tensor) -> Iterator[None]:
        """Follow the backward pass from a loss while entered."""
        with ExitStack() as stack:
            for node in nodes_behind(loss):
                stack.callback(node.register_prehook(self._before(node)).remove)
            yield

    @property
    def _row(self) -> Key:
        return self._rows[-1] if self._rows else in_no_module(None)

    def _key(self, mark: RangeMark) -> Key:
        if mark.scope is Scope.phase:
            return in_no_module(mark.kind)
        outer = self._row
        which = Pass.backward if outer.which is Pass.backward else Pass.forward
        if mark.scope is Scope.operation:
            return Key(
                path=outer.path, call=outer.call, operation=mark.number, kind=mark.kind, which=which
            )
        return Key(path=mark.path, call=mark.number, operation=None, kind=mark.kind, which=which)

    def _note(self) -> None:
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._made_in.append((number, self._row))

    def _before(self, node: torch.autograd.graph.Node) -> Callable[[object], None]:
        place = bisect_right(self._made_in, node._sequence_nr(), key=itemgetter(0)) - 1
        row = self._made_in[place][1] if place >= 0 else in_no_module(None)
        key = msgspec.structs.replace(row, which=Pass.backward)

        def hook(_: object) -> None:
            self.begin_overhead()
            self._rows[-1] = key
            self.end_overhead()

        return hook


def stamp_layers(
    step: Step,
    model: torch.nn.Module,
    device: Device,
    *,
    clean_seconds: float | None,
    calls: int = CALLS,
) -> LayerTimes:
    """Return the time of every row of a step on a synchronous device, or why there are none.

    Args:
        clean_seconds: `latency` of a call without stamps, or None.
    """
    stamps = Stamps(device.now_ns)
    taken: list[CallTimes] = []
    own: list[int] = []
    try:
        with step.active():
            outline = outline_of(lambda: [part() for _, part in step.segments], model)
            with undisturbed(), marking(model, outline, stamps) as marker:
                for number in range(calls + 1):
                    no_backward = _stamped_call(step, marker, stamps)
                    rows = {key: Spent(busy_ns=ns) for key, ns in stamps.spent.items()}
                    taken.append(
                        CallTimes(number, sum(stamps.spent.values()), rows, {}, starved=False)
                    )
                    own.append(stamps.own_ns)
                if marker.strayed:
                    raise Opaque(
                        f"the model does not take the same way in each call: {marker.strayed}"
                    )
    except Opaque as why:
        return LayerTimes(reason=str(why))
    times = times_of(
        taken[1:], TimeSource.stamps
    )  # the first call still fills the marker's own caches
    times.own_seconds = float(np.median(own[1:])) * 1e-9
    times.no_backward = no_backward
    return close(times, clean_seconds)


def _stamped_call(step: Step, marker: Marker, stamps: Stamps) -> str | None:
    """Make a call with stamps.

    Returns:
        Why its backward pass was not followed; None if it was followed or there is none.
    """
    marker.restart()
    stamps.start()
    no_backward = None
    for name, part in step.segments:
        with ExitStack() as stack:
            if name == "backward":
                loss = step.state.loss
                if isinstance(loss, torch.Tensor) and loss.grad_fn is not None:
                    stack.enter_context(stamps.following(loss))
                else:
                    no_backward = "the step does not store a loss with a graph"
            with stamps.around(RangeMark(Scope.phase, kind=name)):
                part()
    return no_backward
