"""jobs.jsonl: which job of SLURM measures which run of a sweep. Later lines replace earlier ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from perfexp.host import untrusted
from perfexp.records.paths import SweepPaths

#: Limit on the size of a jobs.jsonl, which has about 250 bytes for each submission of a run.
_MOST_BYTES = 64 << 20
#: A job, or an element of an array.
_JOB = re.compile(r"\d+(_\d+)?")


class SubmittedRun(msgspec.Struct, kw_only=True):
    """A run of a sweep, numbered from 0, and the job that measures it; `log` is the name of its output in jobs/."""

    run: int
    job: str
    gpu: str
    submitted: str
    log: str


def job_name(sweep: str) -> str:
    """Return the name that all jobs of a sweep have in SLURM."""
    return f"perfexp-{sweep}"


def append(paths: SweepPaths, entries: Iterable[SubmittedRun]) -> None:
    """Append lines at once: all runs of an array were submitted together."""
    content = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
    with untrusted.open_append(paths.jobs) as file:
        file.write(content)


def load(paths: SweepPaths) -> dict[int, SubmittedRun]:
    """Return the latest submission of each run; lines that are not of this form are left out."""
    return {entry.run: entry for entry in _entries(paths)}


def superseded(paths: SweepPaths) -> set[str]:
    """Return the jobs whose run was submitted again later."""
    latest = load(paths)
    return {entry.job for entry in _entries(paths) if latest[entry.run].job != entry.job}


def _entries(paths: SweepPaths) -> Iterator[SubmittedRun]:
    try:
        content = untrusted.read_bytes(paths.jobs, _MOST_BYTES)
    except OSError:
        return
    decoder = msgspec.json.Decoder(SubmittedRun)
    for line in content.splitlines():
        try:
            entry = decoder.decode(line)
        except untrusted.DECODING_ERRORS:
            continue
        if _JOB.fullmatch(entry.job):
            yield entry
