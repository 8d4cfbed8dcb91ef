"""Loading of one client's model from its file, and the folders of clients' names in which such files lie."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from bayesfl.base.checks import instance
from bayesfl.base.described import described
from bayesfl.base.files import folder
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data.split import Change
from bayesfl.federation import store
from bayesfl.federation.client_model import ClientModel
from bayesfl.federation.errors import CheckpointError
from bayesfl.federation.form import Form
from bayesfl.federation.identity import differences, refuse, same_method
from bayesfl.federation.settings import METHOD, present

SAFE = re.compile(r"[^/\\\0]+")
LONGEST = 255  # bytes of a folder's name


def load_client(
    path: str | os.PathLike[str], algorithm: Algorithm, *, transform: Change | None = None, device: torch.device | str = "cpu"
) -> ClientModel:
    """Load one client's model, which `ClientModel.save` or a node of a deployed federation wrote; no data are needed.

    Args:
        path: The folder, or a folder in which only one client's models lie, as a node's folder of states, of which the one written last is
            taken; the files say when that was, so that they may be copied.
        algorithm: The method that made it, with the same options.
        transform: The transform of the federation's data, of which the file holds a description and no code; None where it had none.
        device: The device that is to hold it and to compute its predictions.

    Raises:
        TypeError: `algorithm` is no `Algorithm`, or `path` is neither text nor a path.
        ValueError: The device is absent, or `path` is empty.
        CheckpointError: There is no model of a client, or several clients'; or the file is damaged, or was made with another method or
            another transform, see `bayesfl.base.described`.
    """
    instance("algorithm", algorithm, Algorithm, METHOD)
    file = only_file(folder("path", path))
    found = store.read_file(file, store.CLIENT, present(device))
    same_method(repr(str(file)), found.pop("algorithm"), algorithm)
    form, _ = found.pop("form"), found.pop("written")
    apart = differences({"transform": form["transform"]}, {"transform": described(transform)})
    refuse(f"{str(file)!r} was made with another function of inputs:", apart, "give that one by transform=, as a file holds no code")
    return ClientModel(algorithm, **found, form=Form.read(form, transform))


def check_file_names(names: Sequence[str]) -> None:
    """Check that clients' names can be names of folders, none of which lies outside the folder that holds them.

    Raises:
        ValueError: A name is empty, `.` or `..`, or holds a slash or another character that no folder may have, or is too long; or two are
            alike.
    """
    bad = [f"{name!r} cannot be one" for name in names if not SAFE.fullmatch(name) or name in (".", "..")]
    for name in names:
        if (size := len(os.fsencode(name))) > LONGEST:
            bad.append(f"{name[:40]!r}... has {size} bytes, more than the {LONGEST} of a folder's name")
    firsts: dict[str, int] = {}
    for place, name in enumerate(names):
        if (first := firsts.setdefault(name.casefold(), place)) != place:
            how = "are the same one" if names[first] == name else "are the same one where case does not count"
            bad.append(f"{names[first]!r} (client {first}) and {name!r} (client {place}) {how}")
    if bad:
        raise ValueError(f"clients' names become folders, and {bad[0]}; save single clients by result.client(...).save(path)")


def only_file(path: Path) -> Path:
    """Return the file of the only client's model in a folder or below it; of one client's several, that written last.

    Raises:
        CheckpointError: There is none, or there are models of several clients; or `path` is a file.
    """
    if path.is_file():
        raise CheckpointError(f"path must name a folder, but {str(path)!r} is a file; pass the folder that holds it, {str(path.parent)!r}")
    direct = path / store.CLIENT_FILE
    found = [direct] if direct.is_file() else sorted(path.rglob(store.CLIENT_FILE))
    if not found:
        raise CheckpointError(f"{str(path)!r} holds no model of a client, no {store.CLIENT_FILE}")
    if len(found) == 1:
        return found[0]
    models = {file: store.read_file(file, store.CLIENT) for file in found}
    experiments = {file.parent.parent.name for file in found}  # a client has another folder in each, and perhaps another number
    if len(experiments) < len(found) or len({model["name"] for model in models.values()}) > 1:
        several = ", ".join(str(file.parent) for file in found[:3])
        raise CheckpointError(f"{str(path)!r} holds models of several clients, {len(found)} of them: {several}; pass one of these folders")
    return max(found, key=lambda file: models[file]["written"])
