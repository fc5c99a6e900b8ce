"""Chains with matrices of their own: right where nothing is doubtful, and doubtful where they would not be."""

import pytest
import torch

from tests.families import FAMILIES, dense
from tests.kernels.gpu.processes import shared, together
from tests.kernels.gpu.test_chain_forward import DOUBTFUL, assert_filtered, assert_right, operands, spaced

chain_own = pytest.importorskip("logchain.kernels.gpu.chain_own")
chains = pytest.importorskip("logchain.kernels.gpu.chains")

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["held", "tiles"])
def tiles(request, monkeypatch):
    """Matrices in one tile, and in several."""
    if request.param == "tiles":
        monkeypatch.setattr(chain_own, "_HELD", {False: 0, True: 0})
        monkeypatch.setattr(chain_own, "_TILE", {False: 64, True: 64})
    return request.param


def run(chain: chains.Operands, *, keep: bool = True, parts: int | None = None):
    """log_norm, doubt and messages, from memory that held NaN; with parts each program is a process."""
    v, g, m, c = chain.shape
    device = chain.x.device
    messages = torch.full((v if keep else min(v, 2), g, m, c), NAN, dtype=chain.dtype, device=device)
    log_norm = torch.full((g, m), NAN, dtype=F64, device=device)
    if parts is None:
        return log_norm, chain_own.forward(chain, messages, log_norm), messages
    # all programs of a launch see what is prepared once
    same = len(chain.bulk) == 1
    ready = chain_own.prepared(chain, parts, same)
    shared([messages, log_norm, *ready[0], ready[1]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_own, "prepared", lambda *_: ready)
        together(g * parts, lambda: chain_own.forward(chain, messages, log_norm, parts=parts, programs=1))
    return log_norm, ready[0].doubt, messages


def posteriors(chain: chains.Operands, final=None):
    """Those of states (v, g, 1, c) and of transitions (v - 1, g, c, c), by definition, in float64; NaN for no path."""
    x, bulk, start = (tensor.detach().double().cpu() for tensor in (chain.x, chain.bulk, chain.start))
    v, g, _, c = x.shape
    states, pairs = torch.zeros(v, g, 1, c, dtype=F64), torch.zeros(v - 1, g, c, c, dtype=F64)
    logs = (bulk if chain.log_params else bulk.log()).expand(v - 1, g, c, c)
    for z in range(g):
        last = v if chain.ends is None else int(chain.ends[z])
        a, b = [start[z, 0] + x[0, z, 0]], torch.zeros(c, dtype=F64) if final is None else final[z, 0].double().cpu()
        for i in range(1, last):
            a.append(torch.logsumexp(a[-1][:, None] + logs[i - 1, z], 0) + x[i, z, 0])
        for i in reversed(range(last)):
            states[i, z, 0] = torch.softmax(a[i] + b, 0)
            if i:
                joint = a[i - 1][:, None] + logs[i - 1, z] + (x[i, z, 0] + b)
                pairs[i - 1, z] = torch.softmax(joint.flatten(), 0).view(c, c)
                b = torch.logsumexp(logs[i - 1, z] + (x[i, z, 0] + b), 1)
    return states, pairs


class Gradients:
    """All gradients of a chain, from memory that held NaN; with parts each program is a process."""

    def __init__(self, chain, *, weight=None, final=None, by_log=True, redone=None, log_norm=None, parts=None):
        v, g, m, c = chain.shape
        found, self.forward_doubt, messages = run(chain)
        device = chain.x.device
        self.log_norm = found if log_norm is None else log_norm
        self.weight = torch.ones(g, m, device=device) if weight is None else weight
        same = len(chain.bulk) == 1
        self.messages, self.same, self.chain = messages, same, chain
        self.x = torch.full((g, v, m, c), NAN, dtype=chain.dtype, device=device).transpose(0, 1)
        self.start, self.r = (torch.full((n, g, m, c), NAN, dtype=chain.dtype, device=device) for n in (1, v))
        self.start = self.start[0]
        self.bulk = torch.full((v - 1, g, c, c), NAN, dtype=chain.dtype, device=device)
        redone = torch.zeros(g, m, dtype=torch.bool, device=device) if redone is None else redone
        options = {"grad_x": self.x, "grad_start": self.start, "r": self.r if same else None, "final": final}
        options |= {"grad_bulk": None if same else self.bulk, "by_log": by_log}
        arguments = chain, messages, redone, self.log_norm, self.weight
        if parts is None:
            self.doubt = chain_own.backward(*arguments, **options) | self.forward_doubt
            return
        ready, between = chain_own.prepared(chain, parts, same, end=True), chain_own.scratch(chain, parts)
        shared([self.x, self.start, self.r, self.bulk, *ready[0], ready[1], *between])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chain_own, "prepared", lambda *_, **__: ready)
            patch.setattr(chain_own, "scratch", lambda *_: between)
            together(g * parts, lambda: chain_own.backward(*arguments, **options, parts=parts, programs=1))
        self.doubt = ready[0].doubt | self.forward_doubt

    def transitions(self):
        """Expected transitions (v - 1, g, c, c)."""
        if not self.same:
            return self.bulk.double().cpu()
        p, bound = self.chain.bulk.double(), chains.room(self.chain, 0).bound[0] >> 1
        p = (p.exp() if self.chain.log_params else p) / torch.exp2(bound.double())[:, None, None]
        outer = self.messages[:-1, :, 0, :, None].double() * self.r[1:, :, 0, None, :].double()
        return (outer * p * self.weight[..., None].double()).cpu()

    def check(self, *, states=None, pairs=None, final=None, atol=2e-6):
        """What is not doubtful lies near the truth."""
        if states is None:
            states, pairs = posteriors(self.chain, final)
        weight, sure = self.weight.double().cpu(), (~self.doubt).cpu()[:, 0]
        for found, truth in [
            (self.x.double().cpu(), states * weight[..., None]),
            (self.start[None].double().cpu(), states[:1] * weight[..., None]),
            (self.transitions(), pairs * weight[..., None]),
        ]:
            torch.testing.assert_close(found[:, sure], truth[:, sure].nan_to_num(0.0), rtol=atol * 10, atol=atol)


