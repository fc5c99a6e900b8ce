"""A random search for wrong verdicts on products of factors: small chains on the edge of what a format holds."""

import numpy as np
import pytest
import torch
from torch import Tensor

import logchain
from logchain.transitions import LowRank
from tests.contract import unit
from tests.kernels import structures
from tests.kernels.structures import F32, F64, INF, KINDS, Chain, check, draw

CASES = [
    *(kind for kind in KINDS.values() if kind.is_product),
    structures.block_diagonal(2, 1),
    structures.low_rank(2, 1),
    structures.low_rank(3, 2, False),
    structures.monarch(2, 2, 2),
    structures.kronecker(2, 2, 2, 2, 2),
]

# how far below others log-potentials lie, in nats, and weights, in decades, of float32
NATS = [0, 0, 3, 17, 20, 37, 50, 56, 69, 75, 90, 104, 150, 300, INF]
DECADES = [0, 0, 0, -3, -8, -12, -16, -20, -30, -38, -44, 3, 8, 19, 30]


def hard_chain(seed: int, dtype: torch.dtype) -> Chain:
    """Four sequences of a random structure, whose operands have up to three sizes."""
    rng, wider = np.random.default_rng(seed), 1 if dtype == F32 else 8
    v = int(rng.integers(1, 7))
    chain = draw(
        CASES[rng.integers(len(CASES))],
        (4,),
        (int(rng.choice([1, 4])),),
        v=v,
        steps=int(rng.choice([1, max(v - 1, 1)])),
        dtype=dtype,
        zeros=float(rng.choice([0, 0.1, 0.4])),
        ends=bool(rng.integers(2)),
        seed=seed,
    )

    def levels(like: Tensor, sizes: list[float]) -> Tensor:
        few = torch.from_numpy(rng.choice(sizes, size=rng.integers(1, 4)).astype(float))
        return wider * few[torch.from_numpy(rng.integers(len(few), size=tuple(like.shape)))]

    def spread(weights: Tensor) -> Tensor:
        decades = levels(weights, DECADES) * (rng.random() < 0.6)
        result = (weights.double() * 10.0 ** decades.clamp(-305, 300)).to(dtype)
        return result.masked_fill(result.isinf(), 1.0)

    parameters = tuple(spread(parameter) for parameter in chain.parameters)
    x = (chain.x - levels(chain.x, NATS)).to(dtype)
    chain = chain._replace(x=x, parameters=parameters, p0=spread(chain.p0))
    return chain.logs() if rng.random() < 0.4 else chain


def bound(chain: Chain) -> float:
    """The contract's bound, of paths that run below others by the largest logarithm, and the reference's rounding."""

    def largest(*operands: Tensor) -> float:
        return max(float(operand.double().nan_to_num(0, 0, 0).abs().amax()) for operand in operands)

    weights, (v, c) = (*chain.parameters, chain.p0), chain.x.shape[-2:]
    depth = largest(chain.x, *(weights if chain.log_params else ()))
    logs = largest(*(weights if chain.log_params else (weight.double().log() for weight in weights)))
    return v * ((3 * c + 8 + 2 * depth) * unit(chain.x.dtype) + 8 * logs * 2.0**-53)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_hard_chains_have_no_wrong_verdict(dtype):
    recomputed = 0
    for seed in range(200):
        chain = hard_chain(seed, dtype)
        recomputed += check("cpu", chain, bound(chain)).recomputed
    assert 100 < recomputed < 500  # of 800


def test_float64_log_partitions_are_not_rounded_by_their_scale():
    """The scale of a message, 900 bits, is taken out of its sum before the logarithm."""
    check("cpu", draw(KINDS["monarch"], dtype=F64), near=5 * 30 * 2.0**-53)


def test_half_gradients_of_shared_operands_are_added_in_float64():
    """Those of each sequence, which is computed in logarithms, are out of the range of float16."""
    x = torch.zeros(2, 2, 2, dtype=torch.float16)
    x[:, 0, 1] = -200.0
    p0 = torch.tensor([0.0, -1.0], dtype=torch.float16).requires_grad_()
    left, right = (torch.tensor([[a], [-200.0 - a]], dtype=torch.float16) for a in (-200.0, 0.0))
    with logchain.rescues() as seen:
        log_norm = logchain.product(x, LowRank(left, right), p0, log_params=True)
    (gradient,) = torch.autograd.grad(log_norm, p0, torch.tensor([1e6, 1.0 - 1e6]))
    assert seen.sequences == 2
    torch.testing.assert_close(gradient.double(), torch.tensor([0.7310586, 0.2689414], dtype=F64), rtol=1e-3, atol=0.0)
