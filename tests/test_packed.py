"""Sequences one behind the other give what each gives alone, in values and gradients."""

import os
import signal
from functools import partial

import pytest
import torch

import logchain
from logchain.kernels.cpu import arguments, team
from logchain.memory import peak_bytes
from logchain.schedules.packed import Packed

F64 = torch.float64
LENGTHS = [3, 1, 9, 4, 4, 30, 2, 1]


def packed(shared: bool, dtype=F64):
    generator = torch.Generator().manual_seed(0)
    total, n, c = sum(LENGTHS), len(LENGTHS), 4
    x = torch.randn(total, c, generator=generator, dtype=dtype)
    bulk = torch.rand(1 if shared else total, c, c, generator=generator, dtype=dtype)
    p0 = torch.rand(*(() if shared else (n,)), c, generator=generator, dtype=dtype)
    cu_seqlens = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return [operand.requires_grad_() for operand in (x, bulk, p0)], cu_seqlens


def alone(operands, cu_seqlens, shared):
    """The operands of each sequence."""
    x, bulk, p0 = operands
    for i, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        yield x[start:end], bulk if shared else bulk[start + 1 : end], p0 if shared else p0[i]


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
def test_product(shared, log):
    operands, cu_seqlens = packed(shared)
    found = logchain.product(*operands, cu_seqlens=cu_seqlens, log_params=log)
    expected = torch.stack([logchain.product(*one, log_params=log) for one in alone(operands, cu_seqlens, shared)])
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    grads = [torch.autograd.grad(value.cos().sum(), operands, create_graph=True) for value in (found, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    seconds = [torch.autograd.grad(sum(part.sin().sum() for part in parts), operands) for parts in grads]
    for one, other in zip(*seconds, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("transitions", [None, "sum", "full"])
@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
def test_marginals(shared, transitions):
    operands, cu_seqlens = packed(shared)
    found = logchain.marginals(*operands, cu_seqlens=cu_seqlens, transitions=transitions)
    parts = [logchain.marginals(*one, transitions=transitions) for one in alone(operands, cu_seqlens, shared)]
    torch.testing.assert_close(found.states, torch.cat([part.states for part in parts]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.log_norm, torch.stack([part.log_norm for part in parts]))
    if transitions is None:
        assert found.transitions is None
        return
    if transitions == "sum" and shared:
        expected = sum(part.transitions for part in parts)
    else:
        none = torch.zeros(1, 4, 4, dtype=F64)
        expected = torch.cat([torch.cat([none, part.transitions]) for part in parts])
    torch.testing.assert_close(found.transitions, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(value.cos().sum(), operands) for value in (found.transitions, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("threads", "whose"), [(1, "nobody's"), (3, "torch's"), (3, "Python's")])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
def test_what_underflows_is_redone_where_it_lies(shared, dtype, log, threads, whose, monkeypatch):
    """Matrices with zeros, weights of their own, emissions far apart; one is impossible, one has no weight."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(arguments, "WORTH_A_THREAD", 1)
    if whose == "Python's":
        monkeypatch.setattr(team, "_parallel", lambda: None)
    operands, cu_seqlens = packed(shared, dtype)
    with torch.no_grad():
        x, bulk, p0 = (operand.clone() for operand in operands)
        x[17:25] *= 4000
        x[13, 0], x[14, 0] = 4000, -torch.inf  # nothing else leaves state 0: a short sequence that others lie behind
        x[6] = -torch.inf  # in the third sequence
        bulk[:, 0, 1:] = 0
        p0 = p0 * torch.rand(len(LENGTHS), 1, dtype=dtype) + 0.1
        bulk, p0 = (bulk.log(), p0.log()) if log else (bulk, p0)
    operands = [operand.requires_grad_() for operand in (x, bulk, p0)]
    weight = torch.linspace(-1, 2, len(LENGTHS), dtype=dtype).masked_fill(torch.arange(len(LENGTHS)) == 4, 0.0)
    with logchain.rescues() as seen:
        found = logchain.product(*operands, cu_seqlens=cu_seqlens, log_params=log)
    assert seen.sequences > 0
    each = [
        logchain.product(x[start:end], bulk if shared else bulk[start + 1 : end], p0[i], log_params=log)
        for i, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
    ]
    expected, close = torch.stack(each), {"rtol": 100 * torch.finfo(dtype).eps, "atol": 100 * torch.finfo(dtype).eps}
    assert found[2] == -torch.inf
    torch.testing.assert_close(found, expected, **close)
    for one, other in zip(*(torch.autograd.grad(value, operands, weight) for value in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, **close)
    with torch.no_grad():
        states, counts, norm = logchain.marginals(*operands, cu_seqlens=cu_seqlens, transitions="sum", log_params=log)
    assert torch.equal(norm, found) and states.dtype == counts.dtype == dtype
    by_log = torch.autograd.grad(logchain.product(*operands, cu_seqlens=cu_seqlens, log_params=log).sum(), operands)
    torch.testing.assert_close(states, by_log[0], **close)
    torch.testing.assert_close(counts, by_log[1] if log else by_log[1] * bulk, **close)


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 1000.0), (F64, 8000.0)], ids=["float32", "float64"])
def test_a_short_sequence_that_is_redone_leaves_what_lies_behind_it(dtype, far):
    """A longer sequence that is not redone has its rows there: of x, and of its gradient."""
    x = torch.zeros(7, 2, dtype=dtype)
    x[0, 1] = x[1, 0] = -far
    x.requires_grad_()
    bulk, p0 = torch.eye(2, dtype=dtype)[None], torch.ones(2, dtype=dtype)
    with logchain.rescues() as seen:
        out = logchain.product(x, bulk, p0, cu_seqlens=torch.tensor([0, 2, 7]))
    out.sum().backward()
    assert seen.sequences == 1
    torch.testing.assert_close(x.grad, torch.full_like(x, 0.5))


def test_weights_of_sequences_scale_gradients():
    operands, cu_seqlens = packed(True, torch.float32)
    found = logchain.product(*operands, cu_seqlens=cu_seqlens)
    small = torch.autograd.grad(found.sum(), operands, retain_graph=True)
    large = torch.autograd.grad(found.sum() * 2.0**40, operands)
    for one, other in zip(large, small, strict=True):
        torch.testing.assert_close(one / 2.0**40, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("matrices", [1, 20_000])
def test_nothing_is_padded(matrices):
    """Beside the operands and their gradients a call holds one message for each row, however unequal the lengths."""
    x = torch.randn(20_000, 8).requires_grad_()
    cu_seqlens = torch.tensor([0, *range(1, 500), 20_000])
    bulk, p0 = torch.rand(matrices, 8, 8), torch.rand(8)
    peak = peak_bytes(lambda: torch.autograd.grad(logchain.product(x, bulk, p0, cu_seqlens=cu_seqlens).sum(), x))
    assert peak < 1.5 * x.numel() * 4


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@pytest.mark.parametrize(
    ("shared", "dtype"),
    [((False, False), F64), ((True, True), F64), ((True, False), torch.float32), ((False, True), torch.float32)],
    ids=str,
)
def test_entropy_and_divergence(shared, dtype, log):
    """Matrices of each step, one for all, and one chain with the other; some sequences are left by the loops."""
    (p, cu_seqlens), q = packed(shared[0], dtype), packed(shared[1], dtype)[0]
    with torch.no_grad():
        q[0].copy_(q[0].roll(1, 0))
        for x, bulk, _ in (p, q):
            x[13, 0], x[14, 0] = 4000, -torch.inf  # nothing else leaves state 0
            x[6] = -torch.inf  # in the third sequence
            bulk[:, 0, 1:] = -torch.inf if log else 0.0
    questions = (
        (lambda p, q, **o: logchain.entropy(*p, **o)),
        (lambda p, q, **o: logchain.kl_divergence(tuple(p), tuple(q), **o)),
    )
    close = {"rtol": 10 * torch.finfo(dtype).eps, "atol": 1e-9 if dtype == F64 else 1e-6}
    for question in questions:
        pairs = zip(alone(p, cu_seqlens, shared[0]), alone(q, cu_seqlens, shared[1]), strict=True)
        expected = torch.stack([question(*pair, log_params=log) for pair in pairs])
        with torch.no_grad(), logchain.rescues() as seen:
            found = question(p, q, log_params=log, cu_seqlens=cu_seqlens)
        assert 0 < seen.sequences < len(LENGTHS) and found.dtype == dtype and found[2] == 0
        torch.testing.assert_close(found, expected, **close)
        differentiable = question(p, q, log_params=log, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(differentiable, expected, **close)
        grads = [
            torch.autograd.grad(value.cos()[3:].sum(), [*p, *q], allow_unused=True)
            for value in (differentiable, expected)
        ]
        for one, other in zip(*grads, strict=True):
            if other is not None:
                torch.testing.assert_close(one, other, rtol=1e-5 if dtype == torch.float32 else 1e-10, atol=1e-5)


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("gradients", [False, True], ids=["values", "gradients"])
def test_forward_backward(shared, log, gradients):
    """Also of sequences that are far apart or impossible, and where one has NaN behind it."""
    operands, cu_seqlens = packed(shared)
    with torch.no_grad():
        x, bulk, _ = operands
        x[8:17] *= 4000
        x[5] = -torch.inf
        x[-1] = float("nan")
        bulk[:, 0, 1:] = -torch.inf if log else 0
    operands = [operand.detach().requires_grad_(gradients) for operand in operands]
    found = logchain.forward_backward(*operands, cu_seqlens=cu_seqlens, log_params=log)
    parts = [logchain.forward_backward(*one, log_params=log) for one in alone(operands, cu_seqlens, shared)]
    expected = [join([part[i] for part in parts]) for i, join in enumerate((torch.cat, torch.cat, torch.stack))]
    for value, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-13, atol=1e-12, equal_nan=True)
    if gradients:
        sums = [sum(part.nan_to_num(0, 0, 0).cos().sum() for part in parts) for parts in (found, expected)]
        for value, truth in zip(*(torch.autograd.grad(total, operands) for total in sums), strict=True):
            torch.testing.assert_close(value, truth, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
def test_log_prob(shared, log):
    """Of several paths at once; one that holds no state, and one through a zero, are impossible."""
    operands, cu_seqlens = packed(shared)
    states = torch.randint(0, 4, (3, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    states[0, 5], states[1, 3] = -1, 2
    with torch.no_grad():
        operands[0][3, 2] = -torch.inf
    found = logchain.log_prob(*operands, states, cu_seqlens=cu_seqlens, log_params=log)
    paths = states.split(LENGTHS, -1)
    each = [
        logchain.log_prob(*one, path, log_params=log)
        for one, path in zip(alone(operands, cu_seqlens, shared), paths, strict=True)
    ]
    expected = torch.stack(each, -1)
    assert found[0, 2] == found[1, 1] == -torch.inf
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    sums = [value.masked_fill(value == -torch.inf, 0.0).cos().sum() for value in (found, expected)]
    for value, truth in zip(*(torch.autograd.grad(total, operands) for total in sums), strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-11, atol=1e-11)
    with pytest.raises(ValueError, match=r"states: expected shape \[\.\.\., 54\]"):
        logchain.log_prob(*operands, states[..., 1:], cu_seqlens=cu_seqlens, log_params=log)


def test_one_sequence_does_not_reach_another():
    operands, cu_seqlens = packed(True)
    x = operands[0].detach().clone()
    x[5] = float("nan")  # in the third sequence
    found = logchain.product(x, *operands[1:], cu_seqlens=cu_seqlens)
    assert found.isnan().tolist() == [i == 2 for i in range(len(LENGTHS))]


def test_padding_is_bounded():
    operands, cu_seqlens = packed(True)
    pieces = list(Packed(*operands, cu_seqlens, None))
    assert sum(len(piece.x) for piece in pieces) == len(LENGTHS)
    assert sum(piece.x.shape[0] * piece.x.shape[1] for piece in pieces) <= 1.25 * sum(LENGTHS)


@pytest.mark.parametrize(
    ("lengths", "shared", "each"),
    [([90_000], True, True), ([60_000, 90_000], True, True), ([60_000] * 3, True, False), ([10] * 9000, False, False)],
    ids=lambda value: str(value)[:20],
)
def test_few_long_sequences_are_cut(lengths, shared, each, monkeypatch):
    """Those with a matrix for each step only where these need not be copied."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    total, c, cu_seqlens = sum(lengths), 64, torch.tensor([0, *lengths]).cumsum(0)
    x, p0 = torch.empty(1).expand(total, c), torch.empty(c)
    for matrices, expected in ((1, shared), (total, each)):
        packed = Packed(x, torch.empty(1).expand(matrices, c, c), p0, cu_seqlens, None)
        assert packed.in_place
        assert packed.stays != expected


@pytest.mark.parametrize("lengths", [[90], [40, 89], [40, 30, 40, 38], [50, 50]], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "each"])
def test_answers_are_the_same_where_they_are_cut(shared, lengths, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    total, c = sum(lengths), 5
    operands = [
        torch.randn(total, c, generator=generator, dtype=F64),
        torch.rand(1 if shared else total, c, c, generator=generator, dtype=F64),
        torch.rand(c, generator=generator, dtype=F64),
    ]
    for operand in operands:
        operand.requires_grad_()
    options = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}

    def answers(differentiated: bool):
        with torch.set_grad_enabled(differentiated):
            found = [
                logchain.product(*operands, **options),
                *logchain.marginals(*operands, transitions="sum", **options),
                *logchain.forward_backward(*operands, **options),
                *logchain.viterbi(*operands, **options),
                logchain.entropy(*operands, **options),
            ]
        return [*found, *torch.autograd.grad(found[0].sin().sum(), operands)] if differentiated else found

    for differentiated in (False, True):
        found = []
        for cut in (True, False):
            monkeypatch.setattr(Packed, "_overlaps", cut)
            found.append(answers(differentiated))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_samples_of_packed_sequences_do_not_depend_on_threads(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, bulk = torch.randn(9000, 24, generator=generator), torch.rand(1, 24, 24, generator=generator)
    found = []
    for threads in (1, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        options = {"cu_seqlens": torch.tensor([0, 4000, 9000]), "generator": torch.Generator().manual_seed(1)}
        found.append(logchain.sample(x, bulk, torch.ones(24), 2, **options))
    assert torch.equal(*found)


def test_wrong_arguments():
    (x, bulk, p0), cu_seqlens = packed(True)
    log_prob = partial(logchain.log_prob, states=torch.zeros(len(x), dtype=torch.int64))

    def from_itself(*chain, **options):
        return logchain.kl_divergence(chain, chain, **options)

    functions = [logchain.product, logchain.marginals, logchain.viterbi, logchain.forward_backward, logchain.entropy]
    for function in (*functions, log_prob, from_itself):
        with pytest.raises(ValueError, match="cu_seqlens: expected rising integers from 0 to 54"):
            function(x, bulk, p0, cu_seqlens=cu_seqlens[:-1])
        with pytest.raises(ValueError, match="cu_seqlens: expected rising integers"):
            function(x, bulk, p0, cu_seqlens=torch.tensor([0, 3, 3, 54]))
        with pytest.raises(TypeError, match="cu_seqlens: expected int32 or int64, got float32"):
            function(x, bulk, p0, cu_seqlens=cu_seqlens.float())
        with pytest.raises(TypeError, match="cu_seqlens: expected a torch.Tensor, got list"):
            function(x, bulk, p0, cu_seqlens=cu_seqlens.tolist())
        with pytest.raises(ValueError, match="lengths: expected None beside cu_seqlens"):
            function(x, bulk, p0, cu_seqlens=cu_seqlens, lengths=3)
        with pytest.raises(TypeError, match="log_params: expected True or False, got 1"):
            function(x, bulk, p0, cu_seqlens=cu_seqlens, log_params=1)
        with pytest.raises(ValueError, match=r"x: expected shape \[total, c\]"):
            function(x[None], bulk, p0, cu_seqlens=cu_seqlens)
        with pytest.raises(ValueError, match=r"bulk: expected shape \[1 or 54, 4, 4\]"):
            function(x, bulk[:, :2], p0, cu_seqlens=cu_seqlens)
        with pytest.raises(ValueError, match=r"p0: expected shape \[4\] or \[8, 4\]"):
            function(x, bulk, p0[:2], cu_seqlens=cu_seqlens)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_forked_process_has_threads_too(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(arguments, "WORTH_A_THREAD", 1)
    chain = torch.zeros(4, 3, 2), torch.ones(2, 2, 2), torch.ones(2)
    expected = logchain.product(*chain).tolist()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends it, if it waits for threads that are not there
        os._exit(0 if logchain.product(*chain).tolist() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
