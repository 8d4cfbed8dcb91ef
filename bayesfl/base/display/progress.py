"""Bars of progress: a widget in a notebook that can show one, otherwise a line on a terminal."""

import importlib.util
from typing import Any


def progress_bar(*iterables: Any, **options: Any) -> Any:
    """Return a progress bar of tqdm.

    With `disable=None` the bar is shown on a terminal, and in a notebook with ipywidgets.

    Args:
        *iterables: The iterable to follow, if any.
        **options: Options of `tqdm.tqdm`.
    """
    if importlib.util.find_spec("ipywidgets") is None:
        from tqdm import tqdm
    else:
        from tqdm.auto import tqdm
    return tqdm(*iterables, **options)
