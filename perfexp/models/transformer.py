"""Transformer encoders for sequences, texts and video frames, and CLIP's comparison with texts.

The CLIP gesture classifier consists of them. Source: Radford et al., "Learning Transferable Visual
Models From Natural Language Supervision". The blocks are pre-norm: layer norms precede attention
and perceptron.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention

from perfexp.models.gestures import NUM_TOKENS, padded

#: Longest sequence or text, in frames or tokens.
LONGEST = 512
#: Side of the images for CLIP's ViT-B/32, in pixels.
IMAGE_SIDE = 224


class Block(nn.Module):
    """Self-attention and a perceptron with four times the width.

    Each follows a layer norm and has a shortcut.

    Args:
        width: numbers per position.
        is_causal: whether a position attends only to itself and earlier positions.
    """

    def __init__(self, width: int, heads: int, dropout: float, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal, self.dropout = heads, is_causal, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        mixed = inputs + self.drop(self._attend(self.norm_1(inputs)))
        return mixed + self.perceptron(self.norm_2(mixed))  # type: ignore[no-any-return]

    def _attend(self, inputs: Tensor) -> Tensor:
        """Return self-attention over normalized inputs, (batch, length, width)."""
        batch, length, width = inputs.shape
        parts = self.query_key_value(inputs).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=self.is_causal
        )
        outputs: torch.Tensor = self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return outputs


class Transformer(nn.Module):
    """Blocks over embedded positions, with a final layer norm.

    Sines and cosines of the positions are added first. Raises `ValueError` above `LONGEST`
    positions.
    """

    positions: Tensor

    def __init__(
        self, width: int, layers: int, heads: int, dropout: float, *, is_causal: bool = False
    ) -> None:
        super().__init__()
        self.register_buffer("positions", sines(LONGEST, width), persistent=False)
        self.blocks = nn.Sequential(
            *(Block(width, heads, dropout, is_causal=is_causal) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map embedded positions (batch, length, width) to the same shape."""
        if inputs.shape[1] > LONGEST:
            raise ValueError(f"a sequence has at most {LONGEST} positions")
        outputs: torch.Tensor = self.norm(self.blocks(inputs + self.positions[: inputs.shape[1]]))
        return outputs


def sines(length: int, width: int) -> Tensor:
    """Return positional encodings (length, width): sines at even columns, cosines at odd ones.

    Source: Vaswani et al., "Attention Is All You Need", section 3.5.
    """
    rates = torch.exp(-math.log(10_000.0) * torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class SequenceEncoder(nn.Module):
    """An encoder for sequences (batch, frames, columns), for example skeleton joint coordinates.

    It combines a linear embedding, a transformer and the mean over frames.

    Args:
        embedding: length of the output per sequence.
    """

    def __init__(
        self, columns: int, width: int, layers: int, heads: int, dropout: float, embedding: int
    ) -> None:
        super().__init__()
        self.columns, self.shape = columns, f"FRAMESx{columns}"
        self.embed = nn.Linear(columns, width)
        self.project = nn.Linear(width, embedding, bias=False)
        self.transformer = Transformer(width, layers, heads, dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map sequences to (batch, embedding); raise `ValueError` for another number of columns."""
        if inputs.ndim != 3 or inputs.shape[2] != self.columns:
            raise ValueError(f"a frame has {self.columns} columns, set input_size={self.shape}")
        outputs: torch.Tensor = self.project(self.transformer(self.embed(inputs)).mean(dim=1))
        return outputs


class FrameEncoder(nn.Module):
    """An encoder for clips (batch, 3, frames, height, width).

    It encodes each frame as an image and averages over frames.

    Args:
        images: encoder that maps images (n, 3, 224, 224) to (n, embedding).
    """

    def __init__(self, images: nn.Module) -> None:
        super().__init__()
        self.images, self.shape = images, str(IMAGE_SIDE)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map clips to (batch, embedding); raise `ValueError` for frames of another size."""
        if inputs.ndim != 5 or inputs.shape[3:] != (IMAGE_SIDE, IMAGE_SIDE):
            raise ValueError(
                f"a frame has {IMAGE_SIDE} × {IMAGE_SIDE} pixels, set input_size={self.shape}"
            )
        batch, _, frames = inputs.shape[:3]
        images = inputs.transpose(1, 2).flatten(0, 1)
        features: torch.Tensor = self.images(images).view(batch, frames, -1)
        return features.mean(dim=1)


class TextEncoder(nn.Module):
    """An encoder for fixed texts: a causal transformer over their bytes.

    The output at a text's end represents the text.
    """

    tokens: Tensor
    ends: Tensor

    def __init__(
        self, texts: Sequence[str], width: int, layers: int, heads: int, embedding: int
    ) -> None:
        super().__init__()
        tokens, ends = padded(texts)
        # places of the ends in all texts' states, one text after the other
        flat_ends = [row * len(tokens[0]) + end for row, end in enumerate(ends)]
        self.register_buffer("tokens", torch.tensor(tokens), persistent=False)
        self.register_buffer("ends", torch.tensor(flat_ends), persistent=False)
        self.embed = nn.Embedding(NUM_TOKENS, width)
        self.project = nn.Linear(width, embedding, bias=False)
        self.transformer = Transformer(width, layers, heads, 0.0, is_causal=True)

    def forward(self) -> Tensor:
        """Return the texts as (texts, embedding)."""
        states = self.transformer(self.embed(self.tokens))
        outputs: torch.Tensor = self.project(states.flatten(0, 1).index_select(0, self.ends))
        return outputs


class ClipClassifier(nn.Module):
    """Class scores: cosines between inputs and class texts, divided by a temperature.

    In training, every forward pass encodes the texts. In evaluation, the last `encode_texts`
    counts.
    """

    text_features: Tensor

    def __init__(
        self, inputs: nn.Module, texts: TextEncoder, *, num_classes: int, temperature: float
    ) -> None:
        super().__init__()
        self.inputs, self.texts = inputs, texts
        self.temperature, self.num_classes = temperature, num_classes
        size = texts.project.out_features
        self.register_buffer("text_features", torch.zeros(num_classes, size), persistent=False)

    @torch.no_grad()
    def encode_texts(self) -> None:
        """Encode the texts with the current weights, in place to keep captured graphs valid."""
        self.text_features.copy_(normalize(self.texts(), dim=-1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scores (batch, classes)."""
        texts = normalize(self.texts(), dim=-1) if self.training else self.text_features
        features = normalize(self.inputs(inputs), dim=-1)
        return features @ texts.to(features.dtype).T / self.temperature


def info_nce(scores: Tensor) -> Tensor:
    """Return the symmetric InfoNCE for (n, n) scores with pairs on the diagonal.

    Source: Radford et al., figure 3. Row i compares input i with all texts, column i text i with
    all inputs.
    """
    pairs = torch.arange(len(scores), device=scores.device)
    cross_entropy = nn.functional.cross_entropy
    return (cross_entropy(scores, pairs) + cross_entropy(scores.T, pairs)) / 2
