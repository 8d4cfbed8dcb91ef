"""The server's requests to its clients: written on the server, and read on a client."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch.utils._pytree import tree_map

from bayesfl.base.described import digest_of
from bayesfl.base.protocols import Server, Tensors, View
from bayesfl.base.trees import nest
from bayesfl.data.tensors import dtype_name
from bayesfl.federation.rounds.admission import PROTOCOL
from bayesfl.federation.settings import DTYPES
from bayesfl.federation.store.identity import agreement
from bayesfl.flower import records
from bayesfl.flower.deployed import Deployed

_SETTINGS: dict[str, type] = {
    **dict.fromkeys(("experiment", "base", "kept_in", "survey"), str),
    **dict.fromkeys(("keeps", "sends", "tolerant", "whole", "calibrated"), bool),
    **dict.fromkeys(("client", "round", "rounds", "seed", "kept_as"), int),
}


@dataclass(frozen=True)
class Order:
    """Hold a request of the server to one client.

    Args:
        client: The client's id.
        experiment: The experiment's name.
        round: Number of rounds done before.
        rounds: Number of rounds of the run.
        seed: The run's seed.
        dtype: The run's precision.
        sessions: Sessions of the servers that have run the experiment, the present one last.
        base: The name of the client's state at the start; empty for the initial one.
        kept_in: The experiment of that state: this one, or an earlier one.
        kept_as: The client's id in that experiment.
        named: Names of the states that may be needed again.
        keeps: Whether the method's clients have a private state.
        sends: Whether the reply is gathered.
        tolerant: Whether the client predicts without its fine-tuning if that is not finite; always
            False for training.
        survey: Name of the survey: one of the method's predictor, or a step's place, `0` for the
            first; empty for other requests.
        model: Digests of the sent tensors, by field; keys of the client's stored objects.
        common: State that the server sends to every client.
        addressed: State that the server sends to this client only, [1, ...].
        start: The initial state, [1, ...], if the client starts from it; empty otherwise.
        survey_states: The state of this survey and of the steps before it, or the last states of
            the steps of calibration, by the survey's name.
        told: The last states of the surveys that the method's predictor needs, by their names.
        whole: Whether the request has the model's tensors; further questions of a survey do not.
        calibrated: Whether `survey_states` are the last ones of the steps of calibration.
    """

    client: int
    experiment: str
    round: int
    rounds: int
    seed: int
    dtype: torch.dtype
    sessions: list[str]
    base: str
    kept_in: str
    kept_as: int
    named: list[str]
    keeps: bool
    sends: bool
    tolerant: bool
    survey: str
    model: Mapping[str, str]
    common: Server
    addressed: View
    start: View
    survey_states: Mapping[str, Tensors]
    told: Mapping[str, Tensors]
    whole: bool
    calibrated: bool

    @classmethod
    def of(cls, message: Message, device: torch.device | str) -> "Order":
        """Read a request.

        Raises:
            RecordError: A setting or a tensor is missing, or was damaged in transit.
        """
        content = message.content
        asked: dict[str, Any] = {
            key: records.setting(content, key, kind) for key, kind in _SETTINGS.items()
        }
        asked |= {
            key: list(map(str, records.setting(content, key, list)))
            for key in ("sessions", "named")
        }
        asked["dtype"] = DTYPES[records.setting(content, "dtype", str)]
        digests = {
            part: records.setting(content, f"{part}_digest", str)
            for part in ("common", "own", "survey_states", "told")
        }
        parts = {
            part: nest(records.unpack(content, part, digest))
            for part, digest in digests.items()
            if digest and (part == "survey_states" or asked["whole"])
        }
        common, own, told = (
            tree_map(lambda t: t.to(device), parts.get(part, {}))
            for part in ("common", "own", "told")
        )
        return cls(
            model=digests,
            common=common,
            told=told,
            survey_states=parts.get("survey_states", {}),
            **{"addressed": {}, "start": {}, **own},
            **asked,
        )


def orders(
    state: Deployed,
    ids: np.ndarray,
    senders: set[int],
    kept: Collection[tuple[str, ...]],
    *,
    tolerant: bool = False,
    survey: str = "",
    survey_states: Mapping[str, Tensors] = {},
    whole: bool = True,
) -> dict[int, RecordDict]:
    """Make the server's request to each of some clients; the bytes of common tensors are shared.

    Args:
        state: The federation.
        ids: The clients [C].
        senders: The clients whose replies are gathered.
        kept: For each server state that may be needed again its `base`: the names of the clients'
            states, a tuple of J.
        tolerant: Whether a client whose fine-tuning is not finite predicts without it.
        survey: See `Order`.
        survey_states: See `Order`.
        whole: See `Order`.

    Returns:
        The message to each client, by its id.
    """
    common, addressed = state.algorithm.share(state.server, torch.from_numpy(ids))
    shared, digest = records.pack(common)
    states, states_digest = records.pack(survey_states) if survey_states else (None, "")
    told, told_digest = records.pack(state.answers) if state.answers else (None, "")
    everyone: dict[str, Any] = {
        "protocol": PROTOCOL,
        "algorithm": digest_of(agreement(state.algorithm, state.calibration)),
        "experiment": state.experiment,
        "sessions": list(state.sessions),
        "round": state.round,
        "rounds": state.settings.rounds,
        "seed": state.settings.seed,
        "dtype": dtype_name(state.dtype),
        "tolerant": tolerant,
        "survey": survey,
        "whole": whole,
        "calibrated": bool(survey_states) and not survey,
        "keeps": bool(state.start),
        "common_digest": digest,
        "survey_states_digest": states_digest,
        "told_digest": told_digest,
    }
    found: dict[int, RecordDict] = {}
    for place, client in enumerate(ids.tolist()):
        kept_at = state.place(client)
        start = (
            {} if kept_at.base else tree_map(lambda t: t[None], state.initial(kept_at.experiment))
        )
        own, digest = records.pack(
            {"addressed": tree_map(lambda t, i=place: t[i : i + 1], addressed), "start": start}
        )
        config = {
            **everyone,
            "client": client,
            "named": sorted({state.base[client], *(names[client] for names in kept)} - {""}),
            "sends": client in senders,
            "own_digest": digest,
            "base": kept_at.base,
            "kept_in": kept_at.experiment,
            "kept_as": kept_at.client,
        }
        found[client] = RecordDict(
            {
                "config": ConfigRecord(config),
                **({"common": shared, "own": own} if whole else {}),
                **({"told": told} if whole and told is not None else {}),
                **({} if states is None else {"survey_states": states}),
            }
        )
    return found
