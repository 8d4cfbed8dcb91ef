"""What a federation has learnt: predictions, adaptation to new clients, saving and loading."""

import os
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_map

from bayesfl import checkpoint, predict
from bayesfl.blocks import Algorithm, flatten
from bayesfl.checks import instance, number, whole
from bayesfl.data import FederatedData, Split
from bayesfl.engine import Engine
from bayesfl.gather import Plain
from bayesfl.history import History
from bayesfl.identity import differences, identity
from bayesfl.local import Local, chunks, private_rows, write_rows
from bayesfl.predict import Predictions
from bayesfl.protocols import Server, View
from bayesfl.random import Purpose, Stage, generator

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def name_of(dtype: torch.dtype) -> str:
    """A precision's name, as `float32`, by which `DTYPES` has it."""
    return str(dtype).removeprefix("torch.")


METHOD = "build one on a model, as bf.algorithms.fedavg(model)"
FEDERATION = "make one by bf.data.from_arrays(x, y), or by a recipe such as bf.data.iid('digits')"


@dataclass(frozen=True)
class Settings:
    """How a run is made; a resumed run shares all but `rounds` and `evaluate_every` with the one it goes on from.

    Args:
        rounds: Rounds in all; schedules read it.
        participation: Expected share of the clients in a cohort, in (0, 1].
        sampling: `fixed` takes max(1, floor(J participation)) clients; `bernoulli` each with that probability, given that at least
            min(2, J) are in; `poisson` each with that probability, whoever that leaves, drawn from a secret by `ClientPrivacy` alone.
        train: Who trains: the `cohort`, or `all`, of whom only the cohort is gathered.
        seed: Of everything random.
        evaluate_every: Rounds between evaluations; the last round is always evaluated. None: never.
        aggregation: How uplinks are added up, in words.
    """

    rounds: int
    participation: float
    sampling: Literal["fixed", "bernoulli", "poisson"]
    train: Literal["cohort", "all"]
    seed: int
    evaluate_every: int | None
    aggregation: str = Plain.name

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", whole("rounds", self.rounds, least=1))
        object.__setattr__(self, "seed", whole("seed", self.seed, least=0))
        if self.evaluate_every is not None:
            every = whole("evaluate_every (None is never)", self.evaluate_every, least=1)
            object.__setattr__(self, "evaluate_every", every)
        object.__setattr__(self, "participation", number("participation", self.participation))
        if not 0 < self.participation <= 1:
            raise ValueError(f"participation is a share of the clients and must lie in (0, 1], got {self.participation}")
        drawn = ("fixed", "bernoulli") if self.aggregation == Plain.name else ("fixed", "bernoulli", "poisson")
        if self.sampling not in drawn:
            raise ValueError(f"sampling must be 'fixed' or 'bernoulli', got {self.sampling!r}")
        if self.train not in ("cohort", "all"):
            raise ValueError(f"train must be 'cohort' or 'all', got {self.train!r}")
        instance("aggregation", self.aggregation, str, "it says in words how uplinks are added up")

    def fixed_size(self, clients: int) -> int:
        """How many clients a cohort of fixed size has."""
        return max(1, int(clients * self.participation + 1e-9))  # 0.29 * 100 is 28.999...

    def largest(self, clients: int) -> int:
        """How many clients a cohort can have."""
        return self.fixed_size(clients) if self.sampling == "fixed" else clients

    def cohort(self, clients: int, round: int) -> np.ndarray:
        """The ids of one round's cohort, ascending.

        Raises:
            ValueError: It is drawn from a secret, which is not here.
        """
        if self.sampling == "poisson":
            raise ValueError("poisson cohorts are drawn by ClientPrivacy from its secret; pass it as aggregation, or another sampling")
        rng = generator(self.seed, Purpose.COHORT, round=round)
        size = self.fixed_size(clients) if self.sampling == "fixed" else _successes(clients, self.participation, min(2, clients), rng)
        return np.sort(rng.permutation(clients)[:size])

    def evaluates(self, round: int) -> bool:
        """Whether the measures are taken after this round."""
        every = self.evaluate_every
        return every is not None and ((round + 1) % every == 0 or round + 1 == self.rounds)


def _successes(trials: int, p: float, least: int, rng: np.random.Generator) -> int:
    """A draw from Binomial(trials, p) given that it is at least `least`: its size by the inverse of the distribution function.

    Given its size, every cohort of independent coins is as likely as any other, so nothing need be redrawn however small p is.
    """
    if p == 1:
        return trials
    k = np.arange(least, trials)
    steps = np.log(trials - k) - np.log(k + 1) + (np.log(p) - np.log1p(-p))  # from the log probability of k to that of k + 1
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    below = np.cumsum(np.exp(logs - logs.max()))
    return least + min(int(np.searchsorted(below, rng.random() * below[-1], side="right")), trials - least)


