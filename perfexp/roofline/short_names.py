"""Labels: short names of kernels and layers, with what tells those apart that would have the same one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence

#: Template arguments longer than this say less than a number.
_LONGEST = 24
#: Labels that are the same so far look the same where they are cut.
_BEGINNING = 28
_WORDS = re.compile(r"[_ ]")
_NAMESPACES = re.compile(r"(?:\w+::)+")
_CAST = re.compile(r"\((?:unsigned |signed )?[a-z]+(?: [a-z]+)*\)(?=[-\w])")


def marks(names: Sequence[str], short: Callable[[str], str]) -> dict[str, str]:
    """What has to follow a short name so that it is nobody else's: `<…, 4>`, ` #2`, or nothing.

    Args:
        names: whole ones, in the order in which they are numbered where nothing else tells them apart.
        short: makes a short name of a whole one.
    """
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        alike[short(name)].append(name)
    found = {}
    for group in alike.values():
        endings = _endings(group)
        for number, (name, ending) in enumerate(zip(group, endings, strict=True), start=1):
            found[name] = ending or (f" #{number}" if number > 1 else "")
    return found


def _endings(group: Sequence[str]) -> list[str]:
    """The shortest end of the template arguments that is another one for each name; nothing where none is short."""
    every = [template_arguments(name) for name in group]
    for count in range(1, max(map(len, every)) + 1 if len(group) > 1 else 1):
        ends = [_end(arguments, count) for arguments in every]
        if max(map(len, ends)) > _LONGEST:
            break
        if len(set(ends)) == len(ends):
            return ends
    return [""] * len(group)


def _end(arguments: Sequence[str], count: int) -> str:
    left = ["…"] if len(arguments) > count else []
    return f"<{', '.join([*left, *arguments[-count:]])}>" if arguments else ""


def words_apart(labels: Sequence[str]) -> list[str]:
    """For each label the first of its words that a label with the same beginning does not have; nothing for others.

    Libraries name kernels by long rows of words: `sm80_xmma_fprop_implicit_gemm_f32f32_…_tilesize128x32x8_stage3_…`.

    Args:
        labels: no two are the same.
    """
    alike: defaultdict[str, list[list[str]]] = defaultdict(list)
    words = [_WORDS.split(label) for label in labels]
    for label, each in zip(labels, words, strict=True):
        alike[label[:_BEGINNING]].append(each)
    found = []
    for label, each in zip(labels, words, strict=True):
        others = [set(other) for other in alike[label[:_BEGINNING]] if other is not each]
        own = (word for word in each if others and word and not any(word in other for other in others))
        found.append(next(own, ""))
    return found


def template_arguments(name: str) -> list[str]:
    """The arguments of a kernel's own template, without namespaces and casts; none where it has none.

    Args:
        name: as the profiler gives it: `void ns::kernel<float, (int)4>(T1 *)`.
    """
    text = name.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    begin, depth, found = text.find("<"), 0, [""]
    if begin < 0 or "(" in _CAST.sub("", text[:begin]):
        return []
    for character in text[begin:]:
        depth += character in "<("
        if depth == 1 and character == ",":
            found.append("")
        elif depth > 1 or character not in "<>":
            found[-1] += character
        depth -= character in ">)"
        if not depth:
            break
    return [_CAST.sub("", _NAMESPACES.sub("", argument)).strip() for argument in found]


def cut(label: str, mark: str, length: int) -> str:
    """A label that is not longer than a place takes, with what tells it apart.

    Args:
        label: any.
        mark: its end, or a word of it; nothing where the label alone is enough.
        length: characters.
    """
    if len(label) <= length:
        return label
    return f"{label.removesuffix(mark)[: max(length - len(mark) - 1, 1)]}…{mark}"
