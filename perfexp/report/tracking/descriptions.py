"""Descriptions: what MLflow shows about a run besides its figures and files.

These are tags, parameters (settings that people choose or group by; the whole plan is an artifact),
datasets, and a length-limited description in Markdown, which MLflow calls a note.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from perfexp.comparison import sweep_verdicts
from perfexp.comparison.sweep_verdicts import Winner
from perfexp.host.credentials import hide
from perfexp.host.files import safe_name
from perfexp.plan.override_keys import line_to_type
from perfexp.records import sweep_summary
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.fact_lookup import fact_at
from perfexp.records.grid import Section, escape_markdown
from perfexp.records.record import LARGEST, Key, Record
from perfexp.records.remarks import raised_diagnostics
from perfexp.records.subject import MODEL_AXES, label, one_line, subject, varying
from perfexp.records.sweep_record import Sweep
from perfexp.report import markdown, overview, sections
from perfexp.report.tracking import run_names
from perfexp.report.tracking.delivery import Dataset
from perfexp.report.tracking.store import (
    NAME_LENGTH,
    PARAM_LENGTH,
    TAG_LENGTH,
    allowed,
    clean,
    metric_part,
    signed,
)

#: Fact tags, and their places in the environment; the first place with a value counts.
_FACTS = {
    "driver": ("device.driver", "device.driver_version"),
    "cuda": ("device.cuda", "torch.cuda"),
    "cudnn": ("device.cudnn", "torch.cudnn"),
    "rocm": ("device.rocm", "torch.rocm"),
    "torch": ("packages.torch",),
    "python": ("python",),
    "host": ("host",),
    "mlflow.user": ("user",),
    "mlflow.source.git.commit": ("git.commit",),
}
#: Tag prefixes, and tags, that users cannot set.
_RESERVED, _TAKEN = ("mlflow.", "perfexp."), (*_FACTS, "gpu", "cpu")
#: Table lengths to try until a description is short enough, in lines with header and rule.
_TABLE_LINES = (100, 50, 25, 12, 6, 3)
#: Characters that `signed` adds to a description, at most.
_SIGNATURE_LENGTH = 50
#: Longest word that fits on an MLflow page, and the pattern for one Markdown character.
_WORD, _CHARACTER = 60, re.compile(r"\\.|&\w+;|.")
#: Parameter limit per run: pages and comparisons list all of them.
MOST_PARAMS = 25
#: Configuration groups whose chosen option is a parameter.
_GROUPS = ("stopping", "data")
#: Keys that other parameters already show.
_SHOWN = (
    "model",
    "model.name",
    "algorithm",
    "mode",
    "precision",
    "batch_size",
    "input_size",
    "gpu",
    "execution",
    *_GROUPS,
)
#: Key groups that do not affect measurements.
_NOT_MEASURED = (
    "tracking",
    "output_dir",
    "speed_dir",
    "export",
    "compare",
    "stage",
    "quiet",
    "device_lock",
    "host_sharing",
    "timeout_seconds",
    "resume",
    "cluster",
    "hydra",
)
#: Longest dataset source that every store accepts, in characters.
_SOURCE_LENGTH = 16_000


def safe_uid(text: str) -> str:
    """Return a record's uid or phase in characters that are safe inside MLflow's search query.

    They come from files that anybody may have written.
    """
    return safe_name(text)[:NAME_LENGTH]


def point_tags(analysis: Analysis, notes: Mapping[str, str]) -> dict[str, str]:
    """Return tags for a run or some of its points: statuses, diagnostics and machine facts.

    Args:
        notes: tags about the metrics, from `payload.sendable_figures`.
    """
    record = analysis.record
    statuses = Counter(row.status.value for row in analysis.rows)
    points = ", ".join(f"{count} {status}" for status, count in statuses.items())
    doubts = ", ".join(raised.worst.code for raised in raised_diagnostics(analysis))
    facts = {"perfexp.points": points, "perfexp.doubts": doubts, **notes}
    facts["mlflow.source.name"] = "perfexp"
    for name in _FACTS:
        facts[name] = fact(record.environment, name)
    facts |= own_tags(record.plan)
    device = "cpu" if fact_at(record.environment, "device.kind") == "cpu" else "gpu"
    facts[device] = _first(record.environment, ["device.name"])
    if record.sweep:
        facts |= {"perfexp.sweep": safe_uid(record.sweep.uid), "perfexp.job": str(record.sweep.job)}
    return tags(facts)


def own_tags(plan: dict[str, Any]) -> dict[str, str]:
    """Return `tracking.tags` from a plan. Names are checked again, since records may be foreign."""
    user_tags = fact_at(plan, "tracking.tags")
    tags = {}
    for name, text in user_tags.items() if isinstance(user_tags, Mapping) else ():
        if text is not None and tag_fault(str(name)) is None:
            tags[str(name)[:NAME_LENGTH]] = str(text)
    return tags


def sweep_tags(first: Record) -> dict[str, str]:
    """Return a sweep's tags from its first run: user, commit and the user's own tags."""
    facts = {name: fact(first.environment, name) for name in _FACTS if name.startswith("mlflow.")}
    return facts | own_tags(first.plan)


def winner_tags(sweep_analysis: SweepAnalysis) -> dict[str, str]:
    """Return tags that name a sweep's fastest runs, by the verdicts in its table.

    * `perfexp.best`: the fastest run.
    * `perfexp.best_ties`: other runs, not shown to be slower.
    * `perfexp.best_by`: the metric that decides.
    * `perfexp.best_undecided`: runs without a decided verdict.

    If the winner depends on the point or model, each text names its points or models in
    parentheses. There are no tags if the runs share no point. They are set once all runs of the
    sweep have ended.
    """
    winners = sweep_verdicts.winners(sweep_analysis)
    fields = varying(winner.key for winner in winners)
    names = ("best", "best_ties", "best_undecided", "best_by")
    places: dict[str, dict[str, list[str]]] = {name: {} for name in names}
    for winner in winners:
        point_text = " · ".join(
            filter(None, (winner.model, label(winner.key, fields) if fields else ""))
        )
        best = winner.best and _axes_text(winner.best, winner)
        others = "; ".join(_axes_text(axes, winner) for axes in winner.ties)
        texts = {"best": best, "best_by": _deciding_metric(winner.measure)}
        texts["best_ties" if best else "best_undecided"] = others
        for name, text in texts.items():
            if text:
                places[name].setdefault(text, []).append(point_text)
    tags = {}
    for name, by_text in places.items():
        if by_text:
            tags[f"perfexp.{name}"] = _with_places(name, by_text, len(winners))
    return tags


def _with_places(name: str, places: Mapping[str, Collection[str]], num_points: int) -> str:
    """Return texts in one line, each with the places where it holds.

    Texts that hold everywhere have no places.

    Args:
        name: name of the tag, without `perfexp.`.
        places: points or models by text.
        num_points: number of all places.
    """
    texts = []
    for text, points in places.items():
        if name != "best_by" and len(points) != num_points:
            text += f" ({', '.join(points)})"
        texts.append(text)
    return " | ".join(texts)


def _deciding_metric(measure: str) -> str:
    """Return the name of the MLflow metric that shows a compared measure."""
    if measure == "throughput":
        return "throughput/samples_per_second"
    return f"{metric_part(measure)}/p50_ms"


def _axes_text(every: Mapping[str, str], of_winner: Winner) -> str:
    """Return a group's axes as text.

    The model is left out if each model has its own winner. A single option shows its value alone.
    """
    axes = dict(every)
    if of_winner.model:
        for axis in MODEL_AXES:
            axes.pop(axis, None)
    if len(axes) == 1 and "." not in "".join(axes):
        return "".join(axes.values())
    return ", ".join(f"{axis}={text}" for axis, text in axes.items())


def tag_fault(name: str) -> str | None:
    """Return why users cannot set a tag with this name; None if they can.

    Settings are refused before anything is measured, and tags in foreign records are left out.
    """
    if name.startswith(_RESERVED) or name in _TAKEN:
        return "perfexp and MLflow set tags of this name"
    if name == allowed(name):
        return None
    return "use letters, digits, spaces and _-.:"


def tags(texts: Mapping[str, str]) -> dict[str, str]:
    """Return texts as tags that every store accepts, cut to length; empty texts are left out."""
    return {name: clean(text, TAG_LENGTH) for name, text in texts.items() if text}


def reasons(by_name: Mapping[str, str]) -> str:
    """Join reasons, each behind its name."""
    return "; ".join(f"{name}: {reason}" for name, reason in by_name.items())


def fact(environment: dict[str, Any], name: str) -> str:
    """Return the environment fact that a tag shows; empty if unknown."""
    return _first(environment, _FACTS[name])


def _first(environment: dict[str, Any], places: Iterable[str]) -> str:
    """Return the first text or number at these dotted places as text; empty if there is none."""
    for fact_path in places:
        text = fact_at(environment, fact_path)
        if isinstance(text, str | int | float):
            return str(text)
    return ""


def of_run(analysis: Analysis, skipped: Mapping[str, str]) -> str:
    """Return a run's description: its report, and the skipped files with their reasons.

    Args:
        skipped: reasons why files are not sent, by path.
    """
    # MLflow's page has the run's name as its title
    page = markdown.markdown(analysis).removeprefix("# ")
    files = list(map(": ".join, skipped.items()))
    return _note(analysis.record.plan, page, *_parts(Section("files that were not sent", files)))


def of_points(part: Analysis) -> str:
    """Return a nested run's description: its points' figures. The full report is with the run."""
    origin = f"A part of the run {escape_markdown(part.record.name)}."
    return _note({}, overview.points(part).markdown(), origin)


def of_sweep(sweep_analysis: SweepAnalysis) -> str:
    """Return a sweep's description: how many runs have ended, results, and how to repeat it."""
    sweep, program = sweep_analysis.sweep, ("python", "-m", "perfexp")
    command = line_to_type(sweep.command, program, in_turn=sweep.in_turn)
    return _note(
        sweep_analysis.analyses[0].record.plan if sweep_analysis.analyses else {},
        *_parts(
            *sections.of_sweep(sweep_analysis),
            Section("not measured", sweep_summary.child_failures(sweep_analysis)),
            sections.to_repeat(command),
        ),
    )


