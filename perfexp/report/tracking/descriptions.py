"""Descriptions for runs and sweeps in a tracking store: tags, and length-limited Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from perfexp.host.files import safe_name
from perfexp.plan.override_keys import line_to_type
from perfexp.records import sweep_summary
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.fact_lookup import fact_at
from perfexp.records.grid import Section, escape_markdown
from perfexp.records.record import Record
from perfexp.records.remarks import raised_diagnostics
from perfexp.report import markdown, overview, sections
from perfexp.report.tracking.store import NAME_LENGTH, TAG_LENGTH, allowed, clean, signed

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
#: Longest word that fits on an MLflow page, and the pattern for one Markdown character.
_WORD, _CHARACTER = 60, re.compile(r"\\.|&\w+;|.")


def safe_uid(text: str) -> str:
    """Return a uid that is safe inside a query.

    Uids come from files that anybody may have written.
    """
    return safe_name(text)[:NAME_LENGTH]


def point_tags(analysis: Analysis, notes: Mapping[str, str]) -> dict[str, str]:
    """Return tags for a run's points: statuses, diagnostics, metric `notes` and machine facts."""
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
    own = fact_at(plan, "tracking.tags")
    tags = {}
    for name, text in own.items() if isinstance(own, Mapping) else ():
        if text is not None and tag_fault(str(name)) is None:
            tags[str(name)[:NAME_LENGTH]] = str(text)
    return tags


def sweep_tags(first: Record) -> dict[str, str]:
    """Return a sweep's tags from its first run: user, commit and the user's own tags."""
    facts = {name: fact(first.environment, name) for name in _FACTS if name.startswith("mlflow.")}
    return facts | own_tags(first.plan)


def tag_fault(name: str) -> str | None:
    """Return why users cannot set a tag with this name; None if they can."""
    if name.startswith(_RESERVED) or name in _TAKEN:
        return "perfexp and MLflow set tags of this name"
    if name == allowed(name):
        return None
    return "use letters, digits, spaces and _-.:"


def tags(texts: Mapping[str, str]) -> dict[str, str]:
    """Return texts as tags, without empty texts."""
    return {name: clean(text, TAG_LENGTH) for name, text in texts.items() if text}


def reasons(by_name: Mapping[str, str]) -> str:
    """Join reasons, each behind its name."""
    return "; ".join(f"{name}: {reason}" for name, reason in by_name.items())


def fact(environment: dict[str, Any], name: str) -> str:
    """Return the environment fact that a tag shows; empty if unknown."""
    return _first(environment, _FACTS[name])


def _first(environment: dict[str, Any], places: Iterable[str]) -> str:
    for place in places:
        text = fact_at(environment, place)
        if isinstance(text, str | int | float):
            return str(text)
    return ""


def of_run(analysis: Analysis, skipped: Mapping[str, str]) -> str:
    """Describe a run: its report, and the skipped files with their reasons."""
    # MLflow's page has the run's name as its title
    page = markdown.markdown(analysis).removeprefix("# ")
    files = list(map(": ".join, skipped.items()))
    return _note(analysis.record.plan, page, *_parts(Section("files that were not sent", files)))


def of_points(part: Analysis) -> str:
    """Describe some points by their figures. The full report is with the run."""
    whole = f"A part of the run {escape_markdown(part.record.name)}."
    return _note({}, overview.points(part).markdown(), whole)


def of_sweep(whole: SweepAnalysis) -> str:
    """Describe a sweep: how many runs have ended, their results, and the command to repeat it."""
    sweep, program = whole.sweep, ("python", "-m", "perfexp")
    again = line_to_type(sweep.command, program, in_turn=sweep.in_turn)
    return _note(
        whole.analyses[0].record.plan if whole.analyses else {},
        *_parts(
            *sections.of_sweep(whole),
            Section("not measured", sweep_summary.child_failures(whole)),
            sections.to_repeat(again),
        ),
    )


def _parts(*parts: Section) -> Iterator[str]:
    for part in parts:
        if part.content:
            yield markdown.section(part)


def _note(plan: dict[str, Any], *blocks: str) -> str:
    """Join paragraphs, below the plan's `tracking.description`."""
    own = escape_markdown(str(fact_at(plan, "tracking.description") or ""))
    text = "\n\n".join(block.strip("\n") for block in (own, *blocks) if block)
    return signed(fitted(breakable(text), TAG_LENGTH - 50))


def breakable(text: str) -> str:
    """Let browsers break long words in Markdown. Code and table lines are short already."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if not line.startswith(("|", "    ")):
            lines[number] = re.sub(r"\S+", _broken, line)
    return "\n".join(lines)


def _broken(word: re.Match[str]) -> str:
    """Insert zero-width spaces into a word where a browser may break it."""
    characters = _CHARACTER.findall(word[0])
    for place in range(_WORD, len(characters), _WORD):
        characters[place] = f"&#8203;{characters[place]}"
    return "".join(characters)


def fitted(text: str, length: int) -> str:
    """Shorten Markdown to a maximum length.

    Long tables lose their last lines and state how many; any other excess is cut off.
    """
    blocks = clean(text, len(text) + length).split("\n\n")
    for most in _TABLE_LINES:
        if len(text) <= length:
            break
        text = "\n\n".join(_shortened(block, most) for block in blocks)
    return clean(text, length)


def _shortened(block: str, most: int) -> str:
    lines = block.split("\n")
    if not block.startswith("|") or len(lines) <= most:
        return block
    return "\n".join([*lines[:most], f"\n… and {len(lines) - most} more: see report.md"])
