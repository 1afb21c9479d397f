"""Judge of two callables: which one is faster, and whether it honestly computes the same.

Each side runs in processes of its own. One more process, the referee, computes the left side again
and compares. This process has the clock that confirms theirs: no code of either side can reach it.
"""

from __future__ import annotations

import json
import math
import operator
import os
import random
import secrets
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil

from perfexp.comparison.document import Verdict
from perfexp.errors import PerfexpError, UserError, did_you_mean
from perfexp.host import fork_server
from perfexp.host.installation import python_command
from perfexp.records import units
from perfexp.statistics import sequential
from perfexp.statistics.estimators import Interval
from perfexp.statistics.ratios import LogRatio

_SIDE = "perfexp.measuring.callable_side"
#: Smallest number of pairs of processes, and the used share of the sequential level: equal sides
#: are FASTER or SLOWER in at most 1 % of comparisons. Eight pairs of any symmetric distribution
#: have one sign in 1 %.
_LEAST_PAIRS, _LEVEL_SHARE = 8, 0.2
#: Checked and warm-up calls of each shape.
_CHECKED, _WARM_CALLS = 4, 3
#: Blocks of a pair, seconds of a block, and its smallest and largest number of inputs.
_BLOCKS, _BLOCK_SECONDS, _LEAST_INPUTS, _MOST_INPUTS = 6, 0.05, 4, 40
#: Longest wait for an answer, in seconds.
_SILENCE_SECONDS = 600.0
#: Time around the right side's calls that the judge's clock may show beyond the left's: shares of
#: the calls' own time and of the left's time around its calls. Up to half of the blocks exceed it.
_TIMED_SHARE, _UNTIMED_SHARE, _UNEXPLAINED_SHARE = 0.2, 0.05, 0.5
#: Factor between calls with new and with repeated contents that shows a cache, if three quarters of
#: the calls exceed it.
_CACHE_FACTOR = 1.5
#: Largest share of a call that work after it may take, and an allowance in seconds.
_TAIL_SHARE, _TAIL_SECONDS = 0.2, 3e-5
#: How much faster than copying as many bytes a call can be.
_CEILING_FACTOR = 4.0
_WORDS = {Verdict.BETTER: "FASTER", Verdict.WORSE: "SLOWER"}

Seconds = dict[str, list[float]]


class CallableComparison(msgspec.Struct, kw_only=True, frozen=True):
    """Result of a comparison of two callables.

    Attributes:
        device: product name of the device that computed.
        verdict: on the right side; `not comparable` if a side was refused.
        word: verdict as reports print it, such as FASTER.
        seconds: time of a call by side, the geometric mean over shapes and processes.
        ratio: right over left, with an interval at the level of the last look; None without a
            verdict on the time.
        pairs: number of pairs of processes.
        reason: why a side was refused; None if neither was.
        notes: facts that qualify the verdict.
    """

    left: str
    right: str
    device: str
    verdict: Verdict
    word: str
    seconds: dict[str, float]
    ratio: Interval | None
    pairs: int
    reason: str | None
    notes: tuple[str, ...]


def lines(compared: CallableComparison) -> list[str]:
    """Return a comparison for readers: both times, the ratio, the verdict with its reason."""
    lines_of_sides = []
    for side, target in (("left", compared.left), ("right", compared.right)):
        time_of_call = ""
        if seconds := compared.seconds.get(side):
            time_of_call = f"  {units.format_seconds(seconds)}"
        lines_of_sides.append(f"{side:5}  {target}{time_of_call}")
    verdict = f"right is {compared.word}"
    if compared.ratio:
        interval = compared.ratio
        verdict += (
            f": right/left {interval.value:.3f}, {interval.low:.3f} to {interval.high:.3f}"
            f" ({units.counted(compared.pairs, 'pair')} of processes, {compared.device})"
        )
    if compared.reason:
        verdict += f": {compared.reason}"
    return [*lines_of_sides, verdict, *(f"note: {note}" for note in compared.notes)]


class _Refused(PerfexpError):
    """A side fails, or does something else than compute; the message names it."""