def _parts(*parts: Section) -> Iterator[str]:
    """Yield sections as Markdown, without empty ones."""
    for part in parts:
        if part.content:
            yield markdown.section(part)


def _note(plan: dict[str, Any], *blocks: str) -> str:
    """Return paragraphs as a signed description, below the user's `tracking.description`."""
    user_text = escape_markdown(str(fact_at(plan, "tracking.description") or ""))
    text = "\n\n".join(block.strip("\n") for block in (user_text, *blocks) if block)
    return signed(fitted(breakable(text), TAG_LENGTH - _SIGNATURE_LENGTH))


def breakable(text: str) -> str:
    """Return Markdown in which browsers can break long words; code and tables stay as they are."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if not line.startswith(("|", "    ")):
            lines[number] = re.sub(r"\S+", _broken, line)
    return "\n".join(lines)


def _broken(word: re.Match[str]) -> str:
    """Return a word with zero-width spaces where a browser may break it."""
    characters = _CHARACTER.findall(word[0])
    for index in range(_WORD, len(characters), _WORD):
        characters[index] = f"&#8203;{characters[index]}"
    return "".join(characters)


def fitted(text: str, length: int) -> str:
    """Return Markdown shortened to a maximum number of characters.

    Long tables lose their last lines and state how many; any other excess is cut off.
    """
    blocks = clean(text, len(text) + length).split("\n\n")
    for most in _TABLE_LINES:
        if len(text) <= length:
            break
        text = "\n\n".join(_shortened(block, most) for block in blocks)
    return clean(text, length)


def _shortened(block: str, most: int) -> str:
    """Return a table with its first `most` lines and the number of others; other blocks as is."""
    lines = block.split("\n")
    if not block.startswith("|") or len(lines) <= most:
        return block
    return "\n".join([*lines[:most], f"\n… and {len(lines) - most} more: see report.md"])


def params_of_points(record: Record, keys: Sequence[Key]) -> dict[str, str]:
    """Return parameters for some of a record's points: subject, sizes, device and libraries."""
    about = subject(record.plan, record.environment)
    named = {
        "model": about.model,
        "algorithm": about.algorithm,
        "mode": about.mode,
        "precision": about.precision,
        "execution": about.execution,
        "phase": ", ".join(_phases(keys)),
        "batch_size": _batch_sizes(keys),
        "input_size": ", ".join(dict.fromkeys(key.size_label for key in keys)),
        "device": about.device or "",
        "torch": fact(record.environment, "torch"),
        "cudnn": fact(record.environment, "cudnn"),
    }
    return _cleaned(named)


