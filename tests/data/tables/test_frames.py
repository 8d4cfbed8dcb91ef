"""Data frames: what their columns hold, and their order."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data.conversion import to_inputs
from bayesfl.data.tables.frames import check_columns


def test_numbers_of_several_types():
    """Truth values and pandas' own types, whose missing values are NaN."""
    frame = pd.DataFrame(
        {"age": [1.5, 2.0], "ill": [True, False], "n": pd.array([1, None], dtype="Int64")}
    )
    found: torch.Tensor = to_inputs(frame)  # pyright: ignore[reportAssignmentType] (one tensor)
    assert_close(found, torch.tensor([[1.5, 1.0, 1.0], [2.0, 0.0, torch.nan]]), equal_nan=True)


def test_only_names_are_compared():
    """Numbers of columns are names only where they are in another order."""
    named, plain = pd.DataFrame([[1.0, 2.0]], columns=["a", "b"]), pd.DataFrame([[1.0, 2.0]])
    for train, test in (
        (named, plain),
        (plain, named),
        (named, None),
        (named, [[1.0, 2.0]]),
        (plain, plain),
    ):
        check_columns("x", train, test, pooled=True)
    check_columns("x", [named, plain], [[]], pooled=False)
    for train, test, pooled, match in (
        (plain, plain[[1, 0]], True, r"^test x .*\[1, 0\] .*\[0, 1\]"),
        (named, named[["a"]], True, r"^test x lacks columns \['b'\] of x and has \[\]"),
        ([[1.0], named, named[["b", "a"]]], None, False, r"^x of client 2 .* x of client 1 "),
    ):
        with pytest.raises(ValueError, match=match):
            check_columns("x", train, test, pooled=pooled)


def test_rows_that_were_shuffled_apart_are_refused():
    """Frames and columns of the same rows in other orders are joined by place; equal indices,
    arrays, and others beside them pass.
    """
    frame = pd.DataFrame({"a": np.arange(20.0), "b": np.arange(20.0)})
    label, owner = pd.Series(np.arange(20) % 2), pd.Series(["x", "y"] * 10)
    shuffled = frame.sample(frac=1, random_state=0)
    test = (frame, label.iloc[::-1], owner)
    for given, options, match in (
        ((shuffled, label), {"client_ids": owner}, "y and x .*indices.*reset_index"),
        ((frame, label.iloc[::-1]), {"client_ids": owner}, "y and x .*indices"),
        ((frame, label), {"client_ids": owner.iloc[::-1]}, "client_ids and x .*indices"),
        ((frame, label), {"client_ids": owner, "test": test}, "test y and test x .*indices"),
        (([frame] * 2, [label, label.iloc[::-1]]), {}, "y of client 1 and x of client 1 .*indices"),
    ):
        with pytest.raises(ValueError, match=match):
            bf.data.from_arrays(*given, **options)
    beside = (label.loc[shuffled.index], owner.loc[shuffled.index])
    for y, ids in (beside, (label.to_numpy(), owner.tolist())):
        assert bf.data.from_arrays(shuffled, y, client_ids=ids).clients == 2


def test_a_model_knows_the_columns_it_was_trained_on(tmp_path):
    """New rows for a client, new clients, and a later run: other columns, or another order, are
    refused; arrays have no names.
    """
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(40, 2)), columns=["age", "pressure"])
    label, owner = np.arange(40) % 2, ["x", "y"] * 20
    data, turned = (
        bf.data.from_arrays(f, label, client_ids=owner) for f in (frame, frame[["pressure", "age"]])
    )
    method = bf.algorithms.fedavg(bf.models.mlp(2, hidden=4, outputs=2), epochs=1)
    result = bf.simulate(method, data, rounds=1, progress=False)
    result.client("x").save(tmp_path)
    result.save(tmp_path / "run")
    words = r"\['pressure', 'age'\].*\['age', 'pressure'\]"
    for one in (
        result.client("x"),
        bf.load_client(tmp_path, method),
        bf.load(tmp_path / "run", method).client("x"),
    ):
        assert_close(one.predict(frame).probs, one.predict(frame.to_numpy()).probs)
        with pytest.raises(ValueError, match=words):
            one.predict(frame[["pressure", "age"]])
    for refused in (
        lambda: result.predict(turned.train),
        lambda: result.adapt(turned),
        lambda: bf.simulate(method, turned, rounds=1, seed=1, start=result, progress=False),
    ):
        with pytest.raises(
            ValueError, match=r"columns: saved \('age', .*given \('pressure', .*; select"
        ):
            refused()


def test_columns_of_the_first_frame_that_has_names():
    """A client whose rows came as an array has none to compare."""
    frame, labels = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]}), np.array([0, 1])
    given = bf.data.from_arrays([frame.to_numpy(), frame], [labels, labels])
    assert given.columns == given.train.columns == ("a", "b")
    assert bf.data.from_arrays([frame.to_numpy()] * 2, [labels, labels]).columns is None