@dataclass(frozen=True)
class Result:
    """What a federation has learnt.

    Args:
        algorithm: The method.
        data: The clients.
        settings: How the run was made.
        engine: How it was computed, its chunk decided.
        round: Rounds done.
        server: The server's state.
        private: The clients' own states, [J, ...] each.
        history: One row a round.
        device: Where it was computed, and where its predictions are.
        dtype: Precision of its state.
        novel: Whether its clients joined after training, by `adapt`; then it predicts, but no training goes on from it.
        chosen: `tuned` where it is known already: that of the federation that new clients joined, or a saved one.
    """

    algorithm: Algorithm
    data: FederatedData
    settings: Settings
    engine: Engine
    round: int
    server: Server
    private: View
    history: History = field(default_factory=History)
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    novel: bool = False
    chosen: float | None = None

    def __repr__(self) -> str:
        return (
            f"Result({self.data.clients} clients of {self.data.source.name}, round {self.round} of {self.settings.rounds}; {self.history})"
        )

    @cached_property
    def tuned(self) -> float | None:
        """The number of the method's predictor that suits the validation data of all clients: FedSI's predictive precision; else None.

        Raises:
            ValueError: The data have no validation split.
        """
        if self.chosen is not None:
            return self.chosen
        data = self.data.to(self.device, self.dtype)
        with self.engine.crew(self.device) as crew:
            return predict.tune(self.algorithm, self.server, self.private, data, self.engine, crew, **self._address)

    def _known(self) -> float | None:
        """`tuned`, where there are data to tune on."""
        try:
            predict.check_tunable(self.algorithm, self.data)
        except ValueError:
            return self.chosen
        return self.tuned

    @property
    def _address(self) -> dict[str, int]:
        return {"seed": self.settings.seed, "round": self.round, "rounds": self.settings.rounds}

    def predict(self, split: Split | None = None, *, draws: int | None = None) -> Predictions:
        """Every client's predictive distribution on a split of its data, after aggregation (and fine-tuning where the method has it).

        Args:
            split: `test` unless given; one of `data`'s, or a part of one, its inputs changed or not.
            draws: Posterior draws to average over; 0 predicts at the mean, None as the method's paper does.

        Raises:
            TypeError: It is no split.
            ValueError: The split has other clients, or `draws` is not a whole number >= 0.
        """
        if split is not None:
            instance("split", split, Split, "pass clients.test, or another split of result.data")
        data = self.data.to(self.device, self.dtype)
        split = data.test if split is None else split.to(self.device, self.dtype)
        if not split.counts.any():
            raise ValueError("the split has no examples to predict; pass one that has, or make the data with a larger part for it")
        if split.clients != data.clients:
            raise ValueError(f"the split has {split.clients} clients, the result {data.clients}; use result.adapt(...) for new clients")
        if not any(_is_part(split, known) for known in data.splits.values()):
            raise ValueError(
                "the split is of other clients: its labels are not rows of the same clients in result.data. Pass one of result.data's "
                "splits, or a part of one; result.adapt(...) is for clients never seen"
            )
        if draws is not None:
            whole("draws (None is the paper's number)", draws, least=0)
        options = {**self._address, "draws": draws, "value": None if draws == 0 else self.tuned}
        with self.engine.crew(self.device) as crew:
            (found,) = predict.personal(self.algorithm, self.server, self.private, data, [split], self.engine, crew, **options)
        return found

    def adapt(self, novel: FederatedData) -> "Result":
        """The same federation for clients never seen in training: their state made from the server's, and adapted once.

        What the server holds for each client it makes anew for them (`Algorithm.newcomers`). The result predicts, and can be saved;
        training does not go on from it.

        Args:
            novel: The new clients; the method's `adapt` phases read their training data.

        Raises:
            TypeError: They are no federation.
            ValueError: Their inputs or outputs differ from the federation's.
            DivergenceError: Their training is not finite.
        """
        instance("novel", novel, FederatedData, FEDERATION)
        if (novel.inputs, novel.outputs, novel.task) != (self.data.inputs, self.data.outputs, self.data.task):
            raise ValueError(
                f"new clients have inputs {novel.inputs} and {novel.outputs} outputs ({novel.task}), the federation "
                f"{self.data.inputs} and {self.data.outputs} ({self.data.task}); adapt clients of the same problem"
            )
        train = novel.to(self.device, self.dtype).train
        server = self.algorithm.newcomers(self.server, novel.clients)
        private = private_rows(self.algorithm, server, novel.clients)
        local = Local(self.algorithm, self.algorithm.adapt, self.engine, train, self.settings.seed, self.settings.rounds, Stage.ADAPT)
        size = self.engine.chunk_size(novel.clients, self.algorithm, self.device)
        everyone = chunks(np.arange(novel.clients), train.counts, size)
        with self.engine.crew(self.device) as crew:
            for done in crew.over(everyone, lambda ids: local(ids, server, private, self.round)):
                write_rows(private, done.ids, done.views)
        return replace(self, data=novel, server=server, private=private, history=History(), novel=True, chosen=self._known())

    def to_arviz(self, client: int, block: str, *, draws: int = 1000) -> Any:
        """Draws from a client's posterior of a block, as ArviZ's InferenceData, one variable for each parameter, [chain, draw, ...].

        Of a block that stands M times the copies come first, [chain, draw, M, ...].

        Args:
            client: Its id.
            block: A block whose posterior has an entropy.
            draws: How many; independent, so they make one chain.

        Raises:
            ValueError: There is no such client, or nothing to draw.
        """
        import arviz

        whole("client", client, least=0)
        whole("draws", draws, least=1)
        if not 0 <= client < self.data.clients:
            raise ValueError(f"client must be one of 0 to {self.data.clients - 1}, got {client}")
        if block not in self.algorithm.blocks or not self.algorithm.blocks[block].stochastic:
            drawn = [name for name, this in self.algorithm.blocks.items() if this.stochastic]
            raise ValueError(f"block {block!r} has no entropy to draw from; the blocks that do are {drawn}")
        this, layout = self.algorithm.blocks[block], self.algorithm.layout(block)
        belief = (
            {key: t[client] for key, t in self.private[block].items()} if this.keep else self.algorithm.belief(block, self.server[block])
        )
        index = list(self.algorithm.blocks).index(block)
        rng = generator(self.settings.seed, Purpose.POSTERIOR, round=self.round, client=client, index=index)
        noise = torch.from_numpy(rng.standard_normal((draws, self.algorithm.noise_size(block)), np.float32)).to(belief["loc"])
        noise = self.algorithm.noise_of_copies(block, noise)
        leaves = layout.leaves(this.posterior.sample({key: t.unsqueeze(0) for key, t in belief.items()}, noise))
        posterior = {name: leaf.unsqueeze(0).cpu().numpy() for name, leaf in leaves.items()}
        if int(arviz.__version__.split(".")[0]) > 0:  # from version 1 the groups are one mapping
            return arviz.from_dict({"posterior": posterior})
        return arviz.from_dict(posterior=posterior)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the state, the settings and the history into the folder `path`; `bf.load` reads them.

        What is not in it: the model's code and the data, which `bf.load` is given and checks.

        Raises:
            ValueError: A file is where the folder should be.
        """
        checkpoint.write(path, self._meta(), self._tensors())

    def save_round(self, path: str | os.PathLike[str]) -> None:
        """The same as a checkpoint of a run in progress, beside the one before it, which stays; older ones go.

        Raises:
            ValueError: A file is where the folder should be.
        """
        checkpoint.write_round(path, self.round, self._meta(), self._tensors())

    def _tensors(self) -> dict[str, Any]:
        return {"server": self.server, "private": self.private}

    def _meta(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "engine": asdict(self.engine),
            "round": self.round,
            "dtype": name_of(self.dtype),
            "novel": self.novel,
            "chosen": self.chosen if self.chosen is not None else self.__dict__.get("tuned"),
            "history": self.history.rows,
            "algorithm": identity(self.algorithm),
            "data": self.data.hash,
        }


def load(path: str | os.PathLike[str], algorithm: Algorithm, clients: FederatedData, *, device: torch.device | str = "cpu") -> Result:
    """A saved run.

    Args:
        path: The folder that `Result.save` wrote, or that of `simulate`'s checkpoints, of which the newest whole one is taken.
        algorithm: The method it was made with.
        clients: The data it was made on.
        device: Where its state goes.

    Raises:
        TypeError: The method or the data are something else.
        ValueError: The device is absent.
        CheckpointError: There is no run, it is damaged, or it was made with another method or on other data.
    """
    of_a_run(algorithm, clients)
    device = present(device)
    meta, state = checkpoint.read(path, device)
    try:
        made_with, made_on = meta["algorithm"], str(meta["data"])
        result = Result(
            algorithm,
            clients,
            Settings(**meta["settings"]),
            Engine(**meta["engine"]),
            whole("round", meta["round"], least=0),
            state["server"],
            state.get("private", {}),
            History.read(meta["history"]),
            device,
            DTYPES[meta["dtype"]],
            meta["novel"],
            None if meta["chosen"] is None else number("chosen", meta["chosen"]),
        )
        instance("novel", result.novel, bool, "save writes True or False")
        if result.round > result.settings.rounds or not (result.novel or len(result.history) == result.round):
            raise ValueError(f"round {result.round} of {result.settings.rounds} with a history of {len(result.history)}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise checkpoint.CheckpointError(f"{str(path)!r} is no saved run of this version: {type(error).__name__}, {error}") from error
    _check_same(f"{str(path)!r}", made_with, made_on, algorithm, clients)
    check_state(str(path), algorithm, result.server, result.private, clients=clients.clients, dtype=result.dtype, stacked=True)
    return result


def of_a_run(algorithm: Algorithm, clients: FederatedData) -> None:
    """That these are a method and its data.

    Raises:
        TypeError: They are something else.
    """
    instance("algorithm", algorithm, Algorithm, METHOD)
    instance("clients", clients, FederatedData, FEDERATION)


def present(device: torch.device | str) -> torch.device:
    """The device, with its number.

    Raises:
        ValueError: This machine has none such.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {str(device)!r} is absent ({reason}); use device='cpu'") from error


