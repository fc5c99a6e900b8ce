"""The fused chains keep the accuracy contract: log-partitions, posteriors, and products of segments."""

import numpy as np
import pytest
import torch

from logchain import reference
from tests.contract import Truth, assert_values, poisoned_memory
from tests.families import FAMILIES, Chain

backward_chain = pytest.importorskip("logchain.kernels.gpu.backward_chain")
forward_chain = pytest.importorskip("logchain.kernels.gpu.forward_chain")

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")

# the first shares a set of matrices among 6 sequences, the second gives each its own
SHARED, EACH = False, True
BOTH = pytest.mark.parametrize("each", [SHARED, EACH], ids=["dot", "vector"])


def few(each: bool) -> dict:
    """Six sequences that share matrices, or two that do not: the interpreter takes its time for each program."""
    return {"each": True, "n": 2, "t": 1} if each else {"each": False, "n": 3, "t": 2}


def short(name: str, each: bool) -> dict:
    """The family's own number of steps, but not too many."""
    steps = FAMILIES[name]().x.shape[-2]
    return few(each) | {"v": min(steps, 5 if each else 9)}


class Problem:
    """A chain [n, t] as the launchers want it: 6 sequences that share one set, or 6 sets of one sequence."""

    def __init__(self, chain: Chain, device: str, lengths=None):
        self.chain, self.lengths, self.device = chain, lengths, device
        x, bulk, p0 = (operand.to(device) for operand in chain[:3])
        batch, (v, c) = x.shape[:-2], x.shape[-2:]
        steps = bulk.shape[-3]
        self.g = bulk[..., 0, 0, 0].numel() if steps else batch.numel() if bulk.shape[:-3] == batch else 1
        self.m = batch.numel() // self.g
        self.x = x.movedim(-2, 0).reshape(v, self.g, self.m, c)
        self.bulk = bulk.movedim(-3, 0).reshape(steps, self.g, c, c)
        start = p0 if chain.log_params else p0.double().log()
        self.start = start.expand(*batch, c).reshape(self.g, self.m, c)
        self.ends = None
        if lengths is not None:
            lengths = lengths.reshape(lengths.shape + (1,) * (len(batch) - lengths.dim()))
            self.ends = lengths.expand(batch).reshape(self.g, self.m).to(device)

    def forward(self, **options):
        options = {"log_params": self.chain.log_params, "keep": False} | options
        return forward_chain.forward(self.x, self.bulk, self.start, self.ends, **options)

    def value(self, **options):
        """The log-partition [*B] on the CPU."""
        return self.forward(**options)[0].reshape(self.chain.x.shape[:-2]).cpu()

    def backward(self, messages, weight, log_norm=None, **options):
        options = {"log_params": self.chain.log_params} | options
        log_norm = torch.zeros(self.g, self.m, dtype=F64, device=self.device) if log_norm is None else log_norm
        return backward_chain.backward(self.x, self.bulk, self.ends, messages, log_norm, weight, **options)

    def of_batch(self, values: np.ndarray) -> np.ndarray:
        """[*B, v, ...] as (v, g, m, ...)."""
        values = values.reshape(self.g, self.m, *values.shape[len(self.chain.x.shape) - 2 :])
        return np.moveaxis(values, 2, 0)

    def assert_contract(self, slack: float = 0.0):
        truth = Truth(self.chain, self.lengths)
        log_norm, messages = self.forward(keep=True)
        assert_values(log_norm.reshape(truth.log_norm.shape).cpu(), truth.log_norm, truth.value_bound() + slack)
        self.assert_messages(messages, slack)
        self.assert_gradients(messages, truth, slack)

    def assert_gradients(self, messages, truth, slack: float = 0.0):
        """Posteriors times weights in `grad_x`, and transition posteriors from messages and r, within the contract."""
        weight = torch.arange(self.g * self.m).cos().reshape(self.g, self.m).to(messages)
        grad_x = torch.full_like(self.x, NAN)
        start, r = self.backward(messages, weight, grad_x=grad_x, want_r=True)
        bound = slack + np.broadcast_to(truth.gradient_bound[..., None, None], truth.states.shape)
        states, reach, bound = (self.of_batch(array) for array in (truth.states, truth.reach.states, bound))
        weight = weight.cpu().double().numpy()[..., None]
        found = grad_x.cpu().double().numpy()
        assert (found[reach == 0] == 0).all()
        if grad_x.dtype in (torch.bfloat16, torch.float16):
            bound = bound + torch.finfo(grad_x.dtype).eps * states
        error = np.abs(found - weight * states)
        assert (error <= bound).all(), f"error {error.max():.3g}, {(error / bound).max():.3g} times the bound"
        error = np.abs(start.cpu().double().numpy() - weight * states[0])
        assert (error <= bound[0]).all()
        log_bulk = self.bulk.cpu().double()
        log_bulk = log_bulk if self.chain.log_params else log_bulk.log()
        a, b = messages[:-1].cpu().double(), r[1:].cpu().double()
        joint = (a[..., :, None] + log_bulk[:, :, None] + b[..., None, :]).exp().numpy()
        error = np.abs(joint - self.of_batch(truth.transitions))
        assert (error <= bound[1:, ..., None]).all(), f"error {error.max():.3g} of transitions"

    def assert_messages(self, messages, slack: float = 0.0):
        """Maximum 0, -inf exactly where nothing passes and behind the end, and right between."""
        options = {"log_params": self.chain.log_params, "lengths": self.lengths}
        truth = reference.forward_backward(*(t.double().numpy() for t in self.chain[:3]), **options).forward
        truth = truth.reshape(-1, *truth.shape[-2:]).swapaxes(0, 1).reshape(messages.shape)
        found = messages.cpu().double().numpy()
        np.testing.assert_array_equal(np.isneginf(found), np.isneginf(truth))
        top = truth.max(-1, keepdims=True)
        truth = truth - np.where(np.isneginf(top), 0.0, top)
        assert (np.abs(found.max(-1)[found.max(-1) > -np.inf]) < 1e-6).all()
        possible = np.isfinite(truth)
        deepest = np.abs(np.where(possible, truth, 0.0)).max((0, -1), keepdims=True)
        allowed = slack + 2.0**-20 * np.sqrt(len(truth)) + 2.0**-22 * np.broadcast_to(deepest, truth.shape)[possible]
        error = np.abs(found[possible] - truth[possible])
        assert (error <= allowed).all(), f"{(error / allowed).max():.3g} times the bound"


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
    assert_values(log_norm.reshape(truth.log_norm.shape).cpu(), truth.log_norm, truth.value_bound(F64))


