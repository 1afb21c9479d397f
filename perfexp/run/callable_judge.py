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
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import psutil

from perfexp.comparison.document import Verdict
from perfexp.doctor import environment
from perfexp.errors import PerfexpError, UserError
from perfexp.host.installation import python_command
from perfexp.host.process import MessageError, SilenceError, WorkerProcess
from perfexp.records import units
from perfexp.run.worker_query import error_of
from perfexp.statistics import sequential
from perfexp.statistics.estimators import Interval
from perfexp.statistics.ratios import LogRatio

_SIDE = "perfexp.measuring.callable_side"
#: Smallest number of pairs of processes, and the used share of the sequential level: equal sides
#: are FASTER or SLOWER in about 1 % of comparisons. Eight pairs of any symmetric distribution
#: have one sign in 1 %.
_LEAST_PAIRS, _LEVEL_SHARE = 8, 0.18
#: Checked and warm-up calls of each shape.
_CHECKED, _WARM_CALLS = 4, 3
#: Blocks of a pair, seconds of a block, and its smallest and largest number of inputs.
_BLOCKS, _BLOCK_SECONDS, _LEAST_INPUTS, _MOST_INPUTS = 6, 0.05, 4, 40
#: Longest wait for an answer, in seconds.
_SILENCE_SECONDS = 600.0
#: Time around the right side's calls that the judge's clock may show beyond the left's: shares of
#: the calls' own time and of the left's time around its calls. Three quarters of the blocks may
#: exceed it.
_TIMED_SHARE, _UNTIMED_SHARE, _UNEXPLAINED_SHARE = 0.2, 0.05, 0.75
#: Factor between calls with new and with repeated contents that shows a cache, if three quarters of
#: the calls exceed it.
_CACHE_FACTOR = 1.5
#: Largest share of a call that work after it may take, and an allowance in seconds.
_TAIL_SHARE, _TAIL_SECONDS = 0.2, 3e-5
#: How much faster than copying as many bytes a call that reads and writes them all can be.
_CEILING_FACTOR = 4.0
#: Share of the CPU cores above which other processes disturb.
_BUSY_SHARE = 0.1
_WORDS = {Verdict.BETTER: "FASTER", Verdict.WORSE: "SLOWER"}

#: Largest CPU time of processes that the right side has started, as a share of its blocks' time.
#: torch.compile's idle ones are allowed.
_HELPED_SHARE = 0.2
#: A seed of all arguments; or two, and which argument is of the second one.
Seed = int | tuple[int, int, int]

#: Answer of a side to a question, with its length by this process's clock as `elapsed`.
_Answer = dict[str, Any]


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
    found = []
    for side, place in (("left", compared.left), ("right", compared.right)):
        time_of_call = ""
        if seconds := compared.seconds.get(side):
            time_of_call = f"  {units.format_seconds(seconds)}"
        found.append(f"{side:5}  {place}{time_of_call}")
    verdict = f"right is {compared.word}"
    if compared.ratio:
        interval = compared.ratio
        verdict += (
            f": right/left {interval.value:.3f}, {interval.low:.3f} to {interval.high:.3f}"
            f" ({units.counted(compared.pairs, 'pair')} of processes, {compared.device})"
        )
    elif compared.verdict is Verdict.UNDECIDED:
        verdict += (
            f": {compared.pairs} of at least {_LEAST_PAIRS} pairs of processes were measured; "
            "set a longer --max-seconds"
        )
    if compared.reason:
        verdict += f": {compared.reason}"
    return [*found, verdict, *(f"note: {note}" for note in compared.notes)]


class _Refused(PerfexpError):
    """A side fails, or does something else than compute; the message names it."""


