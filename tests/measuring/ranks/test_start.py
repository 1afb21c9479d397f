"""Start: real processes by torch's elastic launcher, and what is told of how they end."""

import json
import os
import socket
import sys

import pytest

from perfexp.errors import UserError
from perfexp.measuring.ranks import start
from perfexp.records.messages import Events

RANK = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(next(a for a in sys.argv if a.startswith("--ranks=")).partition("=")[2])
number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def tell(**event):
    with open(folder / "events", "w") as pipe: print(json.dumps(event), file=pipe)
def leave(**error):
    pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"timestamp": 1.5, **error}))
"""


@pytest.fixture
def run():
    """Starts ranks; gives the exit code and the events that arrive at the worker's parent."""

    def started(script, size=2, port=None):
        receive, send = os.pipe()
        with os.fdopen(receive) as events:
            try:
                code = start.run(
                    [sys.executable, "-c", RANK + script], size=size, port=port, emit=Events(send)
                )
            finally:
                os.close(send)
            return code, list(map(json.loads, events))

    return started


@pytest.mark.slow
def test_events_are_passed_on_in_order_and_the_end_is_told(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = """
if number == 0:
    for index in range(50): tell(event="block", text=str(index))
else:
    assert os.environ["LOCAL_RANK"] == "1" and size == 2
"""
    code, told = run(script, port=port)
    assert code == 0
    assert told == [
        *({"event": "block", "text": str(index)} for index in range(50)),
        {"event": "finished"},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_named_and_the_others_end(run, victim):
    code, told = run(f"""
if number == {victim}: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
""")
    assert code == 1
    [failed] = told
    assert failed["event"] == "failed"
    assert failed["status"] == "killed"
    assert f"rank {victim} of 2 (process " in failed["message"]
    assert "SIGKILL" in failed["message"]


@pytest.mark.parametrize(
    ("codes", "told", "said"),
    [
        (
            {0: start.RANK_LOST, 1: -9},
            None,
            "rank 1 of 2 (process 101) was terminated by SIGKILL; the system may have",
        ),
        (
            {0: -15, 1: -9},
            None,
            "rank 1 of 2 (process 101) was terminated by SIGKILL; the system may have",
        ),
        (
            {0: -6, 1: -9},
            None,
            "rank 1 of 2 (process 101) was terminated by SIGKILL; the system may have",
        ),
        (
            {0: -6, 1: -6},
            None,
            "(process 100) was terminated by SIGABRT and rank 1 of 2 (process 101) was terminated by SIGABRT",
        ),
        (
            {0: -9, 1: 1},
            {"message": "rank 1 of 2: Connection closed", "status": "failed", "timestamp": 1},
            "rank 0 of 2 (process 100)",
        ),
        (
            {0: start.RANK_LOST, 1: 1},
            {"message": "rank 1 of 2: no room", "status": "oom", "timestamp": 1},
            "rank 1 of 2: no room",
        ),
        ({0: start.RANK_LOST, 1: 3}, None, "rank 1 of 2 ended with code 3; see details/run.log"),
        ({0: -15, 1: -15}, None, "SIGTERM and rank 1 of 2"),
        ({0: start.RANK_LOST}, None, "rank 0 of 2 ended with code 76"),
    ],
)
def test_the_cause_is_told_and_not_what_followed_from_it(codes, told, said):
    """The launcher ends the others by SIGTERM; the first rank leaves with a code of its own when it misses another."""
    ends = {
        rank: start.FailedRank(100 + rank, code, told if rank else None)
        for rank, code in codes.items()
    }
    heard = []
    code = start.report(ends, 2, lambda event, **details: heard.append((event, details)))
    [(event, details)] = heard
    assert (code, event) == (1, "failed")
    assert said in details["message"]


def test_the_first_of_two_errors_is_told():
    ends = {
        rank: start.FailedRank(
            rank, 1, {"message": f"error of {rank}", "status": "oom", "timestamp": 9.5 - rank}
        )
        for rank in (1, 2)
    }
    heard = []
    assert (
        start.report(
            {**ends, 0: start.FailedRank(0, start.RANK_LOST)},
            3,
            lambda _, **given: heard.append(given),
        )
        == 1
    )
    assert heard == [{"message": "error of 2", "status": "oom"}]


@pytest.mark.slow
def test_what_a_rank_says_of_its_own_error_is_told(run):
    code, told = run("""
if number == 1:
    leave(status="oom", message="rank 1 of 2: OutOfMemoryError: no room")
    sys.exit(1)
time.sleep(600)
""")
    assert code == 1
    assert told == [
        {"event": "failed", "message": "rank 1 of 2: OutOfMemoryError: no room", "status": "oom"}
    ]


@pytest.mark.slow
def test_a_code_without_a_word_is_told(run):
    code, told = run("""
if number == 1: sys.exit(3)
time.sleep(600)
""")
    assert code == 1
    assert told == [
        {"event": "failed", "message": "rank 1 of 2 ended with code 3; see details/run.log"}
    ]


@pytest.mark.slow
def test_a_refusal_of_the_first_rank_is_its_own(run):
    code, told = run("""
if number == 0:
    tell(event="refused", message="no such thing", exit_code=2)
    sys.exit(2)
time.sleep(600)
""")
    assert code == 2
    assert told == [{"event": "refused", "message": "no such thing", "exit_code": 2}]


@pytest.mark.slow
def test_ranks_out_of_step_after_a_point_are_no_failure(run):
    """The point is written down; another process measures what is left."""
    code, told = run(f"""
if number == 0: sys.exit({start.OUT_OF_STEP})
time.sleep(600)
""")
    assert (code, told) == (0, [{"event": "finished"}])


def test_a_port_in_use_is_refused_before_anything_starts(run):
    taken = socket.create_server(("127.0.0.1", 0))
    with (
        taken,
        pytest.raises(UserError, match=r"gpu\.port=\d+ can't be used: Address already in use"),
    ):
        run("sys.exit(9)", port=taken.getsockname()[1])
