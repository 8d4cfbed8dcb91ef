"""Coloured data: what is drawn has the stated probabilities, and nothing else is drawn."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesfl.base.random import Purpose, generator
from bayesfl.data import coloured, load, recoloured
from tests.data.made import source_of

MADE = (0.9, 0.6, 0.3, 0.05)


def source(side=6, train=24_000, test=8_000, classes=10):
    """Made-up images, each with its row written into one corner, so that it can be known again
    whatever its colour.
    """
    rows = train + test
    x = torch.rand(rows, 1, side, side, generator=torch.Generator().manual_seed(0)) / 2 + 0.25
    x[:, 0, 0, 0] = (torch.arange(rows) + 1.0) / (rows + 1)
    y = torch.from_numpy(np.random.default_rng(0).integers(0, classes, rows))
    return source_of(x[:train], y[:train], x[train:], y[train:], name="made", outputs=classes)


def within(share, n, p):
    """Five standard deviations of a binomial share."""
    return abs(share - p) <= 5 * (p * (1 - p) / n) ** 0.5


def parts(split, client, turns):
    """Grey images [n, H, W] upright, colours [n] and labels [n]."""
    x, y = split.client(client)
    lit = x.flatten(2).sum(2) > 0
    assert (lit.sum(1) == 1).all(), "one channel is black"
    return x.sum(1).rot90(-turns, (-2, -1)), lit.long().argmax(1), y


@pytest.fixture(scope="module")
def made():
    of = source()
    return of, coloured(of, agreement=MADE, test_agreement=0.2, flip=0.25, seed=3)


def test_noise_and_colours_have_their_probabilities(made):
    """Of every client and part: how often the label is flipped, how often colour agrees with the
    noisy label; independent of each other.
    """
    of, data = made
    for split, agreement in ((data.train, MADE), (data.test, (0.2,) * 4)):
        for client, p in enumerate(agreement):
            grey, colour, y = parts(split, client, client)
            row = (grey[:, 0, 0] * (len(of.x) + 1)).round().long() - 1
            assert_close(grey, of.x[row, 0])
            agrees, flipped = colour == y, (of.y[row] < 5).long() != y
            for event, chance in ((flipped, 0.25), (agrees, p), (agrees & flipped, 0.25 * p)):
                assert within(float(event.double().mean()), len(y), chance)


def test_every_training_row_goes_to_one_client(made):
    """Client i takes every fourth of the shuffled rows, and every fourth test row as they come."""
    of, data = made
    order = generator(3, Purpose.PARTITION).permutation(24_000)
    for client in range(4):
        assert data.train.rows(client).tolist() == order[client::4].tolist()
        assert data.test.rows(client).tolist() == list(range(24_000 + client, 32_000, 4))
    assert data.train.environments == 1
    assert coloured(of, agreement=MADE, test_agreement=0.2, seed=3).hash == data.hash
    assert coloured(of, agreement=MADE, test_agreement=0.2, seed=4).hash != data.hash


def test_quarter_turns_go_counter_clockwise():
    """The upper right corner of client 1 is the lower right one of the image: rows become columns
    from the left.
    """
    of = source(train=80, test=40)
    flat, turned = (coloured(of, agreement=MADE, rotate=rotate) for rotate in (False, True))
    for client, (row, column) in enumerate(((0, 0), (0, -1), (-1, -1), (-1, 0))):
        straight, image = flat.train.client(client)[0][0], turned.train.client(client)[0][0]
        assert torch.equal(image[:, 0, 0], straight[:, row, column])
    assert torch.equal(flat.train.y, turned.train.y)


def test_other_colours_of_the_same_images(made):
    """Labels and shapes stay; the share at which it was made gives it back; with a larger share
    colours only change towards agreeing.
    """
    _, data = made
    assert torch.equal(recoloured(data, 0.2).x, data.test.x)
    before = None
    for p in (0.1, 0.3, 0.5):
        split = recoloured(data, p)
        assert split.y is data.test.y
        assert torch.equal(split.x[split.index].sum(1), data.test.x[split.index].sum(1))
        agrees = torch.cat([parts(split, j, 0)[1] == parts(split, j, 0)[2] for j in range(4)])
        assert within(float(agrees.double().mean()), len(agrees), p)
        assert before is None or bool((agrees | ~before).all())
        before = agrees


def test_several_environments_of_a_client():
    """IRM's set on one machine: halves with a share each."""
    data = coloured(source(), agreement=((0.8, 0.2), (0.5,)), rotate=False, test_agreement=0.1)
    assert (data.clients, data.train.environments) == (2, 2)
    assert data.train.environment is not None
    _, colour, y = parts(data.train, 0, 0)
    environment = data.train.environment[data.train.rows(0)]
    for e, p in enumerate((0.8, 0.2)):
        agrees = (colour == y)[environment == e]
        assert len(agrees) == 8000
        assert within(float(agrees.double().mean()), len(agrees), p)


def test_test_rows_off_the_end_of_the_training_part():
    """As IRM's code has it; every second pixel of 28 x 28; digits are squares of 8."""
    x = torch.rand(70, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    y = torch.arange(70) % 10
    data = coloured(source_of(x[:60], y[:60], x[60:], y[60:], name="big"), test=20, rotate=False)
    assert (data.inputs, len(data.train.x)) == ((2, 14, 14), 60)
    assert sorted(data.test.index.tolist()) == list(range(40, 60))
    row = int(data.train.rows(0)[0])
    assert torch.equal(data.train.x[row].sum(0), x[row, 0, ::2, ::2])
    digits = coloured(flip=0.0)
    assert digits.inputs == (2, 8, 8)
    first = digits.train.rows(0)
    assert torch.equal(digits.train.x[first].sum(1), load("digits").x[first].view(-1, 8, 8))
    assert torch.equal(digits.train.y[first], (load("digits").y[first] < 5).long())


def test_agreements_as_an_array():
    """What NumPy or torch holds is as good as a tuple."""
    for shares in (np.array([0.9, 0.8]), torch.tensor([0.9, 0.8], dtype=torch.float64)):
        assert coloured(agreement=shares).hash == coloured(agreement=(0.9, 0.8)).hash
        assert coloured(agreement=[shares]).hash == coloured(agreement=((0.9, 0.8),)).hash


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agreement": (0.9, 1.2)}, r"^agreement .*\[0, 1\], got 1\.2"),
        ({"test_agreement": -0.1}, r"test_agreement .*\[0, 1\], got -0\.1"),
        ({"flip": 2.0}, r"flip .*\[0, 1\], got 2\.0"),
        ({"test": 0}, r"^test .*1.* got 0"),
        ({"source": "diabetes"}, r"coloured .*'diabetes' is a regression"),
        (
            {"source": source_of(*[torch.rand(9, 1, 4, 4), torch.rand(9)] * 2, name="dose")},
            r"coloured .*'dose' is a regression",
        ),
        (
            {"source": source_of(*[torch.rand(9, 3, 4, 4), torch.arange(9) % 2] * 2, name="rgb")},
            r"coloured .*'rgb' .*\[3, 4, 4\]",
        ),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        coloured(**options)


def test_the_agreement_is_a_share(made):
    with pytest.raises(ValueError, match=r"agreement .*\[0, 1\], got 1\.5"):
        recoloured(made[1], 1.5)
