"""Who gets which rows: pure functions of labels and a generator. What deals rows out returns one array of them per client.

`labels` are [N] int64 throughout, a class of -1 stands for rows that take no part.
"""

from collections.abc import Sequence

import numpy as np

SHARES, TEST, NOVEL, OFFICIAL = range(4)  # words of the addresses under Purpose.SPLIT: every sort of draw has its own
REDRAWS = 100
"""How often Dirichlet proportions are drawn anew before small clients are topped up."""


def rows_by_class(labels: np.ndarray, classes: int) -> list[np.ndarray]:
    """Finds the rows of each class, in their order."""
    return [np.flatnonzero(labels == k) for k in range(classes)]


def cut_points(size: int, pieces: int, smallest: int, rng: np.random.Generator) -> np.ndarray:
    """Draws where to cut `size` things into `pieces` of at least `smallest` (>= 1) each, every such cut equally likely.

    Returns:
        Sorted points [pieces - 1] within [1, size - 1], all different.

    Raises:
        ValueError: There are too few things.
    """
    slack = size - pieces * (smallest - 1)
    if pieces > slack:
        raise ValueError(f"{size} examples cannot make {pieces} pieces of at least {smallest}")
    points = np.sort(rng.choice(np.arange(1, slack), size=pieces - 1, replace=False))
    return points + (smallest - 1) * np.arange(1, pieces)


def largest_remainder(total: int, weights: np.ndarray) -> np.ndarray:
    """Finds whole numbers that add up to `total`, as close to proportional to `weights` as can be; ties go to the first.

    Args:
        total: What to share out.
        weights: Shares [J] >= 0, not all 0.
    """
    quota = total * weights / weights.sum()
    counts = np.floor(quota).astype(np.int64)
    counts[np.argsort(counts - quota, kind="stable")[: total - counts.sum()]] += 1
    return counts


