"""Overlapped chains on the Triton kernels: what was not forgotten is found again, and nothing is read by the host."""

import itertools
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import logchain
from logchain import demo
from logchain.autograd.operator import IMPLEMENTATIONS
from logchain.kernels import numbers
from logchain.memory import peak_bytes
from logchain.schedules import choose
from tests.conftest import INTERPRETED
from tests.contract import TENSOR_CORES, Truth, assert_contract, assert_nothing_behind_matters, poisoned_memory
from tests.families import Chain, Draw

pytest.importorskip("triton")

from logchain.kernels.gpu import chain_exact, launch

F32, F64 = torch.float32, torch.float64

# sequences of `mixed`, and the ends of some
FORGETS, KEEPS, IMPOSSIBLE, SHORT = range(4)
LENGTHS = torch.tensor([26, 26, 26, 16])


@pytest.fixture
def cut(kernels, monkeypatch):
    """The device, on which `product` walks its chains in three segments side by side."""
    monkeypatch.setattr(choose, "of", lambda *_: choose.Schedule("overlapped", 3))
    return kernels


def mixed(own: bool, each: bool, c: int = 3) -> Chain:
    """Four sequences by matrices that hardly forget, unless x tells the state; one has no path; p0 has a zero."""
    draw = Draw(0, 4, 1, 26, c, own)
    bulk = draw.bulk() * 1e-3 + torch.eye(c, dtype=F64)
    x, p0 = draw.x(0.1), draw.p0()
    x[FORGETS, 0, ::2, 1] += 30.0
    x[IMPOSSIBLE, 0, 14] = -torch.inf
    p0[..., 0] = 0.0
    return Chain(x, bulk if each else bulk[..., :1, :, :], p0)


def refused(chain: Chain, device: str, **options) -> int:
    """How many boundaries are refused, in either direction."""
    leaves = [tensor.to(device).requires_grad_() for tensor in chain[:3]]
    with logchain.rescues() as seen:
        logchain.product(*leaves, log_params=chain.log_params, **options).sum().backward()
    return seen.boundaries


@pytest.mark.parametrize("ends", [None, LENGTHS[:, None]], ids=["whole", "lengths"])
@pytest.mark.parametrize(("dtype", "log"), [(F32, False), (F32, True), (F64, False), (F64, True)], ids=str)
@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_what_is_not_forgotten_is_found_again(own, each, dtype, log, ends, cut):
    chain = mixed(own, each).to(dtype)
    chain = chain.logs() if log else chain
    with poisoned_memory():
        assert_contract(chain, ends, device=cut, k=TENSOR_CORES)


def test_some_of_a_batch_forget(cut):
    """Otherwise these tests would be of one kind alone: the others' counts are of two boundaries each way."""
    chain = mixed(True, True).to(F32)
    counts = [refused(Chain(*(tensor[i : i + 1] for tensor in chain[:3])), cut) for i in range(4)]
    assert counts == [0, 4, 2, 4]
    assert refused(mixed(False, True).to(F32), cut) == 10