# of which float64 shows more
DOUBLE = {"dense", "c1", "sharp", "offsets", "sparse", "detour"}


@pytest.mark.parametrize(
    "name, dtype", [(name, F32) for name in FAMILIES if name != "c301"] + [(name, F64) for name in sorted(DOUBLE)]
)
def test_families(device, name, dtype):
    family = FAMILIES[name](dtype=dtype, each=True, n=1, t=1)
    chain = operands(family, device=device)
    found = Gradients(chain)
    assert_right(family, found.log_norm, found.forward_doubt, k=1)
    found.check(atol=1e-5 if dtype == F32 else 1e-11)
    assert not found.doubt.any() or name in DOUBTFUL
    if not found.forward_doubt.any():
        assert_filtered(chain, found.messages)


def one_for_all(family):
    """The family with its first matrix for all steps."""
    return family._replace(bulk=family.bulk[..., :1, :, :])


@pytest.mark.parametrize("c, same, log", [(1, False, True), (7, True, False), (17, False, False), (33, False, True)])
def test_sizes_and_lengths(device, tiles, c, same, log):
    family = dense(F32, n=3, t=1, v=4, c=c, each=True)
    family = one_for_all(family) if same else family
    family = family.logs() if log else family
    lengths = [1, 3, 4]
    chain = operands(family, lengths, device)
    weight = torch.tensor([[0.5], [-2.0], [3.0]], device=device, dtype=torch.bfloat16).expand(3, 1)
    found = Gradients(chain, weight=weight)
    assert not found.doubt.any()
    assert_right(family, found.log_norm, found.doubt, lengths, k=1)
    assert_filtered(chain, found.messages)
    found.check()
    alike = run(chain, keep=False)
    assert torch.equal(alike[0], found.log_norm)
    assert torch.equal(alike[2][(chain.ends[0, 0] - 1) % 2, 0], found.messages[chain.ends[0, 0] - 1, 0])


