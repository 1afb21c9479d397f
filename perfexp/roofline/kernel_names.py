"""Short labels of kernels, distinct where kernels share a short name."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

#: Longer template arguments are less readable than a number.
_MAX_ENDING = 24
_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|<unnamed>::")
_NAMESPACES = re.compile(r"(?:\w+::)+")
_CAST = re.compile(r"\((?:unsigned |signed )?[a-z]+(?: [a-z]+)*\)(?=[-\w])")
#: Names of functors in template arguments, and the general ones among them.
_HINT = re.compile(r"\w*Functor\w*|launch_\w*|\w*(?:_kernel_cuda|_kernel_impl|Ops|Op)")
_GENERAL = (
    "TensorListMetadata",
    "elementwise_kernel",
    "ReduceOp",
    "func_wrapper_t",
    "OffsetCalculator",
)


def short(kernel: str) -> str:
    """A kernel's name without its types, after the functor that specializes a general kernel of torch."""
    bare = _outside(_outside(_ANONYMOUS.sub("", kernel), "(", ")"), "<", ">").strip()
    name = bare.split(" ")[-1].rsplit("::", 1)[-1] or kernel.strip()
    if not name.endswith(("elementwise_kernel", "apply_kernel", "reduce_kernel")):
        return name
    words = re.findall(r"\w+", kernel.partition("<")[2])
    functors = (word for word in words if _HINT.fullmatch(word) and not word.startswith(_GENERAL))
    functor = next(functors, "").removeprefix("launch_")
    return f"{functor} · {name}" if functor else name


def _outside(text: str, opening: str, closing: str) -> str:
    """A text without its brackets, nested ones included, and their contents."""
    outside, depth = "", 0
    for character in text:
        depth += character == opening
        outside += "" if depth else character
        depth -= character == closing and depth > 0
    return outside


def labels(names: Sequence[str]) -> list[str]:
    """Distinct short labels of distinct kernels: `gemm<…, 4>`, `gemm<…, 8>`, or `gemm`, `gemm #2` in their order."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[short(name)].append(name)
    endings = {
        name: end
        for group in groups.values()
        for name, end in zip(group, _endings(group), strict=True)
    }
    return numbered([short(name) + endings[name] for name in names])


def numbered(texts: Sequence[str]) -> list[str]:
    """The same texts, repetitions with a number: `conv1`, `conv1 #2`."""
    counts = Counter[str]()
    result = []
    for text in texts:
        counts[text] += 1
        result.append(f"{text} #{counts[text]}" if counts[text] > 1 else text)
    return result


def _endings(group: Sequence[str]) -> list[str]:
    """The shortest ends of the template arguments that differ; empty where none is short."""
    arguments = [_template_arguments(name) for name in group]
    for count in range(1, max(map(len, arguments)) + 1 if len(group) > 1 else 1):
        ends = [_end(own, count) for own in arguments]
        if max(map(len, ends)) > _MAX_ENDING:
            break
        if len(set(ends)) == len(ends):
            return ends
    return [""] * len(group)


def _end(arguments: Sequence[str], count: int) -> str:
    omitted = ["…"] if len(arguments) > count else []
    return f"<{', '.join([*omitted, *arguments[-count:]])}>" if arguments else ""


def _template_arguments(name: str) -> list[str]:
    """The arguments of a kernel's own template, `float` and `4` of `void ns::kernel<float, (int)4>(T1 *)`."""
    head, bracket, rest = _ANONYMOUS.sub("", name).partition("<")
    if not bracket or "(" in _CAST.sub("", head):
        return []
    depth, arguments = 1, [""]
    for character in rest:
        depth += (character in "<(") - (character in ">)")
        if not depth:
            break
        if depth == 1 and character == ",":
            arguments.append("")
        else:
            arguments[-1] += character
    return [_CAST.sub("", _NAMESPACES.sub("", argument)).strip() for argument in arguments]


def cut(label: str, length: int) -> str:
    """A label without its middle if it is too long, since both ends distinguish it."""
    half = (length - 1) // 2
    return label if len(label) <= length else f"{label[: length - 1 - half]}…{label[-half:]}"
