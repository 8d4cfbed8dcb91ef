"""Assignment of rows to clients: pure functions of labels and a generator. Most return one array of
rows per client.

`labels` are [N] int64 throughout; the rows of a class of -1 are left out.
"""

from collections.abc import Sequence

import numpy as np

# `phase` under Purpose.SPLIT, one for every kind of draw.
SHARES, TEST, NOVEL, OFFICIAL, LIMIT, FRAME = (*range(5), 90)
REDRAWS = 100
"""Largest number of draws of Dirichlet proportions before small clients are topped up."""


def rows_by_class(labels: np.ndarray, classes: int) -> list[np.ndarray]:
    """Return the rows of each class, ascending."""
    return [np.flatnonzero(labels == k) for k in range(classes)]


def cut_points(size: int, pieces: int, smallest: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the points that cut `size` rows into `pieces` of at least `smallest` (>= 1) each, every
    such cut equally likely.

    Returns:
        Sorted points [pieces - 1] within [1, size - 1], all different.

    Raises:
        ValueError: `size` is less than `pieces` times `smallest`; NumPy raises it.
    """
    slack = size - pieces * (smallest - 1)
    points = np.sort(rng.choice(np.arange(1, slack), size=pieces - 1, replace=False))
    return points + (smallest - 1) * np.arange(1, pieces)


def largest_remainder(total: int, weights: np.ndarray) -> np.ndarray:
    """Return whole numbers that add up to `total`, as close to proportional to `weights` as
    possible; ties go to the first.

    Args:
        total: The number to divide.
        weights: Weights [J] >= 0, not all 0.
    """
    quota = total * weights / weights.sum()
    counts = np.floor(quota).astype(np.int64)
    counts[np.argsort(counts - quota, kind="stable")[: total - counts.sum()]] += 1
    return counts


def deal(rows: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle `rows` and give the first counts[0] to the first client, and so on; rows left over go
    to no client.
    """
    return np.split(rng.permutation(rows), np.cumsum(counts))[:-1]


def concatenated(pieces: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Join each client's pieces to one sorted array of rows."""
    return [np.sort(np.concatenate([*mine, np.empty(0, np.int64)])) for mine in pieces]


def stratified(
    labels: np.ndarray | None, rows: np.ndarray, number: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw `number` of `rows`, each class in proportion.

    A class gives its last row only if the number cannot be reached otherwise, so that it remains
    among the other rows.

    Args:
        labels: Class of each of `rows`, [n]; None draws them whatever their class.
        rows: The rows to draw from, [n].
        number: Number of rows to draw, within [0, n].
        rng: The generator of the draws.

    Returns:
        The rows that remain and those that were drawn, both in the order of `rows`.
    """
    group = (
        np.zeros(len(rows), dtype=np.int64)
        if labels is None
        else np.unique(labels, return_inverse=True)[1].reshape(-1)
    )
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
    labels: np.ndarray,
    superclasses: Sequence[Sequence[int]],
    clients: int,
    smallest: int,
    rng: np.random.Generator,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Divide classes so that every client has one class of each superclass only.

    Clients come in groups as large as a superclass; within a group, every subclass goes to one
    client. Every class is cut into one piece per group at the same places (relative to its size
    where classes differ in size), and a group's clients get the same piece of their classes.

    Args:
        labels: Subclass of each row [N].
        superclasses: The subclasses of each superclass, K groups of one size.
        clients: Number of clients, a multiple of the size of a superclass.
        smallest: Smallest number of rows in a piece.
        rng: The generator of the draws.

    Returns:
        Rows of each client, and the subclasses that each client has, [J, K].
    """
    size = len(superclasses[0])
    groups = clients // size
    # [groups, K, subclasses].
    held = np.array(
        [[rng.permutation(subclasses) for subclasses in superclasses] for _ in range(groups)]
    )
    held = held.transpose(0, 2, 1).reshape(clients, len(superclasses))
    rows = {
        k: rng.permutation(np.flatnonzero(labels == k))
        for k in np.sort(np.concatenate(superclasses))
    }
    fewest = min(map(len, rows.values()))
    points = cut_points(fewest, groups, smallest, rng)
    # Points scaled to a class of n >= fewest rows and rounded down stay different, and pieces do
    # not get smaller.
    pieces = {k: np.split(mine, points * len(mine) // fewest) for k, mine in rows.items()}
    return concatenated([[pieces[k][j // size] for k in held[j]] for j in range(clients)]), held


def spread_labels(classes: int, clients: int, labels: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the classes of each client: `labels` different ones, every class as often as any other,
    to within one.

    Returns:
        Classes [J, labels], sorted for each client.
    """
    used = np.zeros(classes, dtype=np.int64)
    held = np.empty((clients, labels), dtype=np.int64)
    for j in range(clients):
        order = rng.permutation(classes)
        # The least used, ties at random.
        chosen = order[np.argsort(used[order], kind="stable")[:labels]]
        used[chosen] += 1
        held[j] = np.sort(chosen)
    return held


def deal_labels(
    labels: np.ndarray, held: np.ndarray, classes: int, equal: bool, rng: np.random.Generator
) -> list[np.ndarray]:
    """Divide each class among the clients that have it, in equal parts (to within one) or in parts
    of random size.

    Args:
        labels: Class of each row [N].
        held: Classes of each client [J, L].
        classes: Number of classes.
        equal: Whether parts are equal.
        rng: The generator of the draws.

    Raises:
        ValueError: A class has fewer rows than clients that have the class.
    """
    pieces: list[list[np.ndarray]] = [[] for _ in held]
    for k, rows in enumerate(rows_by_class(labels, classes)):
        owners = rng.permutation(np.flatnonzero((held == k).any(1)))
        if not len(owners):
            continue
        if len(owners) > len(rows):
            raise ValueError(
                f"class {k} has {len(rows)} training examples for {len(owners)} clients: use fewer "
                "clients or fewer labels per client"
            )
        shuffled = rng.permutation(rows)
        parts = (
            np.array_split(shuffled, len(owners))
            if equal
            else np.split(shuffled, cut_points(len(rows), len(owners), 1, rng))
        )
        for j, part in zip(owners, parts, strict=True):
            pieces[j].append(part)
    return concatenated(pieces)


def deal_around(
    labels: np.ndarray, wanted: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Give every client the same number of rows of each class. Each class has one shuffled queue,
    which starts again at its end.

    A row is given a second time only after all others of its class were given once.

    Args:
        labels: Class of each row [N].
        wanted: Number of rows of each client and class, [J, K].
        rng: The generator of the draws.

    Raises:
        ValueError: A client is to get more rows of a class than there are, so that it would have
            one twice.
    """
    by_class = rows_by_class(labels, wanted.shape[1])
    most, have = wanted.max(0, initial=0), np.array([len(rows) for rows in by_class])
    if (most > have).any():
        k = int((most - have).argmax())
        raise ValueError(
            f"class {k} has {have[k]} examples, and a client wants {most[k]}: take fewer per "
            "client, or a smaller `uniform`"
        )
    pieces = []
    for k, rows in enumerate(by_class):
        queue, ends = rng.permutation(rows), np.cumsum(wanted[:, k])
        pieces.append(
            [
                queue[np.arange(end - n, end) % max(1, len(queue))]
                for n, end in zip(wanted[:, k], ends, strict=True)
            ]
        )
    return concatenated(list(zip(*pieces, strict=True)))


def shards(
    labels: np.ndarray, clients: int, each: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Sort rows by class, ties at random, cut them into clients * each shards of one size (to
    within one), and give `each` to every client.

    Args:
        labels: Class of each row [N], N >= clients * each.
        clients: Number of clients.
        each: Number of shards of a client.
        rng: The generator of the draws.
    """
    shuffled = rng.permutation(len(labels))
    pieces = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], clients * each)
    return concatenated(
        [
            [pieces[k] for k in mine]
            for mine in rng.permutation(clients * each).reshape(clients, each)
        ]
    )


def pachinko_counts(
    sizes: np.ndarray,
    superclasses: Sequence[Sequence[int]],
    clients: int,
    size: int,
    alpha: float,
    beta: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draw how many rows of each class each client gets, [K, J], by Pachinko allocation: down a
    tree of superclasses and their classes.

    Every client draws weights of the superclasses from a symmetric Dirichlet of `alpha`, and of the
    classes in each from one of `beta`; for each of its rows it draws a superclass and then a class
    by these weights, among those with rows left. Clients draw one after another, so that the last
    ones take what the others leave.

    Args:
        sizes: Number of rows of each class [K].
        superclasses: The classes of each superclass; a class is in at most one.
        clients: Number of clients J, with J * size <= the rows of all superclasses.
        size: Number of rows of each client.
        alpha: Concentration over superclasses, > 0.
        beta: Concentration over the classes of one superclass, > 0.
        rng: The generator of the draws.
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
    """Draw a place with probability in proportion to its weight, among those that are `there`;
    uniformly if all of these weights are 0.
    """
    weights = np.where(there, weights, 0.0)
    weights = there.astype(float) if not weights.sum() > 0 else weights
    ends = np.cumsum(weights)
    return int(np.searchsorted(ends, rng.random() * ends[-1], side="right"))


def dirichlet_counts(
    sizes: np.ndarray, clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> tuple[np.ndarray, int]:
    """Draw how many rows of each class each client gets, with the proportions of every class from a
    symmetric Dirichlet.

    Proportions are drawn again while a client has fewer than `min_size` rows, up to `REDRAWS` draws
    in all; then the smallest clients are topped up with rows of the largest clients' commonest
    classes, so that the time is bounded for any alpha.

    Args:
        sizes: Number of rows of each class [K].
        clients: Number of clients J, with J * min_size <= the sum of `sizes`.
        alpha: Concentration, > 0.
        min_size: Smallest number of rows of a client.
        rng: The generator of the draws.

    Returns:
        Counts [K, J], and the number of rows that topping up moved.
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
    while True:
        poor, rich = int(totals.argmin()), int(totals.argmax())
        if poor == rich or totals[poor] >= min_size:
            return counts, moved
        k = int(counts[:, rich].argmax())
        amount = min(
            int(min_size - totals[poor]), int(totals[rich] - min_size), int(counts[k, rich])
        )
        counts[k, poor] += amount
        counts[k, rich] -= amount
        totals[poor] += amount
        totals[rich] -= amount
        moved += amount


def deal_counts(
    labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Give each client `counts` [K, J] rows of each class, drawn at random."""
    dealt = [
        deal(rows, counts[k], rng) for k, rows in enumerate(rows_by_class(labels, len(counts)))
    ]
    return concatenated(list(zip(*dealt, strict=True)))


def follow_counts(
    labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Divide the test rows of each class in proportion to the training `counts` [K, J].

    A client that would get none receives one row of its commonest class, which another client has
    too.

    Args:
        labels: Class of each test row, [N].
        counts: Number of training rows of each class and client, [K, J].
        rng: The generator of the draws.
    """
    by_class = rows_by_class(labels, len(counts))
    shares = [
        largest_remainder(len(rows), mine)
        if len(rows) and mine.sum()
        else np.zeros(counts.shape[1], np.int64)
        for rows, mine in zip(by_class, counts, strict=True)
    ]
    clients = concatenated(
        list(
            zip(
                *(
                    deal(rows[: int(s.sum())], s, rng)
                    for rows, s in zip(by_class, shares, strict=True)
                ),
                strict=True,
            )
        )
    )
    present = np.array([len(rows) > 0 for rows in by_class])
    for j, rows in enumerate(clients):
        common = int(np.where(present, counts[:, j], 0).argmax())
        if not len(rows) and len(by_class[common]) and counts[common, j]:
            clients[j] = rng.choice(by_class[common], size=1)
    return clients
