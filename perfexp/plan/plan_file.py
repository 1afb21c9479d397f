"""Write, read and compare plan.yaml, the plan in a run's folder.

Commands read it as plain data, which runs no code. Only a worker turns it into objects, after it
has checked that the parent process wrote it (`load`). Two comments at its end let a run be
continued: the folder in which it was begun, and the user's signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from perfexp.errors import UserError
from perfexp.host import credentials, foreign, signature
from perfexp.plan.config import Plan, typed
from perfexp.plan.override_keys import NOT_MEASURED, flat
from perfexp.plan.plan_fields import FIRST_FORMAT, FORMAT
from perfexp.records import old_names

#: Texts about a data sheet's figures: another wording of them is the same plan.
_REMARKS = ("gpu.facts.sources", "gpu.facts.notes")
#: Characters of a value that are shown where two plans differ.
_LONGEST, _LONGEST_HASH = 200, 8
#: Beginnings of the comments behind a plan.
_PLACE, _MARK = b"# begun in ", b"# signature "


class _Dumper(yaml.SafeDumper):
    """Writes equal lists twice, since reading a plan refuses YAML aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def to_yaml(plain: Mapping[str, Any]) -> bytes:
    """Return a plan as YAML, in the order of the schema.

    `run.preparation` writes it with `signed`.
    """
    return yaml.dump(dict(plain), Dumper=_Dumper, sort_keys=False, allow_unicode=True).encode()


def signed(content: bytes) -> bytes:
    """Return a plan.yaml's content with two comments: the current folder, and a signature of both.

    Without the user's key there is no signature. `run.preparation.prepare` writes the result.
    """
    content += _PLACE + json.dumps(str(Path.cwd())).encode() + b"\n"
    mark = signature.of(content)
    if mark:
        return content + _MARK + mark.encode() + b"\n"
    return content


def read_begun(path: Path) -> tuple[dict[str, Any], str | None]:
    """Read a plan.yaml to continue its run.

    `resume=FOLDER` calls it.

    Returns:
        The plan as plain data, and the folder in which this user began the run. The folder is None
        if somebody else began it.

    Raises:
        UserError: the file is unreadable, or has an unknown format.
    """
    plain, content = _read(path)
    _refuse_other_format(path, plain)
    text, _, mark = content.rpartition(_MARK)
    begun_in = text.rpartition(_PLACE)[2]
    if signature.is_of(mark.decode(errors="replace").strip(), text):
        return plain, json.loads(begun_in)
    return plain, None


def hide_credentials(content: bytes) -> bytes:
    """Mask the credentials in a YAML file's content; empty if the file cannot be read."""
    try:
        return to_yaml(credentials.hide(foreign.yaml_data(content)))
    except (ValueError, TypeError):
        return b""


def load(path: Path, sha256: str) -> Plan:
    """Read a plan.yaml to run it; a worker's first step.

    Args:
        sha256: checksum from the parent process, so that only the plan that it composed is run.

    Raises:
        UserError: the file has another checksum.
    """
    content = foreign.read_bytes(path)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path} is not the plan that was composed; start the run again.")
    return typed(old_names.plan_of_today(yaml.safe_load(content)))


def read(path: Path) -> dict[str, Any]:
    """Read a plan.yaml as plain data, with today's key names.

    `resume=`, `status`, `list runs` and `ab` look up keys in it.

    Raises:
        UserError: the file is unreadable, or is not a plan.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return a plan.yaml as plain data, and its content; see `read`."""
    try:
        content = foreign.read_bytes(path)
        plain = foreign.yaml_data(content)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} cannot be read as a plan: {reason}.") from error
    if not isinstance(plain, dict) or not _has_texts_as_keys(plain):
        raise UserError(f"{path} is not a plan.")
    return old_names.plan_of_today(plain), content


def _has_texts_as_keys(plain: Mapping[Any, Any]) -> bool:
    """Return whether all keys are texts, so that JSON can sort them.

    In deeper mappings, such as a model's settings, other keys are allowed if JSON takes them.
    """
    with suppress(TypeError):
        json.dumps(plain, sort_keys=True, default=str)
        return all(isinstance(key, str) for key in plain)
    return False


def read_to_resume(path: Path) -> dict[str, Any]:
    """Read a plan.yaml as plain data, to continue its run.

    `run.preparation` compares it with the plan that is to continue.

    Raises:
        UserError: the file is unreadable, or has a format that cannot be continued.
    """
    plain = read(path)
    _refuse_other_format(path, plain)
    return plain


def _refuse_other_format(path: Path, plain: Mapping[str, Any]) -> None:
    """Raise `UserError` for a plan with a format that this version cannot continue."""
    version = plain.get("format", 1)
    if type(version) is not int or not FIRST_FORMAT <= version <= FORMAT:
        raise UserError(
            f"{path} has format {str(version)[:_LONGEST]}; this version resumes formats "
            f"{FIRST_FORMAT} to {FORMAT}. Measure again with --overwrite, or use another "
            "output_dir."
        )


def plan_hash(plain: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the keys that concern the measurement, under their first names.

    Runs with equal hashes measured the same; records store it.
    """
    measured = old_names.plan_as_first_named(plain)
    for key in NOT_MEASURED:
        measured.pop(key, None)
    return hashlib.sha256(json.dumps(measured, sort_keys=True, default=str).encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the dotted keys in which two plans measure different things, with both values.

    A key that an older format lacks did not exist then: it had today's default, unless a command
    sets it. A folder with another plan is refused with them.
    """
    before, after, command = flat(old), flat(new), new.get("command") or ()
    version = old.get("format", 1)  # a record may hold anything
    is_older = not isinstance(version, int) or version < new.get("format", FORMAT)
    new_keys = after.keys() - before.keys()
    added = {key for key in new_keys if is_older and not _is_set(key, command)}
    return [
        f"{key}: {_shown(key, before)} → {_shown(key, after)}"
        for key in sorted((before.keys() | after.keys()) - added - set(_REMARKS))
        if before.get(key) != after.get(key) and key.split(".")[0] not in NOT_MEASURED
    ]


def _shown(key: str, flat: Mapping[str, Any]) -> str:
    """Return a key's value as short text; a dash if the plan does not have the key."""
    longest = _LONGEST_HASH if key.startswith("sources.") else _LONGEST
    return str(flat.get(key, "–"))[:longest]


def refusal_of_sources(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return why results in a folder come from other code than now, with the remedy.

    None if the user's code files are equal. Continuing a run and reproducing a record are refused
    with it.
    """
    files = changed_sources(before, now)
    if not files:
        return None
    listed = ", ".join(files[:20])
    if not any(file in (now.get("sources") or {}) for file in files):
        return (
            f"{listed} can't be found here: start in its folder by python -m perfexp, or set "
            "PYTHONPATH."
        )
    return f"{listed} changed since: restore it, or measure the new code into another output_dir."


def changed_sources(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the user's code files that differ between two plans.

    None are listed if a plan does not name its code files.
    """
    before, after = old.get("sources"), new.get("sources")
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return []
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )


def _is_set(key: str, command: Iterable[str]) -> bool:
    """Return whether a command sets a key: by its name, a mapping around it, or an experiment."""
    typed = {text.lstrip("+~").partition("=")[0] for text in command}
    if key.startswith("sources"):
        return False
    return "experiment" in typed or any(
        f"{key}.".startswith(f"{name}.") for name in typed if "." in name or name == key
    )
