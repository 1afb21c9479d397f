"""Control messages from the first rank to the others, over a connection per rank.

The `Leader` in rank 0 sends a line before each thing that all ranks do together; each `Follower`
reads lines and does the same. A call costs a single write of 5 bytes.

The connections are pipes on a single host, TCP between hosts. Over TCP the first rank listens at an
address of the launching node. Each other rank sends its number and the secret that the launchers
pass on. A connection without the secret is closed.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from perfexp.devices import Device
from perfexp.host import foreign
from perfexp.host.files import write_atomically
from perfexp.measuring.modes import Step
from perfexp.measuring.ranks import Burst, Place, ProcessGroup, Shareable
from perfexp.models import Session, Sharing
from perfexp.records.record import Key
from perfexp.timing.collecting import undisturbed

if TYPE_CHECKING:
    from perfexp.measuring.ranks.group import TorchGroup


#: A dying rank's connections break first; its pipe closes within this time.
_DYING_SECONDS = 0.5
#: Time for which a failed rank waits until the first rank fails the same way and records it.
_LINGER_SECONDS = 10.0

#: Messages without content. `alive` means that all devices are reserved, and ranks load the model.
_CALL, _FIRST, _CLOSE, _ALIVE = b"call\n", b"first\n", b"close\n", b"alive\n"
#: Answer of another host's first rank once its devices are reserved.
_RESERVED = b"."

#: Prepares a point in a following rank. The context has the step and the forward pass before the
#: first call.
Point = Callable[[Key], AbstractContextManager[tuple[Step, Callable[[], object]]]]
#: Limit on a whole greeting. Another program may connect and, for example, send nothing.
_GREETING_SECONDS = 5.0
#: Time for all ranks to connect, since some nodes import torch faster than others.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 300.0, 0.1


@dataclass(kw_only=True)
class Member:
    """A rank's session, device, process group and place."""

    session: Session
    device: Device
    group: TorchGroup
    place: Place

    def burst(self, step: Step, calls: int, sharing: Sharing) -> list[Burst]:
        """Make this rank's calls of a burst; return the results of all ranks.

        All ranks must call it, because it waits for them. See `ProcessGroup.burst`.

        Args:
            calls: number of calls. With `Sharing.alone` only rank 0 makes them.
        """
        device = self.device
        works = sharing is not Sharing.alone or self.place.number == 0
        with ExitStack() as stack:
            stack.enter_context(undisturbed())
            if isinstance(self.session, Shareable):
                stack.enter_context(self.session.sharing(sharing))
            device.synchronize()
            self.group.barrier()
            start, error = device.now_ns(), None
            try:
                for _ in range(calls if works else 0):
                    step.call()
                device.synchronize()
            except Exception as raised:
                if sharing not in (Sharing.nothing, Sharing.alone) or device.is_lost():
                    raise
                # the others only wait for this rank's result
                error = f"{type(raised).__name__}: {raised}"
            end = device.now_ns() if works else start
        results = self.group.gather((start, end, error))
        per_host = self.place.per_host
        bursts = []
        # each host has its own clock
        for first_rank in range(0, len(results), per_host):
            of_host = results[first_rank : first_rank + per_host]
            begin = min(start for start, _, _ in of_host)
            for start, end, why in of_host:
                bursts.append(Burst(start_ns=start - begin, end_ns=end - begin, error=why))
        return bursts