def test_gradients_of_linear_entries(device, tiles):
    chain = operands(dense(F32, n=2, t=1, v=3, c=9, each=True), device=device)
    bulk = chain.bulk.clone()
    bulk[:, :, 2, 3:] = 0.0
    for scale in (1.0, 2.0**-100, 2.0**80):
        chain = chain._replace(bulk=bulk * scale)
        entries = Gradients(chain, by_log=False)
        counts = Gradients(chain).bulk
        assert not entries.doubt.any() and (entries.bulk[:, :, 2, 3:] == 0.0).all()
        torch.testing.assert_close(entries.bulk * chain.bulk, counts)
        assert (counts[chain.bulk > 0] > 0).all()


@pytest.mark.parametrize("x_type, bulk_type", [(torch.bfloat16, F32), (torch.float16, torch.bfloat16), (F32, F64)])
def test_narrow_and_mixed_types(device, x_type, bulk_type):
    chain = operands(dense(F64, n=2, t=1, v=3, c=7, each=True), device=device)
    dtype = torch.promote_types(bulk_type, F32)
    chain = chain._replace(x=chain.x.to(x_type), bulk=chain.bulk.to(bulk_type), dtype=dtype)
    found = Gradients(chain)
    wide = run(chain._replace(x=chain.x.double(), bulk=chain.bulk.double(), dtype=F64))[0]
    torch.testing.assert_close(found.log_norm, wide, rtol=1e-6, atol=0)
    found.check()


def test_strides(device):
    chain = operands(dense(F32, n=2, t=1, v=3, c=8, each=True), device=device)
    expected = Gradients(chain)
    for x, bulk in [
        (spaced(chain.x), chain.bulk),
        (chain.x, chain.bulk.mT.contiguous().mT),
        (chain.x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), spaced(chain.bulk)),
    ]:
        found = Gradients(chain._replace(x=x, bulk=bulk))
        assert torch.equal(found.log_norm, expected.log_norm)
        assert torch.equal(found.x, expected.x) and torch.equal(found.bulk, expected.bulk)
    alike = chain._replace(bulk=chain.bulk[:, :1].expand_as(chain.bulk))
    Gradients(alike).check()


def test_large_offsets_are_taken_out(device, tiles):
    chain = operands(dense(F64, n=2, t=1, v=5, c=7, each=True), device=device)
    chain = chain._replace(x=chain.x.round(), bulk=(1024 * chain.bulk).round())  # exact in what follows
    chain = chain._replace(x=chain.x.float(), bulk=chain.bulk.float(), dtype=F32)
    expected = Gradients(chain)
    far = torch.tensor([0.0, 2.0**-115, 2.0**90, 1.0][1:] + [2.0**-60], device=device)[:, None, None, None]
    for shift, scale in [(2.0**17, torch.ones_like(far)), (-(2.0**17), torch.full_like(far, 2.0**-115)), (0.0, far)]:
        found = Gradients(chain._replace(x=chain.x + shift, bulk=chain.bulk * scale))
        assert not found.doubt.any()
        moved = found.log_norm - 5 * shift - scale.double().log().sum()
        torch.testing.assert_close(moved, expected.log_norm, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.bulk, expected.bulk, rtol=1e-5, atol=1e-7)


def test_nan_stays_in_its_sequence(device):
    chain = operands(dense(F32, n=5, t=1, v=4, c=7, each=True), device=device)
    expected = Gradients(chain)
    x, bulk = chain.x.clone(), chain.bulk.clone()
    x[2, 3, 0, 5] = NAN
    bulk[1, 1, 0, 4] = NAN
    x[2, 1, 0, 4] = -INF  # where the state is not admitted
    found = Gradients(chain._replace(x=x, bulk=bulk))
    assert found.forward_doubt.flatten().tolist() == [False, True, False, True, False]
    for one, other in [(found.x, expected.x), (found.bulk, expected.bulk)]:
        assert torch.equal(one[:, [0, 2, 4]], other[:, [0, 2, 4]])


