"""Non-negative least squares for the step-time model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def solve_nnls(gram: Array, moment: Array, max_rounds: int = 200) -> Array:
    """Return the x >= 0 that minimises ``x' G x - 2 m' x``.

    ``gram`` (d, d) is X'X and ``moment`` (d,) is X'y of a least-squares problem; the active-set method of Lawson and
    Hanson in the form of Bro and de Jong (1997), which needs no more than these. Columns that carry no data, or that
    are combinations of others, get 0 or share the weight; the call never fails.
    """
    size = len(moment)
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    gram = gram / np.outer(scale, scale) + 1e-9 * np.eye(size)
    moment = moment / scale
    solution = np.zeros(size)
    passive = np.zeros(size, dtype=bool)
    tolerance = 1e-9 * max(1.0, float(np.abs(moment).max(initial=0.0)))
    for _ in range(max_rounds):
        slope = np.where(passive, -np.inf, moment - gram @ solution)
        best = int(np.argmax(slope))
        if slope[best] <= tolerance:
            break
        passive[best] = True
        while True:
            index = np.flatnonzero(passive)
            trial = np.linalg.solve(gram[np.ix_(index, index)], moment[index])
            if trial.min() > 0:
                solution[:] = 0.0
                solution[index] = trial
                break
            current = solution[index]
            falling = trial <= 0
            step = float(np.min(current[falling] / np.maximum(current[falling] - trial[falling], 1e-300)))
            solution[index] = np.maximum(0.0, current + step * (trial - current))
            passive[index[falling & (solution[index] <= 1e-15)]] = False
            if not passive.any():
                solution[:] = 0.0
                break
    return np.asarray(solution / scale, dtype=np.float64)
