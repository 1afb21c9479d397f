"""Credentials in URLs: replaced before any other code can write, print or send them.

`hide` removes them from a command line and from a composed plan; `reveal` returns them to the code that opens a
connection, in this process only. `mask` cleans texts with URLs, `scrub` also messages of libraries, which may quote a
part of a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any
from urllib.parse import unquote

_MASK = "***"
#: User and password of a URL, up to its last @: a password may hold characters that are not allowed there.
_USER = re.compile(r"(?s)(?<=://).*@")
#: The same within a text of several URLs, which spaces, quotes or commas separate.
_USER_IN_TEXT = re.compile(
    r"(?<!sqlite://)(?<!file://)(?<=://)(?:(?!,\s*[A-Za-z][\w+.-]*://)[^\s'\"])*@"
)
#: Values of a query or a fragment, by names of secrets; others (`sslmode=require`) are of use to readers.
_QUERY = re.compile(
    r"([?&;#][\w.%-]*(?:tok|pass|pwd|pw|secret|key|sig|auth|cred|session)[\w.%-]*=)([^&;#\s'\",]+)",
    re.IGNORECASE,
)
_URL = re.compile(r"\s*[A-Za-z][\w+.-]*://")
#: Stores in files have no credentials, and may have an @ in their paths.
_FILES = ("sqlite:", "file:")
#: A shorter secret would be found inside other words.
_SHORTEST = 4
#: URLs of this process by the text that replaces them everywhere else.
_hidden: dict[str, str] = {}


def hide(node: Any) -> Any:
    """Return plain data in which no URL has a credential; a text that starts with a scheme is one URL."""
    if isinstance(node, Mapping):
        return {key: hide(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [hide(value) for value in node]
    if not isinstance(node, str) or not _URL.match(node):
        return mask(node) if isinstance(node, str) else node
    if node.lstrip().startswith(_FILES):
        return node
    masked = shown = _QUERY.sub(rf"\1{_MASK}", _USER.sub(f"{_MASK}@", node))
    if masked != node:
        for number in count(2):
            if _hidden.setdefault(shown, node) == node:
                break
            shown = masked.replace(
                _MASK, f"{_MASK}{number}", 1
            )  # another credential for the same address
    return shown


def reveal(url: str) -> str:
    """Return the URL that was passed to `hide`; any other URL as it is."""
    return _hidden.get(url, url)


def is_masked(text: str) -> bool:
    """Whether a credential was removed from a text, such as a URL that `hide` returned in another process."""
    return _MASK in text


def mask(text: str) -> str:
    """Return a text without the credentials of the URLs in it."""
    return (
        _QUERY.sub(rf"\1{_MASK}", _USER_IN_TEXT.sub(f"{_MASK}@", text)) if "://" in text else text
    )


def scrub(text: str) -> str:
    """Return a foreign text, such as a library's error, without credentials, wherever it quotes a hidden one."""
    for secret in sorted(
        {secret for url in _hidden.values() for secret in _secrets(url)}, key=len, reverse=True
    ):
        text = text.replace(secret, _MASK)
    return mask(text)


def _secrets(url: str) -> Iterator[str]:
    user = _USER.search(url)
    parts = [user[0][:-1], user[0][:-1].partition(":")[2]] if user else []
    parts += [value for _, value in _QUERY.findall(url)]
    for part in parts:
        yield from (
            text for text in (part, unquote(part)) if len(text) >= _SHORTEST and text != _MASK
        )
