"""The answers of the public functions where `bulk` is a structure."""

import math
from typing import Literal

import torch
from torch import Tensor

from ..arguments import check_values
from ..autograd.scan import total as sum_of_paths
from ..transitions import Semiring, Transition
from . import messages as log_messages
from . import paths, topk
from .eager import between_graphs
from .entropy import entropy as entropy_of
from .entropy import entropy_of_sums
from .operands import multiplied_out
from .product import log_norm, posteriors
from .question import Question

# a structure whose parameters are expected counts
Counts = Transition | None


@between_graphs
def product(question: Question) -> Tensor:
    """The log-partition [*B]."""
    return log_norm(question.operands).to(question.operands.dtype)


@between_graphs
def total(question: Question, semiring: Semiring) -> Tensor:
    """The sum of the weights of all paths [*B]."""
    operands = question.operands
    if operands.transition.sums:
        operands = multiplied_out(operands)
    return sum_of_paths(operands.steps(), semiring).to(operands.dtype)


@between_graphs
def marginals(question: Question, transitions: Literal["sum", "full"] | None) -> tuple[Tensor, Counts, Tensor]:
    """State posteriors, a structure whose parameters are expected counts, and the log-partition."""
    operands = question.operands
    if transitions == "full":
        *batch, v, _ = operands.x.shape
        structure = operands.transition
        parameters = [
            parameter.expand(*batch, v - 1, *parameter.shape[parameter.dim() - own :])
            for parameter, own in zip(structure.parameters, structure.own_axes, strict=True)
        ]
        operands = operands.of(operands.x, operands.p0, *parameters)
    value, (states, counts, _) = posteriors(operands, (True, transitions is not None, False))
    assert states is not None
    counted = None
    if transitions is not None:
        assert counts is not None
        counted = operands.transition.with_parameters(*question.counts(counts, each=transitions == "full"))
    return question.by_row(states, 1), counted, value.to(operands.dtype)


@between_graphs
def forward_backward(question: Question) -> tuple[Tensor, Tensor, Tensor]:
    """Forward messages, backward messages and the log-partition."""
    ahead, behind, value = log_messages.messages(question.operands)
    return question.by_row(ahead, 1), question.by_row(behind, 1), value


@between_graphs
def viterbi(question: Question) -> tuple[Tensor, Tensor]:
    """The best path and its log-weight."""
    operands = question.operands
    states, unknown = paths.best_paths(operands)
    score = paths.log_weight(operands, states).masked_fill(unknown, math.nan)
    return question.by_row(states), score.to(operands.dtype)


@between_graphs
def topk_paths(question: Question, k: int) -> tuple[Tensor, Tensor]:
    """The k best paths and their log-weights, in falling order."""
    operands = question.operands
    states, unknown = topk.topk_paths(operands, k)
    scores = paths.log_weight(operands, states.movedim(-2, 0)).movedim(0, -1)
    scores = scores.masked_fill(unknown[..., None], math.nan)
    order = scores.detach().argsort(stable=True, dim=-1, descending=True)
    states = states.gather(-2, order[..., None].expand_as(states))
    if question.mask is not None:
        states = question.by_row(states.movedim(-2, 0))
    return states, scores.gather(-1, order).to(operands.dtype)


@between_graphs
def sample(question: Question, num_samples: int, generator: torch.Generator | None) -> Tensor:
    """Paths drawn from the posterior."""
    operands = question.operands
    if num_samples == 0 or operands.x.numel() == 0:
        drawn = operands.x.new_empty((num_samples, *operands.x.shape[:-1]), dtype=torch.int64)
    else:
        with torch.no_grad():
            drawn = paths.drawn_paths(operands, num_samples, generator)
    return question.by_row(drawn)


@between_graphs
def log_prob(question: Question, states: Tensor) -> Tensor:
    """The log posterior of paths [*S, *B, v], see `Question.padded`."""
    operands = question.operands
    weight = paths.log_weight(operands, states)
    norm = log_norm(operands)
    impossible = (weight == -math.inf) & ~norm.isnan()
    return torch.where(impossible, -math.inf, weight - norm).to(operands.dtype)


@between_graphs
def entropy(question: Question) -> Tensor:
    """The entropy of the posterior over paths."""
    operands = question.operands
    return (entropy_of_sums if operands.transition.sums else entropy_of)(operands).to(operands.dtype)


@between_graphs
def check(question: Question) -> None:
    """Raise ValueError for NaN, +inf and negative weights, see `logchain.check`."""
    question.check_weights()
    x, transition, p0, ends, _ = question.operands
    for parameter, own in zip(transition.parameters, transition.own_axes, strict=True):
        axes = parameter.dim() - own
        flat = parameter.reshape(*parameter.shape[:axes], parameter.shape[axes:].numel(), 1)
        check_values(x, flat, p0, ends)


def check_products(transition: Transition, argument: str = "bulk") -> None:
    """Raise TypeError for a structure whose entries are sums."""
    if transition.sums:
        name = type(transition).__name__
        raise TypeError(
            f"{argument}: expected a structure whose entries are products, got {name}: its entries are sums, through "
            f"which there is no best path. Pass {name}.to_dense(), of c^2 numbers, for the best path of states"
        )