def _phases(keys: Sequence[Key]) -> dict[str, None]:
    """Return the phases of timed points, each once, in order."""
    return dict.fromkeys(key.phase for key in keys if key.is_timed)


def _batch_sizes(keys: Sequence[Key]) -> str:
    """Return the points' batch sizes, or an empty string while the largest batch is searched for.

    MLflow parameters never change, so an unknown batch size must stay unset.
    """
    sizes = dict.fromkeys(key.batch_size for key in keys)
    if LARGEST in sizes:
        return ""
    return ", ".join(map(str, sizes))


def params_of_run(record: Record) -> dict[str, str]:
    """Return a run's parameters, from its points, some group options and its command line.

    MLflow's lists filter and group runs by them.
    """
    texts = params_of_points(record, [point.key for point in record.points])
    for group in _GROUPS:
        texts[group] = str(fact_at(record.plan, f"choices.{group}") or "")
    axes = record.sweep.axes if record.sweep else {}
    return _cleaned(texts | dict(_chosen(record, axes)), axes)


def params_of_sweep(sweep: Sweep, records: Sequence[Record]) -> dict[str, str]:
    """Return a sweep's parameters: its axes and its runs' parameters, each with all values.

    They are sent once all runs have ended, since MLflow never changes a parameter.
    """
    children = sorted(sweep.children, key=lambda child: child.job)
    axes = _joined(child.axes for child in children)
    axes = {"model" if name == "model.name" else name: text for name, text in axes.items()}
    keys = list[Key]()
    for record in records:
        for point in record.points:
            keys.append(point.key)
    joined = _joined(map(params_of_run, records))
    return _cleaned({**joined, "batch_size": _batch_sizes(keys), **axes}, axes)


