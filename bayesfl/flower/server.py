"""The server's side: rounds over a network, with the simulation's cohorts, draws and sums."""

import logging
import os
import secrets
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl import checkpoint
from bayesfl.admission import PROTOCOL, Admission, Message, TooFewClients, attempts, objection
from bayesfl.blocks import Algorithm, nest
from bayesfl.checks import instance, number, whole
from bayesfl.flower import records
from bayesfl.flower.client import code
from bayesfl.flower.post import ask
from bayesfl.flower.roster import Roster
from bayesfl.gather import Gate, Gather
from bayesfl.history import History
from bayesfl.identity import differences, identity
from bayesfl.local import chunks
from bayesfl.predict import choose
from bayesfl.protocols import Server, View
from bayesfl.result import DTYPES, METHOD, Settings, check_state

log = logging.getLogger(__name__)
MEASURES = ("accuracy", "nll", "ece", "mce", "brier", "macro_f1", "auroc", "rmse", "coverage_50", "coverage_90")
"""What clients may report of their predictions, by the names of `bayesfl.metrics`; of other numbers the server takes no notice."""


class BadClients(RuntimeError):
    """Clients whose replies are missing or bad, where that stops the run."""


@dataclass(frozen=True)
class Deployed:
    """What the server of a deployed federation has learnt; the clients keep the rest.

    Args:
        algorithm: The method.
        settings: How the run is made.
        experiment: Its name, by which clients keep their states.
        round: Rounds done.
        server: The server's state.
        start: A client's private state at its start.
        base: Of each client, the round of its last state that was taken; 0 the initial one, [J] int64.
        history: One row a round, and one more of the final evaluation.
        dtype: Precision of its state.
    """

    algorithm: Algorithm
    settings: Settings
    experiment: str
    round: int
    server: Server
    start: View
    base: np.ndarray
    history: History = field(default_factory=History)
    dtype: torch.dtype = torch.float32

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.base)


def server_app(algorithm: Algorithm, **options: Any) -> ServerApp:
    """A Flower ServerApp that runs `serve` with these options."""
    instance("algorithm", algorithm, Algorithm, METHOD)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, algorithm, **options)

    return app


def serve(
    grid: Grid,
    algorithm: Algorithm,
    *,
    clients: int,
    rounds: int,
    participation: float = 1.0,
    sampling: Literal["fixed", "bernoulli"] | None = None,
    train: Literal["cohort", "all"] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    timeout: float = 600.0,
    min_clients: int = 1,
    below_minimum: Literal["skip", "repeat"] = "skip",
    on_bad_client: Literal["stop", "skip"] = "skip",
    max_norm: float | None = 100.0,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 1,
) -> Deployed:
    """Trains a federation over Flower's grid: the same numbers as `simulate` with the same seed, to rounding.

    It waits until all clients are there, runs the rounds, and at last has every client predict its test data with the final model. Where
    the folder of checkpoints holds this experiment, it goes on from the newest one.

    Args:
        grid: Flower's, as a ServerApp gets it.
        algorithm: The method, the same as the clients' to the last option.
        clients: How many there are; their ids are 0 to J - 1.
        rounds: Rounds in all, those done before included.
        participation: See `simulate`; so are `sampling`, `train`, `seed` and `dtype`.
        sampling: `fixed` or `bernoulli`; None for the method's own.
        train: `cohort` or `all`; None for the method's own.
        seed: Of everything random, on the clients, too.
        dtype: In which precision.
        timeout: Seconds that a client has for its reply.
        min_clients: Replies that a round needs.
        below_minimum: What becomes of a round with fewer: `skip` leaves all as it was, `repeat` tries again, three times in all.
        on_bad_client: `skip` a client whose reply is missing or bad, which starts its next round from its last state that was taken, or
            `stop` the run.
        max_norm: How many times as far as the round's median a client may go from what it was sent; None for no such check.
        checkpoint: A folder for checkpoints of the server; without one a server that was killed starts anew.
        every: Rounds between checkpoints; the last round always makes one.

    Raises:
        TypeError: The method is none.
        ValueError: An option is outside its range, or the method tunes a number and no client has validation data.
        CheckpointError: The folder holds another run.
        BadClients: A reply is missing or bad and that stops the run.
        TooFewClients: A round that is to be repeated had too few replies three times.
        DivergenceError: The server's state is no longer finite.
    """
    instance("algorithm", algorithm, Algorithm, METHOD)
    settings = Settings(rounds, participation, sampling or algorithm.sampling, train or algorithm.train, seed, None)
    admission = Admission(on_bad_client, min_clients, below_minimum, max_norm)
    whole("clients", clients, least=1)
    whole("every", every, least=1)
    if not number("timeout", timeout) > 0:
        raise ValueError(f"timeout is in seconds and must be > 0, got {timeout}")
    if not isinstance(dtype, torch.dtype) or str(dtype).removeprefix("torch.") not in DTYPES:
        raise ValueError(f"dtype must be a floating-point type such as torch.float32, got {dtype!r}")
    run = _Run(grid, admission, float(timeout), checkpoint, every)
    state = run.begin(algorithm, settings, clients, dtype)
    while state.round < settings.rounds:
        state = run.round(state)
    return run.evaluate(state)


