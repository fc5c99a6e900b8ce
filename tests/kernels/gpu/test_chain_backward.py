"""Posteriors and the factors of transitions' counts, in linear messages, against log-sum-exp in float64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.contract import TENSOR_CORES, gradient_bound, poisoned_memory

chain_backward = pytest.importorskip("logchain.kernels.gpu.chain_backward")

from logchain import kernels as devices  # noqa: E402
from logchain.autograd import chain_operators  # noqa: E402
from logchain.autograd.operator import IMPLEMENTATIONS  # noqa: E402
from logchain.kernels.gpu import chain_counts, chains  # noqa: E402
from logchain.kernels.gpu.chain_forward import forward  # noqa: E402
from logchain.kernels.gpu.chains import Operands  # noqa: E402
from tests.kernels.gpu import calls  # noqa: E402
from tests.kernels.gpu.processes import shared, together  # noqa: E402
from tests.kernels.gpu.recorded import on  # noqa: E402

INF = float("inf")
F32, F64 = torch.float32, torch.float64


def draw(
    v, g, m, c, s=None, *, dtype=F32, spread=3.0, zeros=0.0, lengths=False, log_params=False, seed=0, x_dtype=None
):
    """A batch of chains."""
    generator = torch.Generator().manual_seed(seed)
    s = max(v - 1, 1) if s is None else s
    x = (spread * torch.randn(v, g, m, c, generator=generator)).to(x_dtype or dtype)
    bulk = torch.rand(s, g, c, c, generator=generator, dtype=F64)
    bulk[torch.rand(bulk.shape, generator=generator) < zeros] = 0.0
    x[torch.rand(x.shape, generator=generator) < zeros / 2] = -INF
    bulk = (bulk.log() if log_params else bulk).to(dtype)
    start = torch.randn(g, m, c, generator=generator, dtype=F64)
    ends = torch.randint(1, v + 1, (g, m), generator=generator) if lengths else None
    return Operands(x, bulk, start, ends, log_params, dtype)


class Found(NamedTuple):
    """What the kernels computed, and the operands."""

    chain: Operands
    messages: Tensor
    log_norm: Tensor
    weight: Tensor
    grad_x: Tensor
    grad_start: Tensor
    r: Tensor
    doubt: Tensor


def run(chain, weight=None, final=None, *, grad_x=None, parts=1, redone=None, change=None) -> Found:
    """Forward and backward; `change(messages, log_norm)` between them."""
    v, g, m, c = chain.shape
    weight = torch.randn(g, m, generator=torch.Generator().manual_seed(1)).to(chain.dtype) if weight is None else weight
    final = None if final is None else final.to(chain.dtype)
    with poisoned_memory():
        messages, log_norm = torch.empty(v, g, m, c, dtype=chain.dtype), torch.empty(g, m, dtype=F64)
        doubt = forward(chain, messages, log_norm, parts=1)
        if final is not None:
            log_norm = truth(chain, torch.ones(g, m), final)[0]
        if change is not None:
            change(messages, log_norm)
        grad_x = torch.empty(chain.x.shape, dtype=chain.dtype) if grad_x is None else grad_x
        grad_start, r = torch.empty(g, m, c, dtype=chain.dtype), torch.empty(v, g, m, c, dtype=chain.dtype)
        redone = doubt if redone is None else redone

        bound, level = chains.room(chain, 0)[:2]

        def launch(programs=None):
            return chain_backward.backward(
                chain, messages, redone, log_norm, weight, bound=bound, level=level, grad_x=grad_x,
                grad_start=grad_start, r=r, final=final, parts=parts, programs=programs,
            )  # fmt: skip

        if parts == 1:
            doubt = doubt | launch()
        else:
            begun = chain_backward.begun(chain, parts, redone, log_norm, weight)
            shared([*begun, grad_x, grad_start, r])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(chain_backward, "begun", lambda *_: begun)
                together(g * -(-m // 16) * parts, lambda: launch(programs=1))
            doubt = doubt | begun.doubt
    return Found(chain, messages, log_norm, weight, grad_x, grad_start, r, doubt)


def truth(chain, weight, final=None):
    """log Z (g, m), weight times posteriors (v, g, m, c), and of transitions (v - 1, g, m, c, c)."""
    x = chain.x.double()
    v, g, m, c = x.shape
    logs = chain.bulk.double() if chain.log_params else chain.bulk.double().log()
    logs = logs.expand(max(v - 1, 1), g, c, c)
    ends = torch.full((g, m), v) if chain.ends is None else chain.ends
    last = torch.zeros(g, m, c, dtype=F64) if final is None else final.double()
    alpha, beta = [chain.start + x[0]], [last] * v
    for i in range(1, v):
        alpha.append(torch.logsumexp(alpha[-1][..., :, None] + logs[i - 1][:, None], -2) + x[i])
    for i in reversed(range(1, v)):
        b = torch.logsumexp(logs[i - 1][:, None] + (x[i] + beta[i])[..., None, :], -1)
        beta[i - 1] = torch.where((i < ends)[..., None], b, last)
    log_norm = torch.logsumexp(
        torch.stack([torch.where((ends == i + 1)[..., None], alpha[i], -INF) for i in range(v)]) + last, (0, -1)
    )
    weight = weight.double()

    def share(joint, i, unit):
        shape = (...,) + (None,) * unit
        possible = (log_norm > -INF) & (i < ends) & (weight != 0)
        return torch.where(possible[shape], (joint - log_norm[shape]).exp() * weight[shape], 0.0)

    states = torch.stack([share(alpha[i] + beta[i], i, 1) for i in range(v)])
    pairs = [
        share(alpha[i - 1][..., :, None] + logs[i - 1][:, None] + (x[i] + beta[i])[..., None, :], i, 2)
        for i in range(1, v)
    ]
    return log_norm, states, torch.stack(pairs) if pairs else states.new_zeros(0, g, m, c, c)


def factors(found: Found) -> Tensor:
    """Posteriors of transitions (v - 1, g, m, c, c), times the weight, as whoever reads r computes them."""
    chain, v = found.chain, len(found.chain.x)
    logs = chain.bulk.double() if chain.log_params else chain.bulk.double().log()
    top = logs.amax((-1, -2), keepdim=True) / torch.log(torch.tensor(2.0, dtype=F64))
    k = torch.where(top.isfinite(), torch.ceil(top) if chain.log_params else torch.floor(top), 0.0)
    p = (logs - k * torch.log(torch.tensor(2.0, dtype=F64))).exp().expand(max(v - 1, 1), *logs.shape[1:])[: v - 1]
    counts = found.messages[:-1].double()[..., :, None] * p[:, :, None] * found.r[1:].double()[..., None, :]
    return torch.where(
        found.weight.double()[..., None, None] == 0, 0.0, counts * found.weight.double()[..., None, None]
    )


def check(found: Found, final=None, doubtful=None, units=1.0) -> None:
    """Posteriors and factors lie within the contract; only `doubtful` sequences are so."""
    v, g, m, c = found.chain.shape
    assert found.doubt.equal(torch.zeros(g, m, dtype=torch.bool) if doubtful is None else doubtful)
    _, states, pairs = truth(found.chain, found.weight, final)
    good = ~found.doubt
    size = torch.where(found.weight == 0, 1.0, found.weight.double().abs())[..., None]
    depth = found.chain.x.double()
    depth = torch.where(depth.isfinite(), depth - depth.amax(-1, keepdim=True), 0.0).abs().max()
    gradients = [(found.grad_x, states, size), (found.grad_start[None], states[:1], size)]
    for got, want, scale in [*gradients, (factors(found), pairs, size[..., None])]:
        assert not got[:, good].isnan().any()
        bound = (
            gradient_bound((want / scale).numpy(), v, c, depth.item(), dtype=found.chain.dtype, k=TENSOR_CORES) * units
        )
        error = ((got.double() - want) / scale).abs()
        assert (error <= torch.from_numpy(bound))[:, good].all(), (error / torch.from_numpy(bound))[:, good].max()
        assert (got[:, good][want[:, good] == 0] == 0).all(), "nothing has a gradient"


@pytest.mark.parametrize(
    "v, g, m, c", [(1, 1, 1, 1), (2, 2, 5, 7), (4, 1, 17, 17), (5, 2, 1, 33), (3, 1, 2, 1), (2, 1, 18, 40)]
)
@pytest.mark.parametrize("log_params", [False, True])
def test_gradients(device, v, g, m, c, log_params):
    check(run(draw(v, g, m, c, log_params=log_params)))


@pytest.mark.parametrize("log_params", [False, True])
def test_lengths_and_zeros(device, log_params):
    chain = draw(5, 2, 17, 7, lengths=True, zeros=0.3, log_params=log_params)
    found = run(chain)
    doubtful = found.doubt
    assert doubtful.float().mean() < 0.1
    check(found, doubtful=doubtful)
    behind = torch.arange(5)[:, None, None] >= chain.ends
    assert (found.grad_x[behind] == 0).all() and (found.r[behind] == 0).all()


def test_one_matrix_for_all_steps(device):
    check(run(draw(5, 2, 3, 17, 1, lengths=True)))


def test_float64(device):
    check(run(draw(4, 1, 3, 17, dtype=F64, lengths=True)))
    check(run(draw(4, 1, 3, 33, dtype=F64, log_params=True)))


def test_bfloat16_potentials(device):
    check(run(draw(4, 1, 3, 17, x_dtype=torch.bfloat16), grad_x=torch.empty(4, 1, 3, 17)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, F64])
def test_dtype_of_gradients(device, dtype):
    chain = draw(3, 1, 2, 7)
    rounded, exact = run(chain, grad_x=torch.empty(3, 1, 2, 7, dtype=dtype)), run(chain)
    assert rounded.grad_x.equal(exact.grad_x.to(dtype))


def test_strides(device):
    chain, plain = draw(4, 2, 5, 12), run(draw(4, 2, 5, 12))
    x = chain.x.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)
    bulk = chain.bulk.mT.contiguous().mT
    weight = plain.weight.mT.contiguous().mT
    grad_x = torch.full((2, 5, 4, 2, 12), float("nan"))[..., 1, :].permute(2, 0, 1, 3)
    found = run(chain._replace(x=x, bulk=bulk), weight, grad_x=grad_x)
    assert found.grad_x.equal(plain.grad_x) and found.grad_start.equal(plain.grad_start)
    assert found.r[1:].equal(plain.r[1:]) and not found.doubt.any()
    chain = chain._replace(x=chain.x[:1, :1].expand(4, 2, 5, 12))
    check(run(chain, torch.ones(1, 1).expand(2, 5)))


@pytest.mark.parametrize("log_params", [False, True])
def test_scales(device, log_params):
    chain = draw(4, 1, 3, 17, log_params=log_params)
    bulk = chain.bulk - 1e5 if log_params else chain.bulk * 1e-30
    steps = torch.tensor([0.0, 1e4, -1e4, 3e3])[:, None, None, None]
    check(run(chain._replace(x=chain.x + steps, bulk=bulk)), units=100 if log_params else 2)


def test_weights_of_any_size(device):
    chain = draw(3, 1, 4, 7)
    check(run(chain, torch.tensor([[1e36, 1e-30, -1.0, 0.0]])))


def test_final_messages(device):
    chain = draw(4, 2, 5, 7, lengths=True)
    final = 5 * torch.randn(2, 5, 7) + 1e4
    final[0, 0, 1:4] = -INF
    check(run(chain, final=final), final)


def test_states_that_no_path_reaches(device):
    """Neither their x nor their b takes part in scales."""
    chain = draw(4, 1, 2, 7)
    chain.bulk[:, :, :4, 4:] = 0.0
    chain.start[..., 4:] = -INF
    final = torch.zeros(1, 2, 7)
    final[..., 4:] = 1e4
    check(run(chain, final=final), final)


def test_sequences_without_gradient(device):
    """Impossible ones, those of weight 0, and those whose messages are logarithms disturb nobody."""
    chain, plain = draw(4, 2, 5, 7), run(draw(4, 2, 5, 7))
    chain.x[2, 0, 1] = -INF
    weight, redone = plain.weight.clone(), torch.zeros(2, 5, dtype=torch.bool)
    weight[1, 2], redone[1, 3], redone[0, 4] = 0.0, True, True

    def change(messages, log_norm):
        assert log_norm[0, 1] == -INF
        messages[:, 1, 2], messages[:, 1, 3] = float("nan"), -5.0
        messages[:, 0, 4], log_norm[1, 2] = -INF, float("nan")

    chain.x[:, 1, 2] = float("nan")
    found = run(chain, weight, redone=redone, change=change)
    nothing = redone.clone()
    nothing[0, 1] = nothing[1, 2] = True
    for got, want in (
        (found.grad_x, plain.grad_x),
        (found.grad_start[None], plain.grad_start[None]),
        (found.r, plain.r),
    ):
        assert (got[1:, nothing] == 0).all() and got[1:, ~nothing].equal(want[1:, ~nothing])
    assert not found.doubt[0].any()


def test_nan_makes_one_sequence_nan(device):
    chain, plain = draw(4, 1, 3, 7, lengths=True), run(draw(4, 1, 3, 7, lengths=True))
    found = run(chain, change=lambda _, log_norm: log_norm[0, 1].fill_(float("nan")))
    there = torch.arange(4) < chain.ends[0, 1]
    assert found.grad_x[there, 0, 1].isnan().all() and found.grad_start[0, 1].isnan().all()
    assert (found.grad_x[~there, 0, 1] == 0).all() and (found.r[~there, 0, 1] == 0).all()
    assert found.r[1:, 0, 1][there[1:]].isnan().all()
    for i in (0, 2):
        assert found.grad_x[:, 0, i].equal(plain.grad_x[:, 0, i]) and found.r[1:, 0, i].equal(plain.r[1:, 0, i])


def test_nan_behind_an_end(device):
    chain = draw(4, 1, 3, 7)._replace(ends=torch.tensor([[2, 2, 4]]))
    plain = run(chain)
    chain.bulk[2], chain.x[3, 0, :2] = float("nan"), float("nan")
    found = run(chain)
    assert found.doubt.tolist() == [[False, False, True]]
    assert found.grad_x[:, :, :2].equal(plain.grad_x[:, :, :2]) and found.r[1:, :, :2].equal(plain.r[1:, :, :2])


def test_what_underflows_is_doubtful(device):
    """What follows wants states that are all the same in the forward messages, which are not doubtful."""
    x = torch.tensor([0.0, -150.0, -170.0]).expand(1, 1, 2, 3)
    final = torch.tensor([[[-300.0, 0.0, 20.0], [0.0, 0.0, 0.0]]])
    chain = Operands(x, torch.ones(1, 1, 3, 3), torch.zeros(1, 2, 3, dtype=F64), None, False, F32)
    found = run(chain, torch.ones(1, 2), final)
    assert found.doubt.tolist() == [[True, False]]
    assert (found.grad_x - truth(chain, torch.ones(1, 2), final)[1])[0, 0].abs().max(-1).values[0] > 0.1


def test_nothing_but_the_first_gradient(device):
    chain, plain = draw(4, 1, 3, 7), run(draw(4, 1, 3, 7))
    grad_start = torch.full((1, 3, 7), float("nan"))
    chain_backward.backward(
        chain,
        plain.messages,
        plain.doubt,
        plain.log_norm,
        plain.weight,
        bound=chains.room(chain, 0).bound,
        level=chains.room(chain, 0).level,
        grad_x=None,
        grad_start=grad_start,
        r=None,
        final=None,
    )
    assert grad_start.equal(plain.grad_start)


@pytest.mark.parametrize("m, c, parts, lengths", [(17, 33, 3, True), (3, 40, 4, False)])
def test_programs_that_meet(device, m, c, parts, lengths):
    if device == "cuda":
        pytest.skip("there, programs meet in every test")
    chain = draw(4, 1, m, c, lengths=lengths)
    found, alone = run(chain, parts=parts), run(chain)
    check(found)
    torch.testing.assert_close(found.r[1:], alone.r[1:], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("s", [3, 1])
def test_the_gradient_of_matrices(device, s):
    """Counts from the messages and r that the kernels leave."""
    chain = draw(4, 2, 17, 7, s, log_params=True, lengths=True)
    found, out = run(chain), torch.empty(s, 2, 7, 7)
    assert not found.doubt.any()
    chain_counts.gradient(chain, found.messages, found.r, found.weight, found.doubt, out)
    counts = truth(chain, found.weight)[2].sum(2)
    counts = counts.sum(0, keepdim=True) if s == 1 else counts
    torch.testing.assert_close(out, counts.float(), rtol=1e-4, atol=1e-6)


def test_matrices_are_looked_at_once():
    """Of all launches of a log-partition with gradients one finds bounds, for all others."""
    with on("sm_90") as launches:
        calls.gradients(4, 20, 40)
    names = [launched[0].fn.__name__ for launched, _ in launches]
    assert names == [
        "_prepare_kernel", "_forward_kernel", "_forward_kernel",
        "scale_kernel", "_backward_kernel", "_backward_kernel",
        "_product_kernel", "_counts_kernel",
    ]  # fmt: skip


@pytest.mark.parametrize("lengths", [None, [3, 1]])
@pytest.mark.parametrize(("n", "v", "each"), [(2, 4, False), (2, 1, False), (1, 3, False), (2, 3, True)])
def test_what_is_kept_has_the_shapes_that_compilers_are_told(device, monkeypatch, n, v, each, lengths):
    monkeypatch.setattr(devices, "on_gpu", lambda tensor: True)
    x, p0 = torch.randn(n, v, 5, device=device), torch.rand(5, device=device)
    bulk = torch.rand((n,) * each + (max(v - 1, 1), 5, 5), device=device)
    ends = None if lengths is None else torch.tensor(lengths[:n], device=device).clamp(max=v)
    arguments = x, bulk, p0, ends, False, True, 1
    kept, told = IMPLEMENTATIONS["log_norm"](*arguments), chain_operators._kept_shapes(*arguments)
    assert [(one.shape, one.dtype) for one in kept] == [(one.shape, one.dtype) for one in told]
    assert bool(kept[2].numel()) == (n > 1 and not each)
    # whoever does not have it finds the same
    weight = torch.rand(n, device=device)
    options = False, False, True, True, True, 1
    gradients = [
        IMPLEMENTATIONS["log_norm_backward"](weight, x, bulk, p0, ends, *saved, *options)
        for saved in (kept, (*kept[:2], x.new_empty(0), kept[3]))
    ]
    assert all(map(torch.equal, *gradients))
