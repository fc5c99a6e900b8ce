"""Operands on the host: pieces arrive whole and in time, and gradients return, whatever runs first."""

import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import logchain
from logchain import kernels as devices
from logchain.operands import check_operands
from logchain.schedules import budget
from logchain.schedules import transfers as pieces
from tests.backends import on
from tests.conftest import INTERPRETED
from tests.contract import Truth, assert_contract
from tests.families import FAMILIES

LENGTHS = torch.tensor([[1, 5], [17, 2], [11, 6]])
NAN, F32 = float("nan"), torch.float32


class Queue(list):
    """Work that is done in order, up to a mark, when somebody waits for that mark."""

    def mark(self):
        return SimpleNamespace(synchronize=partial(self.run, len(self)))

    def run(self, place):
        for i in range(place):
            work, self[i] = self[i], None
            if work is not None:
                work()


class FakeDevice:
    """Two queues, of copies and of computations, that run when they must: what may come first, does.

    `eager` copies run as soon as their marks allow, and computations when somebody waits for them; or copies wait too.
    Computations that are not queued here, by `now`, are done `at_once`: they wait as soon as they are told to.
    """

    def __init__(self, eager):
        self.eager, self.compute, self.sides, self.at_once = eager, Queue(), [], False
        self.pinned, self.most_pinned = weakref.WeakSet(), 0

    def now(self, piece, work):
        """Queue a computation on a piece."""
        self.compute.append(partial(work, piece))


class FakeSide:
    def __init__(self, device, where):
        self._device, self._copies = device, Queue()
        device.sides.append(self)

    def pinned(self, like):
        memory = torch.full(like.shape, NAN, dtype=like.dtype)
        self._device.pinned.add(memory)
        self._device.most_pinned = max(self._device.most_pinned, len(self._device.pinned))
        return memory

    def computed(self):
        return self._device.compute.mark()

    def copy(self, into, source, *, after):
        assert into.is_contiguous() and source.is_contiguous() and into.dtype == source.dtype
        self._copies += [after and after.synchronize, partial(into.copy_, source)]
        mark = self._copies.mark()
        if self._device.eager:
            mark.synchronize()
        return mark

    def compute_after(self, mark):
        if self._device.at_once:
            mark.synchronize()
        self._device.compute.append(mark.synchronize)


@pytest.fixture(params=[True, False], ids=["copies first", "computations first"])
def device(request, monkeypatch):
    """A fake device, and every tensor lies on the host."""
    found = FakeDevice(request.param)
    monkeypatch.setattr(pieces, "Side", partial(FakeSide, found))
    monkeypatch.setattr(pieces, "apart", lambda tensor, device: True)
    return found


RANGES = [(0, 3), (2, 5), (5, 6), (6, 9), (1, 2), (4, 4), (8, 9)]


@pytest.mark.parametrize("ranges", [RANGES, RANGES[::-1], RANGES[:1], RANGES[:2], []], ids=len)
def test_each_piece_arrives_before_it_is_computed_and_stays_until_then(ranges, device):
    tensor = torch.randn(2, 3, 9).transpose(0, 2)  # strange strides
    found, places = [], set()
    for piece in pieces.pieces(tensor, ranges, torch.device("cpu")):
        places.add(piece.untyped_storage().data_ptr())
        device.now(piece, lambda piece: found.append(piece.clone()))
    device.compute.run(len(device.compute))
    for one, (start, stop) in zip(found, ranges, strict=True):
        assert torch.equal(one, tensor[start:stop])
    assert len(places) == min(2, len(ranges)) and device.most_pinned <= 2


def test_a_piece_is_asked_for_while_the_one_before_is_computed(device):
    """The copy into the device's buffer waits for no more than the piece that lay in it."""
    device.eager, done = True, []
    for i, piece in enumerate(pieces.pieces(torch.randn(40), [(10 * i, 10 * i + 10) for i in range(4)], None)):
        assert len(done) == max(0, i - 1)
        device.now(piece, done.append)


@pytest.mark.parametrize("ranges", [RANGES, RANGES[::-1]], ids=["forward", "backward"])
def test_what_is_computed_returns(ranges, device):
    operand = torch.zeros(3, 9, 2, dtype=torch.float32)
    expected, dtype = operand.clone(), torch.float32 if device.eager else torch.float64
    gradient = pieces.Gradient(operand, lambda whole: whole.transpose(0, 1), ranges, dtype, torch.device("cpu"))
    for i, (start, stop) in enumerate(ranges):
        value = torch.randn(stop - start, 3, 2, dtype=torch.float64)
        expected.transpose(0, 1)[start:stop] = value
        piece = gradient.piece(i).fill_(NAN)
        if device.eager:  # what is computed late is copied late
            device.now(piece, lambda piece, value=value: piece.copy_(value))
        else:
            piece.copy_(value)
        gradient.put()
        del piece
    assert torch.equal(gradient.whole(), expected)
    assert device.most_pinned == 2