def load(folder: str | os.PathLike[str], algorithm: Algorithm) -> Deployed:
    """The newest checkpoint of a deployed federation.

    Args:
        folder: The server's folder of checkpoints.
        algorithm: The method it was made with.

    Raises:
        CheckpointError: There is none, it is damaged, or it was made with another method.
    """
    return _read(folder, algorithm)[0]


@dataclass
class _Run:
    """One run of a server.

    Args:
        grid: Flower's.
        admission: Which replies are taken.
        timeout: Seconds that a client has.
        folder: For checkpoints.
        every: Rounds between them.
    """

    grid: Grid
    admission: Admission
    timeout: float
    folder: str | os.PathLike[str] | None
    every: int
    roster: Roster = field(init=False)
    kept: list[np.ndarray] = field(init=False)
    """`base` of the checkpoints that are kept, the newest first."""

    def begin(self, algorithm: Algorithm, settings: Settings, clients: int, dtype: torch.dtype) -> Deployed:
        """The state to go on from, and all clients there."""
        keys: dict[int, str] = {}
        self.kept = []
        if self.folder is not None and checkpoint.held(self.folder):
            state, meta = _read(self.folder, algorithm)
            keys = {int(client): str(key) for client, key in meta["keys"].items()}
            state = _resumed(state, settings, clients, dtype)
            log.info("going on after round %d of experiment %s", state.round, state.experiment)
            self.kept = _bases(self.folder, clients)
        else:
            server = algorithm.init(clients, seed=settings.seed, dtype=dtype)
            base = np.zeros(clients, np.int64)
            state = Deployed(algorithm, settings, secrets.token_hex(8), 0, server, algorithm.rows(server), base, dtype=dtype)
        if self.folder is not None:
            checkpoint.claim(self.folder, resumed=True)
        hello = {"protocol": PROTOCOL, "algorithm": code(algorithm)}
        self.roster = Roster(clients, hello, keys)
        self.roster.wait(self.grid)
        predictor = algorithm.predictor
        if predictor is not None and len(predictor.grid) > 1 and not sum(self.roster.validation.values()):
            raise ValueError(
                f"{predictor.tunes} is chosen on validation data, and no client has any: give them some, or give the method a number, as "
                f"{predictor.tunes}=1.0"
            )
        if self.folder is not None and not checkpoint.held(self.folder):
            self._save(state)  # the experiment's name and the clients' keys, before anything depends on them
        return state

    def round(self, state: Deployed) -> Deployed:
        """A round later, checkpointed where that is due."""
        tried = attempts(self.admission, lambda attempt: self._round(state, attempt))
        if tried is None:
            tried = replace(state, round=state.round + 1), {"round": state.round + 1, "cohort": 0}
        state, row = tried
        state.history.append(row)
        log.info("round %d of %d: %s", state.round, state.settings.rounds, ", ".join(f"{k} {v:.4g}" for k, v in row.items()))
        if state.round % self.every == 0 or state.round == state.settings.rounds:
            self._save(state)
        return state

    def _round(self, state: Deployed, attempt: int) -> tuple[Deployed, dict[str, Any]]:
        start = time.perf_counter()
        algorithm, settings, round = state.algorithm, state.settings, state.round
        chosen = settings.cohort(state.clients, round)
        working = np.arange(state.clients) if settings.train == "all" else chosen
        declared = algorithm.uplink(state.dtype)
        most = records.most_bytes(declared)
        gather = Gather(algorithm, state.server, round)
        gate = Gate(algorithm, state.server, gather, self.admission, round, state.history)
        replies: dict[int, dict[str, Tensor]] = {}
        acknowledged: set[int] = set()
        lost, losses, up = 0, [], 0
        contents = self._orders(state, working, set(chosen.tolist()))
        down = sum(_size(content) for _, content in contents.values())
        for client, reply in ask(self.grid, "train", contents, timeout=self.timeout, group=f"{round}.{attempt}"):
            if isinstance(reply, str):
                lost += client in chosen
                gate.drop(client, reply)
                continue
            try:
                up += _size(reply)
                message = _message(reply, most) if client in chosen else _acknowledgement(reply)
                reason = objection(message, declared if client in chosen else {}, round)
            except records.RecordError as error:
                reason = str(error)
            else:
                replies[client] = dict(message.tensors)
                losses += [(client, loss)] if client in chosen and (loss := _measure(reply, "train_nll")) is not None else []
            if reason:
                gate.drop(client, reason)
            else:
                acknowledged.add(client)
        came = [client for client in chosen.tolist() if client in acknowledged]
        if came:
            counts = np.array([self.roster.counts[client] for client in range(state.clients)])
            (order,) = chunks(np.array(came), counts, len(came))
            rows = nest({name: torch.stack([replies[client][name] for client in order.tolist()]) for name in declared})
            sent = {name: rows.pop(name) for name, block in algorithm.blocks.items() if block.pool}
            gate.hold(order, torch.from_numpy(counts[order]).to(state.dtype), sent, rows)
        dropped = gate.close()
        if dropped and not self.admission.skips:
            raise BadClients(f"round {round}, counted from 0: " + "; ".join(f"client {c}: {gate.dropped[c]}" for c in dropped))
        taken = [client for client in came if client not in dropped]
        if len(taken) < self.admission.min_clients:
            raise TooFewClients(
                f"{len(taken)} replies were taken in round {round}, counted from 0, which needs {self.admission.min_clients}"
            )
        server = gather.server()
        base = state.base.copy()
        base[sorted(acknowledged - set(dropped))] = round + 1
        inside = [loss for client, loss in losses if client in taken]
        row: dict[str, Any] = {
            "round": round + 1,
            "cohort": len(taken),
            "seconds": time.perf_counter() - start,
            "bytes_up": up,
            "bytes_down": down,
            "train_nll": float(np.mean(inside)) if inside else float("nan"),
            "lost": lost,
            "rejected": len(chosen) - lost - len(taken),
            "uplink_norm": gate.median,
        }
        return replace(state, round=round + 1, server=server, base=base), row

    def evaluate(self, state: Deployed) -> Deployed:
        """The final model down, every client's predictions made where its data are, and the mean of what they measured."""
        predictor, value = state.algorithm.predictor, float("nan")
        everyone = np.arange(state.clients)
        self.roster.look(self.grid)
        if predictor is not None and predictor.grid:
            value = predictor.grid[0] if len(predictor.grid) == 1 else self._tuned(state, everyone)
        found: dict[str, list[float]] = {}
        orders = self._orders(state, everyone, set(), value=value)
        for client, reply in ask(self.grid, "evaluate", orders, timeout=self.timeout, group="evaluate"):
            if isinstance(reply, str):
                log.warning("client %d did not predict: %s", client, reply)
                continue
            for name in MEASURES:
                if (measure := _measure(reply, name)) is not None:
                    found.setdefault(f"personal_{name}", []).append(measure)
        if found:
            last = state.history.rows[-1] if len(state.history) else {}
            last |= {name: float(np.mean(values)) for name, values in found.items()} | {"evaluated": max(map(len, found.values()))}
            log.info("evaluation: %s", ", ".join(f"{k} {v:.4g}" for k, v in last.items() if k.startswith("personal_")))
            self._save(state)
        return state

    def _tuned(self, state: Deployed, everyone: np.ndarray) -> float:
        """The number that the method's predictor tunes, from sums over the clients' validation data."""
        predictor = state.algorithm.predictor
        assert predictor is not None
        total, examples = torch.zeros(len(predictor.grid), dtype=torch.float64), 0
        asked = np.array([client for client in everyone.tolist() if self.roster.validation.get(client)])
        wanted = {"scores": ((len(predictor.grid),), torch.float64)}
        for client, reply in ask(self.grid, "evaluate.tune", self._orders(state, asked, set()), timeout=self.timeout, group="tune"):
            try:
                if isinstance(reply, str):
                    raise records.RecordError(reply)
                tensors = records.unpack(reply, "scores", records.setting(reply, "digest", str), most=records.most_bytes(wanted))
                shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
                if shapes != wanted:
                    raise records.RecordError(f"it sent {shapes}, not {wanted}")
            except records.RecordError as error:
                log.warning("client %d has no part in tuning %s: %s", client, predictor.tunes, error)
                continue
            total += tensors["scores"]
            examples += self.roster.validation[client]
        return choose(predictor, total, examples)

    def _orders(
        self, state: Deployed, ids: np.ndarray, senders: set[int], *, value: float = float("nan")
    ) -> dict[int, tuple[int, RecordDict]]:
        """{client: (node, what it is told)}; the tensors for all are the same bytes."""
        self.roster.look(self.grid)
        algorithm = state.algorithm
        common, addressed = algorithm.share(state.server, torch.from_numpy(ids))
        given = algorithm.given(common, state.round, state.settings.rounds)
        oldest = np.minimum.reduce([state.base, *self.kept])
        shared, digest = records.pack({name: t for name, t in given.items() if name not in ("round", "rounds")})
        told = {
            "protocol": PROTOCOL,
            "algorithm": code(algorithm),
            "experiment": state.experiment,
            "round": state.round,
            "rounds": state.settings.rounds,
            "seed": state.settings.seed,
            "dtype": str(state.dtype).removeprefix("torch."),
            "value": value,
            "common_digest": digest,
        }
        orders: dict[int, tuple[int, RecordDict]] = {}
        for place, client in enumerate(ids.tolist()):
            base = int(state.base[client])
            start = {} if base else tree_map(lambda t: t[None], state.start)
            own, digest = records.pack({"addressed": tree_map(lambda t, i=place: t[i : i + 1], addressed), "start": start})
            config = {**told, "base": base, "oldest": int(oldest[client]), "sends": client in senders, "own_digest": digest}
            content = RecordDict({"config": ConfigRecord(config), "common": shared, "own": own})
            orders[client] = (self.roster.nodes[client], content)
        return orders

    def _save(self, state: Deployed) -> None:
        if self.folder is None:
            return
        meta = {
            "settings": asdict(state.settings),
            "experiment": state.experiment,
            "round": state.round,
            "dtype": str(state.dtype).removeprefix("torch."),
            "base": state.base.tolist(),
            "keys": self.roster.keys,
            "history": state.history.rows,
            "algorithm": identity(state.algorithm),
        }
        checkpoint.write_round(self.folder, state.round, meta, {"server": state.server, "start": state.start})
        self.kept = [state.base, *self.kept][: checkpoint.KEPT]