class Leader(ProcessGroup):
    """The first rank's `ProcessGroup`: sends a message before this rank does the same.

    A message to a rank that has ended raises `ConnectionError`.
    """

    def __init__(self, place: Place) -> None:
        self.size = place.size
        #: Descriptors of the connections to ranks 1, 2, …
        self._pipes = to_followers(place)
        #: Those to the first rank on each other host.
        self._other_hosts = self._pipes[place.per_host - 1 :: place.per_host]
        #: The present point's step without messages, for bursts.
        self._plain: Step | None = None
        self._member: Member | None = None

    def begin(self) -> None:
        """Start all ranks, now that this host's devices are reserved.

        Other hosts' devices are reserved first, host by host, so that two runs cannot block each
        other.
        """
        for descriptor in self._other_hosts:
            os.write(descriptor, _line("reserve", socket.gethostname()))
            if os.read(descriptor, 1) != _RESERVED:
                raise ConnectionResetError("a rank has left")
        self._send(_ALIVE)

    def works_with(self, member: Member) -> None:
        """Set this rank's session, device and group, once its model is loaded."""
        self._member = member

    def open(self, key: Key) -> None:
        self._send(_line("open", msgspec.to_builtins(key)))

    def close(self) -> None:
        self._send(_CLOSE)

    def first(self) -> None:
        self._send(_FIRST)

    def joined(self, step: Step) -> Step:
        """See `ProcessGroup`; a segment is announced by its index."""
        self._plain = step
        segments = tuple(
            (name, self._led(_line("call", index), part))
            for index, (name, part) in enumerate(step.segments)
        )
        return replace(step, call=self._led(_CALL, step.call), segments=segments)

    def burst(self, step: Step, calls: int, sharing: Sharing) -> Sequence[Burst]:
        """See `ProcessGroup`; in a burst there are no messages between calls."""
        assert self._plain is not None and self._member is not None
        self._send(_line("burst", {"calls": calls, "sharing": sharing.value}))
        return self._member.burst(self._plain, calls, sharing)

    def lost(self) -> bool:
        """See `ProcessGroup`; waits half a second for a dying rank."""
        time.sleep(_DYING_SECONDS)
        try:
            self._send(_ALIVE)
        except ConnectionError:
            return True
        # TCP accepts a message to a rank that closed its end; that end is then readable
        return bool(select.select(self._pipes, [], [], 0)[0])

    def end(self) -> None:
        """Close the connections, which ends the other ranks' loops."""
        for descriptor in self._pipes:
            os.close(descriptor)
        self._pipes = []

    def _led(self, message: bytes, call: Callable[[], object]) -> Callable[[], None]:
        """Return a function that sends a message to all ranks and then makes the call here."""
        pipes, write = self._pipes, os.write

        def led() -> None:
            """Send the message to all followers, then make the same call."""
            for descriptor in pipes:
                write(descriptor, message)
            call()

        return led

    def _send(self, message: bytes) -> None:
        """Send a message to all ranks."""
        for descriptor in self._pipes:
            os.write(descriptor, message)


class Follower:
    """The connection's end in a following rank; `worker.rank_process` reads it until it closes."""

    def __init__(self, place: Place) -> None:
        self._file = from_leader(place)

    def wait(self) -> bool:
        """Wait for the first rank's message that all devices are reserved.

        Return False if the first rank has left instead.
        """
        return next(self._messages(), None) is not None

    def host_of_first(self) -> str | None:
        """Wait until this host's devices must be reserved; return the first rank's host name.

        None if the first rank has left.
        """
        return next((content for _, content in self._messages()), None)

    def answer_reserved(self) -> None:
        """Report to the first rank that this host's devices are reserved."""
        os.write(self._file.fileno(), _RESERVED)

    def follow(self, point: Point, member: Member) -> None:
        """Make the calls in the first rank's messages until it closes the connection.

        Args:
            point: prepares a point's step.
            member: this rank, for bursts.
        """
        with ExitStack() as opened:
            for name, content in self._messages():
                if name == "open":
                    step, first = opened.enter_context(point(msgspec.convert(content, Key)))
                    opened.enter_context(undisturbed())
                elif name == "call":
                    call = step.call if content is None else step.segments[content][1]
                    call()
                elif name == "first":
                    first()
                elif name == "burst":
                    member.burst(step, content["calls"], Sharing(content["sharing"]))
                elif name == "close":
                    opened.close()

    def linger(self) -> None:
        """Wait for the first rank after an error.

        The first rank may be recording the same error and then ends this process.
        """
        end = time.monotonic() + _LINGER_SECONDS
        while (left := end - time.monotonic()) > 0 and select.select([self._file], [], [], left)[0]:
            if not os.read(self._file.fileno(), 65536):
                return

    def close(self) -> None:
        """Close the connection, so that the first rank notices that this rank has left."""
        self._file.close()

    def _messages(self) -> Iterator[tuple[str, Any]]:
        """Yield name and content of each message; content is None for messages without."""
        for line in self._file:
            name, _, content = line.rstrip(b"\n").partition(b" ")
            yield name.decode(), json.loads(content) if content else None


