"""Packed sequences give what each gives alone, in values and gradients, and nothing is padded."""

import re
from functools import partial

import pytest
import torch

import logchain
from logchain.memory import peak_bytes
from tests.backends import on
from tests.subjects import OTHERS, Found, Subject, pack, value
from tests.test_contract import assert_same, total

F32, F64 = torch.float32, torch.float64
LENGTHS = [3, 1, 9, 4, 4, 30, 2, 1]
SUBJECTS: dict[str, Subject] = {"product": value(logchain.product)} | OTHERS
del SUBJECTS["stream"]

# outputs that belong to rows; others belong to sequences
ROWS = {"states", "transitions", "counts", "filtered", "forward", "backward", "best", "paths"}


def chains(dtype=F64, log=False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Padded operands of hard sequences: one impossible, one with NaN, two to be recomputed; NaN in their padding."""
    n, v, c = len(LENGTHS), max(LENGTHS), 4
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, v, c, generator=draw, dtype=dtype)
    bulk, p0 = (0.1 + torch.rand(n, *own, c, generator=draw, dtype=dtype) for own in ((v - 1, c), ()))
    x[2, 3], x[6, 1, 2] = -torch.inf, torch.nan
    x[3], x[5] = 1000 * x[3], 300 * x[5]
    bulk[:, :, 0, 1:] = 0.0
    inside = torch.arange(v) < torch.tensor(LENGTHS)[:, None]
    x[~inside], bulk[~inside[:, 1:]] = torch.nan, torch.nan
    return x, bulk.log() if log else bulk, p0.log() if log else p0


def unpacked(found: Found, inside: torch.Tensor, shared: bool) -> Found:
    """Outputs of packed rows as those of padded sequences, 0 or -inf or -1 in the padding."""
    result = dict(found)
    for key in ROWS & found.keys():
        if key == "counts" and shared:
            continue
        rows = found[key].movedim(-2, 0) if key == "paths" else found[key]
        fill = -1 if not rows.is_floating_point() else -torch.inf if key in ("forward", "backward") else 0.0
        padded = rows.new_full((*inside.shape, *rows.shape[1:]), fill)
        padded[inside] = rows
        result[key] = padded[:, 1:] if key in ("transitions", "counts") else padded
    return result


@pytest.mark.parametrize(
    ("backend", "shared", "log"),
    [("cpu", False, False), ("cpu", True, True), ("plain", False, True), ("plain", True, False)],
)
@pytest.mark.parametrize("name", SUBJECTS)
def test_packed_rows_are_padded_sequences(name, shared, log, backend):
    x, bulk, p0 = chains(log=log)
    bulk = bulk[:1, :1] if shared else bulk
    lengths, options = torch.tensor(LENGTHS), {"log_params": log}
    operands = [operand.requires_grad_() for operand in (x, bulk, p0)]
    rows, into, starts, offsets, inside = pack(*operands, lengths)
    with on(backend):
        wanted = SUBJECTS[name](*operands, lengths=lengths, **options)
        found = SUBJECTS[name](rows, into, starts, cu_seqlens=offsets, **options)
    found = unpacked(found, inside, shared)
    if shared and "counts" in found:  # a NaN of one sequence is in the sum of all
        found["counts"], wanted["counts"] = (one["counts"].nan_to_num(0.0).view(4, 4) for one in (found, wanted))
    assert_same(found, wanted, rtol=1e-10, atol=1e-10)
    # gradients of all sequences but the one with NaN
    clean = torch.tensor([i != 6 for i in range(len(LENGTHS))])
    both = [total({key: one[clean] for key, one in some.items() if key != "counts"}) for some in (found, wanted)]
    with on(backend):
        gradients = [torch.autograd.grad(some, operands) for some in both]
    for one, other in zip(*gradients, strict=True):
        some = clean if len(one) == len(clean) else slice(None)
        torch.testing.assert_close(one[some], other[some], rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 1000.0), (F64, 8000.0)], ids=["float32", "float64"])
def test_a_recomputed_sequence_leaves_the_next(dtype, far):
    """A longer sequence that is not recomputed has its rows there: of x, and of its gradient."""
    x = torch.zeros(7, 2, dtype=dtype)
    x[0, 1] = x[1, 0] = -far
    x.requires_grad_()
    bulk, p0 = torch.eye(2, dtype=dtype)[None], torch.ones(2, dtype=dtype)
    with logchain.rescues() as seen:
        out = logchain.product(x, bulk, p0, cu_seqlens=torch.tensor([0, 2, 7]))
    out.sum().backward()
    assert seen.sequences == 1
    torch.testing.assert_close(x.grad, torch.full_like(x, 0.5))


@pytest.mark.parametrize("matrices", [1, 20_000])
def test_nothing_is_padded(matrices):
    """Beside the operands and their gradients a call holds one message for each row, however unequal the lengths."""
    x = torch.randn(20_000, 8).requires_grad_()
    cu_seqlens = torch.tensor([0, *range(1, 500), 20_000])
    bulk, p0 = torch.rand(matrices, 8, 8), torch.rand(8)
    peak = peak_bytes(lambda: torch.autograd.grad(logchain.product(x, bulk, p0, cu_seqlens=cu_seqlens).sum(), x))
    assert peak < 1.5 * x.numel() * 4


def test_samples_of_packed_sequences_do_not_depend_on_threads(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, bulk = torch.randn(9000, 24, generator=generator), torch.rand(1, 24, 24, generator=generator)
    found = []
    for threads in (1, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        options = {"cu_seqlens": torch.tensor([0, 4000, 9000]), "generator": torch.Generator().manual_seed(1)}
        found.append(logchain.sample(x, bulk, torch.ones(24), 2, **options))
    assert torch.equal(*found)


X, BULK, P0, OFFSETS = torch.zeros(54, 4), torch.ones(1, 4, 4), torch.ones(4), torch.tensor([0, 3, 4, 54])
WRONG = [
    (ValueError, "cu_seqlens: expected rising integers from 0 to 54", {"cu_seqlens": OFFSETS[:-1]}),
    (ValueError, "cu_seqlens: expected rising integers", {"cu_seqlens": torch.tensor([0, 3, 3, 54])}),
    (TypeError, "cu_seqlens: expected int32 or int64, got float32", {"cu_seqlens": OFFSETS.float()}),
    (TypeError, "cu_seqlens: expected a torch.Tensor, got list", {"cu_seqlens": OFFSETS.tolist()}),
    (ValueError, "lengths: expected None with cu_seqlens", {"lengths": 3}),
    (TypeError, "log_params: expected True or False, got 1", {"log_params": 1}),
    (ValueError, "x: expected shape [total, c]", {"x": X[None]}),
    (ValueError, "bulk: expected shape [1 or 54, 4, 4]", {"bulk": BULK[:, :2]}),
    (ValueError, "p0: expected shape [4] or [3, 4]", {"p0": P0[:2]}),
]


@pytest.mark.parametrize(("error", "message", "changes"), WRONG, ids=[row[1] for row in WRONG])
def test_wrong_arguments(error, message, changes):
    def from_itself(x, bulk, p0, **options):
        return logchain.kl_divergence((x, bulk, p0), (x, bulk, p0), **options)

    log_prob = partial(logchain.log_prob, states=torch.zeros(54, dtype=torch.int64))
    functions = [logchain.product, logchain.marginals, logchain.viterbi, logchain.forward_backward, logchain.entropy]
    for function in (*functions, log_prob, from_itself):
        with pytest.raises(error, match=re.escape(message)):
            function(**{"x": X, "bulk": BULK, "p0": P0, "cu_seqlens": OFFSETS} | changes)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_single_matrix_needs_no_axis_of_steps(name, packed):
    draw = torch.Generator().manual_seed(0)
    x, bulk, p0 = torch.randn(4, 5, 3, generator=draw), torch.rand(3, 3, generator=draw), torch.ones(3)
    options = {"cu_seqlens": torch.tensor([0, 5, 7, 10, 20])} if packed else {}
    x = x.flatten(0, 1) if packed else x
    for lengths in [{}] if packed else [{}, {"lengths": [5, 2, 3, 5]}]:
        found, expected = (SUBJECTS[name](x, matrix, p0, **options, **lengths) for matrix in (bulk, bulk[None]))
        for key, one in found.items():
            assert torch.equal(one, expected[key].view(one.shape)), key
        assert found.get("counts", bulk).shape == bulk.shape