def _read(folder: str | os.PathLike[str], algorithm: Algorithm) -> tuple[Deployed, dict[str, Any]]:
    """The newest checkpoint of a deployed federation, and its meta data.

    Raises:
        CheckpointError: There is none, it is damaged, or it was made with another method.
    """
    instance("algorithm", algorithm, Algorithm, METHOD)
    meta, tensors = checkpoint.read(folder)
    try:
        made_with = meta["algorithm"]
        state = Deployed(
            algorithm,
            Settings(**meta["settings"]),
            str(meta["experiment"]),
            whole("round", meta["round"], least=0),
            tensors["server"],
            tensors.get("start", {}),
            np.array([whole("base", base, least=0) for base in meta["base"]], np.int64),
            History(meta["history"]),
            DTYPES[meta["dtype"]],
        )
        dict(meta["keys"])
        if not state.base.max(initial=0) <= state.round <= state.settings.rounds:
            raise ValueError(f"round {state.round} of {state.settings.rounds}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise checkpoint.CheckpointError(
            f"{str(folder)!r} is no checkpoint of a deployed federation: {type(error).__name__}, {error}"
        ) from error
    if different := differences(made_with, identity(algorithm)):
        raise checkpoint.CheckpointError(f"{str(folder)!r} was made with another algorithm, which differs in {'; '.join(different)}")
    check_state(str(folder), algorithm, state.server, state.start, clients=state.clients, dtype=state.dtype, rows=None)
    return state, meta