def test_a_long_sum_of_scales_is_rounded_once(device):
    chain = FAMILIES["offsets"](dtype=F64, n=3, t=2, v=100, c=2)
    truth = Truth(chain)
    assert_values(Problem(chain, device).value(), truth.log_norm, truth.value_bound())


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
@pytest.mark.parametrize("c", [6, 70])
@pytest.mark.parametrize("lengths", [[3, 1], [1, 1], [5, 4]])
def test_nothing_behind_an_end_matters(device, lengths, c, each):
    """The last length is that of the whole tensor or not: blocks stop at their own largest end."""
    chain = FAMILIES["dense"](dtype=F32, v=5, c=c, each=each, n=2, t=1)
    lengths = torch.tensor(lengths)
    for n, length in enumerate(lengths):
        chain.x[n, :, length:] = NAN
        if each:
            chain.bulk[n, :, max(length - 1, 0) :] = NAN
    with np.errstate(invalid="ignore"):
        clean = chain._replace(x=chain.x.nan_to_num(), bulk=chain.bulk.nan_to_num())
    problem = Problem(chain, device, lengths)
    log_norm, messages = problem.forward(keep=True)
    truth = Truth(clean, lengths)
    assert_values(log_norm.reshape(2, 1).cpu(), truth.log_norm, truth.value_bound())
    assert_values(problem.value(), truth.log_norm, truth.value_bound())
    Problem(clean, device, lengths).assert_messages(messages)
    problem.chain = clean
    problem.bulk = Problem(clean, device).bulk
    problem.assert_gradients(messages, truth)


