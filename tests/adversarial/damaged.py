"""Records with one thing changed, systematically: what a damaged disk, a person or another program could make of one.

Each node of a record that differs from others in kind is dropped, emptied, or gets a value that it should not have.
"""

import copy

#: Values in place of a number, of a text, and of a list or a mapping.
_NUMBERS = (0, -1, 1e308, -1e308, 5e-324, 10**30, "NaN", None, [])
_TEXTS = ("", "NaN", "x" * 300, "\ud7ff\u202e\x1b[2J", 0, None)
_PARTS = (None, 0, "NaN")


def damaged(content):
    """Yield the place and a copy of a record, as plain data, with one change each."""
    for place in sorted(_places(content), key=str):
        node = _at(content, place)
        changes = [("drop", _DROP)]
        if isinstance(node, (list, dict)):
            changes += [("empty", type(node)()), *((repr(value), value) for value in _PARTS)]
        elif isinstance(node, str):
            changes += [(repr(value)[:20], value) for value in _TEXTS]
        else:
            changes += [(repr(value), value) for value in _NUMBERS]
        if isinstance(node, list):
            changes += [("doubled", node * 2), ("reversed", node[::-1]), ("first", node[:1])]
            changes += [
                (f"all {value!r}", [value] * len(node))
                for value in (0, 1e308, -1.0)
                if _are_numbers(node)
            ]
        for name, value in changes:
            changed = copy.deepcopy(content)
            parent = _at(changed, place[:-1])
            if value is _DROP:
                del parent[place[-1]]
            else:
                parent[place[-1]] = value
            yield f"{'.'.join(map(str, place))}: {name}", changed


_DROP = object()


def _places(node, place=()):
    """The places of nodes: of lists the first and the last, of equal series and metrics one for each point."""
    items = []
    if isinstance(node, dict):
        items = list(node.items())
    elif isinstance(node, list) and node:
        items = list({0: node[0], len(node) - 1: node[-1]}.items())
    for key, inner in items:
        yield (*place, key)
        yield from _places(inner, (*place, key))


def _at(node, place):
    for key in place:
        node = node[key]
    return node


def _are_numbers(node):
    return bool(node) and all(isinstance(value, (int, float)) for value in node)
