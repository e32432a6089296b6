"""PowerSGD: send each matrix of a bucket as the product of two thin ones, and keep the difference for later steps.

    from power_sgd import power_sgd
    model = parallel.DataParallel(rank, params, optimizer=parallel.SGD(0.1), hook=power_sgd(4))

Of a gradient a (n rows, m columns, with the error of the last step): P = mean of a Q, made orthogonal; Q = mean of
aT P; the result is P QT. Vogels, Karimireddy, Jaggi, arXiv:1905.13727. A step sends columns * (n + m) floats
and not n * m, in two all-reduces; vectors, and matrices that would not be half as large, travel whole.
"""

from math import prod

import numpy as np

from overlap import parallel


def power_sgd(columns: int = 4, *, warm_up: int = 10, seed: int = 0) -> parallel.Hook:
    """Return a hook that sends everything in the first `warm_up` steps, and then matrices of so many columns."""

    async def hook(bucket: parallel.GradientBucket) -> np.ndarray:
        group, state, priority = bucket.group, bucket.state, bucket.priority
        state["calls"] = state.get("calls", 0) + 1
        if state["calls"] <= warm_up:
            return await group.all_reduce(bucket.buffer, op="mean", priority=priority)
        thin, whole = divide_shapes(bucket.shapes, columns)
        if "q" not in state:
            random = np.random.default_rng([seed, bucket.index])
            state["q"] = [orthogonal_basis(random.standard_normal((m, r), np.float32)) for _, _, m, r in thin]
            state["error"] = np.zeros(bucket.buffer.size, np.float32)
        a = state["error"]
        matrices = [a[place].reshape(n, m) for place, n, m, _ in thin]  # views: what is left in them is the error

        def project_gradient(gradient: np.ndarray) -> np.ndarray:
            np.add(a, gradient, out=a, casting="unsafe")
            products = [matrix @ q for matrix, q in zip(matrices, state["q"], strict=True)]
            return join_flat([*products, *(a[place] for place in whole)])

        def project_back(sent: np.ndarray) -> np.ndarray:
            *products, _ = split_by_shapes(sent, [(n, r) for _, n, _, r in thin])
            state["p"], back = [orthogonal_basis(product) for product in products], []
            for matrix, p in zip(matrices, state["p"], strict=True):
                back.append(matrix.T @ p)
                matrix -= p @ back[-1].T
            for place in whole:
                a[place] = 0
            return join_flat(back)

        def restore_mean(sent: np.ndarray, received: np.ndarray) -> np.ndarray:
            mean = np.empty(a.size, np.float32)
            *means, _ = split_by_shapes(received, [(m, r) for _, _, m, r in thin])
            for (place, *_), p, q in zip(thin, state["p"], means, strict=True):
                mean[place] = (p @ q.T).reshape(-1)
            *_, rest = split_by_shapes(sent, [(n, r) for _, n, _, r in thin])
            for place, part in zip(
                whole, split_by_shapes(rest, [(place.stop - place.start,) for place in whole]), strict=False
            ):
                mean[place] = part
            state["q"] = [orthogonal_basis(q) for q in means]
            return mean.astype(bucket.buffer.dtype)

        cost = {"stream": "hooks", "bytes_moved": 2 * columns * bucket.buffer.nbytes}
        products = await bucket.rank.compute(project_gradient, bucket.buffer, **cost)
        sent = await group.all_reduce(products, op="mean", priority=priority)
        received = await group.all_reduce(
            await bucket.rank.compute(project_back, sent, **cost), op="mean", priority=priority
        )
        return await bucket.rank.compute(restore_mean, sent, received, **cost)

    return hook


def divide_shapes(
    shapes: tuple[tuple[int, ...], ...], columns: int
) -> tuple[list[tuple[slice, int, int, int]], list[slice]]:
    """Return (place in the bucket, rows, columns, thin columns) of matrices that shrink, and places of other parts."""
    thin, whole, start = [], [], 0
    for shape in shapes:
        place = slice(start, start := start + prod(shape))
        n, m = (shape or (1,))[0], prod(shape[1:])
        r = min(columns, n, m)
        if r and 2 * (n + m) * r < n * m:
            thin.append((place, n, m, r))
        else:
            whole.append(place)
    return thin, whole


def join_flat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.float32), *(array.reshape(-1) for array in arrays)])


def split_by_shapes(values: np.ndarray, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Return an array of each shape, and what is behind them."""
    *arrays, rest = np.split(values, np.cumsum([prod(shape) for shape in shapes], dtype=int))
    return [*(array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True)), rest]


def orthogonal_basis(matrix: np.ndarray) -> np.ndarray:
    """Return an orthogonal basis of the columns by Gram and Schmidt; a dependent column becomes 0."""
    basis = matrix.astype(np.float32)  # a copy
    for column in range(basis.shape[1]):
        own = basis[:, column]
        before = np.linalg.norm(own)
        for _ in range(2):  # once more because of rounding
            own -= basis[:, :column] @ (basis[:, :column].T @ own)
        length = np.linalg.norm(own)
        own *= 0 if length <= 1e-6 * before else 1 / length
    return basis