@pytest.mark.parametrize("gradients", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
def test_a_chain_that_forgets_is_not_walked_again(each, gradients, cut, monkeypatch):
    draw = Draw(0, 2, 1, 61, 3, each)
    bulk = draw.bulk()
    chain = Chain(draw.x(), bulk if each else bulk[..., :1, :, :], draw.p0()).to(F32)
    exact = Mock(wraps=chain_exact.forward)
    monkeypatch.setattr(chain_exact, "forward", exact)
    with logchain.rescues() as seen:
        if gradients:
            assert_contract(chain, device=cut, k=TENSOR_CORES)
        else:
            logchain.product(*(tensor.to(cut) for tensor in chain[:3]))
    assert (seen.sequences, seen.boundaries) == (0, 0)
    assert not exact.call_args.args[3].any() and exact.call_args.args[3].numel() == 2


def test_values_alone(cut):
    chain = mixed(False, True).to(F32)
    truth = Truth(chain)
    with poisoned_memory():
        out = logchain.product(*(tensor.to(cut) for tensor in chain[:3]))
    error = (out.cpu().double() - torch.from_numpy(truth.log_norm)).nan_to_num(nan=0.0).abs().numpy()
    assert out[IMPOSSIBLE] == -torch.inf and (error <= truth.value_bound(k=TENSOR_CORES)).all()


@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
def test_nothing_behind_the_end_of_a_sequence_matters(each, cut):
    assert_nothing_behind_matters(mixed(True, each).to(F32), LENGTHS[:, None], device=cut, k=TENSOR_CORES)


def test_a_length_that_cannot_be_is_told(cut):
    chain = mixed(False, True).to(F32)
    lengths = torch.tensor([[27], [26], [26], [0]], device=cut)
    out = logchain.product(*(tensor.to(cut) for tensor in chain[:3]), lengths=lengths)
    assert out[:, 0].isnan().tolist() == [True, False, False, True]


READS = ("_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero")


class NoReads(TorchDispatchMode):
    """Operators whose results, or whose results' sizes, wait for the device raise, in the library's own ones too."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "logchain":
            with self:
                return IMPLEMENTATIONS[function._opname](*args, **(kwargs or {}))
        indices = args[1] if function._opname.startswith("index") else ()
        masks = [index for index in indices if isinstance(index, torch.Tensor) and index.dtype == torch.bool]
        if function._opname in READS or masks:
            raise RuntimeError(f"read by the host: {function}")
        return function(*args, **(kwargs or {}))


def step(chain: Chain, device: str, lengths=None) -> None:
    leaves = [tensor.to(device).requires_grad_() for tensor in chain[:3]]
    logchain.product(*leaves, lengths=None if lengths is None else lengths.to(device)).sum().backward()


@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_nothing_is_read_by_the_host(own, each, cut, monkeypatch):
    """Not even where boundaries are refused."""
    monkeypatch.setattr(numbers, "on_gpu", lambda tensor: True)
    with NoReads():
        step(mixed(own, each).to(F32), cut, LENGTHS[:, None])
        step(mixed(own, each), cut)


def test_the_guard_knows_a_read(monkeypatch):
    """A CPU reads what is verified."""
    monkeypatch.setattr(choose, "of", lambda *_: choose.Schedule("overlapped", 3))
    with pytest.raises(RuntimeError, match="read by the host"), NoReads():
        step(mixed(True, True).to(F32), "cpu")


@pytest.mark.skipif(not INTERPRETED, reason="the profiler of a CPU counts")
@pytest.mark.parametrize(("n", "c", "count"), [(1, 16, 64), (4, 16, 64), (1, 32, 500)])
@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_it_takes_the_memory_that_is_said(own, each, n, c, count, kernels, monkeypatch):
    """Counted where kernels are not run; a walk with gradients takes three small numbers a step besides."""
    monkeypatch.setattr(launch, "run", lambda *_, **__: None)
    sets, v = (n if own else 1), 5001
    x, bulk = torch.randn(n, v, c), torch.rand(sets, v - 1 if each else 1, c, c)
    size = choose.Size.of(x.shape, bulk.shape, False, False, False, True, gpu=True)
    monkeypatch.setattr(choose, "of", lambda *_: choose.Schedule("overlapped", count))
    said = max(choose.cost_counts.peaks(size, choose.Schedule("overlapped", count)))
    assert 0.5 * said <= peak_bytes(lambda: demo.forward_backward((x, bulk, torch.ones(c)))) <= said + 12 * n * v


def test_what_is_chosen_on_a_gpu_takes_two_messages():
    place = choose.where("cuda")
    for sets, members, one_matrix in itertools.product((1, 4), (1, 4), (False, True)):
        size = choose.Size(100_000, sets, members, 8, one_matrix, 4, False, False, True, True)
        in_place = (members if one_matrix else sets) == 1
        assert bool(choose.overlapped(size, place)) == in_place
        assert choose.overlapped(size._replace(gradients=False, one_matrix=True), place)
