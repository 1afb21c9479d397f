"""Forked CUDA: stand-ins for CUDA tensors in a forked process, where CUDA itself does not work."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._subclasses import fake_tensor

#: CUDA queries that fail in a forked process; it gets its parent's answers.
_CUDA_QUESTIONS = (
    *("is_available", "is_initialized", "current_device", "device_count", "is_bf16_supported"),
    *("get_device_name", "get_device_capability", "get_device_properties"),
)
#: Methods that select the device in their Python binding, unlike their operator.
_SELECTING_METHODS = ("copy_", "contiguous", "__getitem__", "__setitem__", "__invert__")


def answers() -> dict[str, Any]:
    """Return CUDA's answers by function name, for a forked process.

    They are empty if CUDA is not initialized.
    """
    if not torch.cuda.is_initialized():
        return {}
    return {name: getattr(torch.cuda, name)() for name in _CUDA_QUESTIONS}


def prepare(known: dict[str, Any]) -> None:
    """Adapt torch permanently to a forked process.

    Args:
        known: the parent's `answers`.
    """
    if not known:
        return
    for name, result in known.items():
        setattr(torch.cuda, name, lambda *_, result=result, **__: result)
    torch.cuda._initialized = False  # else recomputation saves the device's random state
    torch.cuda._lazy_init = torch.cuda.synchronize = lambda *_: None
    fake_tensor.init_gpu_context = lambda _: None  # type: ignore[assignment]
    leave_device_unselected(known["current_device"])


def leave_device_unselected(index: int) -> None:
    """Keep torch's bindings from querying or selecting the CUDA device.

    A forked process can do neither. Some methods select their tensor's device after querying it; a
    stand-in answers `meta` once.
    """
    handlers, question = fake_tensor._DISPATCH_META_HANDLERS, torch.ops.prim.device.default
    device: Callable[..., Any] = handlers[question]
    asked: list[bool] = []
    select_backend = torch._C._select_conv_backend

    def meta_once(args: Any) -> Any:
        if asked and asked.pop():
            return torch.device("meta")
        return device(args)

    def unselected(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            asked.append(True)
            try:
                return method(*args, **kwargs)
            finally:
                asked.clear()

        return call

    def numbered(value: Any) -> Any:
        if value == "cuda" or value == torch.device("cuda"):
            return f"cuda:{index}"
        return value

    def to_numbered(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return method(
                tensor,
                *map(numbered, args),
                **{key: numbered(value) for key, value in kwargs.items()},
            )

        return call

    def made_on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(make)
        def call(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            made = make(*args, device="cpu", **kwargs)
            if device is None:
                return made
            return made.to(device)

        return call

    def backend(*args: Any, **kwargs: Any) -> Any:
        try:
            return select_backend(*args, **kwargs)
        except RuntimeError:  # depthwise depends on the device; its output layout does not
            return torch._C._ConvBackend.Cudnn  # type: ignore[attr-defined]

    handlers[question] = meta_once
    torch.nn.functional.scaled_dot_product_attention = _attention(
        torch.nn.functional.scaled_dot_product_attention
    )
    for name in _SELECTING_METHODS:
        setattr(torch.Tensor, name, unselected(getattr(torch.Tensor, name)))
    torch.Tensor.to = to_numbered(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor.to("cuda")  # type: ignore[method-assign]
    torch.tensor = made_on_host(torch.tensor)
    torch._C._select_conv_backend = backend


def _attention(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function with the operator that a GPU uses for four-dimensional tensors.

    Only stand-ins need it.
    """

    @wraps(attend)
    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **settings: Any
    ) -> Any:
        given = (query, key, value)
        if torch.overrides.has_torch_function(given):
            return torch.overrides.handle_torch_function(
                attention, given, *given, attn_mask, *rest, **settings
            )
        if not query.is_cuda or query.ndim != 4 or settings.pop("enable_gqa", False):
            return attend(*given, attn_mask, *rest, **settings)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                ~attn_mask, -torch.inf
            )
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        settings = dict(zip(("dropout_p", "is_causal"), rest, strict=False)) | settings
        keeps = torch.is_grad_enabled() and any(one.requires_grad for one in given)
        operator = torch.ops.aten._scaled_dot_product_efficient_attention.default
        return operator(*given, attn_mask, keeps, **settings)[0]

    return attention
