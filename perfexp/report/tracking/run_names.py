"""Run names for MLflow's lists, which show about 17 characters: short, with what differs first.

A name consists of words: model, algorithm, mode, precision, execution, sizes. Usual words are left
out. In a sweep the words for its axes (the overrides that vary) come first.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from perfexp.records.fact_lookup import fact_at
from perfexp.records.record import LARGEST, USUAL_PRECISION, Key, Record
from perfexp.records.subject import EXECUTION_KEYS, one_line, subject
from perfexp.records.sweep_record import Sweep
from perfexp.roofline.kernel_names import cut

#: Longest generated name; names set by users may be longer.
LENGTH = 24
#: Minimum length of a shortened word, and of a shortened word that tells a sweep's runs apart.
_SHORTEST, _SHORTEST_AXIS = 5, 11
#: Name part that shows each sweep axis; other axes have their own word.
_PARTS = {
    "model": "model",
    "algorithm": "algorithm",
    "mode": "mode",
    "precision": "precision",
    "execution": "execution",
    "input_size": "input_size",
    "batch_size": "batch_size",
    "model.name": "model",
    "mode.train.batch_size": "batch_size",
    "mode.inference.batch_size": "batch_size",
}
#: Irregular plurals: nouns for sweep axes other than the part's name with an s.
_NOUNS = {"input_size": "sizes", "batch_size": "batches", "gpu": "GPUs", "gpu.count": "GPU counts"}
#: Further axes that a name shows by value only.
_PLAIN = ("gpu", "experiment")
#: Words that names leave out unless a sweep varies them.
_USUAL = ("default", USUAL_PRECISION, "eager")
_INFERENCE = "inf"
_MODES = {"inference": _INFERENCE, "train_inference": "tr+inf"}
#: Short words for execution settings.
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
    """Return a run's name, e.g. `vgg16 winograd 224 b8`.

    A name set by the user wins. Otherwise the name holds as many words as fit.

    Args:
        keys: points that the name describes; all by default.
    """
    # in a sweep, the user names the whole sweep
    user_name = "" if record.sweep else of_user(record)
    return user_name or _fitted(_words(record, list(keys) or _timed(record)), _axes(record))


def of_part(record: Record, keys: Sequence[Key]) -> str:
    """Return the name for a nested run: one phase and batch size, e.g. `b8 train resnet50 224`."""
    words = _words(record, keys)
    words["mode"] = _MODES.get(keys[0].phase, keys[0].phase) if keys else ""
    return _fitted(words, _axes(record), [words["batch_size"], words["mode"]])


def of_sweep(sweep: Sweep, records: Sequence[Record]) -> str:
    """Return a sweep's name: its axes with their value counts, then the words that all runs share.

    For example `3 models × 2 algorithms`.
    """
    values: dict[str, set[str]] = {}
    for child in sweep.children:
        for axis, value in child.axes.items():
            values.setdefault(axis, set()).add(value)
    counts = dict.fromkeys(values, "")
    if len(sweep.children) == sweep.jobs:
        counts = {axis: f"{len(texts)} " for axis, texts in values.items() if len(texts) > 1}
    user_name = of_user(records[0]) if records else ""
    return user_name or _of_axes(counts, records) or one_line(sweep.name)


def of_unfinished_sweep(record: Record) -> str:
    """Return the name for a run's sweep until its summary is sent, e.g. `models × algorithms`."""
    return of_user(record) or _of_axes(dict.fromkeys(_axes(record), ""), [record]) or "sweep"


def of_user(record: Record) -> str:
    """Return `tracking.run_name` from a record's plan, or an empty string.

    It replaces the generated name.
    """
    return one_line(str(fact_at(record.plan, "tracking.run_name") or ""))


def shape(keys: Sequence[Key]) -> str:
    """Return input and batch sizes, e.g. `224x224 b8` or `160x160-320x320 b1-64`.

    Names of datasets contain it.
    """
    sizes = ["x".join(map(str, key.input_size)) for key in sorted(keys, key=lambda key: key.pixels)]
    return f"{_range(sizes)} {_batches(keys)}".strip()


def _axes(record: Record) -> Mapping[str, str]:
    """Return the sweep axes and this run's values; empty outside a sweep."""
    if record.sweep:
        return record.sweep.axes
    return {}


def _timed(record: Record) -> list[Key]:
    """Return the keys of a record's timed points."""
    return [point.key for point in record.points if point.key.is_timed]


