"""Import of torchvision even if its compiled operators do not fit torch.

An example is a CUDA build next to a CPU torch. Packages that import torchvision themselves, such as
timm and transformers, then work, too.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

_MISSING_OPERATORS = "operator torchvision::nms does not exist"

#: Owner of the declared operators; they live as long as this object.
_declarations: torch.library.Library | None = None


def import_torchvision() -> Any:
    """Return the module `torchvision`.

    `import torchvision` registers shape functions for its compiled operators. It fails if these
    could not be loaded, although only detection models need them. In that case the operators are
    declared without code and the import is repeated. Any other import error is raised.
    """
    global _declarations
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if _MISSING_OPERATORS not in str(error) or _declarations is not None:
            raise
    _declarations = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        signature = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        _declarations.define(signature)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    return importlib.import_module("torchvision")


def torchvision_facts() -> dict[str, Any]:
    """Return torchvision's version and whether its compiled operators are loaded.

    Empty before its import.
    """
    torchvision = sys.modules.get("torchvision")
    if torchvision is None:
        return {}
    return {
        "torchvision": torchvision.__version__,
        "torchvision_compiled_operators": bool(torchvision.extension._has_ops()),
    }
