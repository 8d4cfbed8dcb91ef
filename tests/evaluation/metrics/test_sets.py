"""Which examples sets and intervals hold, by hand."""

import torch

from bayesfl.evaluation.metrics.sets import held_classes, held_numbers


def test_a_set_holds_the_classes_in_it():
    sets = torch.tensor([[True, False, True], [False, False, False]])
    assert held_classes(sets, torch.tensor([2, 2])).tolist() == [True, False]
    assert held_classes(sets, torch.tensor([1, 0])).tolist() == [False, False]


def test_an_example_is_held_with_all_its_targets():
    lower, upper = torch.tensor([[0.0, 0.0], [0.0, 0.0], [-torch.inf, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 1.0], [torch.inf, 1.0]])
    assert held_numbers(lower, upper, torch.tensor([[0.0, 1.0], [0.5, 1.1], [9.0, 1.0]])).tolist() == [True, False, True]
    assert held_numbers(lower[:, :1], upper[:, :1], torch.tensor([0.5, 2.0, 3.0])).tolist() == [True, False, True]
