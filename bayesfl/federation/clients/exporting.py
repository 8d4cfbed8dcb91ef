"""Export of a client's model to an ONNX file with the same predictions."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesfl.base.files import atomic_path
from bayesfl.base.inputs import Inputs, call, each, named
from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.data.split import Change
from bayesfl.evaluation.calibration import Fitted

NEAR = 1e-4
"""Maximum difference between exported and own predictions, relative if these exceed 1."""


class Served(nn.Module):
    """Compute a client's predictions at the posterior means from untransformed rows: transform,
    networks, likelihood, temperatures and biases.

    Args:
        networks: The networks that predict together; one for most methods.
        weights: Weight of each network's predictions.
        likelihood: The method's likelihood.
        transform: Function applied to rows before the networks; None for none.
        dtype: Precision of the networks.
        steps: Steps of calibration with the client's own parameters; steps that do not change
            predictions are ignored.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        weights: Tensor,
        likelihood: Likelihood,
        transform: Change | None,
        dtype: torch.dtype,
        steps: Sequence[Fitted],
    ) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.register_buffer("weights", weights)
        self._likelihood, self._transform, self._dtype = likelihood, transform, dtype
        self._moves = [
            (name, one.own[name][0].to(dtype))
            for one in steps
            for name in ("temperature", "bias")
            if name in one.own
        ]

    def forward(self, x: Inputs) -> Tensors:
        """Return the predictions for rows [N, ...], one tensor for each name."""
        x = self._transform(x) if self._transform is not None else x
        x = each(lambda t: t.to(self._dtype) if t.is_floating_point() else t, x)
        made = [
            self._likelihood.predictive(call(network, x).unsqueeze(0)) for network in self.networks
        ]
        weights = self.get_buffer("weights")
        if "probs" in made[0]:
            probs = sum(w * one["probs"] for w, one in zip(weights, made, strict=True))
            return {"probs": self._calibrated(torch.as_tensor(probs))}
        (only,) = made
        return {name: t for name, t in only.items() if name not in ("epistemic", "aleatoric")}

    def _calibrated(self, probs: Tensor) -> Tensor:
        if not self._moves:
            return probs
        logits = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
        for kind, by in self._moves:
            logits = logits / by if kind == "temperature" else logits + by
        return logits.softmax(-1)


def write_onnx(
    path: str | os.PathLike[str],
    served: Served,
    rows: Inputs,
    expected: Mapping[str, Tensor],
    about: Mapping[str, Any],
) -> None:
    """Write a client's prediction function to an ONNX file, for any number of rows.

    Args:
        path: The file.
        served: The module to export.
        rows: Two or more example rows.
        expected: The client's own predictions for these.
        about: Further metadata of the file, JSON-able.

    Raises:
        ValueError: The predictions of the module and of the client differ.
    """
    import onnx
    import onnxruntime
    import onnxscript

    op: Any = onnxscript.opset18

    def log_sigmoid(x: Any) -> Any:
        return op.Neg(op.Softplus(op.Neg(x)))  # where log(sigmoid(x)) would be -inf

    served.eval()
    with torch.no_grad():
        found = served(rows)
    any_rows = {0: torch.export.Dim("rows", min=1)}
    names = [re.sub(r"\W+", "_", name).strip("_") for name, _ in named(rows)]
    with atomic_path(path) as temporary:
        torch.onnx.export(
            served,
            (rows, {}),  # a mapping in the last place would be interpreted as keywords
            temporary,
            dynamo=True,
            dynamic_shapes={"x": each(lambda t: any_rows, rows)},
            input_names=names,
            output_names=[_SERVED + name for name in found],
            external_data=False,
            verbose=False,
            custom_translation_table={torch.ops.aten.log_sigmoid.default: log_sigmoid},
        )
        model = onnx.load(temporary)
        _tidy(
            model.graph,
            {name: f"{name}_inside" for name in found} | {_SERVED + name: name for name in found},
        )
        onnx.helper.set_model_props(model, {"bayesfl": json.dumps(about)})
        onnx.checker.check_model(model)
        onnx.save(model, temporary)
        session = onnxruntime.InferenceSession(temporary)
        inputs = {name: t.cpu().numpy() for name, (_, t) in zip(names, named(rows), strict=True)}
        for name, made in zip(found, session.run(list(found), inputs), strict=True):
            apart = float(
                ((torch.from_numpy(made) - expected[name]).abs() / (1 + expected[name].abs())).max()
            )
            if not apart <= NEAR:
                raise ValueError(
                    f"the exported network's {name!r} would differ from the client's predictions "
                    f"by up to {apart:.2g}: the client averages over a posterior, which ONNX "
                    "export does not support (plug_in=True exports the means), or the transform "
                    "uses all rows that are predicted together"
                )


_SERVED = "served_"
"""Prefix of output names until values inside the graph with the same names are renamed."""


def _tidy(graph: Any, names: Mapping[str, str]) -> None:
    """Rename a graph's values, and remove each node's reference to the source code."""
    for node in graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
        for place in (node.input, node.output):
            place[:] = [names.get(name, name) for name in place]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _tidy(attribute.g, names)
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