class _Process:
    """A process of one side, stopped except while it answers.

    Args:
        name: `left` or `right`.
        arguments: its function, the maker of inputs, and a folder.

    Attributes:
        facts: what `Side.describe` returns.
    """

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        self._log = Path(arguments[2]) / f"{secrets.token_hex(8)}.log"
        with theirs, self._log.open("wb") as log:
            self._process = _started(arguments, log.fileno(), theirs.fileno())
        self._connection = Connection(ours.detach())
        self.facts: dict[str, Any] = {}

    def ask(self, question: str, **arguments: Any) -> Any:
        """Return the answer to a question.

        Raises:
            UserError: a function does not exist.
            _Refused: the callable failed or replaced functions.
        """
        self._signal(signal.SIGCONT)
        begun = time.perf_counter()
        try:
            self._connection.send_bytes(json.dumps([question, arguments]).encode())
            if not self._connection.poll(_SILENCE_SECONDS):
                raise _Refused(f"{self.name} did not return in {_SILENCE_SECONDS:.0f} s")
            reply = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            lines = self._log.read_text(errors="replace").splitlines()
            raise _Refused(f"{self.name} ended its process: {' '.join(lines[-1:])}") from error
        seconds = time.perf_counter() - begun
        self._signal(signal.SIGSTOP)
        if reply.get("exit_code") == UserError.exit_code:
            raise UserError(reply["error"])
        if "error" in reply:
            raise _Refused(f"{self.name}: {reply['error']}")
        answer = reply["answer"]
        if question == "calls":
            if answer["changed"]:
                raise _Refused(f"{self.name} replaces {', '.join(answer['changed'][:3])}")
            answer["elapsed"] = seconds
        return answer

    def end(self) -> None:
        """End the process and its descendants."""
        self._signal(signal.SIGKILL)
        self._process.wait(_SILENCE_SECONDS)
        self._connection.close()

    def _signal(self, number: int) -> None:
        """Send a signal to the process, its group and its descendants."""
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            os.killpg(self._process.pid, number)
            # those in sessions of their own
            for descendant in psutil.Process(self._process.pid).children(recursive=True):
                descendant.send_signal(number)


def _started(
    arguments: Sequence[str], log: int, events: int
) -> subprocess.Popen[bytes] | fork_server.ForkedProcess:
    """Start a side's process: forked if possible, which saves the import of torch.

    Args:
        log: file descriptor for its output.
        events: file descriptor for its answers.
    """
    try:
        return fork_server.fork(_SIDE, arguments, ["torch", _SIDE], log=log, events=events)
    except fork_server.Unforkable:
        descriptor_options = [f"--events-fd={events}", f"--parent={os.getpid()}"]
        command = python_command(_SIDE, *arguments, *descriptor_options)
        return subprocess.Popen(
            command, stdout=log, stderr=log, pass_fds=[events], start_new_session=True
        )


def compare_callables(
    left: str,
    right: str,
    make_inputs: str,
    *,
    margin: float = 0.01,
    max_seconds: float = 600.0,
    rtol: float | None = None,
    atol: float | None = None,
) -> CallableComparison:
    """Compare two functions of tensors: is the right one faster, and does it compute the same?

    Functions are named `FILE.py:NAME` or `MODULE:NAME`. `make_inputs(seed)` returns the arguments
    as a tuple, on the device that computes. If its module has a list `shapes`, each of them is
    passed as a second argument.

    >>> from pathlib import Path
    >>> _ = Path("inputs.py").write_text("from torch import randn; make = lambda seed: randn(64)")
    >>> compared = compare_callables("torch:relu", "torch:sigmoid", "inputs.py:make")
    >>> compared.word, compared.pairs
    ('NOT COMPARABLE', 0)

    Args:
        margin: largest relative difference that counts as the same.
        max_seconds: time after which no further pair of processes begins.
        rtol: relative tolerance of outputs; by default it follows from the errors of the left side.
        atol: absolute tolerance of outputs.

    Raises:
        UserError: a function does not exist.
    """
    with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
        tolerances = {"rtol": rtol, "atol": atol}
        judge = _Judge((left, right, make_inputs), folder, tolerances)
        return judge.decide(margin, max_seconds)


