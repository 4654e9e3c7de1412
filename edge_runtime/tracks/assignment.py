"""Pairs of two kinds of things that together weigh most: an exact assignment without scipy, in numpy.

ByteTrack's own is lap's Jonker-Volgenant with a limit, by which a pair that costs more than the limit is worse than
none. With the weight of a pair as how far its cost is below the limit that is the matching of the largest weight, in
which a thing may stay alone. Greedy pairs would do for things apart, but swap ids where two cross, which is when
tracking matters; scipy, which has an exact one, is 35 MB that a device would carry for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Weights = npt.NDArray[np.float64]
Partners = npt.NDArray[np.intp]

ALONE = -1


def heaviest_pairs(weights: Weights) -> Partners:
    """Return for each row the column that it is paired with, or ALONE, so that the sum of weights is the largest.

    Shapes: weights [rows, columns] -> [rows]. A pair whose weight is not above 0 is never made.
    """
    rows, columns = weights.shape
    partners = np.full(rows, ALONE, np.intp)
    if not rows or not columns:
        return partners
    best = weights.argmax(axis=1)
    heaviest = weights[np.arange(rows), best]
    (able,) = (heaviest > 0).nonzero()
    owners = np.full(columns, ALONE, np.intp)
    owners[best[able[::-1]]] = able[::-1]  # of several rows that want a column, the first
    is_served = owners[best[able]] == able
    partners[able[is_served]] = best[able[is_served]]
    if not is_served.all():  # else no row is in another's way: no other pairs can weigh more
        _serve(able[~is_served].tolist(), weights, np.maximum(heaviest, 0.0), partners, owners)
    return partners


# ---- private --------------------------------------------------------------------------------------------------------


def _serve(waiting: Sequence[int], weights: Weights, row_prices: Weights, partners: Partners, owners: Partners) -> None:
    """Pair these rows too, one after another, each by the shortest path of swaps (Hungarian method, as Dijkstra).

    row_prices: of each row its heaviest pair, which those that are paired have. partners, owners: of rows and columns;
    changed in place.

    Invariant: prices of rows and columns are never below 0, their sum never below the pair's weight, and equal to it
    for pairs that were made; a thing that stays alone has the price 0. No pairs weigh more than prices that fulfil
    this.
    """
    columns = len(owners)
    column_prices = np.zeros(columns)
    for start in waiting:
        distances = np.full(columns, np.inf)
        reached_from = np.full(columns, ALONE, np.intp)
        is_open = np.ones(columns, bool)
        visited: list[tuple[int, float]] = []
        row, distance = start, 0.0
        end_row, end_distance = row, float(row_prices[row])  # the row that this path would leave alone
        while True:
            steps = distance + row_prices[row] + column_prices - weights[row]
            is_nearer = is_open & (steps < distances)
            distances[is_nearer] = steps[is_nearer]
            reached_from[is_nearer] = row
            column = int(np.where(is_open, distances, np.inf).argmin())
            if not is_open[column] or distances[column] >= end_distance:
                column = ALONE
                break
            distance = float(distances[column])
            if owners[column] == ALONE:
                end_distance = distance
                break
            is_open[column] = False
            visited.append((column, distance))
            row = int(owners[column])
            if distance + row_prices[row] < end_distance:
                end_row, end_distance = row, float(distance + row_prices[row])
        row_prices[start] -= end_distance
        for seen, at in visited:
            if at < end_distance:
                row_prices[owners[seen]] -= end_distance - at
                column_prices[seen] += end_distance - at
        if column == ALONE:
            column = int(partners[end_row])
            partners[end_row] = ALONE
        while column != ALONE:  # along the path, each row takes the column that the row before it had
            row = int(reached_from[column])
            owners[column] = row
            partners[row], column = column, int(partners[row])
