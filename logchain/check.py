"""Checks of the values of a chain's operands."""

from warnings import warn

import torch
from torch import Tensor

from .arguments import Lengths, check_flag, check_values
from .chain import Chain
from .kernels.weights import Weights, check_weights
from .operands import transition_of
from .transitions import LINEAR, LOG, Transition


def check(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
    normalized: bool = False,
) -> None:
    """Raise ValueError if operands hold NaN, +inf or a negative weight before a sequence's end.

    Other functions check kinds and sizes, and on a CPU for negative weights in `p0`, and in `bulk` if one matrix serves
    all steps. Otherwise NaN in an operand makes the result of its sequence NaN, and so does a negative sum.

    `x` `[*B, v, c]` in nats, `bulk` `[*B or ones, v-1 or 1, c, c]`, `p0` `[*B or ones, c]` and the options are those of
    `logchain.product`. Values after a sequence's end, and matrices into the first rows of concatenated sequences, are
    not checked. With `normalized=True`, as for a hidden Markov model, `p0` and every row of `bulk` (`[from, to]`) have
    to sum to 1 in float64, up to 1e-5. In half precision they may be off by the dtype's eps (logarithms: 8 eps) for
    each parameter of `bulk`, of which a matrix has one and a structure such as `Kronecker` several.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, a length is out of range, or a value is NaN, +inf or negative; the message
            names the operand, and says how many values are invalid, or a negative weight or a sum and its place.

    Warns:
        UserWarning: `bulk` has a matrix for each step but may have been meant to have one for each sequence, or has
            probabilities where `log_params=True` says logarithms.

    Cost: four passes over the operands, a few steps at a time, which wait for a GPU. `normalized=True` takes a copy of
    `bulk` in float64.

    >>> check(torch.zeros(3, 2), torch.tensor([[[0.9, 0.1], [0.2, -0.8]]]), torch.ones(2))
    Traceback (most recent call last):
    ...
    ValueError: bulk: expected non-negative weights, got -0.8 at [0, 1, 1]; pass log_params=True for logarithms
    """
    check_flag("normalized", normalized)
    chain = Chain.of(x, bulk, p0, log_params, lengths, cu_seqlens)
    v, ends, weights = x.shape[-2], chain.operands.lengths, chain.weights()
    inside = None if ends is None else torch.arange(v, device=ends.device) < ends[..., None]
    check_values(Weights("x", x, inside), *weights)
    if not log_params:
        check_weights(*weights)
    _warn_of_likely_mistakes(x, bulk, p0, log_params)
    if normalized:
        _check_sums(chain, transition_of(bulk), p0, log_params)


def _warn_of_likely_mistakes(x: Tensor, bulk: Tensor | Transition, p0: Tensor, log_params: bool) -> None:
    """Warn of arguments that fit, but look like something else."""
    v = x.shape[-2]
    if isinstance(bulk, Tensor) and bulk.dim() == 3 and v > 2 and x.shape[:-2] == (v - 1,) == bulk.shape[:1]:
        text = f"bulk: {list(bulk.shape)} looks like a matrix for each sequence, and is read as one for each step"
        warn(f"{text}; pass bulk[:, None] if it is the former, bulk[None] if the latter", stacklevel=3)
    if log_params and bool((p0 >= 0).all() and _is_one(p0.double().sum(-1), torch.finfo(p0.dtype).eps).all()):
        warn("p0: looks like probabilities, and is read as logarithms; pass log_params=False", stacklevel=3)


def _check_sums(chain: Chain, transition: Transition, p0: Tensor, log_params: bool) -> None:
    """Raise ValueError if `p0`, or a row of a matrix that is read, does not sum to 1."""
    semiring = LOG if log_params else LINEAR
    eps = torch.finfo(transition.dtype).eps * (8 if log_params else 1) * len(transition.parameters)
    transition, p0 = transition.map(Tensor.double), p0.double()
    ones = p0.new_full((*transition.lead, 1, transition.states), semiring.one, dtype=transition.dtype)
    rows, columns = (matrices.apply(ones, semiring)[..., 0, :] for matrices in (transition.mT, transition))
    for mask in chain.reads():
        rows = rows if mask is None else rows.where(mask[..., None], semiring.one)
    of_columns = bool(_is_one(columns.exp() if log_params else columns, eps).all())
    remedy = "; columns do: pass bulk.mT, with rows [from, to]" if of_columns else ""
    for name, sums, text in (("p0", semiring.sum(p0, -1), ""), ("bulk", rows, remedy)):
        sums = sums.exp() if log_params else sums
        unequal = ~_is_one(sums, eps)
        if bool(unequal.any()):
            place = unequal.nonzero()[0].tolist()
            at = f" at {place}" if place else ""
            raise ValueError(f"{name}: expected sums of 1, got {sums[tuple(place)].item():g}{at}{text}")


def _is_one(sums: Tensor, rounding: float) -> Tensor:
    """Whether sums are 1, up to 1e-5 or rounding."""
    return (sums - 1).abs() <= max(1e-5, rounding)