class _Judge:
    """Judges two callables.

    Args:
        places: left side, right side, and maker of inputs, as the user names them.
        folder: empty folder for logs and stored results.
        tolerances: `rtol` and `atol`.
    """

    def __init__(
        self,
        places: tuple[str, str, str],
        folder: str,
        tolerances: Mapping[str, float | None],
    ) -> None:
        self._places, self._tolerances = places, tolerances
        left, right, maker = map(_resolved, places)
        self._arguments = {"left": [left, maker, folder], "right": [right, maker, folder]}
        self._shapes, self._notes = range(0), list[str]()
        #: Times of calls with new contents over times of the same calls repeated.
        self._repeated: Seconds = {"left": [], "right": []}
        #: The sides' times of each block, and the judge's time of the block without them.
        self._timed: Seconds = {"left": [], "right": []}
        self._untimed: Seconds = {"left": [], "right": []}
        #: Medians of each block: a call's time, and the time of work after it.
        self._medians: Seconds = {"left": [], "right": []}
        self._tails: Seconds = {"left": [], "right": []}

    def decide(self, margin: float, max_seconds: float) -> CallableComparison:
        """Measure pairs of processes until a verdict, a refusal or the time limit."""
        deadline = time.monotonic() + max_seconds
        pairs, reason = list[dict[str, float]](), None
        verdict, ratio = Verdict.UNDECIDED, None
        with self._running("left") as referee:
            self._referee = referee
            self._shapes = range(referee.facts["shapes"])
            try:
                while verdict is Verdict.UNDECIDED and len(pairs) < sequential.MOST:
                    if pairs and time.monotonic() > deadline:
                        break
                    pairs.append(self._pair(is_first=not pairs))
                    if len(pairs) >= _LEAST_PAIRS:
                        verdict, ratio = _judged(pairs, margin)
                if verdict is Verdict.BETTER:
                    self._check_times()
            except _Refused as refused:
                verdict, reason, ratio = Verdict.NOT_COMPARABLE, str(refused), None
        seconds = {}
        for name in self._arguments if ratio else ():
            seconds[name] = statistics.geometric_mean(pair[name] for pair in pairs)
        return CallableComparison(
            left=self._places[0],
            right=self._places[1],
            device=referee.facts["device"],
            verdict=verdict,
            word=_WORDS.get(verdict, verdict.upper()),
            seconds=seconds,
            ratio=ratio,
            pairs=len(pairs),
            reason=reason,
            notes=tuple(self._notes),
        )

    def _pair(self, *, is_first: bool) -> dict[str, float]:
        """Return the time of a call by side, in seconds, from a new process of each.

        It is the geometric mean over the shapes.
        """
        medians: Seconds = {"left": [], "right": []}
        with self._running("left") as left, self._running("right") as right:
            if is_first:
                self._check_origins(left.facts, right.facts)
                for side, shape in product((left, right), self._shapes):
                    self._calls(side, shape, _seeds(_CHECKED), check=True)
            for shape in self._shapes:
                seconds = self._blocks([left, right], shape)
                for name, samples in seconds.items():
                    medians[name].append(statistics.median(samples))
                if is_first:
                    ceiling_seconds = left.ask("ceiling", shape=shape) / _CEILING_FACTOR
                    _check_ceiling(ceiling_seconds, medians["left"][-1], medians["right"][-1])
        self._check_repeated()
        return {
            name: statistics.geometric_mean(samples_of_side)
            for name, samples_of_side in medians.items()
        }

    def _blocks(self, sides: list[_Process], shape: int) -> Seconds:
        """Return the times of calls by side, in blocks in random order.

        All inputs are new, and each is made a second time for a call that shows a cache.
        """
        seconds: Seconds = {"left": [], "right": []}
        counts = [float(_MOST_INPUTS)]
        for side in sides:
            for _ in range(2):  # the first calls may compile
                warm = self._calls(side, shape, _seeds(_WARM_CALLS))
            counts.append(_BLOCK_SECONDS / warm["elapsed"] * _WARM_CALLS / 2)
        for _ in range(_BLOCKS):
            seeds = _seeds(max(_LEAST_INPUTS, int(min(counts))))
            random.shuffle(sides)
            for side in sides:
                # the first call finds cold caches
                twice = [seeds[0], *(seed for seed in seeds[1:] for _ in range(2))]
                answer = self._calls(side, shape, twice)
                seconds_of_new, seconds_repeated = answer["seconds"][1::2], answer["seconds"][2::2]
                seconds[side.name] += seconds_of_new
                self._repeated[side.name] += map(operator.truediv, seconds_of_new, seconds_repeated)
                self._timed[side.name].append(sum(answer["seconds"]))
                self._medians[side.name].append(statistics.median(answer["seconds"]))
                self._tails[side.name].append(statistics.median(answer["tails"]))
                untimed_seconds = answer["elapsed"] - sum(answer["seconds"])
                self._untimed[side.name].append(untimed_seconds)
        return seconds

    def _calls(
        self, side: _Process, shape: int, seeds: Sequence[int], *, check: bool = False
    ) -> Any:
        """Let a side make calls, and have the stored results verified."""
        answer = side.ask("calls", seeds=seeds, shape=shape, check=check)
        stored = answer["stored"]
        reason = self._referee.ask("verify", stored=stored, shape=shape, **self._tolerances)
        if reason:
            hint = "; make(seed) or the function depends on more than the seed"
            raise _Refused(f"{side.name}: {reason}{hint if side.name == 'left' else ''}")
        return answer

    def _check_origins(self, left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
        """Note or refuse that the right side is made of the left one."""
        left_place, right_place = (self._arguments[name][0] for name in ("left", "right"))
        if left_place == right_place:
            self._notes.append("both sides are the same function")
        elif left["origin"] == right["origin"]:
            raise _Refused("right is the left side's function under another name")
        elif (file := left_place.rpartition(":")[0]) in right["files"]:
            self._notes.append(f"right imports {Path(file).name}, the left side's file")

    def _check_repeated(self) -> None:
        """Refuse a right side that is faster if contents are repeated, unless the left is, too."""
        left, right = (statistics.quantiles(ratios)[0] for ratios in self._repeated.values())
        if right > max(_CACHE_FACTOR, _CACHE_FACTOR * left):
            raise _Refused(
                f"right caches results: new contents take {right:.1f} times as long as repeated"
            )

    def _check_times(self) -> None:
        """Refuse a right side that works after it has returned, or changes its times.

        Around the calls of the latter, the judge's clock shows more time than around the left's.
        """
        left_tail, right_tail = map(statistics.median, self._tails.values())
        call_seconds = statistics.median(self._medians["right"])
        usual_tail = _TAIL_SHARE * call_seconds + _TAIL_SECONDS + 2 * max(0.0, left_tail)
        if right_tail > usual_tail:
            raise _Refused("right works after it has returned")
        unexplained = 0
        for timed, untimed, usual in zip(
            self._timed["right"], self._untimed["right"], self._untimed["left"], strict=True
        ):
            unexplained += untimed - usual > _TIMED_SHARE * timed + _UNTIMED_SHARE * usual
        if unexplained > _UNEXPLAINED_SHARE * len(self._timed["right"]):
            raise _Refused(
                "right takes longer by the judge's clock than by its own: it changes times"
            )

    @contextmanager
    def _running(self, name: str) -> Iterator[_Process]:
        """Yield a side's process while it runs, after it described itself.

        Args:
            name: `left` or `right`.
        """
        process = _Process(name, self._arguments[name])
        try:
            process.facts = process.ask("describe")
            yield process
        finally:
            process.end()


def _judged(pairs: Sequence[Mapping[str, float]], margin: float) -> tuple[Verdict, Interval]:
    """Return the verdict and the ratio right over left, with its interval.

    Each pair of processes counts as one observation.
    """
    logs = [math.log(pair["right"] / pair["left"]) for pair in pairs]
    count, level = len(logs), _LEVEL_SHARE * sequential.level(len(logs))
    error = statistics.stdev(logs) / math.sqrt(count)
    ratio = LogRatio(value=statistics.fmean(logs), error=error, degrees=count - 1)
    verdict = Verdict.UNDECIDED
    if ratio.p_beyond(margin) <= level:
        verdict = Verdict.BETTER if ratio.value < 0 else Verdict.WORSE
    elif ratio.p_within(margin) <= level:
        verdict = Verdict.SAME
    return verdict, ratio.interval(level)


def _check_ceiling(least: float, left: float, right: float) -> None:
    """Refuse a right side that is faster than memory allows, unless the left side is, too."""
    if right < least <= left:
        raise _Refused(
            f"right takes {right:.2g} s, but its inputs and outputs need {least:.2g} s of memory "
            "traffic; inputs that it need not read do not belong in the maker"
        )


def _seeds(count: int) -> list[int]:
    """Return seeds that nobody can predict."""
    return [secrets.randbelow(2**31) for _ in range(count)]


def _resolved(target: str) -> str:
    """Return a function's place with the whole path of its file.

    Raises:
        UserError: the text is not a place, or there is no such file.
    """
    module_name, colon, name = target.rpartition(":")
    if not (colon and module_name and name.isidentifier()):
        raise UserError(f"'{target}' does not name a function; write FILE.py:NAME or MODULE:NAME.")
    if not module_name.endswith(".py"):
        return target
    file = Path(module_name).resolve()
    if not file.is_file():
        modules = [module.name for module in file.parent.glob("*.py")]
        raise UserError(f"{module_name} not found. {did_you_mean(file.name, modules)}".rstrip())
    return f"{file}:{name}"
