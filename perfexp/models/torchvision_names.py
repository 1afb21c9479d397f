"""Names of models without a configuration file: of torchvision, timm and transformers.

Importing any of these packages takes seconds, so torchvision's source files are searched instead.
The command line uses the names for `model=NAME`, listings and completion.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

#: Packages whose models perfexp does not measure, and why.
REFUSED = {
    "detection": "learns from boxes and takes a list of images",
    "optical_flow": "takes pairs of images",
}
#: Prefixes for models of timm and of Hugging Face's transformers.
TIMM, HF = "timm:", "hf:"
_PREFIXED = re.compile(rf"{TIMM}\w+|{HF}[\w-]+")
_BUILDER = re.compile(
    r"^@register_model\((?:name=)?(?:[\"'](\w+)[\"'])?\)\n.*?^def (\w+)", re.MULTILINE | re.DOTALL
)


@cache
def names() -> tuple[str, ...]:
    """Return the sorted names of measurable models; empty without torchvision.

    They are read from the decorators `@register_model` in torchvision's source files.
    """
    try:
        spec = importlib.util.find_spec("torchvision")
    except (ImportError, ValueError):
        return ()
    model_names = set()
    for root in (spec.submodule_search_locations or []) if spec else []:
        models = Path(root) / "models"
        for file in models.rglob("*.py"):
            if file.parent.name not in REFUSED:
                builders = _BUILDER.finditer(file.read_text(encoding="utf-8"))
                model_names |= {builder[1] or builder[2] for builder in builders}
    return tuple(sorted(model_names))


def is_name(option: str) -> bool:
    """Return whether a `model` option needs no file, such as `swin_t`, `timm:NAME` or `hf:NAME`."""
    return _PREFIXED.fullmatch(option) is not None or option in names()


@cache
def node(option: str) -> dict[str, Any]:
    """Return the configuration for an option without a file; the same object each time.

    It takes the defaults from `conf/model/torchvision.yaml`, `timm.yaml` or `hf.yaml`.
    """
    prefix, colon, _ = option.partition(":")
    return {"defaults": [prefix if colon else "torchvision", "_self_"], "name": option}
