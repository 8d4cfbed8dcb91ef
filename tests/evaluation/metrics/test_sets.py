"""Coverage and size of sets and intervals, against loops over examples."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from bayesfl.evaluation.metrics import set_coverage, set_size
from bayesfl.evaluation.metrics.sets import held_numbers

MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


def case() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.rand(3, 3, 4, generator=rng) < 0.5, torch.randint(4, (3, 3), generator=rng)


def test_shares_and_sizes_are_those_of_a_loop():
    """Rows that pad do not count, whatever their labels; a client without rows has NaN."""
    sets, labels = case()
    rows = [[i for i in range(3) if MASK[j, i]] for j in range(3)]
    expected = [[float(sets[j, i, labels[j, i]]) for i in of] for j, of in enumerate(rows)]
    sizes = [[float(sets[j, i].sum()) for i in of] for j, of in enumerate(rows)]
    labels[1, 2] = -100
    found, size = set_coverage(sets, labels, MASK), set_size(sets, MASK)
    for j in range(2):
        assert_close(found[j].item(), sum(expected[j]) / len(expected[j]))
        assert_close(size[j].item(), sum(sizes[j]) / len(sizes[j]))
    assert bool(found[2].isnan() & size[2].isnan())
    assert 0 < found[0] < 1


def test_an_example_is_held_with_all_its_targets():
    lower, upper = torch.tensor([[0.0, 0.0], [0.0, 0.0], [-torch.inf, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 1.0], [torch.inf, 1.0]])
    assert held_numbers(lower, upper, torch.tensor([[0.0, 1.0], [0.5, 1.1], [9.0, 1.0]])).tolist() == [True, False, True]
    assert held_numbers(lower[:, :1], upper[:, :1], torch.tensor([0.5, 2.0, 3.0])).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda sets, labels: (sets.float(), labels), "sets must be bool"),
        (lambda sets, labels: (sets[0], labels), "sets must be bool"),
        (lambda sets, labels: (sets, labels[:2]), "labels must be"),
        (lambda sets, labels: (sets, labels + 4), "labels must be classes"),
    ],
)
def test_sets_that_do_not_fit(change: Any, words: str):
    sets, labels = change(*case())
    with pytest.raises(ValueError, match=words):
        set_coverage(sets, labels, MASK)
