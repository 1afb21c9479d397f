"""Names of runs in lists, which show about 17 characters: short, and what differs between runs comes first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perfexp.records.record import LARGEST, USUAL_PRECISION, Key, Record
from perfexp.records.sweep_record import Sweep
from perfexp.roofline.kernel_names import cut
from perfexp.summaries.subject import EXECUTION_KEYS, one_line, subject

#: Longest name that perfexp makes; a user's may be longer.
LENGTH = 24
#: Characters that are left of a shortened word; of a longer one of an axis while other words can be left out.
_SHORTEST, _SHORTEST_AXIS = 5, 11
#: Part of a name by the axis of a sweep that it shows; other axes have a word of their own.
_PARTS = {axis: axis for axis in ("model", "algorithm", "mode", "precision", "execution", "input_size", "batch_size")}
_PARTS |= {"model.name": "model", "mode.train.batch_size": "batch_size", "mode.inference.batch_size": "batch_size"}
#: Nouns of a sweep's axes in its name.
_NOUNS = {
    "model": "models",
    "algorithm": "algorithms",
    "mode": "modes",
    "precision": "precisions",
    "execution": "executions",
    "input_size": "sizes",
    "batch_size": "batches",
    "gpu": "GPUs",
    "gpu.count": "GPU counts",
}
#: Further axes that a name shows by value only.
_PLAIN = ("gpu", "experiment")
#: Words that names leave out unless a sweep varies them.
_USUAL = ("default", USUAL_PRECISION, "eager")
_MODES = {"inference": "inf", "train_inference": "tr+inf"}
#: Settings of the execution by the words that names have.
_EXECUTIONS = {
    "compile=default": "compile",
    "compile=max-autotune": "autotune",
    "compile=reduce-overhead": "reduce",
    "cuda_graph": "graph",
    "channels_last": "nhwc",
    "cudnn_benchmark": "bench",
    "deterministic": "determ",
}


def of_run(record: Record, keys: Iterable[Key] = ()) -> str:
    """Return the name of a run, `vgg16 winograd 224 b8`: the user's own, or its words as far as they fit.

    Args:
        keys: the points that the name describes, by default all.
    """
    axes = record.sweep.axes if record.sweep else {}
    own = None if record.sweep else of_user(record.plan)  # in a sweep it is the name of the whole
    words = _words(record, list(keys) or [point.key for point in record.points if point.key.is_timed])
    return own or _fitted(words, axes)


def of_part(record: Record, keys: Sequence[Key]) -> str:
    """Return the name of one phase and batch size of a run: `b8 train resnet50 224`."""
    words, axes = _words(record, keys), record.sweep.axes if record.sweep else {}
    words["mode"] = _MODES.get(keys[0].phase, keys[0].phase) if keys else ""
    return _fitted(words, axes, [words["batch_size"], words["mode"]])


def of_sweep(sweep: Sweep, records: Sequence[Record]) -> str:
    """Return the name of a sweep: its axes with the number of their values, `3 models × 2 algorithms`, and the rest."""
    axes = dict.fromkeys(axis for child in sweep.children for axis in child.axes)
    counts = {axis: len({child.axes.get(axis) for child in sweep.children}) for axis in axes}
    is_whole = len(sweep.children) == sweep.jobs
    counts = {axis: count if is_whole else 0 for axis, count in counts.items() if count > 1 or not is_whole}
    own = of_user(records[0].plan) if records else None
    return own or _of_axes(counts, records) or one_line(sweep.name)


def of_unfinished_sweep(record: Record) -> str:
    """Return the name of a run's sweep until its summary is sent: `models × algorithms`."""
    axes = record.sweep.axes if record.sweep else {}
    return of_user(record.plan) or _of_axes(dict.fromkeys(axes, 0), [record]) or "sweep"


def of_user(plan: Mapping[str, Any]) -> str | None:
    """Return `tracking.run_name` of a plan; None without."""
    tracking = plan.get("tracking")
    name = tracking.get("run_name") if isinstance(tracking, Mapping) else None
    return one_line(str(name)) or None if name else None


def _of_axes(counts: Mapping[str, int], records: Sequence[Record]) -> str:
    """The axes with the numbers of their values, where they are known, and what all records share."""
    nouns = [f"{counts[axis] or ''} {_NOUNS.get(_part(axis) or axis) or axis.rpartition('.')[2]}" for axis in counts]
    words = [_fixed(_words(one, [point.key for point in one.points if point.key.is_timed]), counts) for one in records]
    shared = [word for word in words[0] if all(word in other for other in words)] if words else []
    return _with(_cut(" × ".join(noun.strip() for noun in nouns), LENGTH), shared)