def test_on_one_device_pieces_are_views():
    tensor, ranges = torch.randn(6, 4), [(0, 2), (2, 6)]
    for piece, start in zip(pieces.pieces(tensor, ranges, tensor.device), (0, 2), strict=True):
        assert piece.data_ptr() == tensor[start].data_ptr()
    gradient = pieces.Gradient(tensor, lambda whole: whole, ranges, tensor.dtype, tensor.device)
    for i in (1, 0):
        piece = gradient.piece(i)
        assert piece.data_ptr() == gradient.whole()[ranges[i][0]].data_ptr()
        piece.copy_(tensor[slice(*ranges[i])])
        gradient.put()
    assert torch.equal(gradient.whole(), tensor)


@pytest.fixture
def on_host(device, monkeypatch):
    """Have operands, which are named, lie on the host, and pieces be of so many steps."""

    def of(every, names):
        is_bulk = lambda tensor: tensor.shape[-1] == tensor.shape[-2]  # noqa: E731
        monkeypatch.setattr(pieces, "apart", lambda tensor, device: ("bulk" if is_bulk(tensor) else "x") in names)
        monkeypatch.setattr(budget, "every_within", lambda *args: every)
        device.at_once = True
        return device

    return of


@pytest.mark.parametrize(
    ("name", "names", "each", "dtype", "wanted"),
    [
        ("dense", ("x", "bulk"), True, F32, "x bulk p0"),
        ("sharp", ("x",), True, F32, "x"),
        ("left_to_right", ("bulk",), False, torch.bfloat16, "bulk"),
        ("impossible", ("x", "bulk"), False, torch.bfloat16, "p0"),
        ("v1", ("x", "bulk"), False, F32, "x bulk p0"),
        ("v2", ("x", "bulk"), True, F32, "x bulk p0"),
    ],
)
def test_operands_on_the_host_keep_the_contract(name, names, each, dtype, wanted, on_host):
    chain = FAMILIES[name](dtype=dtype, each=each)
    lengths = LENGTHS if name == "dense" else None
    truth = Truth(chain, lengths)
    for every in (1, 5, 16):
        device = on_host(every, names)
        assert_contract(chain, lengths, wanted, truth, memory_budget=1)
        assert device.sides
    assert_contract(chain._replace(bulk=chain.bulk[..., :1, :, :]), lengths, wanted, memory_budget=1)


@pytest.mark.skipif(not INTERPRETED, reason="tensors on a CPU are for the interpreter")
def test_kernels_of_a_device_compute_the_pieces(on_host):
    on_host(3, ("x", "bulk"))
    with on("gpu"):
        assert_contract(FAMILIES["dense"](F32, each=True, n=2, t=1, v=6, c=3), lengths=[6, 4], memory_budget=1)


def test_copies_and_buffers_count(monkeypatch):
    x, bulk, p0 = torch.zeros(3, 50, 4), torch.zeros(3, 49, 4, 4), torch.ones(4)
    here = budget.Sizes(x, bulk, p0).checkpointed(7)
    monkeypatch.setattr(budget, "apart", lambda tensor, device: True)
    step = 3 * 4 * 4  # bytes of x
    assert budget.Sizes(x, bulk, p0).checkpointed(7) - here == 8 * 2 * (step + 4 * step)
    assert budget.Sizes(x.requires_grad_(), bulk, p0).checkpointed(7) - here == 8 * 2 * (2 * step + 4 * step)
    # however much there is, the operands are moved
    assert budget.every_within(10**9, x, bulk, p0) == 49


def test_the_host_is_allowed_beside_a_gpu_alone(monkeypatch):
    x, bulk, p0 = torch.zeros(2, 5, 3), torch.zeros(1, 3, 3), torch.zeros(3)
    with pytest.raises(ValueError, match="^x: expected device meta, got cpu"):
        logchain.product(x, bulk, p0.to("meta"), memory_budget=10**6)
    with pytest.raises(ValueError, match="^p0: expected device cpu, got meta"):
        logchain.product(x, bulk, p0.to("meta"))
    monkeypatch.setattr(devices, "on_gpu", lambda tensor: tensor.device.type == "meta")
    for mixed in ((x, bulk), (x.to("meta"), bulk), (x, bulk.to("meta"))):
        ends = check_operands(*mixed, p0.to("meta"), False, [3, 5], in_pieces=True).lengths
        assert ends.device.type == "meta"
    with pytest.raises(ValueError, match="^x: expected device cpu, got meta"):
        logchain.product(x.to("meta"), bulk, p0, memory_budget=10**6)
    with pytest.raises(ValueError, match="^lengths: expected values from 1 to v = 5, got 3 to 6"):
        logchain.product(x, bulk, p0.to("meta"), lengths=[3, 6], memory_budget=10**6)
