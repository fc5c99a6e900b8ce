"""The fused chains keep the accuracy contract: log-partitions, messages and posteriors."""

import pytest
import torch

from logchain import reference
from tests.contract import TENSOR_CORES as K
from tests.contract import Truth, assert_values
from tests.families import FAMILIES, Chain
from tests.kernels.gpu.chains import BOTH, Problem, few

F32, F64 = torch.float32, torch.float64


def short(name: str, each: bool) -> dict:
    """The family's own number of steps, but not too many."""
    steps = FAMILIES[name]().x.shape[-2]
    return few(each) | {"v": min(steps, 5 if each else 9)}


@BOTH
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "c301"])
def test_forward(device, name, each):
    Problem(FAMILIES[name](dtype=F32, **short(name, each)), device).assert_contract()


@BOTH
@pytest.mark.parametrize("v, c", [(1, 5), (2, 5), (5, 5), (4, 70)])
def test_messages_that_are_not_kept_are_the_same(device, v, c, each):
    problem = Problem(FAMILIES["dense"](dtype=F32, v=v, c=c, **few(each)), device)
    kept, messages = problem.forward(keep=True)
    log_norm, none = problem.forward(keep=False)
    assert messages is not None and none is None
    assert torch.equal(log_norm, kept)


@BOTH
@pytest.mark.parametrize("name, c", [("dense", 33), ("detour", 64), ("sparse", 65), ("detour", 70)])
def test_more_states(device, name, c, each):
    Problem(FAMILIES[name](dtype=F32, v=3, c=c, **few(each)), device).assert_contract()


@BOTH
@pytest.mark.parametrize("c, log_params", [(200, True), (300, False)])
def test_many_states(device, c, log_params, each):
    chain = FAMILIES["dense"](dtype=F32, n=1 if each else 2, t=1, v=3, c=c)
    Problem(chain.logs() if log_params else chain, device).assert_contract()


@pytest.mark.parametrize("m", [1, 2, 17, 33, 65])
@pytest.mark.parametrize("c", [1, 17])
def test_blocks_of_sequences(device, m, c):
    Problem(FAMILIES["dense"](dtype=F32, n=m, t=1, v=4, c=c), device).assert_contract()


@BOTH
@pytest.mark.parametrize("name", ["peaked", "detour", "offsets", "impossible"])
def test_float64(device, name, each):
    Problem(FAMILIES[name](dtype=F64, **few(each), v=6, c=5), device).assert_contract()


@BOTH
def test_arithmetic_in_doubles_for_float_operands(device, each):
    chain = FAMILIES["detour"](dtype=F32, **few(each), v=4, c=5)
    truth = Truth(Chain(chain.x.double(), *chain[1:]))
    log_norm, messages = Problem(chain, device).forward(keep=True, dtype=F64)
    assert messages.dtype == F64
    assert_values(log_norm.reshape(truth.log_norm.shape).cpu(), truth.log_norm, truth.value_bound(F64, K))


def test_a_long_sum_of_scales_is_rounded_once(device):
    chain = FAMILIES["offsets"](dtype=F64, n=3, t=2, v=100, c=2)
    truth = Truth(chain)
    assert_values(Problem(chain, device).value(), truth.log_norm, truth.value_bound(k=K))


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("c", [6, 70])
def test_half_types(device, dtype, c, each):
    chain = FAMILIES["dense"](dtype=F32, **few(each), v=4, c=c)
    chain = Chain(chain.x.to(dtype), chain.bulk.to(dtype), chain.p0)
    Problem(chain, device).assert_contract()


@BOTH
@pytest.mark.parametrize("c", [6, 70])
def test_one_matrix_for_all_steps(device, c, each):
    chain = FAMILIES["left_to_right"](dtype=F32, v=5, c=c, **few(each))
    Problem(chain._replace(bulk=chain.bulk[..., :1, :, :]), device).assert_contract()


@BOTH
def test_rescues_are_counted(device, each):
    rescued = torch.zeros(1, dtype=torch.int64, device=device)
    for name, some in (("dense", False), ("left_to_right", False), ("impossible", False), ("detour", True)):
        problem = Problem(FAMILIES[name](dtype=F32, **few(each) | {"v": 5}), device)
        if name == "left_to_right":  # zeros without misaligned maxima
            problem.x *= 0.05
        _, messages = problem.forward(keep=True, rescued=rescued)
        assert (rescued.item() > 0) == some, name
        rescued.zero_()
        problem.backward(messages, torch.ones(problem.g, problem.m, device=device), rescued=rescued)
        assert (rescued.item() > 0) == some, name


@BOTH
@pytest.mark.parametrize("log_params", [False, True])
def test_columns_of_any_size(device, log_params, each):
    """From denormal numbers to the largest, a column of zeros among them: nothing is rescued that need not be."""
    chain = FAMILIES["dense"](dtype=F64, v=4, c=5, **few(each))
    chain.bulk[:] *= torch.tensor([1e-40, 1e-36, 1.0, 1e30, 0.0], dtype=F64)
    chain = chain.to(F32)
    problem = Problem(chain.logs() if log_params else chain, device)
    problem.assert_contract()
    rescued = torch.zeros(1, dtype=torch.int64, device=device)
    problem.forward(rescued=rescued)
    assert rescued.item() == 0


@BOTH
def test_tf32_where_it_is_allowed(device, each):
    chain = FAMILIES["dense"](dtype=F32, v=4, c=70, **few(each))
    torch.set_float32_matmul_precision("high")
    try:
        problem = Problem(chain, device)
        problem.assert_contract(slack=4 * 2.0**-10)
    finally:
        torch.set_float32_matmul_precision("highest")


@BOTH
def test_a_message_from_behind(device, each):
    """A chain cut in two: the second half's backward message is passed to the first."""
    chain = FAMILIES["dense"](dtype=F32, v=6, c=7, **few(each))
    problem, half = Problem(chain, device), Problem(chain, device)
    _, messages = problem.forward(keep=True)
    weight = torch.ones(problem.g, problem.m, device=device)
    grad_x = torch.empty_like(problem.x)
    problem.backward(messages, weight, grad_x=grad_x)
    numpy = reference.forward_backward(*(t.double().numpy() for t in chain[:3])).backward
    final = torch.from_numpy(problem.of_batch(numpy)[2]).to(messages).contiguous()
    half.x, half.bulk = problem.x[:3], problem.bulk[:2]
    found = torch.empty_like(half.x)
    half.backward(messages[:3].contiguous(), weight, grad_x=found, final=final)
    torch.testing.assert_close(found, grad_x[:3], rtol=0, atol=2e-6)
