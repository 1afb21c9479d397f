"""Mask credentials in URLs before other code can write, print or send them.

A tracking server's URL may contain a password or a token. `hide` masks it in a command line and in
a composed plan, and remembers the original in this process. `reveal` returns the original to the
code that opens the connection. `mask` cleans texts that contain URLs. `scrub` also cleans library
messages, which may quote a password without its URL.
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
    """Return plain data (mappings, lists, texts) with `***` for credentials in URLs.

    A text that starts with a scheme, such as `https://`, is one URL. If two URLs differ only in
    their credentials, the second mask has a number, so that `reveal` can tell them apart.
    """
    if isinstance(node, Mapping):
        return {key: hide(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return list(map(hide, node))
    if not isinstance(node, str):
        return node
    if not _URL.match(node):
        return mask(node)
    if node.lstrip().startswith(_FILES):
        return node
    masked = hidden_text = _QUERY.sub(rf"\1{_MASK}", _USER.sub(f"{_MASK}@", node))
    if masked != node:
        for number in count(2):
            if _hidden.setdefault(hidden_text, node) == node:
                break
            # same address, another credential
            hidden_text = masked.replace(_MASK, f"{_MASK}{number}", 1)
    return hidden_text


def reveal(url: str) -> str:
    """Return the original of a URL that `hide` masked in this process, or another URL unchanged."""
    return _hidden.get(url, url)


def is_masked(text: str) -> bool:
    """Return whether a text contains a mask.

    A plan from another process does: its credentials are unknown here. Jobs of a cluster and
    resumed sweeps refuse or skip such a text.
    """
    return _MASK in text


def mask(text: str) -> str:
    """Return a text with the credentials in its URLs masked."""
    if "://" in text:
        return _QUERY.sub(rf"\1{_MASK}", _USER_IN_TEXT.sub(f"{_MASK}@", text))
    return text


def scrub(text: str) -> str:
    """Return a library's message with all secrets masked that `hide` has masked before.

    The tracker cleans MLflow's errors with it before they are printed.
    """
    secrets = {secret for url in _hidden.values() for secret in _secrets(url)}
    for secret in sorted(
        secrets, key=len, reverse=True
    ):  # the longest first: one may contain another
        text = text.replace(secret, _MASK)
    return mask(text)


def _secrets(url: str) -> Iterator[str]:
    """Yield the secrets in a URL, as written and with percent codes decoded.

    These are `user:password`, the password, and secret query values. Short ones are left out.
    """
    parts = [value for _, value in _QUERY.findall(url)]
    if match := _USER.search(url):
        user = match[0].removesuffix("@")
        parts += [user, user.partition(":")[2]]
    for text in [*parts, *map(unquote, parts)]:
        if len(text) >= _SHORTEST and text != _MASK:
            yield text
