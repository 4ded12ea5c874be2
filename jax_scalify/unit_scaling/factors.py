"""Standard deviations of operations on independent unit Gaussians.

The exact ones are integrals over one variable; the interpolations are the empirical models of
Blake et al., *u-µP* (2024), appendix B.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

# Below, a softmax is linear to six digits; beyond, its one-hot limit is as near as 1/mult.
_LINEAR, _ONE_HOT = 2.0**-10, 32.0
_LOG_STEP = 0.25  # of the integrals over log t: at 0.1 they are the same to 13 digits
_POINTS, _STEP = np.linspace(-12, 12, 4801, retstep=True)
_WEIGHTS = np.exp(-(_POINTS**2) / 2) * _STEP / math.sqrt(2 * math.pi)


def logarithmic_interpolation(weight: float, lower: float, upper: float) -> float:
    """Return `upper**weight * lower**(1 - weight)`."""
    return math.exp(weight * math.log(upper) + (1 - weight) * math.log(lower))


def gaussian_std(function: Callable[[np.ndarray], np.ndarray]) -> float:
    """Return the standard deviation of `function(z)`, `z` a unit Gaussian."""
    values = function(_POINTS)
    mean = np.sum(values * _WEIGHTS)
    return float(np.sqrt(np.sum((values - mean) ** 2 * _WEIGHTS)))


def gaussian_rms(function: Callable[[np.ndarray], np.ndarray]) -> float:
    """Return the RMS of `function(z)`, `z` a unit Gaussian: what it does to a unit cotangent."""
    return float(np.sqrt(np.sum(function(_POINTS) ** 2 * _WEIGHTS)))


def softmax_moment(lengths: np.ndarray, shares: np.ndarray, mult: float, *powers: int) -> float:
    """Return a moment of `p = softmax(mult * z)`, `z` unit Gaussians, averaged over lengths.

    It is the mean of the sum of `p[i1]**a1 * p[i2]**a2 * ...` over all different positions `i1`,
    `i2`, ... for the powers `a1`, `a2`, ..., as an integral over one variable: with
    `1 / S**a = ∫ t**(a-1) exp(-t S) dt / Γ(a)` and `S = sum(exp(mult * z))`, the positions are
    independent of each other.
    """
    longest = math.log(lengths.max())
    typical = longest + min(mult**2 / 2, mult * math.sqrt(2 * longest))  # of log S
    log_t = np.arange(-typical - 7 * mult - 25, 7 * mult + 25, _LOG_STEP)
    stride = 8 if mult <= 16 else 4
    z, weights = _POINTS[::stride], _WEIGHTS[::stride] * stride
    log_u = log_t[:, None] + mult * z
    decay = np.exp(-np.exp(np.minimum(log_u, 50)))
    others = decay @ weights
    chosen = np.ones_like(log_t)
    for power in powers:
        chosen *= (decay * np.exp(np.minimum(power * log_u, 600))) @ weights
    total, order = np.zeros_like(log_t), len(powers)
    for length, share in zip(lengths.tolist(), shares):
        if length >= order:
            total += share * math.perm(length, order) * chosen * others ** (length - order)
    return float(np.sum(total) * _LOG_STEP / math.gamma(sum(powers)))


@functools.cache
def softmax_stds(
    length: int,
    mult: float,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    queries: int | None = None,
) -> tuple[float, float, float]:
    """Return three RMS values for `p = softmax(mult * z)` of unit Gaussians.

    Args:
        length: of the softmax.
        mult: of its operands.
        is_causal: average over the softmaxes of queries that see no key behind their position.
        window: how many keys before and behind its own position a query sees; None for all.
        queries: their number, by default `length`; it counts if not all of them see all keys.

    Returns:
        Of `sum(p * v)` for a unit Gaussian `v`; of an element of `p - 1/length`; and of the root of
        the sum of the squares of `p * (v - sum(p * v))`: of a cotangent `v` on its way back.
    """
    lengths, shares = np.array([length]), np.ones(1)
    if is_causal or window is not None:
        left, right = window or (length, length)
        right = 0 if is_causal else right
        lengths, shares = _seen_lengths(length, length if queries is None else queries, left, right)
    moment = functools.partial(softmax_moment, lengths, shares, min(mult, _ONE_HOT))
    uniform = float(np.sum(shares / lengths))
    square, cube = moment(2), moment(3)
    back = max(square - 2 * cube + moment(4) + moment(2, 2), 0.0)
    if mult > _ONE_HOT:
        square, back = 1 - (1 - square) * _ONE_HOT / mult, back * _ONE_HOT / mult
    variance = max(square - uniform, 0.0)
    if mult < _LINEAR:
        variance = mult**2 * float(np.sum(shares * (lengths - 1) / lengths**2))
    return math.sqrt(square), math.sqrt(variance / length), math.sqrt(back)


def _seen_lengths(
    length: int, queries: int, left: int, right: int
) -> tuple[np.ndarray, np.ndarray]:
    """How many keys queries see, and which share of the queries sees so many.

    Query t sees keys t - left to t + right: of 4 keys with left 1 and right 0, one query sees 1 and
    three see 2. Numbers beyond 256 are put together, 64 intervals up to the length.
    """
    t = np.arange(queries)
    seen = np.minimum(t + right, length - 1) - np.maximum(t - left, 0) + 1
    lengths, counts = np.unique(np.maximum(seen, 1), return_counts=True)
    edges = np.unique(np.concatenate([np.arange(257), np.geomspace(256, max(length, 257), 65)]))
    bins = np.searchsorted(edges, lengths)
    shares = np.bincount(bins, counts)
    means = np.bincount(bins, counts * lengths)[shares > 0] / shares[shares > 0]
    return means.round().astype(int), shares[shares > 0] / queries


@functools.cache
def top_k_stds(experts: int, k: int, mult: float, normalize: bool) -> tuple[float, float]:
    """Return two RMS values for the weights w of the k largest of unit Gaussians, one an expert.

    w is `softmax(mult * z)` at the k largest of z; divided by its sum there, if `normalize`. Given
    the largest that is not chosen, t, the chosen ones are independent Gaussians above t, and the
    others below: with 1/S**a as an integral as in `softmax_moment`, each moment is one over t and
    over the other variable,

        experts! / (k! (experts - k - 1)!) * above(t)**k * at(t) * below(t)**(experts - k - 1)

    in which one or two of the factors carry powers of w. Normalised, S has the chosen ones only.

    Args:
        experts: how many there are.
        k: how many of them are chosen.
        mult: of the operands of the softmax.
        normalize: whether the weights add up to 1.

    Returns:
        The roots of the means of `sum(w**2)`, and of the sum of the squares of what a cotangent of
        unit Gaussians of w leaves to `mult * z`.
    """
    if k == experts:
        square, _, back = softmax_stds(experts, mult)
        return square, back
    bounded = min(mult, _ONE_HOT)
    longest = math.log(experts)
    typical = longest + min(bounded**2 / 2, bounded * math.sqrt(2 * longest))
    log_t = np.arange(-typical - 7 * bounded - 25, 7 * bounded + 25, _LOG_STEP)
    z, density = _POINTS[::10], _WEIGHTS[::10] * 10
    log_u = log_t[:, None] + bounded * z
    decay = np.exp(-np.exp(np.minimum(log_u, 50))) * density

    with np.errstate(divide="ignore"):  # of logarithms of 0

        def at(power: int) -> np.ndarray:
            return decay * np.exp(np.minimum(power * log_u, 600))

        def above(power: int) -> np.ndarray:
            values = at(power)
            return np.log(np.cumsum(values[:, ::-1], 1)[:, ::-1] - values / 2)

        def below(values: np.ndarray) -> np.ndarray:
            return np.log(np.cumsum(values, 1) - values / 2)

        count = experts - k - 1
        unseen = np.broadcast_to(density, decay.shape)
        outside = [unseen if normalize else at(0), unseen if normalize else at(2)]
        single, others = np.log(outside[0]), _times(count, below(outside[0]))
        chosen = {power: above(power) for power in (0, 2, 3, 4)}
        ways = math.lgamma(experts + 1) - math.lgamma(k + 1) - math.lgamma(count + 1)

        def integral(total: int, number: int, log_values: np.ndarray) -> float:
            """Of a sum of so many terms alike, with powers that add up to the total."""
            return number * float(np.sum(np.exp(ways + log_values))) * _LOG_STEP / math.gamma(total)

        one_less = _times(k - 1, chosen[0])
        square = integral(2, k, chosen[2] + one_less + single + others)
        cube = integral(3, k, chosen[3] + one_less + single + others)
        # sum(w**2) times sum(p**2), of all p that S has.
        product = integral(4, k, chosen[4] + one_less + single + others)
        if k > 1:
            two_less = _times(k - 2, chosen[0])
            product += integral(4, k * (k - 1), 2 * chosen[2] + two_less + single + others)
        if not normalize:
            product += integral(4, k, chosen[2] + one_less + np.log(outside[1]) + others)
            if count:
                one_of_them = below(outside[1]) + _times(count - 1, below(outside[0]))
                product += integral(4, k * count, chosen[2] + one_less + single + one_of_them)
    back = max(square - 2 * cube + product, 0.0)
    if mult > _ONE_HOT:
        square, back = 1 - (1 - square) * _ONE_HOT / mult, back * _ONE_HOT / mult
    return math.sqrt(square), 0.0 if k == 1 and normalize else math.sqrt(back)


@functools.cache
def balancing_std(experts: int, k: int, mult: float) -> float:
    """Return the RMS of `p * (f - sum(p * f))` for `p = softmax(mult * z)` of unit Gaussians.

    f is 1/k at k of the positions and 0 at the others: the shares of experts, if all tokens choose
    the same. The mean of the square is a sum of moments of p, those of equal powers alike.
    """

    def moment(*powers: int) -> float:
        if len(powers) > experts:
            return 0.0
        mean = softmax_moment(np.array([experts]), np.ones(1), min(mult, _ONE_HOT), *powers)
        return mean / math.perm(experts, len(powers))

    pairs, triples, rest = k * (k - 1), k * (k - 1) * (k - 2), experts - k
    two_one_one = moment(2, 1, 1)
    square = k * moment(2) - 2 * (k * moment(3) + pairs * moment(2, 1))
    square += k * moment(4) + 2 * pairs * moment(3, 1) + pairs * moment(2, 2)
    square += triples * two_one_one + rest * (k * moment(2, 2) + pairs * two_one_one)
    square *= min(1.0, _ONE_HOT / mult)
    return math.sqrt(max(square, 0.0) / experts) / k


def _times(power: int, logarithms: np.ndarray) -> np.ndarray:
    """Logarithms of powers; those of the power 0 are 0, whatever the base."""
    return power * logarithms if power else np.zeros_like(logarithms)