def _varying(words: Mapping[str, str], axes: Mapping[str, str]) -> list[str]:
    """The words of a sweep's axes."""
    own = {axis: f"{'' if axis in _PLAIN else axis.rpartition('.')[2] + '='}{value}" for axis, value in axes.items()}
    return [words[part] if (part := _part(axis)) else one_line(word) for axis, word in own.items()]


def _words(record: Record, keys: Sequence[Key]) -> dict[str, str]:
    """The words of a run by the part of its name, the most telling first."""
    about = subject(record.plan)
    return {
        "model": about.model,
        "algorithm": about.algorithm,
        "mode": _MODES.get(about.mode, about.mode),
        "precision": about.precision,
        "execution": _execution(about.execution),
        "input_size": _range([key.size_label for key in sorted(keys, key=lambda key: key.pixels)]),
        "batch_size": _batches(keys),
    }


def _execution(text: str) -> str:
    """The settings that differ from the usual execution, `nhwc+graph`; `eager` without."""
    words = [_EXECUTIONS.get(word, word) for word in text.split(", ") if word != "eager"]
    return "+".join(words) or "eager"


def _part(axis: str) -> str | None:
    """The part of a name that shows an axis; None if it has a word of its own."""
    group, _, key = axis.partition(".")
    return "execution" if group == "execution" and key in EXECUTION_KEYS else _PARTS.get(axis)


def _batches(keys: Sequence[Key]) -> str:
    """The range of batch sizes, which ends with `max` while the largest one is searched for."""
    in_order = sorted(keys, key=lambda key: (key.batch_size == LARGEST, key.batch_size))
    return f"b{_range([key.batch_label for key in in_order])}" if keys else ""


def shape(keys: Sequence[Key]) -> str:
    """Return sizes and batch sizes of some points: `224x224 b8`, `160x160-320x320 b1-64`."""
    sizes = ["x".join(map(str, key.input_size)) for key in sorted(keys, key=lambda key: key.pixels)]
    return f"{_range(sizes)} {_batches(keys)}".strip()


def _range(sorted_texts: Sequence[str]) -> str:
    return "-".join(dict.fromkeys([*sorted_texts[:1], *sorted_texts[-1:]]))


def _fixed(words: Mapping[str, str], axes: Iterable[str]) -> list[str]:
    """The words that no axis shows; inference, the usual mode, comes last and goes first."""
    shown = set(map(_part, axes))
    rest = [word for part, word in words.items() if part not in shown and word not in _USUAL]
    return sorted(rest, key=lambda word: word == _MODES["inference"])


def _fitted(words: Mapping[str, str], axes: Mapping[str, str], first: Sequence[str] = ()) -> str:
    """Join the words that fit; long ones are shortened so that precision, size and batch size always remain."""
    varying = _varying(words, axes)
    ordered = [word for word in dict.fromkeys([*first, *varying, *_fixed(words, axes)]) if word]
    whole = {*first, *(words[part] for part in ("precision", "input_size", "batch_size"))}
    execution = {words["execution"]} & set(ordered)
    needed = {*ordered[:2], *varying, *whole, *execution, words["model"], words["algorithm"]}
    widths = {word: len(word) for word in ordered if word in needed}
    while _width(widths) > LENGTH:  # the runs of a sweep differ in its axes: their words are shortened last
        spare = [word for word in widths if word not in whole | execution and word != ordered[0]]
        long = [word for word in varying if len(word) > _SHORTEST_AXIS] if set(spare) - set(varying) else []
        least = dict.fromkeys(widths, _SHORTEST) | dict.fromkeys(long, _SHORTEST_AXIS)
        cuttable = [word for word in widths if word not in whole and widths[word] > least[word]]
        if cuttable:
            widths[max(reversed(cuttable), key=lambda word: (word not in varying, widths[word]))] -= 1
        elif spare:
            widths = {word: len(word) for word in widths if word != spare[-1]}
        else:
            break
    for word in ordered:
        if word not in needed and _width(widths) + 1 + len(word) <= LENGTH:
            widths[word] = len(word)
    ways = {word: _cut if word == words["algorithm"] else cut for word in ordered}
    return _cut(" ".join(ways[word](word, widths[word]) for word in ordered if word in widths), LENGTH)


def _width(widths: Mapping[str, int]) -> int:
    """Characters of a name whose words have these."""
    return sum(widths.values()) + len(widths) - 1


def _with(text: str, words: Iterable[str]) -> str:
    """A text with the words that fit behind it."""
    for word in words if text else ():
        text = f"{text} {word}".strip() if len(text) + 1 + len(word) <= LENGTH else text
    return text


def _cut(word: str, length: int) -> str:
    return word if len(word) <= length else f"{word[: length - 1]}…"
