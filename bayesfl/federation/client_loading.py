"""Loading of one client's model from its file."""

import os

import numpy as np
import torch
from torch.utils._pytree import tree_map

from bayesfl.base.checks import instance, number, whole
from bayesfl.base.files import folder
from bayesfl.base.inputs import as_tuples
from bayesfl.base.protocols import StoredPredictor, View
from bayesfl.base.trees import shapes
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data.columns import Columns
from bayesfl.data.split import Change
from bayesfl.federation import checkpoint, step_files
from bayesfl.federation.client import State, private_rows
from bayesfl.federation.client_files import only_file
from bayesfl.federation.client_model import VERSION, ClientModel, needed
from bayesfl.federation.errors import CheckpointError
from bayesfl.federation.form import Form, check_function
from bayesfl.federation.identity import check_method, reading
from bayesfl.federation.settings import DTYPES, METHOD, present


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
        TypeError: `algorithm` is no `Algorithm`, `transform` is no function, or `path` is neither text nor a path.
        ValueError: The device is absent, or `path` is empty.
        CheckpointError: There is no model of a client, or several clients', or several of which none says that it was written last; or the
            file is damaged, or was made with another method or another transform, told by its code, see `FederatedData.hash`.

    Warns:
        UserWarning: The file was written under another version of Python, so that transforms are told by their names and numbers alone.
    """
    instance("algorithm", algorithm, Algorithm, METHOD)
    file = only_file(folder("path", path))
    meta, tensors = checkpoint.read_file(file, present(device))
    try:
        if meta["kind"] != "client" or meta["version"] not in range(1, VERSION + 1):
            raise ValueError(f"it is a {meta['kind']} of version {meta['version']}, this version of bayesfl reads clients up to {VERSION}")
        made_with, inputs = dict(meta["algorithm"]), as_tuples(meta["inputs"])
        form = {"tensors": {"x": ("float32", inputs)}, "transform": None} if meta["version"] == 1 else meta["form"]
        made_by = form["transform"]
        made = ClientModel(
            algorithm,
            str(meta["name"]),
            whole("client", meta["client"], least=0),
            tensors["view"],
            whole("round", meta["round"], least=0),
            whole("seed", meta["seed"], least=0),
            inputs,
            Form.read(form, transform),
            None if meta["class_names"] is None else tuple(meta["class_names"]),
            None if meta["columns"] is None else tuple(map(str, meta["columns"])),
            None if meta.get("prepared") is None else Columns.from_json(meta["prepared"]),
            None if meta["value"] is None else number("value", meta["value"]),
            bool(meta["plug_in"]),
            steps=step_files.read(meta.get("steps", ()), tensors.get("steps", {}), clients=1),
            stored=tensors.get("stored", {}),
            common=tensors.get("common", {}),
            calibrated=reading(algorithm) if meta.get("steps") else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{str(file)!r} is no client's model of this version: {type(error).__name__}, {error}") from error
    check_method(f"{str(file)!r}", made_with, algorithm)
    check_function(f"{str(file)!r}", "transform", made_by, transform)
    try:
        wanted, found = shapes(_start(algorithm, DTYPES[meta["dtype"]])), shapes(made.view)
        if wrong := sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key)):
            raise ValueError(f"{wrong[0]} is {found.get(wrong[0], 'absent')}, not {wanted.get(wrong[0], 'absent')}")
        if isinstance(algorithm.predictor, StoredPredictor) and not made.plug_in:
            algorithm.predictor.restored(algorithm, made.view, made.stored)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{str(file)!r} holds another model than the method has: {error}") from error
    return made


def _start(algorithm: Algorithm, dtype: torch.dtype) -> View:
    """Return what one client predicts from before the first round, for its shapes."""
    server = algorithm.init(1, dtype=dtype)
    got = State(server, private_rows(algorithm, server, 1), 0).received(algorithm, np.zeros(1, np.int64))
    views = algorithm.views(algorithm.given(got.common, 0, 1), got.addressed, got.rows, torch.ones(1, dtype=dtype))
    return {key: tree_map(lambda t: t[0], views[key]) for key in needed(algorithm)}