def deal(rows: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Deals shuffled `rows`, the first counts[0] for the first client, and so on; what is left over is nobody's."""
    return np.split(rng.permutation(rows), np.cumsum(counts))[:-1]


def join(pieces: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Joins each client's pieces to one sorted array of rows."""
    return [np.sort(np.concatenate([*mine, np.empty(0, np.int64)])) for mine in pieces]


def stratified(labels: np.ndarray | None, rows: np.ndarray, number: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Takes `number` of `rows` at random, each class in proportion.

    A class gives its last row only where the number cannot be reached otherwise, so that it stays in what is left.

    Args:
        labels: Class of each of `rows`, [n]; None takes them whatever their class.
        rows: What to take from, [n].
        number: How many, within [0, n].
        rng: Source of the draws.

    Returns:
        What is left and what was taken, both in the order of `rows`.
    """
    group = np.zeros(len(rows), dtype=np.int64) if labels is None else np.unique(labels, return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(group)
    room = sizes - 1 if number <= (sizes - 1).sum() else sizes
    quota = number * sizes / max(len(rows), 1)
    take = np.minimum(np.floor(quota).astype(np.int64), room)
    order = rng.permutation(len(sizes))  # breaks ties
    while take.sum() < number:
        gap = np.where(take < room, quota - take, -np.inf)[order]
        take[order[np.argmax(gap)]] += 1
    taken = np.zeros(len(rows), dtype=bool)
    for k, amount in enumerate(take):
        taken[rng.permutation(np.flatnonzero(group == k))[:amount]] = True
    return rows[~taken], rows[taken]


def drift(
    labels: np.ndarray, superclasses: Sequence[Sequence[int]], clients: int, smallest: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], np.ndarray]:
    """Makes labels drift: every client knows each superclass by one of its subclasses only.

    Clients come in groups as large as a superclass; within a group, every subclass goes to one client. Every class is cut
    into one piece per group at the same places (relative to its size where classes differ in size), and a group's clients get
    the same piece of their classes.

    Args:
        labels: Subclass of each row [N].
        superclasses: The subclasses of each superclass [K][S].
        clients: Number of clients, a multiple of S.
        smallest: Fewest rows in a piece.
        rng: Source of the draws.

    Returns:
        Rows of each client, and the subclasses that each client has, [J, K].
    """
    size = len(superclasses[0])
    groups = clients // size
    held = np.array([[rng.permutation(subclasses) for subclasses in superclasses] for _ in range(groups)])  # [groups, K, S]
    held = held.transpose(0, 2, 1).reshape(clients, len(superclasses))
    rows = {k: rng.permutation(np.flatnonzero(labels == k)) for k in np.sort(np.concatenate(superclasses))}
    fewest = min(map(len, rows.values()))
    points = cut_points(fewest, groups, smallest, rng)
    # Scaled to a class of n >= fewest rows and rounded down, different points stay different and pieces no smaller.
    pieces = {k: np.split(mine, points * len(mine) // fewest) for k, mine in rows.items()}
    return join([[pieces[k][j // size] for k in held[j]] for j in range(clients)]), held


def spread_labels(classes: int, clients: int, labels: int, rng: np.random.Generator) -> np.ndarray:
    """Draws which classes each client has: `labels` different ones, every class as often as any other, to within one.

    Returns:
        Classes [J, labels], sorted for each client.
    """
    used = np.zeros(classes, dtype=np.int64)
    held = np.empty((clients, labels), dtype=np.int64)
    for j in range(clients):
        order = rng.permutation(classes)
        chosen = order[np.argsort(used[order], kind="stable")[:labels]]  # the least used, ties at random
        used[chosen] += 1
        held[j] = np.sort(chosen)
    return held


def deal_labels(labels: np.ndarray, held: np.ndarray, classes: int, equal: bool, rng: np.random.Generator) -> list[np.ndarray]:
    """Deals each class to the clients that have it, in equal parts (to within one) or in parts of random size.

    Args:
        labels: Class of each row [N].
        held: Classes of each client [J, L].
        classes: Number of classes.
        equal: Equal parts.
        rng: Source of the draws.

    Raises:
        ValueError: A class has fewer rows than clients that want some.
    """
    pieces: list[list[np.ndarray]] = [[] for _ in held]
    for k, rows in enumerate(rows_by_class(labels, classes)):
        owners = rng.permutation(np.flatnonzero((held == k).any(1)))
        if not len(owners):
            continue
        if len(owners) > len(rows):
            raise ValueError(
                f"class {k} has {len(rows)} training examples for {len(owners)} clients: use fewer clients or fewer labels per client"
            )
        shuffled = rng.permutation(rows)
        parts = np.array_split(shuffled, len(owners)) if equal else np.split(shuffled, cut_points(len(rows), len(owners), 1, rng))
        for j, part in zip(owners, parts, strict=True):
            pieces[j].append(part)
    return join(pieces)


def deal_exactly(
    labels: np.ndarray, held: np.ndarray, classes: int, amounts: Sequence[int], rng: np.random.Generator
) -> list[list[np.ndarray]]:
    """Deals every client exactly so many rows of each of its classes, for several parts at once; no row is dealt twice.

    Args:
        labels: Class of each row [N].
        held: Classes of each client [J, L].
        classes: Number of classes.
        amounts: Rows of a class that a client gets, for each part.
        rng: Source of the draws.

    Returns:
        Rows of each client, for each part.

    Raises:
        ValueError: A class has too few rows.
    """
    by_class, owners = rows_by_class(labels, classes), [np.flatnonzero((held == k).any(1)) for k in range(classes)]
    scarce = min((k for k in range(classes) if len(owners[k])), key=lambda k: len(by_class[k]) / len(owners[k]))
    most = len(by_class[scarce]) // len(owners[scarce])
    if sum(amounts) > most:
        remedy = f"at most {most} fit, so take less per class or fewer clients" if most else "use fewer clients"
        raise ValueError(
            f"class {scarce} has {len(by_class[scarce])} examples, too few for {' + '.join(map(str, amounts))} for each client with it "
            f"({len(owners[scarce])}): {remedy}"
        )
    pieces: list[list[list[np.ndarray]]] = [[[] for _ in held] for _ in amounts]
    for rows, mine in zip(by_class, owners, strict=True):
        shuffled = iter(rng.permutation(rows))
        for j in mine:
            for part, amount in zip(pieces, amounts, strict=True):
                part[j].append(np.fromiter(shuffled, np.int64, amount))
    return [join(part) for part in pieces]


def deal_around(labels: np.ndarray, wanted: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Deals every client exactly so many rows of each class, from one shuffled queue per class that starts again where it ends.

    A row is dealt a second time only after all others of its class were dealt once.

    Args:
        labels: Class of each row [N].
        wanted: Rows of each class and client, [J, K].
        rng: Source of the draws.

    Raises:
        ValueError: A client wants more rows of a class than there are, so that it would have one twice.
    """
    by_class = rows_by_class(labels, wanted.shape[1])
    most, have = wanted.max(0, initial=0), np.array([len(rows) for rows in by_class])
    if (most > have).any():
        k = int((most - have).argmax())
        raise ValueError(f"class {k} has {have[k]} examples, and a client wants {most[k]}: take fewer per client, or a smaller `uniform`")
    pieces = []
    for k, rows in enumerate(by_class):
        queue, ends = rng.permutation(rows), np.cumsum(wanted[:, k])
        pieces.append([queue[np.arange(end - n, end) % max(1, len(queue))] for n, end in zip(wanted[:, k], ends, strict=True)])
    return join(list(zip(*pieces, strict=True)))


def shards(labels: np.ndarray, clients: int, each: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows sorted by class, ties at random, cut into clients * each shards of one size (to within one), `each` of them to every client.

    Args:
        labels: Class of each row [N], N >= clients * each.
        clients: Number of clients.
        each: Shards of a client.
        rng: Source of the draws.
    """
    shuffled = rng.permutation(len(labels))
    pieces = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], clients * each)
    return join([[pieces[k] for k in mine] for mine in rng.permutation(clients * each).reshape(clients, each)])


def pachinko_counts(
    sizes: np.ndarray, superclasses: Sequence[Sequence[int]], clients: int, size: int, alpha: float, beta: float, rng: np.random.Generator
) -> np.ndarray:
    """Draws how many rows of each class each client gets by Pachinko allocation, [K, J]: down a tree of superclasses and their classes.

    Every client draws weights of the superclasses from a symmetric Dirichlet of `alpha`, and of the classes in each from one of `beta`;
    each of its rows is of a superclass and then a class drawn by these weights among what has rows left. Clients come one after another,
    so that the last take what the others leave.

    Args:
        sizes: Rows of each class [K].
        superclasses: The classes of each superclass; each class stands in one at most.
        clients: Number of clients J, with J * size <= the rows of all superclasses.
        size: Rows of each client.
        alpha: Concentration over superclasses, > 0.
        beta: Concentration over the classes of one, > 0.
        rng: Source of the draws.
    """
    groups, left = [np.asarray(group) for group in superclasses], sizes.copy()
    room = np.array([left[group].sum() for group in groups])
    counts = np.zeros((len(sizes), clients), dtype=np.int64)
    for j in range(clients):
        coarse = rng.dirichlet(np.full(len(groups), alpha))
        fine = [rng.dirichlet(np.full(len(group), beta)) for group in groups]
        for _ in range(size):
            g = _draw(coarse, room > 0, rng)
            k = groups[g][_draw(fine[g], left[groups[g]] > 0, rng)]
            counts[k, j] += 1
            left[k] -= 1
            room[g] -= 1
    return counts


def _draw(weights: np.ndarray, there: np.ndarray, rng: np.random.Generator) -> int:
    """Draws a place with a chance in proportion to its weight, among those that are there; alike where all of these weights are 0."""
    weights = np.where(there, weights, 0.0)
    if not weights.sum() > 0:
        weights = there.astype(float)
    ends = np.cumsum(weights)
    return int(np.searchsorted(ends, rng.random() * ends[-1], side="right"))


def dirichlet_counts(sizes: np.ndarray, clients: int, alpha: float, min_size: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Draws how many rows of each class each client gets, proportions of every class drawn from a symmetric Dirichlet.

    Proportions are drawn anew while a client has too little, at most `REDRAWS` times; after that the smallest clients are topped
    up with rows of the largest clients' commonest classes, so that the time is bounded for any alpha.

    Args:
        sizes: Rows of each class [K].
        clients: Number of clients J, with J * min_size <= the sum of `sizes`.
        alpha: Concentration, > 0.
        min_size: Fewest rows of a client.
        rng: Source of the draws.

    Returns:
        Counts [K, J], and how many rows the topping up moved.
    """
    counts = np.empty((len(sizes), clients), dtype=np.int64)
    for _ in range(REDRAWS):
        shares = rng.dirichlet(np.full(clients, alpha), size=len(sizes))
        ends = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
        ends[:, -1] = sizes
        counts = np.diff(ends, axis=1, prepend=0)
        if counts.sum(0).min() >= min_size:
            return counts, 0
    moved, totals = 0, counts.sum(0)
    while (poor := int(totals.argmin())) != (rich := int(totals.argmax())) and totals[poor] < min_size:
        k = int(counts[:, rich].argmax())
        amount = min(int(min_size - totals[poor]), int(totals[rich] - min_size), int(counts[k, rich]))
        counts[k, poor] += amount
        counts[k, rich] -= amount
        totals[poor] += amount
        totals[rich] -= amount
        moved += amount
    return counts, moved


def deal_counts(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Deals the rows of each class as `counts` [K, J] says."""
    dealt = [deal(rows, counts[k], rng) for k, rows in enumerate(rows_by_class(labels, len(counts)))]
    return join(list(zip(*dealt, strict=True)))


def follow_counts(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Deals test rows of each class in proportion to the training `counts` [K, J].

    A client that would get none is lent one row of its commonest class, which another client has too.

    Args:
        labels: Class of each test row.
        counts: Training rows of each class and client.
        rng: Source of the draws.
    """
    by_class = rows_by_class(labels, len(counts))
    shares = [
        largest_remainder(len(rows), mine) if len(rows) and mine.sum() else np.zeros(counts.shape[1], np.int64)
        for rows, mine in zip(by_class, counts, strict=True)
    ]
    clients = join(list(zip(*(deal(rows[: int(s.sum())], s, rng) for rows, s in zip(by_class, shares, strict=True)), strict=True)))
    present = np.array([len(rows) > 0 for rows in by_class])
    for j, rows in enumerate(clients):
        common = int(np.where(present, counts[:, j], 0).argmax())
        if not len(rows) and len(by_class[common]) and counts[common, j]:
            clients[j] = rng.choice(by_class[common], size=1)
    return clients
