"""Read foreign files: files that this process did not write, such as records of earlier runs.

Their content is data, never code, and may be damaged or hostile. Only regular files are opened.
Anything else (a link, FIFO, device or folder) is an `OSError` that names it. All code that reads
back results, plans, logs or spreadsheets uses this module.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
import shlex
import stat
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import yaml

from perfexp.host.files import write_atomically

#: Limit on a record, its points and its log: a larger file would fill the memory.
MAX_BYTES = 1 << 28
#: Far above every plan: a resolved configuration has about 300 nodes, six levels deep.
_MAX_YAML_BYTES, _MAX_YAML_EVENTS, _MAX_DEPTH = 1 << 24, 1_000_000, 64
#: Characters that YAML may resolve as a number, in quadratic time. In base 60, 1:59:59:… is one.
_NUMBER, _MAX_NUMBER = re.compile(r"[-+.:\d_]*"), 1000
#: The C loader if available: a hundred plans take 40 ms instead of 300.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: Limit on a command that is shown, in characters: nobody types more.
_MAX_SHOWN = 50_000
#: Texts that a terminal or a shell shows or reads as something else: see `command_line`.
_AMBIGUOUS = ("  ", "\\'", "\\\\", "!")
#: Unicode categories of visible characters. Some letters and a symbol are blank all the same.
_VISIBLE, _BLANK = "LNPS", "\u115f\u1160\u2800\u3164\uffa0"
#: What msgspec raises for content that is not of the expected type.
DECODING_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_T = TypeVar("_T")
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}
_KINDS |= {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file and return its descriptor; anything else raises `OSError`, unopened.

    Folders in the path may be links, the file itself may not. With `O_CREAT` a missing file is
    created.

    Args:
        flags: flags for `os.open`, such as `os.O_RDONLY`.
    """
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode  # opening a device or a FIFO can already do something
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "something else")
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def is_regular(path: Path) -> bool:
    """Return whether a path is a regular file, and not a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):  # ValueError: a NUL in its name
        return False


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return a regular file's content.

    Raises:
        OSError: the file is missing, is not regular, or has more bytes than `limit`.
    """
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"it is larger than {limit >> 20} MiB", str(path))
        return file.read(limit)


def open_append(path: Path) -> BinaryIO:
    """Open a regular file for reading and appending; create it if it is missing.

    A file that has another name elsewhere (a hard link) becomes a copy first: the other name keeps
    its content.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    descriptor = open_regular(path, flags)
    if os.fstat(descriptor).st_nlink > 1:
        with os.fdopen(descriptor, "rb") as shared:
            write_atomically(path, shared.read(MAX_BYTES))
        descriptor = open_regular(path, flags)
    return os.fdopen(descriptor, "ab+")


def utf8(content: bytes) -> bytes:
    """Return JSON or YAML content without a byte-order mark."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 0 in content[:2]:
        raise msgspec.DecodeError("its text is UTF-16, save it as UTF-8")
    return content.removeprefix(codecs.BOM_UTF8)


def from_json(content: bytes, kind: type[_T]) -> _T:
    """Return JSON as an object of a type, such as a msgspec Struct.

    Records, sweeps and expected points are read by it.

    Raises:
        DECODING_ERRORS: the content is not JSON, or not of this type.
    """
    return msgspec.json.decode(utf8(content), type=kind)


def json_data(content: bytes) -> Any:
    """Return JSON as plain data: dicts, lists, texts and numbers.

    Environments and manifests are read by it.

    Raises:
        ValueError: the content is not JSON, is not valid Unicode, or is nested too deeply.
    """
    try:
        return msgspec.json.decode(utf8(content))
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def yaml_data(content: bytes) -> Any:
    """Return YAML as plain data: dicts, lists, texts and numbers.

    Plans in run folders are read by it.

    Raises:
        ValueError: the content is not YAML, is larger or nested more deeply than any plan, or has
            an alias, which can stand for billions of nodes.
    """
    if len(content) > _MAX_YAML_BYTES:
        raise ValueError(f"larger than {_MAX_YAML_BYTES >> 20} MiB")
    try:
        content = utf8(content)
        # the loader itself overruns the stack where nodes are nested too deeply
        _check_events(content)
        return yaml.load(content, Loader=_LOADER)
    except (yaml.YAMLError, msgspec.DecodeError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (AttributeError, LookupError, OverflowError, TypeError) as error:  # !!bool foo
        raise ValueError("a value is not of the type that its tag or form says") from error


def spreadsheet_text(text: str) -> str:
    """Return text for a CSV cell; text that a spreadsheet would run gets an apostrophe in front.

    Tables and profiler reports pass each text cell through it.
    """
    if not text.startswith(("=", "+", "-", "@")):
        return text
    with suppress(ValueError):
        float(text)
        return text
    return f"'{text}"


def printable(line: str) -> str:
    """Return a line that is safe to print on a terminal.

    Control characters, including tabs and line breaks, and characters that reverse text become
    question marks. The console and all commands print foreign names and messages through it.
    """
    return "".join(
        letter if letter.isprintable() or letter == "\N{NO-BREAK SPACE}" else "?" for letter in line
    )


def command_line(words: Sequence[str], program: Sequence[str] = ("perfexp",)) -> str | None:
    """Return a command line that users can copy from the terminal into any shell.

    None means that no line is safe: it has invisible characters, for example, or a backslash before
    a quote or backslash, which fish reads as an escape, or `!`, which csh replaces even in quotes.

    Args:
        words: arguments, without quotes.
        program: first words of the line.
    """
    line = shlex.join([*program, *words])
    is_ambiguous = any(text in line for text in _AMBIGUOUS) or not all(map(_is_visible, line))
    if is_ambiguous or len(line) > _MAX_SHOWN:
        return None
    return line


def _is_visible(letter: str) -> bool:
    is_blank = letter in _BLANK
    return letter == " " or (unicodedata.category(letter)[0] in _VISIBLE and not is_blank)


def _check_events(content: bytes) -> None:
    """Raise `ValueError` for YAML that is dangerous to load; see `yaml_data`.

    It parses the content into events, without building any nodes.
    """
    depth = 0
    for number, event in enumerate(yaml.parse(content, Loader=_LOADER)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"the alias *{event.anchor} is not allowed")
        if isinstance(event, yaml.ScalarEvent):
            event.value.encode()  # half a surrogate pair, which no file can take, is a ValueError
            if len(event.value) > _MAX_NUMBER and (event.tag or _NUMBER.fullmatch(event.value)):
                raise ValueError(f"a number of more than {_MAX_NUMBER} characters")
        if depth > _MAX_DEPTH or number > _MAX_YAML_EVENTS:
            raise ValueError("nested too deeply, or too many entries")
