"""Short labels of kernels, with a number where kernels share a short name.

A CUDA kernel's full name has hundreds of characters, mostly template arguments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

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


@lru_cache(maxsize=4096)  # a comparison meets the same kernels in each run
def short(kernel: str) -> str:
    """Return a kernel name without its namespace, types and arguments.

    A general torch kernel is preceded by the functor that specializes it, for example `MulFunctor ·
    vectorized_elementwise_kernel`. Tables and plots of rooflines label kernels with it.
    """
    bare = _outside(_outside(_ANONYMOUS.sub("", kernel), "(", ")"), "<", ">").strip()
    name = bare.split(" ")[-1].rsplit("::", 1)[-1] or kernel.strip()
    if not name.endswith(("elementwise_kernel", "apply_kernel", "reduce_kernel")):
        return name
    words = re.findall(r"\w+", kernel.partition("<")[2])
    functors = (word for word in words if _HINT.fullmatch(word) and not word.startswith(_GENERAL))
    functor = next(functors, "").removeprefix("launch_")
    if functor:
        return f"{functor} · {name}"
    return name


def _outside(text: str, opening: str, closing: str) -> str:
    """Return a text without its brackets and their contents, nested or not."""
    outside, depth = "", 0
    for character in text:
        depth += character == opening
        outside += "" if depth else character
        depth -= character == closing and depth > 0
    return outside


def numbered(texts: Iterable[str]) -> list[str]:
    """Return the texts, with numbers for repetitions: `conv1`, `conv1 #2`.

    Rows with equal labels could not be distinguished.
    """
    counts = Counter[str]()
    result = []
    for text in texts:
        counts[text] += 1
        if counts[text] > 1:
            text = f"{text} #{counts[text]}"
        result.append(text)
    return result


def cut(label: str, length: int) -> str:
    """Return a label without its middle if it is too long, since both ends distinguish it.

    Labels in plots are shortened by it.
    """
    half = (length - 1) // 2
    if len(label) <= length:
        return label
    return f"{label[: length - 1 - half]}…{label[-half:]}"
