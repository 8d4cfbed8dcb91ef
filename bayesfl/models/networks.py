"""Networks of published architectures with a body and a head; sizes are checked, weights are drawn
from a seed.

The head is the output layer in each of them, and the body is what comes before it; `|` marks the
cut.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from torch import Tensor, nn

from bayesfl.base.options import Count, Positive, declared, whole
from bayesfl.models.cutting import SplitModel
from bayesfl.models.starts import seeded


def sizes(name: str, value: int | Iterable[int]) -> tuple[int, ...]:
    """Return one size or several as a tuple.

    Raises:
        ValueError: One is no whole number >= 1.
    """
    every = value if isinstance(value, Iterable) else (value,)
    return tuple(whole(name, one, least=1) for one in every)


@declared
@seeded
def mlp(
    inputs: int | Sequence[int],
    *,
    outputs: Count,
    hidden: int | Sequence[int] = 100,
    start: Literal["torch", "xavier"] = "torch",
    head_scale: Positive | None = None,
    seed: int = 0,
) -> SplitModel:
    """Build a fully connected network with ReLUs, cut before its last layer: the hidden layers are
    the body, the output layer is the head.

    Args:
        inputs: Number of features, or the shape of one example, which is flattened.
        outputs: Number of outputs.
        hidden: Width of the hidden layer, or of each of several; () for none: a linear model that
            is all head, as for logistic regression.
        start: Distribution of the initial weights: `torch` for torch's default, or `xavier`, Glorot
            and Bengio's uniform one with biases of 0.
        head_scale: Draw the head's weights and biases from N(0, head_scale^2) instead; None not to.
        seed: Seed of the start.

    Raises:
        ValueError: A size is no whole number >= 1.

    Example:
        >>> model = bf.models.mlp(64, hidden=(32, 16), outputs=10)
        >>> model.head
        Linear(in_features=16, out_features=10, bias=True)
    """
    shape, widths = sizes("inputs", inputs), sizes("hidden", hidden)
    layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
    for before, after in zip((math.prod(shape), *widths), widths, strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    made = SplitModel(nn.Sequential(*layers), nn.Linear((math.prod(shape), *widths)[-1], outputs))
    for layer in made.modules() if start == "xavier" else ():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return made


@declared
@seeded
def lenet(
    inputs: Sequence[int],
    *,
    outputs: Count,
    channels: tuple[Count, Count] = (6, 16),
    hidden: tuple[Count, Count] = (120, 84),
    head_scale: Positive | None = None,
    seed: int = 0,
) -> SplitModel:
    """Build LeNet-5 with ReLUs and max-pooling: conv 5x5, pool, conv 5x5, pool, 120, 84 | outputs.

    Images smaller than 32 x 32 are padded by 2 in the first convolution, as LeCun et al. pad MNIST.

    Args:
        inputs: (channels, height, width) of an image.
        outputs: Number of outputs.
        channels: Channels of the two convolutions; (16, 32) is pFedVEM's network for CIFAR-10.
        hidden: Widths of the two fully connected layers.
        head_scale: Draw the head's weights and biases from N(0, head_scale^2) instead of torch's
            default.
        seed: Seed of the start.

    Raises:
        ValueError: `inputs` is not the shape of an image.

    References:
        LeCun et al., "Gradient-based learning applied to document recognition", Proceedings of the
        IEEE 86(11), 1998.

    Example:
        >>> bf.models.lenet((1, 28, 28), outputs=10)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    depth, height, width = sizes("inputs", inputs)
    first, second = channels
    padding = 2 if min(height, width) < 32 else 0
    size = [((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width)]
    body = nn.Sequential(
        nn.Conv2d(depth, first, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * size[0] * size[1], hidden[0]),
        nn.ReLU(),
        nn.Linear(hidden[0], hidden[1]),
        nn.ReLU(),
    )
    return SplitModel(body, nn.Linear(hidden[1], outputs))


@declared
@seeded
def leaky_cnn(
    inputs: Sequence[int], *, outputs: Count, head_scale: Positive | None = None, seed: int = 0
) -> SplitModel:
    """Build the networks of FedPAC, with leaky ReLUs of slope 0.01 and max-pooling: conv 5x5, pool,
    conv 5x5, pool, 128 | outputs.

    The convolutions have 16 and 32 channels, the second is padded by 1. For images of several
    channels, as CIFAR-10's, one more convolution follows, 3x3 of 64 channels, padded by 1, and a
    pooling.

    Args:
        inputs: (channels, height, width) of an image.
        outputs: Number of outputs.
        head_scale: Draw the head's weights and biases from N(0, head_scale^2) instead of torch's
            default.
        seed: Seed of the start.

    Raises:
        ValueError: `inputs` is not the shape of an image.

    References:
        Xu, Tong, Huang, "Personalized federated learning with feature alignment and classifier
        collaboration", ICLR 2023, arXiv:2306.11867, experiments; details from the authors' code,
        github.com/JianXu95/FedPAC.

    Example:
        >>> bf.models.leaky_cnn((3, 32, 32), outputs=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    depth, height, width = sizes("inputs", inputs)
    deep = depth > 1
    size = [((side - 4) // 2 - 2) // 2 // (2 if deep else 1) for side in (height, width)]
    layers: list[nn.Module] = [nn.Conv2d(depth, 16, 5), nn.LeakyReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 5, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2)]
    if deep:
        layers += [nn.Conv2d(32, 64, 3, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2)]
    features = (64 if deep else 32) * size[0] * size[1]
    return SplitModel(
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 128), nn.LeakyReLU()),
        nn.Linear(128, outputs),
    )


@declared
@seeded
def cifar100_cnn(
    inputs: Sequence[int] = (3, 32, 32),
    *,
    outputs: Count = 20,
    head_scale: Positive | None = None,
    seed: int = 0,
) -> SplitModel:
    """Build the network of pFedVEM for CIFAR-100: five 3x3 convolutions, averaged | outputs.

    The convolutions have 32, 64, 128, 256 and 100 channels, each with a ReLU; a 2x2 max-pooling
    with padding 1 follows each of the first four, and the average over all places the last.

    Args:
        inputs: (channels, height, width) of an image.
        outputs: Number of outputs; 20 superclasses in the paper.
        head_scale: Draw the head's weights and biases from N(0, head_scale^2) instead of torch's
            default; 1 in the paper's code.
        seed: Seed of the start.

    Raises:
        ValueError: `inputs` is not the shape of an image.

    References:
        Zhu, Ma, Blaschko, "Tackling personalized federated learning with label concept drift via
        hierarchical Bayesian modeling", FL-NeurIPS 2022, experiments; details from the authors'
        code, github.com/JunyiZhu-AI/confidence_aware_PFL.

    Example:
        >>> bf.models.cifar100_cnn()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 20])
    """
    depth = sizes("inputs", inputs)[0]
    widths = (32, 64, 128, 256, 100)
    layers: list[nn.Module] = []
    for before, after in zip((depth, *widths), widths, strict=False):
        layers += [
            nn.Conv2d(before, after, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, padding=1),
        ]
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return SplitModel(nn.Sequential(*layers, nn.Flatten()), nn.Linear(widths[-1], outputs))


class _Reader(nn.Module):
    """An LSTM for text: L characters by number, [B, L] -> the state of the last layer after the
    last character, [B, hidden].
    """

    def __init__(self, characters: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, embedding)
        self.read = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.embed(x.long()))[0][:, -1]


@declared
@seeded
def char_lstm(
    inputs: int | Sequence[int],
    *,
    outputs: Count,
    embedding: Count = 8,
    hidden: Count = 256,
    layers: Count = 2,
    head_scale: Positive | None = None,
    seed: int = 0,
) -> SplitModel:
    """Build a next-character network: embedding, LSTM, its state after the last character |
    outputs.

    Inputs are L characters by number, [B, L], each a whole number within [0, outputs). `torch.func`
    cannot batch an LSTM, so the vmap kernel refuses it, and clients are run one after another; the
    published size is slow on a CPU.

    Args:
        inputs: Number L of characters of one example, or its shape (L,); the weights do not depend
            on it.
        outputs: Number of different characters, in inputs and in outputs.
        embedding: Width of a character's embedding.
        hidden: Width of each LSTM layer.
        layers: Number of LSTM layers.
        head_scale: Draw the head's weights and biases from N(0, head_scale^2) instead of torch's
            default.
        seed: Seed of the start.

    Raises:
        ValueError: A size is no whole number >= 1, or `inputs` is not the shape of a text.

    References:
        McMahan et al., "Communication-efficient learning of deep networks from decentralized data",
        AISTATS 2017, section 3; 100 characters in Marfoq et al., "Federated multi-task learning
        under a mixture of distributions", NeurIPS 2021.

    Example:
        >>> model = bf.models.char_lstm(80, outputs=100, hidden=16)
        >>> model(torch.zeros(2, 80, dtype=torch.long)).shape
        torch.Size([2, 100])
    """
    (_,) = sizes("inputs", inputs)  # a text has one axis
    return SplitModel(_Reader(outputs, embedding, hidden, layers), nn.Linear(hidden, outputs))
