"""Connections from the first rank to the others: pipes on a single host, TCP between hosts.

`control_messages` sends its messages over them. Over TCP the first rank listens at an address of
the launching node. Each other rank sends its number and the secret that the launchers pass on. A
connection without the secret is closed.
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from perfexp.host import foreign
from perfexp.host.files import write_atomically
from perfexp.measuring.ranks import Place

#: Limit on a whole greeting. Another program may connect and, for example, send nothing.
_GREETING_SECONDS = 5.0
#: Time for all ranks to connect, since some nodes import torch faster than others.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 300.0, 0.1


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
