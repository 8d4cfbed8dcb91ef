"""Federations by nature: roles and hospitals, by the published protocols."""

import string

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesfl.data import heart_disease, iid, load, shakespeare
from bayesfl.data.recipes.readers import speeches
from tests.files import where_present

PLAYS = """@@PLAY first

DRAMATIS PERSONAE

KING\tof nothing, who must not be anybody's {long}

ACT I

SCENE I\tA hall, which nobody says. {long}

[Enter KING and
FOOL]

KING\t{long} the first

FOOL\tToo short.

KING\tAnd   more
[Aside, which {long} nobody says]
  on two lines.

ACT II

FOOL:\t{long}

@@PLAY second

PROLOGUE

KING\t{long}{long}

QUEEN\t{exact}
"""


def test_roles_speak_for_themselves(tmp_path):
    """Who says what, in which order; a chunk of 80 characters and the one after it; first ones
    train, last ones test.
    """
    long = "abcdefgh " * 30
    # The last chunk of so many has nothing after it.
    text = PLAYS.format(long=long.strip(), exact=240 * "x")
    said = speeches(text)
    assert said["first, KING"] == f"{long.strip()} the first\nAnd more\non two lines."
    assert said["first, FOOL"] == f"Too short.\n{long.strip()}"
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "moby_plays.txt").write_text(text)
    data = shakespeare(min_size=2, root=tmp_path)
    names = ("first, KING", "first, FOOL", "second, KING", "second, QUEEN")
    assert data.client_names == tuple(said) == names
    characters = string.printable
    assert (data.inputs, data.train.x.dtype, data.class_names) == (
        (80,),
        torch.int64,
        tuple(characters),
    )
    for j, role in enumerate(data.client_names):
        x, y = (
            torch.cat(pair) for pair in zip(data.train.client(j), data.test.client(j), strict=True)
        )
        pairs = torch.cat([x, y[:, None]], 1).tolist()
        chunks = ["".join(characters[c] for c in row) for row in pairs]
        assert chunks == [said[role][80 * i : 80 * i + 81] for i in range(len(chunks))]
        assert len(chunks) == (len(said[role]) - 1) // 80
        assert data.train.counts[j] == int(0.8 * len(chunks))
    assert shakespeare(min_size=4, root=tmp_path).client_names == ("second, KING",)
    with pytest.raises(ValueError, match=r"min_size .*2.* got 1"):
        shakespeare(min_size=1, root=tmp_path)
    with pytest.raises(ValueError, match=r"'shakespeare' .*shakespeare\(\)"):
        iid(load("shakespeare", root=tmp_path))


@where_present
def test_the_plays():
    """37 plays; every role's letters are its own."""
    data = shakespeare()
    assert len({name.split(", ")[0] for name in data.client_names}) == 37
    assert data.train.counts.min() >= 8
    assert data.test.counts.min() >= 2
    counts = data.train.counts + data.test.counts
    assert counts[data.client_names.index("hamlet, HAMLET")] > 500
    assert data.hash == shakespeare().hash


def write_hearts(root, patients=40):
    """A table of made-up patients in the layout of the real one, some incomplete."""
    rng = np.random.default_rng(0)
    lines = ["centre,age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num"]
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        for i in range(patients):
            chol = 0 if hospital == "switzerland" else rng.integers(150, 300)
            fbs = "" if i % 10 == 0 else i % 2
            lines.append(
                f"{hospital},{40 + i},{i % 2},{1 + i % 4},120,{chol},{fbs},"
                f"{i % 3},{100 + i},0,{i / 10},,,,{i % 5}"
            )
    (root / "heart_disease").mkdir()
    (root / "heart_disease" / "heart.csv").write_text("\n".join(lines))


def test_heart_disease_protocol_on_made_up_patients(tmp_path):
    write_hearts(tmp_path)
    data = heart_disease(root=tmp_path, seed=1)
    hospitals = ("cleveland", "hungarian", "switzerland", "va")
    # Of 36 complete patients, rounded up.
    assert (data.client_names, data.inputs, data.counts["test"].tolist()) == (
        hospitals,
        (13,),
        [13] * 4,
    )
    for j in range(4):
        x, y = data.train.client(j)
        assert_close(x.mean(0), torch.zeros(13), atol=1e-5, rtol=0)
        spread = x.std(0, correction=0)
        # A constant attribute stays at 0.
        assert_close(spread, (spread > 0.5).float(), atol=1e-5, rtol=0)
        assert abs(y.float().mean() - data.test.client(j)[1].float().mean()) < 0.06
    assert data.train.client(2)[0][:, 3].abs().max() == 0
    assert heart_disease(root=tmp_path, seed=2).hash != data.hash


@where_present
def test_heart_disease_has_the_published_counts():
    data = heart_disease()
    assert data.counts["train"].tolist() == [199, 172, 30, 85]
    assert data.counts["test"].tolist() == [104, 89, 16, 45]
    assert data.hash == heart_disease().hash
