"""Reports of fits: parameters, sites, forest plots, and what left each site."""

from pathlib import Path

import pytest

import bayesfl as bf
from bayesfl.stats.tables import Tables
from tests.browser import assert_fits, needs_browser
from tests.stats.made import TERMS, frames


@pytest.fixture
def sites() -> Tables:
    """The four sites, one of which has a name that needs escaping."""
    named = {"<south>" if name == "south" else name: one for name, one in frames().items()}
    return bf.stats.tables(named, outcome="ill", terms=TERMS)


def test_a_regression(sites: Tables, tmp_path: Path):
    """Its numbers, its release sheet; a notebook shows the same table."""
    fit = bf.stats.glm(sites, family="binomial")
    asked = len(fit.released.questions)
    fit.report(tmp_path / "report.html", by_site=["age"])
    found = (tmp_path / "report.html").read_text()
    assert len(fit.released.questions) > asked  # of each site, which stand on the sheet
    for number in (*fit.table().loc["age"], *fit.released.bytes.values()):
        assert f'data-value="{float(number)}"' in found
    assert '<th scope="row">&lt;south&gt;</th>' in found
    assert "<south>" not in found
    assert found.count("<img") == 1
    for question in ("Sums", "Likelihood"):
        assert f"<td>{question}</td>" in found
    assert f'data-value="{fit.table().loc["age", "se"]}"' in fit._repr_html_()


def test_a_mixed_model(sites: Tables, tmp_path: Path):
    """Its sites' effects are drawn from what it has."""
    fit = bf.stats.mixed(sites, family="binomial", draws=200)
    fit.report(tmp_path / "report.html", by_site=["(intercept)"])
    found = (tmp_path / "report.html").read_text()
    assert "tau (intercept)" in found
    assert found.count("<img") == 1
    assert "hat" in found


def test_first_tables_in_notebooks(sites: Tables):
    """The rows described as a paper does."""
    found = bf.stats.describe(sites)
    assert f"<td>{found.table().loc['age', 'all']}</td>" in found._repr_html_()


@needs_browser
@pytest.mark.slow
def test_it_fits(sites: Tables, tmp_path: Path):
    bf.stats.glm(sites, family="binomial").report(tmp_path / "report.html", by_site=["age"])
    assert_fits(tmp_path / "report.html")
