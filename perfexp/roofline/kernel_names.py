"""Short labels of kernels, with a number where kernels share a short name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|<unnamed>::")
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


def numbered(texts: Iterable[str]) -> list[str]:
    """The same texts, repetitions with a number: `conv1`, `conv1 #2`."""
    counts = Counter[str]()
    result = []
    for text in texts:
        counts[text] += 1
        result.append(f"{text} #{counts[text]}" if counts[text] > 1 else text)
    return result


def cut(label: str, length: int) -> str:
    """A label without its middle if it is too long, since both ends distinguish it."""
    half = (length - 1) // 2
    return label if len(label) <= length else f"{label[: length - 1 - half]}…{label[-half:]}"
