"""Standard errors of fitted parameters and of functions of them, by the curvature of the log-likelihood."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .checks import check_differentiable
from .log_weights import LogWeights
from .parameters import log_prior


@torch.enable_grad()
def standard_errors(
    model: nn.Module, data: Any, of: Callable[[Any], Tensor | dict[str, Tensor]] | None = None, **conditions: Any
) -> Any:
    r"""Standard errors of a model at its maximum, `sqrt(diag(J (-H)^-1 J'))` (the delta method).

    H is the exact matrix of second derivatives of the log-posterior, that is the log-likelihood and the `log_prior()`
    of all parts, by the trained parameters, and J the Jacobian of the quantities, all in float64. With priors they are
    standard deviations of Laplace's approximation of the posterior.

    Args:
        model: a module with `log_prob(data, **conditions) -> [n]`, fitted to these data.
        data: as in `fit`.
        of: a function of the model (a copy in float64) that returns a tensor or a dictionary of tensors, such as
            `lambda hmm: hmm.transition().exp()`; by default the trained parameters, where logits are relative to the
            mean of those whose probabilities sum to 1, since they are determined up to a constant.
        **conditions: further arguments of `log_prob`.

    Returns:
        A tensor or a dictionary, as `of`, of standard errors in float64: inf for what the data do not determine.

    Raises:
        ValueError: nothing is trained; `of` returns what has no gradients, such as properties of models; or the
            log-posterior has no maximum here: it curves up or is flat in some direction, or its maximum is estimated to
            be more than 0.1 nats above; fit with a smaller tolerance, or have fewer states.
        RuntimeError: `torch.inference_mode` is on.

    Cost: a backward pass of the gradient for each of P trained parameters, `P^2` numbers, and `P^3` multiply-adds.

    Source: T. Louis, "Finding the observed information matrix when using the EM algorithm", J. R. Stat. Soc. B 44
    (1982), whose formula second derivatives of the log-likelihood replace.

    >>> from logchain.nn import HMM
    >>> hmm, data = HMM(1, "poisson"), torch.tensor([[2, 4, 4, 4]])
    >>> report = hmm.fit(data)
    >>> standard_errors(hmm, data, lambda hmm: hmm.emission.log_rates.exp())  # sqrt(rate / steps)
    tensor([0.9354], dtype=torch.float64)
    """
    check_differentiable("standard_errors")
    model = copy.deepcopy(model).double()
    log_prob: Any = model.log_prob
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    parameters: list[Any] = list(trained.values())
    if not parameters:
        raise ValueError("model: expected trained parameters, got none; call requires_grad_(True) on some")
    total: Tensor = log_prob(data, **conditions).double().sum() + log_prior(model)
    gradient = _flat(torch.autograd.grad(total, parameters, create_graph=True, materialize_grads=True))
    values: Any = trained if of is None else of(model)
    if not all(value.requires_grad for value in (values.values() if isinstance(values, dict) else [values])):
        remedy = "pass `lambda hmm: hmm.transition().exp()`, not a property such as `hmm.transition_matrix`"
        raise ValueError(f"of: expected functions of trained parameters, got a tensor without gradients; {remedy}")
    hessian = _jacobian(gradient, parameters)
    gradient, gauges = gradient.detach(), _gauges(model, trained)
    size = hessian.diagonal().abs().mean()
    # directions in which nothing can change get some curvature; quantities depend on none, or have infinite errors
    flat = ((hessian == 0).all(-1) & (gauges.diagonal() == 0)).double().diag()
    factor, failed = torch.linalg.cholesky_ex(size * (gauges + flat) - hessian)
    no_maximum = factor.diagonal().square() <= 1e-10 * hessian.diagonal().abs()
    if failed or no_maximum.any():
        index = int(failed) - 1 if failed else int(no_maximum.int().argmax())
        name = [name for name, parameter in trained.items() for _ in range(parameter.numel())][index]
        problem = f"model: expected a maximum of the log-posterior, which is flat or curves up in {name}"
        raise ValueError(
            f"{problem}; fit further, pass a prior such as prior=Dirichlet(2.0), or call requires_grad_(False)"
        )
    covariance = torch.cholesky_inverse(factor)
    if (missing := float(gradient @ covariance @ gradient) / 2) > 0.1:
        raise ValueError(f"model: expected a maximum, got a fit {missing:.2g} nats below; use a smaller tolerance")
    projection = torch.eye(len(hessian)).to(hessian) - (gauges if of is None else 0)

    def errors(value: Tensor) -> Tensor:
        jacobian = _jacobian(value.flatten(), parameters) @ projection
        free = (jacobian @ (gauges + flat)).norm(dim=-1) > 1e-9 * jacobian.norm(dim=-1)
        variances = ((jacobian @ covariance) * jacobian).sum(-1)
        return variances.sqrt().masked_fill(free, torch.inf).view(value.shape)

    return {name: errors(value) for name, value in values.items()} if isinstance(values, dict) else errors(values)


def _flat(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _jacobian(values: Tensor, parameters: list[Any]) -> Tensor:
    options: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
    return torch.stack([_flat(torch.autograd.grad(value, parameters, **options)) for value in values]).detach()


def _gauges(model: nn.Module, trained: dict[str, nn.Parameter]) -> Tensor:
    """The projection onto directions that add a constant to all logits of probabilities that sum to 1."""
    parts = {id(part.logits): part for part in model.modules() if isinstance(part, LogWeights)}
    blocks = []
    for parameter in trained.values():
        block = torch.zeros(parameter.numel(), parameter.numel(), dtype=torch.float64, device=parameter.device)
        if (part := parts.get(id(parameter))) is not None:
            # those below a rounding error take no part: their curvature is less than the rounding errors of a sum
            possible = (part().detach() > math.log(torch.finfo(torch.float64).eps)).double()
            units = block.fill_diagonal_(1.0).view(-1, *parameter.shape) * possible
            block = torch.stack([possible * part.totals(unit) / part.totals(possible) for unit in units]).flatten(1)
        blocks.append(block)
    gauges: Tensor = torch.block_diag(*blocks).detach()
    return gauges