@BOTH
@pytest.mark.parametrize("c", [5, 70])
@pytest.mark.parametrize("place", ["x", "last x", "bulk"])
def test_nan_stays_in_its_sequence(device, place, c, each):
    chain = FAMILIES["sparse"](dtype=F32, v=4, c=c, each=each, n=2, t=1)
    chain.x[:] = chain.x.nan_to_num(neginf=-1.0)  # every state is possible somewhere
    clean = chain._replace(x=chain.x.clone(), bulk=chain.bulk.clone())
    if place == "bulk":
        chain.bulk[-1, 0, 1, c // 2, 0] = NAN
    else:
        chain.x[1, 0, -1 if place == "last x" else 1, c // 2] = NAN
    problem, other = Problem(chain, device), Problem(clean, device)
    spoilt = torch.tensor([place == "bulk" and not each, True], device=device)
    found, expected = [], []
    for one, out in ((problem, found), (other, expected)):
        log_norm, messages = one.forward(keep=True)
        grad_x = torch.empty_like(one.x)
        start, r = one.backward(messages, torch.ones_like(log_norm), log_norm, grad_x=grad_x, want_r=True)
        out += [
            log_norm.view(-1),
            start.view(2, -1),
            grad_x.view(4, 2, c)[1].view(2, -1),
            r.view(4, 2, c)[1].view(2, -1),
        ]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours[~spoilt], theirs[~spoilt])
        assert ours[spoilt].isnan().flatten(1).any(1).all() if ours.dim() > 1 else ours[spoilt].isnan().all()


@BOTH
def test_no_weight_no_gradient(device, each):
    """Also where the numbers are not finite."""
    chain = FAMILIES["dense"](dtype=F32, v=4, c=5, each=each, n=2, t=1)
    chain.x[1, 0, 2] = NAN
    problem = Problem(chain, device)
    _, messages = problem.forward(keep=True)
    grad_x = torch.full_like(problem.x, NAN)
    weight = torch.tensor([INF, 0.0], device=device).view(problem.g, problem.m)
    start, _ = problem.backward(messages, weight, grad_x=grad_x)
    grad_x, start = grad_x.view(4, 2, 5), start.view(2, 5)
    assert (grad_x[:, 1] == 0).all() and (start[1] == 0).all()
    assert grad_x[:, 0].isinf().all() and start[0].isinf().all()


@BOTH
@pytest.mark.parametrize("c", [6, 68])
def test_strange_strides(device, c, each):
    """Transposed, expanded, sliced and offset operands and gradients."""
    chain = FAMILIES["dense"](dtype=F32, v=4, c=c, **few(each))
    plain = Problem(chain, device)
    log_norm, messages = plain.forward(keep=True)
    weight = torch.ones_like(log_norm)
    expected = torch.empty_like(plain.x)
    start, r = plain.backward(messages, weight, grad_x=expected, want_r=True)

    strange = Problem(chain, device)
    strange.x = plain.x.movedim(0, -1).contiguous().movedim(-1, 0)
    wide = torch.full((*plain.bulk.shape[:2], c + 3, c + 1), NAN, device=device)
    wide[..., 1 : c + 1, 1 : c + 1] = plain.bulk.mT
    strange.bulk = wide[..., 1 : c + 1, 1 : c + 1].mT
    strange.start = plain.start.mT.contiguous().mT
    again, kept = strange.forward(keep=True)
    torch.testing.assert_close(again, log_norm, rtol=0, atol=1e-5)
    grad_x = torch.full((2 * c, *plain.x.shape[:3]), NAN, device=device)[::2].movedim(0, -1)
    first, ratio = strange.backward(kept, weight.mT.contiguous().mT, grad_x=grad_x, want_r=True)
    for ours, theirs in ((grad_x, expected), (first, start), (ratio[1:], r[1:])):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@BOTH
def test_expanded_operands(device, each):
    chain = FAMILIES["dense"](dtype=F32, v=4, c=6, **few(each))
    problem, copied = Problem(chain, device), Problem(chain, device)
    problem.x = problem.x[:1, :1, :1].expand_as(problem.x)
    problem.bulk = problem.bulk[:1].expand_as(problem.bulk)
    problem.start = problem.start[:1, :1].expand_as(problem.start)
    copied.x, copied.bulk, copied.start = (t.contiguous() for t in (problem.x, problem.bulk, problem.start))
    assert torch.equal(problem.forward(keep=False)[0], copied.forward(keep=False)[0])


@BOTH
@pytest.mark.parametrize("c", [6, 70])
def test_nothing_is_read_before_it_is_written(device, c, each):
    chain = FAMILIES["sparse" if c > 6 else "detour"](dtype=F32, v=4, c=c, **few(each))
    lengths = torch.tensor([3, 2, 1][: chain.x.shape[0]])
    with poisoned_memory():
        Problem(chain, device, lengths).assert_contract()


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


def product_of(bulk, x, log_params):
    """float64 logsumexp of a segment (L, g1, g2, c, c) and (L, g1, g2, c)."""
    bulk = bulk.double() if log_params else bulk.double().log()
    total = None
    for i, factor in enumerate(bulk):
        total = factor if total is None else torch.logsumexp(total[..., :, :, None] + factor[..., None, :, :], -2)
        if x is not None:
            total = total + x[i].double()[..., None, :]
    return total


def assert_product(found, offset, truth, length, slack=0.0):
    assert (found.flatten(-2).amax(-1) == torch.where(truth.flatten(-2).amax(-1) == -INF, -INF, 0.0)).all()
    value = found.double() + offset[..., None, None]
    assert torch.equal(value == -INF, truth == -INF)
    possible = truth > -INF
    row_depth = (truth.amax((-2, -1), keepdim=True) - truth)[possible]
    allowed = 2.0**-20 * length**0.5 + 2.0**-22 * (row_depth + slack) + 2.0**-22 * truth[possible].abs()
    error = (value - truth)[possible].abs()
    assert (error <= allowed).all(), f"{(error / allowed).max():.3g} times the bound"


@pytest.mark.parametrize("log_params, with_x", [(False, True), (True, False)])
@pytest.mark.parametrize("length, c", [(1, 1), (2, 5), (5, 16), (3, 17), (2, 32), (2, 64), (2, 70)])
def test_segments(device, length, c, with_x, log_params):
    generator = torch.Generator().manual_seed(c)
    bulk = torch.rand(length, 2, 1, c, c, generator=generator)
    bulk = (bulk * (torch.rand(length, 2, 1, c, c, generator=generator) < 0.7)).to(device)
    x = 10 * torch.randn(length, 2, 1, c, generator=generator).to(device) if with_x else None
    bulk = bulk.log() if log_params else bulk
    out, offset = forward_chain.segment_product(bulk, x, log_params=log_params)
    assert_product(out.cpu(), offset.cpu(), product_of(bulk, x, log_params).cpu(), length)


def test_segments_of_a_stack(device):
    """Views of one stack, into given memory; 1e4 in one matrix, 200 nats of misalignment, an impossible product."""
    stack = torch.randn(3, 7, 8, 8, generator=torch.Generator().manual_seed(0))
    slope = -200 * torch.linspace(0, 1, 8)
    stack[1, 2] += slope
    stack[1, 3] += slope.flip(0)[:, None]
    stack[0, 1] += 1e4
    stack[2, 4] = -INF
    stack = stack.to(device)
    bulk = stack[:, :6].unflatten(1, (2, 3)).movedim(2, 0)  # (3, 3, 2, 8, 8)
    out, offset = torch.full((3, 2, 8, 8), NAN, device=device), torch.full((3, 2), NAN, device=device, dtype=F64)
    given = forward_chain.segment_product(bulk, log_params=True, out=out, offset=offset)
    assert given[0] is out and given[1] is offset
    assert_product(out.cpu(), offset.cpu(), product_of(bulk.cpu(), None, True), 3, slack=200.0)
    assert (out[2, 1] == -INF).all() and offset[2, 1] == 0


def test_segments_of_wide_matrices_and_doubles(device):
    bulk = torch.randn(2, 1, 2, 20, 20, dtype=F64, generator=torch.Generator().manual_seed(0)).to(device)
    out, offset = forward_chain.segment_product(bulk, log_params=True)
    assert out.dtype == F64
    truth = product_of(bulk, None, True)
    assert (out + offset[..., None, None] - truth).abs().max() < 1e-13
