"""Data frames: what their columns hold, and their order."""

import numpy as np
import pandas as pd
import pytest

from bayesfl.data.frames import check_columns, numbers_of


def test_numbers_of_several_types():
    """Truth values and pandas' own types, whose missing values are NaN; text is named."""
    frame = pd.DataFrame({"age": [1.5, 2.0], "ill": [True, False], "n": pd.array([1, None], dtype="Int64")})
    np.testing.assert_array_equal(numbers_of(frame, "x"), [[1.5, 1.0, 1.0], [2.0, 0.0, np.nan]])
    with pytest.raises(ValueError, match=r"^x: columns \['sex'\] .*get_dummies"):
        numbers_of(frame.assign(sex=["f", "m"]), "x")


def test_only_names_are_compared():
    """Numbers of columns are names only where they are in another order."""
    named, plain = pd.DataFrame([[1.0, 2.0]], columns=["a", "b"]), pd.DataFrame([[1.0, 2.0]])
    for train, test in ((named, plain), (plain, named), (named, None), (named, [[1.0, 2.0]]), (plain, plain)):
        check_columns("x", train, test, pooled=True)
    with pytest.raises(ValueError, match=r"^test x .*\[1, 0\] .*\[0, 1\]"):
        check_columns("x", plain, plain[[1, 0]], pooled=True)
    with pytest.raises(ValueError, match=r"^test x lacks columns \['b'\] of x and has \[\]"):
        check_columns("x", named, named[["a"]], pooled=True)
    check_columns("x", [named, plain], [[]], pooled=False)
    with pytest.raises(ValueError, match=r"^x of client 2 .* x of client 1 "):
        check_columns("x", [[1.0], named, named[["b", "a"]]], None, pooled=False)
