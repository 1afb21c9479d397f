"""Sessions for one token of a text: the context's keys and values are in a static cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from perfexp.errors import UserError
from perfexp.models import Batch, Tokens
from perfexp.models.session import TorchSession

#: Name of the cache among a model's inputs before transformers 5.20.
_CACHE = "past_key_values"


class DecodingSession(TorchSession):
    """A causal model of transformers whose calls compute one token for each text.

    The cache has room for `input_size` tokens and is full: the call writes the last one and attends
    to all. Its other content is random, which changes no time. Each call first sets the position
    back, one small kernel for all layers.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._empty_cache(1)

    def random_batch(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Batch:
        """See `Session`. The inputs hold the cache."""
        self._kind.length(input_size)  # type: ignore[attr-defined]
        ids = super().random_batch((1, 1), batch_size, seed).inputs
        module: Any = self.module
        name = "cache" if "cache" in inspect.signature(module.forward).parameters else _CACHE
        cache = self._empty_cache(input_size[1])
        inputs = {"input_ids": ids, name: cache, "use_cache": True}
        with torch.no_grad():
            self.eager(inputs)  # allocates the cache
            cache.last_position = input_size[1] - 1
            cache.lengths = torch.zeros(
                len(cache.layers), dtype=torch.int64, device=self.device.identifier
            )
            for layer, length in zip(cache.layers, cache.lengths, strict=True):
                layer.cumulative_length = length
                layer.keys.normal_()
                layer.values.normal_()
        return Batch(inputs=inputs, targets=None)

    def _empty_cache(self, length: int) -> Any:
        from transformers import StaticCache

        module: Any = self.module
        cache = StaticCache(config=module.config, max_cache_len=length)
        if any(not hasattr(layer, "cumulative_length") for layer in cache.layers):
            raise UserError(
                f"{self._name} keeps other states than keys and values; choose another model for "
                "mode=decode, such as hf:llama."
            )
        return cache

    def forward(self, inputs: Any) -> Any:
        _rewind(inputs)
        return super().forward(inputs)

    def eager(self, inputs: Any) -> Any:
        _rewind(inputs)
        return super().eager(inputs)

    def tokens(self, inputs: Any) -> Tokens:
        """See `Session`. A token reads every parameter, except other tokens' embeddings."""
        module: Any = self.module
        weights = {one.data_ptr(): one.nbytes for one in module.parameters()}
        embeddings, head = module.get_input_embeddings(), module.get_output_embeddings()
        if head is None or head.weight is not embeddings.weight:
            weights.pop(embeddings.weight.data_ptr(), None)
        layers = _cache_of(inputs).layers
        return Tokens(
            count=len(inputs["input_ids"]),
            weight_bytes=sum(weights.values()),
            cache_bytes=sum(layer.keys.nbytes + layer.values.nbytes for layer in layers),
        )


def _cache_of(inputs: Any) -> Any:
    return inputs.get(_CACHE) or inputs["cache"]


def _rewind(inputs: Any) -> None:
    """Set the position of the next token to the cache's last."""
    cache = _cache_of(inputs)
    if hasattr(cache, "lengths"):
        cache.lengths.fill_(cache.last_position)
        for layer in cache.layers:
            layer.cumulative_length_int = cache.last_position  # of a sliding window