class _Process:
    """A process of one side, stopped except while it answers.

    Args:
        name: `left` or `right`.
        arguments: its function, the maker of inputs, and a folder.
    """

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._log = Path(arguments[-1]) / f"{secrets.token_hex(8)}.log"
        questions = self._log.with_suffix(".questions")
        os.mkfifo(questions)
        self._questions = questions.open("r+b", buffering=0)
        command = python_command(_SIDE, *arguments, str(questions))
        self._process = WorkerProcess(command, self._log, imports=["torch", _SIDE])
        self._answers = self._process.events(_SILENCE_SECONDS)

    def ask(self, question: str, **given: Any) -> _Answer:
        """Return the answer to a question.

        Raises:
            UserError: a function does not exist.
            _Refused: the callable failed.
        """
        self._process.send_signals(signal.SIGCONT)
        begun = time.perf_counter()
        self._questions.write(json.dumps([question, given]).encode() + b"\n")
        try:
            answer = next(self._answers)
        except StopIteration as error:
            lines = self._log.read_text(errors="replace").splitlines()[1:]
            raise _Refused(f"{self.name} ended its process: {' '.join(lines[-1:])}") from error
        except (SilenceError, MessageError) as error:
            raise _Refused(f"{self.name} does not answer: {error}") from error
        answer["elapsed"] = time.perf_counter() - begun
        answer["helped"] = sum(map(_cpu_seconds, self._process.send_signals(signal.SIGSTOP)))
        if answer["event"] == "failed":
            failure = error_of(answer)
            if isinstance(failure, UserError):
                raise failure
            raise _Refused(f"{self.name}: {failure}")
        return answer

    def close(self) -> None:
        """End the process and its descendants."""
        self._questions.close()
        self._process.end()


def _cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time that a process has used; 0 if it has ended."""
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def compare_callables(
    left: str,
    right: str,
    make_inputs: str,
    *,
    margin: float = 0.01,
    max_seconds: float = 600.0,
    tolerance: float | None = None,
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
        tolerance: largest relative error (L2) of outputs against the left side's; by default it
            follows from the left side's own errors.

    Raises:
        UserError: a function does not exist.
    """
    with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
        judge = _Judge((left, right, make_inputs), folder, tolerance)
        return judge.decide(margin, max_seconds)