def _line(name: str, content: Any) -> bytes:
    """Return the line for a message with content, which becomes JSON."""
    return f"{name} {json.dumps(content)}\n".encode()


class Meeting(msgspec.Struct, kw_only=True, frozen=True):
    """Address where the first rank listens for ranks on all nodes, and their secret.

    It is a file in each node's rank folder; on a single host there is none.
    """

    host: str
    port: int
    secret: str

    def write(self, folder: Path) -> None:
        """Write it to this node's rank folder, which only the user can read."""
        write_atomically(_file(folder), msgspec.json.encode(self))


def pipe(folder: Path, number: int) -> Path:
    """Return the pipe's path for a rank on the same host."""
    return folder / f"messages-{number}"


def to_followers(place: Place) -> list[int]:
    """Wait for all ranks, and return the first rank's connections to them, in rank order.

    Returns:
        Descriptors to write to.

    Raises:
        TimeoutError: ranks on other hosts do not connect in time.
    """
    meeting = _meeting(place)
    if meeting is None:
        return [os.open(pipe(place.folder, number), os.O_WRONLY) for number in range(1, place.size)]
    connections: dict[int, int] = {}
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with socket.create_server((meeting.host, meeting.port), backlog=place.size) as server:
        while len(connections) < place.size - 1:
            try:
                server.settimeout(_seconds_left(deadline))
                connection = server.accept()[0]
            except TimeoutError as error:
                missing = sorted({*range(1, place.size)} - {*connections})
                raise TimeoutError(
                    f"ranks {missing} did not connect in {_PATIENCE_SECONDS:g} s"
                ) from error
            greeting_deadline = min(deadline, time.monotonic() + _GREETING_SECONDS)
            number = _receive_greeting(connection, meeting.secret, greeting_deadline)
            if number is None or number in connections or not 0 < number < place.size:
                connection.close()
                continue
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connections[number] = connection.detach()
    return [connections[number] for number in sorted(connections)]


def from_leader(place: Place) -> BinaryIO:
    """Return a following rank's connection from the first rank, once the first rank listens.

    Raises:
        OSError: the first rank does not listen in time.
    """
    meeting = _meeting(place)
    if meeting is None:
        return pipe(place.folder, place.number).open("rb")
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            connection = socket.create_connection(
                (meeting.host, meeting.port), timeout=_GREETING_SECONDS
            )
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)
    connection.sendall(_greeting(meeting.secret, place.number))
    connection.settimeout(None)
    return os.fdopen(connection.detach(), "rb")


def _meeting(place: Place) -> Meeting | None:
    """Read the meeting from the rank folder; None on a single host."""
    if not _file(place.folder).exists():
        return None
    return msgspec.json.decode(foreign.read_bytes(_file(place.folder)), type=Meeting)


def _file(folder: Path) -> Path:
    return folder / "meeting.json"


def _greeting(secret: str, number: int) -> bytes:
    """Return what a rank sends first; its length is the same for every rank."""
    return f"{secret} {number:8d}\n".encode()


def _seconds_left(deadline: float) -> float:
    """Return the seconds until a deadline, as a socket timeout.

    Raises:
        TimeoutError: the deadline has passed.
    """
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return seconds


def _receive_greeting(connection: socket.socket, secret: str, deadline: float) -> int | None:
    """Return the rank in a greeting; None without the secret or if incomplete at the deadline.

    Any program may connect, so nothing in the greeting is trusted.
    """
    length, received = len(_greeting(secret, 0)), b""
    try:
        while len(received) < length:
            connection.settimeout(_seconds_left(deadline))
            if not (data := connection.recv(length - len(received))):
                break
            received += data
        has_secret = hmac.compare_digest(received[: len(secret)], secret.encode())
        if has_secret:
            return int(received[len(secret) :])
        return None
    except (OSError, ValueError):
        return None