def _is_part(split: Split, known: Split) -> bool:
    """Whether every client's examples in `split` are among its own in `known`, by labels and places; inputs may have changed."""
    if split.y is not known.y and not (split.y.dtype == known.y.dtype and torch.equal(split.y, known.y)):
        return False

    def owned(of: Split) -> torch.Tensor:
        client = torch.from_numpy(np.repeat(np.arange(of.clients), of.counts)).to(of.index.device)
        return client * len(of.y) + of.index

    return bool(torch.isin(owned(split), owned(known)).all())


def same_run(result: Result, algorithm: Algorithm, clients: FederatedData) -> Result:
    """The result, if it was made with this method on these data.

    Raises:
        CheckpointError: It was not.
    """
    _check_same("the result", identity(result.algorithm), result.data.hash, algorithm, clients)
    return result


def check_state(path: str, algorithm: Algorithm, server: Server, private: View, *, clients: int, dtype: torch.dtype, stacked: bool) -> None:
    """That a state has the tensors that the method keeps, in their types and shapes.

    What a method holds on the server beyond its blocks may grow along its first axis, as models of clusters do, unless that is of clients.

    Args:
        path: Where it comes from.
        algorithm: The method.
        server: The server's state.
        private: Private state.
        clients: How many clients there are.
        dtype: Precision of the run.
        stacked: Whether the private state is that of all clients, [J, ...], or of one, [...].

    Raises:
        CheckpointError: It has not.
    """
    start, one_more = (algorithm.init(n, dtype=dtype) for n in (clients, clients + 1))
    own = algorithm.rows(start)
    own = tree_map(lambda t: t.expand(clients, *t.shape), own) if stacked else own
    wanted = flatten({"server": start, "private": own})
    found = flatten({"server": server, "private": private})
    more = flatten({"server": {name: entry for name, entry in one_more.items() if name not in algorithm.blocks}})
    free = {name for name, t in more.items() if t.dim() and t.shape == wanted[name].shape}

    def fits(name: str) -> bool:
        if not (name in wanted and name in found and wanted[name].dtype == found[name].dtype):
            return False
        start = int(name in free)
        return wanted[name].dim() == found[name].dim() and wanted[name].shape[start:] == found[name].shape[start:]

    def picture(name: str, tensors: dict[str, Any]) -> str:
        return f"{tensors[name].dtype} {list(tensors[name].shape)}" if name in tensors else "absent"

    if wrong := sorted(name for name in wanted.keys() | found.keys() if not fits(name)):
        raise checkpoint.CheckpointError(
            f"{path!r} holds another state than the method keeps: {wrong[0]} is {picture(wrong[0], found)}, not {picture(wrong[0], wanted)}"
            + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "")
        )


def check_method(what: str, made_with: dict[str, Any], algorithm: Algorithm) -> None:
    """That something was made with this method, by its identity.

    Raises:
        CheckpointError: It was not.
    """
    if different := differences(made_with, identity(algorithm)):
        raise checkpoint.CheckpointError(f"{what} was made with another algorithm, which differs in {'; '.join(different)}")


def _check_same(what: str, made_with: dict[str, Any], made_on: str, algorithm: Algorithm, clients: FederatedData) -> None:
    check_method(what, made_with, algorithm)
    if made_on != clients.hash:
        raise checkpoint.CheckpointError(
            f"{what} was made on other data (hash {made_on[:12]}, given {clients.hash[:12]}); give the same recipe and seed"
        )