class _Judge:
    """Judges two callables.

    Args:
        places: left side, right side, and maker of inputs, as the user names them.
        folder: empty folder for logs and stored results.
        tolerance: largest relative error of outputs; None for the default.
    """

    def __init__(
        self, places: tuple[str, str, str], folder: str, tolerance: float | None = None
    ) -> None:
        left, right, maker = self._places = places
        self._tolerance = tolerance
        self._arguments = {"left": [left, maker, folder], "right": [right, maker, folder]}
        self._shapes, self._parameters, self._notes = range(0), range(0), list[str]()
        #: The answers of both sides for each block of calls.
        self._blocks: dict[str, list[_Answer]] = {"left": [], "right": []}

    def decide(self, margin: float, max_seconds: float) -> CallableComparison:
        """Measure pairs of processes until a verdict, a refusal or the time limit."""
        deadline = time.monotonic() + max_seconds
        pairs, reason = list[dict[str, float]](), None
        verdict, ratio = Verdict.UNDECIDED, None
        begun, others = time.monotonic(), environment.other_cpu_seconds()
        with self._running("left") as self._referee:
            facts = self._referee.ask("describe")
            self._shapes = range(facts["shapes"])
            try:
                self._parameters = self._separable(range(facts["arguments"]))
                while verdict is Verdict.UNDECIDED and len(pairs) < sequential.MOST:
                    if pairs and time.monotonic() > deadline:
                        break
                    pairs.append(self._pair(is_first=not pairs))
                    if len(pairs) >= _LEAST_PAIRS:
                        verdict, ratio = _judged(pairs, margin)
                if verdict in (Verdict.BETTER, Verdict.SAME):
                    self._check_times()
            except _Refused as refused:
                verdict, reason, ratio = Verdict.NOT_COMPARABLE, str(refused), None
            used = environment.other_cpu_seconds() - others
        self._note_host(used / (time.monotonic() - begun))
        if verdict is Verdict.UNDECIDED and len(pairs) == sequential.MOST:
            self._notes.append("a wider --margin, larger inputs or a quieter machine may decide it")
        seconds = {}
        for name in self._arguments if pairs and not reason else ():
            seconds[name] = statistics.geometric_mean(pair[name] for pair in pairs)
        return CallableComparison(
            left=self._places[0],
            right=self._places[1],
            device=facts["device"],
            verdict=verdict,
            word=_WORDS.get(verdict, verdict.upper()),
            seconds=seconds,
            ratio=ratio,
            pairs=len(pairs),
            reason=reason,
            notes=tuple(self._notes),
        )

    def _note_host(self, cores: float) -> None:
        """Note how many CPU cores other processes used, if they may have disturbed the calls."""
        if cores > _BUSY_SHARE * environment.cores():
            self._notes.append(
                f"other processes used {cores:.1f} of {environment.cores()} CPU cores (busy_host): "
                "stop them, then compare again"
            )

    def _pair(self, *, is_first: bool) -> dict[str, float]:
        """Return the time of a call by side, in seconds, from a new process of each.

        It is the geometric mean over the shapes.
        """
        medians: dict[str, list[float]] = {"left": [], "right": []}
        with self._running("left") as left, self._running("right") as right:
            sides = [left, right]
            if is_first:
                self._check_origins(left.ask("describe"), right.ask("describe"))
                for side, shape in product(sides, self._shapes):
                    self._check(side, shape)
            for shape in self._shapes:
                self._measure(sides, shape)
                for name, blocks in self._blocks.items():
                    medians[name].append(statistics.median(_pooled(blocks[-_BLOCKS:], "new")))
                if is_first:
                    self._note_ceiling(left.ask("ceiling", shape=shape)["seconds"], medians)
        self._check_repeated()
        return {name: statistics.geometric_mean(each) for name, each in medians.items()}

    def _measure(self, sides: list[_Process], shape: int) -> None:
        """Measure the sides in blocks in random order.

        All inputs are new, and each is made a second time for a call that shows a cache.
        """
        counts, hold_seconds = [float(_MOST_INPUTS)], 0.0
        for side in sides:
            for _ in range(2):  # the first calls may compile
                warm = self._calls(side, shape, _seeds(_WARM_CALLS))
            counts.append(_BLOCK_SECONDS / warm["elapsed"] * _WARM_CALLS / 2)
            hold_seconds = max(hold_seconds, warm["hold_seconds"])  # equal waits on both sides
            if side.name == "right":
                helped = warm["helped"]
        for number in range(_BLOCKS):
            seeds = _seeds(max(_LEAST_INPUTS, int(min(counts))))
            # the first call finds cold caches
            twice = [seeds[0], *(seed for seed in seeds[1:] for _ in range(2))]
            pair: list[Seed] = []  # as in `_check`, so that no call tells whether it is checked
            if number == 0 and self._parameters:
                first, second = _seeds(2)
                pair = [first, (first, second, random.choice(self._parameters))]
            for side in random.sample(sides, 2):
                block = self._calls(side, shape, [*twice, *pair], hold_seconds)
                seconds = block["seconds"][: len(twice)]
                block["new"], block["again"] = seconds[1::2], seconds[2::2]
                self._blocks[side.name].append(block)
        blocks = self._blocks["right"][-_BLOCKS:]
        elapsed = sum(block["elapsed"] for block in blocks)
        if blocks[-1]["helped"] - helped > _HELPED_SHARE * elapsed:
            raise _Refused("right keeps other processes busy")

    def _separable(self, parameters: range) -> range:
        """Return the arguments that may be of another seed than the others, all or none.

        Arguments of different seeds may not fit together, such as indices and a table: a further
        process of the left side tries.
        """
        with self._running("left") as left:
            for shape in self._shapes:
                first, second = _seeds(2)
                mixed = [(first, second, number) for number in parameters]
                try:
                    left.ask("checked_calls", seeds=mixed, shape=shape)
                except _Refused:
                    self._notes.append(
                        "arguments of different seeds do not fit together: the effect of each "
                        "alone is not checked"
                    )
                    return range(0)
        return parameters

    def _check(self, side: _Process, shape: int) -> None:
        """Have outputs verified, also after a change of each argument."""
        first, second, *others = _seeds(_CHECKED)
        mixed = [(first, second, number) for number in self._parameters]
        answer = side.ask("checked_calls", seeds=[*others, first, *mixed], shape=shape)
        self._verify(side, shape, answer)

    def _calls(
        self,
        side: _Process,
        shape: int,
        seeds: Sequence[Seed],
        hold_seconds: float | None = None,
    ) -> _Answer:
        """Let a side make timed calls, and have the stored results verified."""
        answer = side.ask("calls", seeds=seeds, shape=shape, hold_seconds=hold_seconds)
        self._verify(side, shape, answer)
        return answer

    def _verify(self, side: _Process, shape: int, answer: _Answer) -> None:
        """Refuse a side that replaced functions, or whose stored results are wrong."""
        if names := side.ask("changed")["names"]:
            raise _Refused(f"{side.name} replaces {', '.join(names[:3])}")
        reason = self._referee.ask(
            "verify", stored=answer["stored"], shape=shape, tolerance=self._tolerance
        )["reason"]
        if reason:
            hint = "; make(seed) or the function depends on more than the seed"
            raise _Refused(f"{side.name}: {reason}{hint if side.name == 'left' else ''}")

    def _check_origins(self, left: _Answer, right: _Answer) -> None:
        """Note or refuse that the right side is made of the left one."""
        file = Path(self._places[0].rpartition(":")[0])
        if self._places[0] == self._places[1]:
            self._notes.append("both sides are the same function")
        elif left["origin"] == right["origin"]:
            raise _Refused("right is the left side's function under another name")
        elif str(file.resolve()) in right["files"]:
            self._notes.append(f"right imports {file.name}, the left side's file")

    def _note_ceiling(self, copy_seconds: float, medians: Mapping[str, Sequence[float]]) -> None:
        """Note that a right side cannot have read all inputs, unless the left does not, either."""
        least_seconds = copy_seconds / _CEILING_FACTOR
        if medians["right"][-1] < least_seconds <= medians["left"][-1]:
            self._notes.append(
                f"right takes {units.format_seconds(medians['right'][-1])}, but its inputs and "
                f"outputs need {units.format_seconds(least_seconds)} of memory traffic: it does "
                "not read them all"
            )

    def _check_repeated(self) -> None:
        """Refuse a right side that is faster if contents are repeated, unless the left is, too."""
        quartiles = []
        for blocks in self._blocks.values():
            ratios = map(operator.truediv, _pooled(blocks, "new"), _pooled(blocks, "again"))
            quartiles.append(statistics.quantiles(ratios)[0])
        left, right = quartiles
        if right > max(_CACHE_FACTOR, _CACHE_FACTOR * left):
            raise _Refused(
                f"right caches results: new contents take {right:.1f} times as long as repeated"
            )

    def _check_times(self) -> None:
        """Refuse a right side that works after it has returned, or changes its times.

        Around the calls of the latter, the judge's clock shows more time than around the left's.
        """
        left, right = self._blocks.values()
        left_tail, right_tail, call_seconds = (
            statistics.median(_pooled(*where))
            for where in ((left, "tails"), (right, "tails"), (right, "seconds"))
        )
        if right_tail > _TAIL_SHARE * call_seconds + _TAIL_SECONDS + 2 * max(0.0, left_tail):
            raise _Refused("right works after it has returned")
        unexplained = 0
        for one, other in zip(left, right, strict=True):
            usual, timed = one["elapsed"] - sum(one["seconds"]), sum(other["seconds"])
            limit = (1 + _TIMED_SHARE) * timed + (1 + _UNTIMED_SHARE) * usual
            unexplained += other["elapsed"] > limit
        if unexplained > _UNEXPLAINED_SHARE * len(right):
            raise _Refused(
                "right takes longer by the judge's clock than by its own: it changes times"
            )

    def _running(self, name: str) -> closing[_Process]:
        return closing(_Process(name, self._arguments[name]))


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


def _seeds(count: int) -> list[int]:
    """Return seeds that nobody can predict."""
    return [secrets.randbelow(2**31) for _ in range(count)]


def _pooled(blocks: Sequence[_Answer], name: str) -> list[float]:
    return [value for block in blocks for value in block[name]]
