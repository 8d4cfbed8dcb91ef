"""A transformer that classifies texts of one length."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn

from bayesfl.base.options import Count, Positive, Range, declared
from bayesfl.models.cutting import SplitModel
from bayesfl.models.networks import sizes
from bayesfl.models.starts import seeded


class _Layer(nn.Module):
    """Attention between the tokens of a text, then two linear layers for each token, [B, T, d] ->
    [B, T, d].
    """

    def __init__(self, d: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.project, self.gather = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.widen, self.narrow = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        apart = (*x.shape[:2], 3, self.heads, x.shape[2] // self.heads)
        query, key, value = self.project(self.norm1(x)).view(apart).permute(2, 0, 3, 1, 4)
        weights = self.dropout((query @ key.mT / apart[-1] ** 0.5).softmax(-1))
        x = x + self.dropout(self.gather((weights @ value).transpose(1, 2).flatten(2)))
        return x + self.dropout(self.narrow(self.dropout(self.widen(self.norm2(x)).relu())))


class _Encoder(nn.Module):
    """An encoder of text: T tokens by number, [B, T] -> the features of the last one, [B, d]."""

    def __init__(
        self, length: int, tokens: int, d: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(tokens, d), nn.Embedding(length, d)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(_Layer(d, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return self.norm(self.layers(self.dropout(self.embed(x.long()) + places)))[:, -1]


@declared
@seeded
def transformer(
    inputs: int | Sequence[int],
    *,
    outputs: Count,
    tokens: Count | None = None,
    d: Count = 64,
    layers: Count = 2,
    heads: Count = 4,
    dropout: Annotated[float, Range(0, 1, "[")] = 0.1,
    head_scale: Positive | None = None,
    seed: int = 0,
) -> SplitModel:
    """Build a small transformer that classifies texts: embedding, encoder layers, the last token |
    outputs.

    Inputs are T tokens by number, [B, T] int64 (or floats that are whole numbers), each within [0,
    tokens); outputs are [B, O]. Every token attends to every other, later ones included, and the
    head reads what the last of them has gathered: to predict the next character, or a class of a
    text. All texts have T tokens; there is no padding. Tokens and places have an embedding each,
    which are added; places are learned, as in one of the paper's variants. A layer has attention by
    `heads` heads and a network of 4 d ReLUs, both added to what they read, with a layer norm
    *before* each and one after the last layer, so plain SGD needs no warm-up.

    It consists of plain operations, so every kernel, `torch.func` and curvature support it, and an
    example's outputs do not depend on its batch. Dropout, in the places of the paper and of torch's
    own layer, is for training alone; with `dropout=0` every kernel and method take the network.

    Args:
        inputs: Number T of tokens of a text, or its shape (T,).
        outputs: Number of outputs O.
        tokens: Number of different tokens; None for `outputs`, for networks that predict the next
            token.
        d: Width of a token, a multiple of `heads`.
        layers: Number of encoder layers.
        heads: Number of heads of each attention.
        dropout: Probability of dropping a unit in training, in [0, 1).
        head_scale: Draw the head's weights and biases from N(0, head_scale^2) instead of torch's
            default.
        seed: Seed of the start.

    Raises:
        ValueError: A size is no whole number >= 1, or `inputs` is not the shape of a text.

    References:
        Vaswani et al., "Attention is all you need", NeurIPS 2017, sections 3.1 to 3.4, and table 3,
        row (E), on learned places. Norms before the layers: Xiong et al., "On layer normalization
        in the transformer architecture", ICML 2020.

    Example:
        >>> model = bf.models.transformer(12, outputs=2, tokens=50, d=16)
        >>> model(torch.zeros(3, 12, dtype=torch.long)).shape
        torch.Size([3, 2])
    """
    (length,) = sizes("inputs", inputs)
    different = outputs if tokens is None else tokens
    encoder = _Encoder(length, different, d, layers, heads, dropout)
    return SplitModel(encoder, nn.Linear(d, outputs))