def _of_axes(counts: Mapping[str, str], records: Sequence[Record]) -> str:
    """Return a sweep's name: `3 models × 2 algorithms`, then the words that all records share.

    Args:
        counts: text before each axis's noun, such as `3 `; empty while the number is unknown.
    """
    nouns = []
    for axis, count in counts.items():
        part = _part(axis)
        usual = f"{part}s" if part else axis.rpartition(".")[2]
        nouns.append(f"{count}{_NOUNS.get(part or axis, usual)}")
    words = [_fixed(_words(record, _timed(record)), counts) for record in records]
    common = Counter(itertools.chain.from_iterable(map(dict.fromkeys, words)))
    shared = [word for word, number in common.items() if number == len(words)]
    return _with(_cut(" × ".join(nouns), LENGTH), shared)


def _words(record: Record, keys: Sequence[Key]) -> dict[str, str]:
    """Return a run's words, keyed by name part, most informative first.

    `_fitted` joins as many as a name has room for.
    """
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
    """Return the settings that differ from default execution, e.g. `nhwc+graph`, or `eager`."""
    words = [_EXECUTIONS.get(word, word) for word in text.split(", ") if word != "eager"]
    return "+".join(words) or "eager"


def _part(axis: str) -> str | None:
    """Return the name part that shows an axis; None if the axis has its own word."""
    group, _, key = axis.partition(".")
    if group == "execution" and key in EXECUTION_KEYS:
        return "execution"
    return _PARTS.get(axis)


def _batches(keys: Sequence[Key]) -> str:
    """Return the batch-size range, which ends with `max` during a search for the largest batch."""
    in_order = sorted(keys, key=lambda key: (key.batch_size == LARGEST, key.batch_size))
    if keys:
        return f"b{_range([key.batch_label for key in in_order])}"
    return ""


def _range(sorted_texts: Sequence[str]) -> str:
    """Return the first and last text as `FIRST-LAST`; once if they are equal, empty if none."""
    return "-".join(dict.fromkeys([*sorted_texts[:1], *sorted_texts[-1:]]))


def _fixed(words: Mapping[str, str], axes: Iterable[str]) -> list[str]:
    """Return the words that no axis shows.

    Inference is the usual mode, so its word comes last and is dropped first.
    """
    shown = set(map(_part, axes))
    varying = []
    for part, word in words.items():
        if part not in shown and word and word not in _USUAL:
            varying.append(word)
    return sorted(varying, key=lambda word: word == _INFERENCE)


def _varying(words: Mapping[str, str], axes: Mapping[str, str]) -> list[str]:
    """Return the words for a sweep's axes.

    Axes without a word of their own appear as `NAME=VALUE`.
    """
    varying = []
    for axis, value in axes.items():
        if part := _part(axis):
            varying.append(words[part])
        elif axis in _PLAIN:
            varying.append(one_line(value))
        else:
            varying.append(one_line(f"{axis.rpartition('.')[2]}={value}"))
    return varying


def _fitted(words: Mapping[str, str], axes: Mapping[str, str], first: Sequence[str] = ()) -> str:
    """Join words into a name of at most `LENGTH` characters.

    Long words are shortened, starting with the last, and then left out, so that numbers remain.

    Args:
        words: a run's words by name part, from `_words`.
        axes: sweep axes with the run's values.
        first: words that come first and are never shortened.
    """
    varying, fixed = [*first, *_varying(words, axes)], _fixed(words, axes)
    texts: dict[str, str] = {}
    for word in (*varying, *fixed):
        if word and (word in varying or word != _INFERENCE):
            texts[word] = word
    required = [*first, words["precision"], words["execution"]]
    required += (words["input_size"], words["batch_size"])
    long = [word for word in reversed(texts) if word not in required]
    for word in long:
        least = _SHORTEST_AXIS if word in varying else _SHORTEST
        length = max(least, len(word) + LENGTH - len(" ".join(texts.values())))
        texts[word] = _cut(word, length) if word == words["algorithm"] else cut(word, length)
    last = [_INFERENCE] if fixed[-1:] == [_INFERENCE] and _INFERENCE not in texts else []
    for word in long:
        if len(" ".join(texts.values())) > LENGTH and word != next(iter(texts)):
            del texts[word]
            last = []
    return _cut(_with(" ".join(texts.values()), last), LENGTH)


def _with(text: str, words: Iterable[str]) -> str:
    """Return a text with those words appended that fit into `LENGTH` characters."""
    for word in words:
        if text and len(text) + 1 + len(word) <= LENGTH:
            text += f" {word}"
    return text


def _cut(word: str, length: int) -> str:
    """Return a word's beginning, with `…` if it was longer than `length` characters."""
    if len(word) <= length:
        return word
    return f"{word[: length - 1]}…"
