"""Control messages: what the first rank calls, all others call in its order, and none goes on without the others."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from perfexp.measuring.modes import State, Step
from perfexp.measuring.ranks import Place, ProcessGroup, control_messages
from perfexp.measuring.ranks.control_messages import Follower, Leader, Meeting, Member, pipe
from perfexp.models import Sharing
from perfexp.records.record import Key

KEY = Key(phase="train", input_size=(8, 6), batch_size=3, precision="fp32")
ANOTHER = Key(phase="inference", input_size=(16, 6), batch_size=1, precision="fp32")


class Clock:
    """A device whose clock the test sets."""

    def __init__(self, begin_ns=0, call_ns=1):
        self.now, self.call_ns, self.waits = begin_ns, call_ns, 0

    def now_ns(self):
        return self.now

    def synchronize(self):
        self.waits += 1


class Group:
    """Ranks that are threads of this process."""

    def __init__(self, size):
        self.all = threading.Barrier(size, timeout=30)
        self.values = [None] * size

    def of(self, number):
        group = self

        class Member:
            def barrier(self):
                group.all.wait()

            def gather(self, value):
                group.values[number] = value
                group.all.wait()
                found = list(group.values)
                group.all.wait()
                return found

        return Member()


class Session:
    """Says what it shares."""

    def __init__(self, log):
        self.log = log

    def share(self, settings):
        return {}

    @contextmanager
    def sharing(self, what):
        self.log.append(f"sharing {what}")
        yield


def step_of(log, clock):
    def say(name):
        def part():
            log.append(name)
            clock.now += clock.call_ns

        return part

    segments = (("data", say("data")), ("forward", say("forward")))
    return Step(
        call=say("call"),
        segments=segments,
        active=None,
        batch_size=3,
        state=State(source=lambda: None),
        trains=True,
    )


def meet(folder):
    """Have the ranks of a folder meet by TCP; gives the address of the first one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    Meeting(host="127.0.0.1", port=port, secret="s" * 32).write(folder)
    return "127.0.0.1", port


class Ranks(NamedTuple):
    """The first rank's leader and step, the function that ends all, and the number of ranks on a host."""

    leader: Leader
    step: Step
    end: Callable
    per_host: int


@pytest.fixture(params=[3, 1], ids=["one host", "three hosts"])
def ranks(request, tmp_path):
    """Three ranks: the first one's leader and step, what each did, and a function that ends them."""
    size, logs, failed = 3, [[], [], []], []
    if request.param == 1:
        meet(tmp_path)
    clocks = [Clock(begin_ns=10 * number, call_ns=1 + number) for number in range(size)]
    group = Group(size)
    for number in range(1, size):
        os.mkfifo(pipe(tmp_path, number))

    def place(number):
        return Place(number=number, size=size, folder=tmp_path, per_host=request.param)

    def member(number):
        session = Session(logs[number])
        return Member(
            session=session, device=clocks[number], group=group.of(number), place=place(number)
        )

    def follow(number):
        follower = Follower(place(number))
        try:
            if place(number).leads_other_host and follower.host_of_first() == socket.gethostname():
                follower.answer_reserved()
            if not follower.wait():
                logs[number].append("not begun")
                return

            @contextmanager
            def point(key):
                logs[number].append(str(key))
                yield step_of(logs[number], clocks[number]), lambda: logs[number].append("first")
                logs[number].append("closed")

            follower.follow(point, member(number))
        except BaseException as error:  # of a thread nobody would see it
            failed.append(error)
        finally:
            follower.close()

    threads = [
        threading.Thread(target=follow, args=[number], daemon=True) for number in range(1, size)
    ]
    for thread in threads:
        thread.start()
    leader = Leader(place(0))
    leader.works_with(member(0))

    def end():
        leader.end()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert not failed
        return logs

    yield Ranks(leader, step_of(logs[0], clocks[0]), end, request.param)
    leader.end()


def test_all_make_the_same_calls_in_the_same_order(ranks):
    leader, plain, end, _ = ranks
    leader.begin()
    leader.open(KEY)
    step = leader.joined(plain)
    leader.first()
    step.call()
    for _ in range(3):
        for _, part in step.segments:
            part()
    step.call()
    leader.close()
    leader.open(ANOTHER)
    leader.joined(plain).call()
    leader.close()
    own, second, third = end()
    assert second == third
    calls = ["call", *["data", "forward"] * 3, "call"]
    assert own == [*calls, "call"]
    assert second == [str(KEY), "first", *calls, "closed", str(ANOTHER), "call", "closed"]