def test_what_has_no_gradient(device):
    """Sequences: usual, impossible, of weight 0, of unknown log-partition, redone."""
    chain = operands(dense(F32, n=5, t=1, v=3, c=6, each=True), [3, 3, 2, 2, 3], device)
    x = chain.x.clone()
    x[1, 1] = -INF
    chain = chain._replace(x=x)
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], device=device)[:, None]
    redone = torch.tensor([False] * 4 + [True], device=device)[:, None]
    log_norm = run(chain)[0]
    assert log_norm[1] == -INF
    log_norm[3] = NAN
    found = Gradients(chain, weight=weight, redone=redone, log_norm=log_norm)
    for array in (found.x, found.bulk, found.start[None]):
        assert (array[:, 1:3] == 0.0).all() and array[:, 4].isnan().all() and array[0, 3].isnan().all()
    assert (found.x[2, 3] == 0.0).all() and (found.bulk[1, 3] == 0.0).all()
    assert not found.doubt[:3].any()
    found.doubt[3:] = True
    found.check()


def test_what_follows(device, tiles):
    chain = operands(dense(F32, n=3, t=1, v=4, c=6, each=True), [4, 2, 3], device)
    final = 30.0 * torch.randn(3, 1, 6, generator=torch.Generator().manual_seed(0), dtype=F64).to(device)
    final[0, 0, 2] = -INF
    found = Gradients(chain, final=final + 1e5)
    assert not found.doubt.any()
    found.check(final=final)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_underflows_is_doubtful(device, tiles, direction):
    """Only state 0 is left, or only it leads to the end, and all ways but one are 1e-30."""
    c = 9
    x = torch.zeros(4, 3, 1, c, device=device)
    x[0 if direction == "forward" else 3, :, :, 1:] = -300.0
    if direction == "forward":
        x[1, 1, 0, 0] = -INF
        x[2, 2] = -INF
    else:
        x[2, 1, 0, 0] = -INF
        x[3, 2] = -INF
    bulk = (torch.eye(c, device=device) + 1e-30).repeat(3, 3, 1, 1)
    chain = chains.Operands(x, bulk, torch.zeros(3, 1, c, dtype=F64, device=device), None, False, F32)
    found = Gradients(chain)
    assert found.doubt[1]
    assert found.log_norm[2] == -INF or found.doubt[2]
    found.check()


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("logs", [True, False])
def test_lost_path_is_doubtful(device, tiles, logs, same):
    """The only path is from a state that is raised, through an entry whose product with it is 0."""
    bulk = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 2.0**-100], [0.0, 0.0, 1.0]], device=device)
    bulk = torch.where(bulk == 2.0**-100, -1e10, bulk.log()) if logs else bulk
    bulk = bulk[None, None] if same else bulk.repeat(2, 1, 1, 1)
    x = torch.tensor([[0.0, -300.0, -INF], [-INF, -INF, 0.0], [0.0, 0.0, 0.0]], device=device)[:, None, None]
    start = torch.zeros(1, 1, 3, dtype=F64, device=device)
    assert run(chains.Operands(x, bulk, start, None, logs, F32))[1].all()


def test_posteriors_of_raised_states_are_doubtful(device, tiles):
    """What follows leaves only states that the message holds as too large."""
    x = torch.tensor([0.0, -100.0, -105.0], device=device)[None, None, None]
    start = torch.zeros(1, 1, 3, dtype=F64, device=device)
    chain = chains.Operands(x, torch.ones(0, 1, 3, 3, device=device), start, None, False, F32)
    found = Gradients(chain, final=torch.tensor([[[-INF, 0.0, 0.0]]], dtype=F64, device=device))
    assert found.doubt.all() and not found.forward_doubt.any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there a launch has programs that wait for each other")
@pytest.mark.parametrize("dtype, c, parts, same", [(F32, 21, 3, False), (F32, 14, 2, True), (F64, 10, 2, False)])
def test_parts_that_meet(tiles, dtype, c, parts, same):
    family = dense(dtype, n=2, t=1, v=6, c=c, each=True)
    falling = 2.0 ** torch.tensor([100.0, 55.0, 10.0, -35.0, -80.0])[:, None, None]
    family = one_for_all(family) if same else family._replace(bulk=family.bulk * falling.to(dtype))
    lengths = [5, 6]
    chain = operands(family, lengths)
    log_norm, doubt, messages = run(chain, parts=parts)
    assert not doubt.any()
    assert_right(family, log_norm, doubt, lengths, k=1)
    assert_filtered(chain, messages)
    assert torch.equal(run(chain, parts=parts, keep=False)[0], log_norm)
    found = Gradients(chain, parts=parts)
    assert not found.doubt.any()
    found.check()
