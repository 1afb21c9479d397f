"""Credentials in URLs: masked before any other code can write, print or send them.

`hide` masks them in a command line and in a composed plan. `reveal` returns the original URL to the
code that opens a connection, in this process only. `mask` cleans texts that contain URLs. `scrub`
also cleans library messages, which may quote parts of a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any
from urllib.parse import unquote

_MASK = "***"
#: User and password in a URL, up to the last @: a password may contain forbidden characters.
_USER = re.compile(r"(?s)(?<=://).*@")
#: The same in a text with several URLs, separated by spaces, quotes or commas.
_USER_IN_TEXT = re.compile(
    r"(?<!sqlite://)(?<!file://)(?<=://)(?:(?!,\s*[A-Za-z][\w+.-]*://)[^\s'\"])*@"
)
#: Secrets in a query or fragment, found by name; other values, such as `sslmode=require`, help
#: readers.
_QUERY = re.compile(
    r"([?&;#][\w.%-]*(?:tok|pass|pwd|pw|secret|key|sig|auth|cred|session)[\w.%-]*=)([^&;#\s'\",]+)",
    re.IGNORECASE,
)
_URL = re.compile(r"\s*[A-Za-z][\w+.-]*://")
#: File stores have no credentials, but may have an @ in their paths.
_FILES = ("sqlite:", "file:")
#: Shortest secret to search for: shorter secrets occur in ordinary words.
_SHORTEST = 4
#: Original URLs in this process, by their masked text.
_hidden: dict[str, str] = {}


def hide(node: Any) -> Any:
    """Return plain data without credentials in URLs.

    A text that starts with a scheme is one URL.
    """
    if isinstance(node, Mapping):
        return {key: hide(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return list(map(hide, node))
    if not isinstance(node, str) or not _URL.match(node):
        if isinstance(node, str):
            return mask(node)
        return node
    if node.lstrip().startswith(_FILES):
        return node
    masked = shown = _QUERY.sub(rf"\1{_MASK}", _USER.sub(f"{_MASK}@", node))
    if masked != node:
        for number in count(2):
            if _hidden.setdefault(shown, node) == node:
                break
            shown = masked.replace(_MASK, f"{_MASK}{number}", 1)  # same address, another credential
    return shown


def reveal(url: str) -> str:
    """Return the URL that was passed to `hide`; any other URL stays as it is."""
    return _hidden.get(url, url)


def is_masked(text: str) -> bool:
    """Return whether a text has a masked credential, for example from another process."""
    return _MASK in text


def mask(text: str) -> str:
    """Return a text with the credentials in its URLs masked."""
    if "://" in text:
        return _QUERY.sub(rf"\1{_MASK}", _USER_IN_TEXT.sub(f"{_MASK}@", text))
    return text


def scrub(text: str) -> str:
    """Return a foreign text, such as a library's error, with all hidden credentials masked."""
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