def test_burst_runs_without_messages_and_all_ranks_report_it(ranks):
    leader, plain, end, _ = ranks
    leader.begin()
    leader.open(KEY)
    step = leader.joined(plain)
    together = leader.burst(step, 4, Sharing.all)
    apart = leader.burst(step, 2, Sharing.no_gradients)
    alone = leader.burst(step, 5, Sharing.alone)
    leader.close()
    own, second, third = end()
    begins = [
        10 * number * (ranks.per_host == 3) for number in range(3)
    ]  # hosts have clocks of their own
    spans = [(begin, begin + length) for begin, length in zip(begins, (4, 8, 12), strict=True)]
    assert [(each.start_ns, each.end_ns) for each in together] == spans
    assert [each.end_ns - each.start_ns for each in apart] == [2, 4, 6]
    assert [each.end_ns - each.start_ns for each in alone] == [5, 0, 0], (
        "only the first one works alone"
    )
    kinds = ["sharing all", *["call"] * 4, "sharing no_gradients", *["call"] * 2, "sharing alone"]
    assert own == [*kinds, *["call"] * 5]
    assert second == third == [str(KEY), *kinds, "closed"]


def test_ranks_leave_when_the_first_one_does_not_begin(ranks):
    leader, _, end, _ = ranks
    assert end()[1:] == [["not begun"], ["not begun"]]
    assert leader.size == 3


def test_a_rank_that_is_no_more_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("perfexp.measuring.ranks.control_messages._DYING_SECONDS", 0.0)
    path = pipe(tmp_path, 1)
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    leader = Leader(Place(number=0, size=2, folder=tmp_path, per_host=2))
    assert not leader.lost()
    os.close(reader)
    assert leader.lost()


def test_strangers_are_refused_and_a_lost_remote_rank_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("perfexp.measuring.ranks.control_messages._DYING_SECONDS", 0.05)
    address, found = meet(tmp_path), []
    leading = threading.Thread(
        target=lambda: found.append(Leader(Place(number=0, size=2, folder=tmp_path, per_host=1))),
        daemon=True,
    )
    leading.start()
    for greeting in (
        b"x" * 32 + b"        1\n",
        b"s" * 32 + b"        7\n",
        b"s" * 32 + b" nonsense\n",
        b"",
    ):
        while True:
            try:
                stranger = socket.create_connection(address)
                break
            except ConnectionRefusedError:  # the first rank does not listen yet
                continue
        with stranger:
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    follower = Follower(Place(number=1, size=2, folder=tmp_path, per_host=1))
    leading.join(30)
    [leader] = found
    assert not leader.lost()
    follower.close()
    assert leader.lost()
    leader.end()


def test_slow_greeting_is_abandoned_at_its_deadline(monkeypatch):
    class Slow:
        now = 0.0

        def settimeout(self, seconds):
            self.limit = seconds

        def recv(self, length):
            seconds = min(4.9, self.limit)
            self.now += seconds
            if seconds < 4.9:
                raise TimeoutError
            return b"s"

    slow = Slow()
    monkeypatch.setattr(control_messages.time, "monotonic", lambda: slow.now)
    assert control_messages._receive_greeting(slow, "s" * 32, 5.0) is None
    assert slow.now == 5.0


def test_ranks_that_never_connect_end_the_first_one(tmp_path, monkeypatch):
    monkeypatch.setattr(control_messages, "_PATIENCE_SECONDS", 0.0)
    meet(tmp_path)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not connect in 0 s"):
        Leader(Place(number=0, size=3, folder=tmp_path, per_host=1))


def test_a_rank_that_failed_waits_for_the_first_to_end(tmp_path):
    """It reads what still comes, and leaves at the end of the pipe."""
    path = pipe(tmp_path, 1)
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    follower = Follower(Place(number=1, size=2, folder=tmp_path, per_host=2))
    os.write(writer, b"call\ncall\n")
    thread = threading.Thread(target=follower.linger, daemon=True)
    thread.start()
    os.close(writer)
    thread.join(30)
    follower.close()
    assert not thread.is_alive()


def test_one_alone_has_nobody_to_tell():
    step = step_of([], Clock())
    leader = ProcessGroup()
    assert leader.joined(step) is step
    assert not leader.lost()
    with pytest.raises(ValueError, match="several ranks"):
        leader.burst(step, 1, Sharing.all)