def _resumed(saved: Deployed, settings: Settings, clients: int, dtype: torch.dtype) -> Deployed:
    """A saved state under new settings: more rounds are fine, the rest would be another experiment.

    Raises:
        ValueError: It is another.
    """
    if settings.rounds < saved.round:
        raise ValueError(f"rounds counts all rounds, and {saved.round} are already done; got {settings.rounds}")
    if (replace(saved.settings, rounds=settings.rounds), saved.clients, saved.dtype) != (settings, clients, dtype):
        raise ValueError(
            f"a run that goes on keeps its settings: saved {saved.settings}, {saved.clients} clients, {saved.dtype}; given {settings}, "
            f"{clients} clients, {dtype}. Another experiment takes another folder of checkpoints"
        )
    return replace(saved, settings=settings)


def _bases(folder: str | os.PathLike[str], clients: int) -> list[np.ndarray]:
    """`base` of every checkpoint in a folder that can be read."""
    found = []
    for file in checkpoint.held(folder):
        try:
            meta, _ = checkpoint.read_file(file)
        except checkpoint.CheckpointError:
            continue
        found.append(np.array(meta["base"], np.int64).reshape(clients))
    return found


def _message(reply: RecordDict, most: int) -> Message:
    """What a client of the cohort replied.

    Raises:
        RecordError: It is no such message.
    """
    tensors = records.unpack(reply, "up", records.setting(reply, "digest", str), most=most)
    return Message(tensors, records.setting(reply, "round", int), records.setting(reply, "protocol", int))


def _acknowledgement(reply: RecordDict) -> Message:
    """What a client replied that trained outside the cohort: nothing but that it did.

    Raises:
        RecordError: It is no such message.
    """
    return Message({}, records.setting(reply, "round", int), records.setting(reply, "protocol", int))


def _measure(reply: RecordDict, name: str) -> float | None:
    """A number that a client measured, where it is there and finite."""
    found = reply.get("metrics")
    value = found.get(name) if isinstance(found, MetricRecord) else None
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else None


def _size(content: RecordDict) -> int:
    """Bytes of a message's tensors."""
    return sum(len(array.data) for record in content.values() if isinstance(record, ArrayRecord) for array in record.values())