def _joined(params: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return parameters of several runs as one, each with all values, separated by commas."""
    values: dict[str, dict[str, None]] = {}
    for texts in params:
        for name, text in texts.items():
            values.setdefault(name, {})[text] = None
    return {name: ", ".join(texts) for name, texts in values.items()}


def _chosen(record: Record, axes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the command-line keys and values that no other parameter shows.

    For swept keys the value is this run's.
    """
    typed: dict[str, str] = {}
    for argument in record.command:
        if not argument.startswith("-"):
            name, _, text = argument.lstrip("+~").partition("=")
            typed[name] = text
    for name, text in {**typed, **axes}.items():
        if name not in _SHOWN and re.split("[./]", name)[0] not in _NOT_MEASURED:
            # the command of a sweep's run spells values the way Python does
            value = fact_at(record.plan, name)
            if value is not None and not isinstance(value, str | dict):
                text = json.dumps(value)
            yield name, text


def _cleaned(texts: Mapping[str, str], axes: Iterable[str] = ()) -> dict[str, str]:
    """Return at most `MOST_PARAMS` parameters in the form that MLflow accepts, sweep axes first."""
    cleaned = {_name(name): clean(text, PARAM_LENGTH) for name, text in texts.items() if text}
    first = set(map(_name, axes))
    return dict(islice(sorted(cleaned.items(), key=lambda item: item[0] not in first), MOST_PARAMS))


def _name(name: str) -> str:
    """Return a parameter's name in characters and length that MLflow accepts."""
    return allowed(name)[:NAME_LENGTH].strip(" .")


def datasets(record: Record, keys: Sequence[Key]) -> list[Dataset]:
    """Return the points' data, one dataset per phase.

    None if the plan has no data. Phases whose largest batch is being searched for are left out.
    MLflow lists them as the run's inputs.
    """
    node = record.plan.get("data")
    if not isinstance(node, Mapping):
        return []
    kind = one_line(str(node.get("name") or fact_at(record.plan, "choices.data") or "data"))
    source = json.dumps(hide({**node}), default=str, sort_keys=True)
    phase_datasets = []
    for phase in _phases(keys):
        of_phase = [key for key in keys if key.phase == phase]
        if any(key.batch_size == LARGEST for key in of_phase):
            continue
        name = clean(f"{kind} {run_names.shape(of_phase)}", NAME_LENGTH)
        identity = json.dumps([source, name, record.plan.get("seed")], default=str)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        context = "training" if phase == "train" else phase
        phase_datasets.append(
            Dataset(name=name, digest=digest, source=clean(source, _SOURCE_LENGTH), context=context)
        )
    return phase_datasets
