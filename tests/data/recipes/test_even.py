"""Equal parts: by chance, and in the order of a feature."""

import torch
from torch.testing import assert_close

from bayesfl.data import diabetes, iid, load


def test_iid_deals_everything():
    data, source = iid(clients=7), load("digits")
    for split, size in ((data.train, source.train), (data.test, len(source.x) - source.train)):
        assert len(split.index.unique()) == size
        assert split.counts.max() - split.counts.min() <= 1


def test_diabetes():
    data = diabetes()
    assert (data.task, data.outputs, data.inputs) == ("regression", 1, (10,))
    assert data.train.counts.sum() == 354
    x, y = data.train.x[data.train.index], data.train.y[data.train.index]
    assert_close(x.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    assert_close(y.std(correction=0), torch.tensor(1.0), atol=1e-5, rtol=0)
    assert 100 < data.recipe["target_mean"] < 200
