"""A negative weight that is read raises on a CPU, by name and place, whoever asks and in whatever order."""

import re

import numpy as np
import pytest
import torch

import logchain
from logchain import transitions

N, V, C = 2, 6, 3
STRATEGIES = ["auto", "sequential", "chunked", "tree", "overlapped", "meeting"]
HINT = "pass log_params=True for logarithms"


def chain(*, own=False, dtype=torch.float32, v=V, c=C):
    g = torch.Generator().manual_seed(v * c)
    shape = (N, v - 1, c, c) if own else (1, c, c)
    return [
        torch.randn(N, v, c, generator=g).to(dtype),
        (0.1 + torch.rand(shape, generator=g)).to(dtype),
        (0.1 + torch.rand(c, generator=g)).to(dtype),
    ]


QUESTIONS = {
    "product": logchain.product,
    **{s: lambda *a, s=s, **o: logchain.product(*a, strategy=s, **o) for s in STRATEGIES},
    "memory_budget": lambda *a, **o: logchain.product(*a, memory_budget=4000, **o),
    "marginals": logchain.marginals,
    "sums": lambda *a, **o: logchain.marginals(*a, transitions="sum", **o),
    "full": lambda *a, **o: logchain.marginals(*a, transitions="full", **o),
    "forward_backward": logchain.forward_backward,
    "filtered": logchain.filtered,
    "viterbi": logchain.viterbi,
    "topk_paths": lambda *a, **o: logchain.topk_paths(*a, 2, **o),
    "sample": lambda *a, **o: logchain.sample(*a, 2, **o),
    "log_prob": lambda x, *a, **o: logchain.log_prob(x, *a, torch.zeros(x.shape[:-1], dtype=torch.int64), **o),
    "entropy": logchain.entropy,
    "MAX": lambda *a, **o: logchain.semirings.total(*a, logchain.semirings.MAX, **o),
    "semiring": lambda *a, **o: logchain.semirings.total(*a, logchain.semirings.Semiring("sums", torch.logsumexp), **o),
    "check": logchain.check,
}
EACH = pytest.mark.parametrize("question", QUESTIONS)


def expect(question, operands, message, **options):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}; {HINT}$"):
        QUESTIONS[question](*operands, **options)


@EACH
@pytest.mark.parametrize("own", [False, True], ids=["one", "own"])
@pytest.mark.parametrize("derived", [False, True], ids=["plain", "gradients"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_argument_its_value_and_the_place_are_named(question, own, derived, dtype):
    x, bulk, p0 = chain(own=own, dtype=dtype, v=40 if question == "memory_budget" else V)
    place = (1, 3, 2, 1) if own else (0, 2, 1)
    bulk[place] = -0.25
    if derived and question != "check":
        bulk.requires_grad_()
    expect(question, (x, bulk, p0), f"bulk: expected non-negative weights, got -0.25 at {list(place)}")
    bulk, p0 = bulk.detach().abs(), torch.stack([p0, p0])
    p0[1, 2] = -torch.inf
    expect(question, (x, bulk, p0), "p0: expected non-negative weights, got -inf at [1, 2]")


@EACH
def test_a_weight_that_no_sum_shows_is_found_all_the_same(question):
    x, bulk, p0 = chain(v=40 if question == "memory_budget" else V)
    bulk[0, 0, 0] = -1e-9
    expect(question, (x, bulk, p0), "bulk: expected non-negative weights, got -1e-09 at [0, 0, 0]")


@EACH
@pytest.mark.parametrize("transposed", [False, True])
def test_strides_and_expanded_axes_are_the_arguments_own(question, transposed):
    x, bulk, p0 = chain(v=40 if question == "memory_budget" else V)
    bulk[0, 2, 1] = -1
    v = x.shape[1]
    bulk = bulk.mT if transposed else bulk
    place = [0, 0, 1, 2] if transposed else [0, 0, 2, 1]
    operands = x, bulk.expand(N, v - 1, C, C), p0.expand(N, C)
    expect(question, operands, f"bulk: expected non-negative weights, got -1 at {place}")


@EACH
def test_zeros_with_a_sign_and_logarithms_are_no_negative_weights(question):
    if question == "memory_budget":
        pytest.skip("asks for a longer chain")
    for own in (False, True):
        x, bulk, p0 = chain(own=own)
        bulk[..., 1, 2], p0[1] = -0.0, -0.0
        plain = bulk.abs(), p0.abs()
        for expected, found in zip(
            *(questions_of(question, x, *weights) for weights in (plain, (bulk, p0))),
            strict=True,
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        QUESTIONS[question](x, bulk.abs().log(), p0.abs().log(), log_params=True)


def questions_of(question, *operands, **options):
    torch.manual_seed(0)
    found = QUESTIONS[question](*operands, **options)
    return [one for one in (found if isinstance(found, tuple) else (found,)) if one is not None]


@EACH
@pytest.mark.parametrize("value", [-1.0, -torch.inf, torch.nan])
def test_what_no_sequence_reads_may_be_anything(question, value):
    if question == "memory_budget":
        pytest.skip("asks for a longer chain")
    if question == "check" and value != value:
        pytest.skip("NaN is looked for in all matrices that are one for all steps")
    x, bulk, p0 = chain(own=True)
    bulk[0, 3:], bulk[1, 1:] = value, value  # lengths 4 and 2
    lengths = torch.tensor([4, 2])
    found = questions_of(question, x, bulk, p0, lengths=lengths)
    for one in found:
        assert not one.isnan().any()
    one = x[:, :1], torch.full((1, C, C), value), p0  # a single variable, into which no transition leads
    questions_of(question, *one)
    x, bulk, p0 = chain()
    bulk = torch.cat([bulk, torch.full_like(bulk, value)])[:, None]  # the second is that of a sequence of one variable
    questions_of(question, x, bulk, p0, lengths=torch.tensor([4, 1]))
    if value < 0:
        expect(
            question, (x, bulk, p0), f"bulk: expected non-negative weights, got {value:g} at [1, 0, 0, 0]",
            lengths=torch.tensor([4, 2]),
        )  # fmt: skip


PACKED = [q for q in QUESTIONS if q not in (*STRATEGIES[1:], "memory_budget", "log_prob")]


@pytest.mark.parametrize("question", [*PACKED, "log_prob"])
@pytest.mark.parametrize("derived", [False, True], ids=["plain", "gradients"])
def test_packed_sequences(question, derived):
    x, p0 = torch.randn(9, C), torch.rand(3, C)
    cu = torch.tensor([0, 4, 5, 9])
    one, each = torch.rand(1, C, C), torch.rand(9, C, C)
    each[[0, 4, 5]] = -1.0  # into first rows
    if derived and question != "check":
        x.requires_grad_()
    questions_of(question, x, each, p0, cu_seqlens=cu)
    each[6, 1, 2] = one[0, 1, 2] = -0.5
    for bulk, place in ((one, [0, 1, 2]), (each, [6, 1, 2])):
        expect(question, (x, bulk, p0), f"bulk: expected non-negative weights, got -0.5 at {place}", cu_seqlens=cu)
    p0[2, 1] = -3
    expect(question, (x, one.abs(), p0), "p0: expected non-negative weights, got -3 at [2, 1]", cu_seqlens=cu)
    alone = torch.arange(10)  # sequences of one row each
    questions_of(question, x, one, p0[0], cu_seqlens=alone)


def test_divergences_name_the_chain():
    p, q = chain(), chain()
    q[1] = q[1].clone()
    q[1][0, 1, 1] = -2
    for options in ({}, {"lengths": 4}):
        with pytest.raises(ValueError, match=r"^q: bulk: expected non-negative weights, got -2 at \[0, 1, 1\]; "):
            logchain.kl_divergence(tuple(p), tuple(q), **options)
        with pytest.raises(ValueError, match=r"^p: bulk: expected non-negative weights, got -2 at \[0, 1, 1\]; "):
            logchain.kl_divergence(tuple(q), tuple(p), **options)
    packed = [(x.flatten(0, 1), bulk, p0) for x, bulk, p0 in (p, q)]
    with pytest.raises(ValueError, match=r"^q: bulk: expected non-negative weights, got -2 at \[0, 1, 1\]; "):
        logchain.kl_divergence(*packed, cu_seqlens=torch.tensor([0, 5, 12]))


@pytest.mark.parametrize("seed", range(60))
def test_all_schedules_agree_on_random_chains(seed):
    """One negative entry anywhere in operands of any sizes: raised where it is read, by all or by none."""
    rng = np.random.default_rng(seed)
    n, c = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 5, 8, 16, 17, 33]))
    v = int(rng.integers(1, 20))
    own = bool(rng.integers(2))
    dtype = torch.float64 if rng.integers(2) else torch.float32
    x = torch.from_numpy(rng.normal(size=(n, v, c)) * rng.choice([1, 30, 300])).to(dtype)
    lead = (n if rng.integers(2) else 1, v - 1 if own else 1)
    if v == 1:
        lead = (lead[0], 1)
        own = False
    bulk = torch.from_numpy(rng.uniform(size=(*lead, c, c)) * (rng.uniform(size=(*lead, c, c)) < 0.7)).to(dtype)
    p0 = torch.from_numpy(rng.uniform(size=c)).to(dtype)
    lengths = torch.from_numpy(rng.integers(1, v + 1, size=n)) if rng.integers(2) else None
    into = p0 if rng.integers(5) == 0 else bulk
    place = tuple(int(rng.integers(size)) for size in into.shape)
    into[place] = -(10.0 ** rng.integers(-12, 3))
    longest = [v] * n if lengths is None else lengths.tolist()
    read = True
    if into is bulk:
        readers = longest if lead[0] == 1 else [longest[place[0]]]
        read = max(readers) > (place[1] + 1 if own else 1)
    for question in QUESTIONS:
        if question == "memory_budget":
            continue
        options = {} if lengths is None else {"lengths": lengths}
        if question == "meeting" and lengths is not None:
            continue
        if read:
            name = "p0" if into is p0 else "bulk"
            value = into[place].item()
            expect(
                question, (x, bulk, p0), f"{name}: expected non-negative weights, got {value:g} at {list(place)}",
                **options,
            )  # fmt: skip
        else:
            questions_of(question, x, bulk, p0, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_many_threads_and_long_chains(strategy):
    torch.manual_seed(0)
    for n, v, c in ((1, 3000, 8), (64, 50, 40), (1, 500, 64)):
        x, bulk, p0 = torch.randn(n, v, c), torch.rand(v - 1, c, c), torch.rand(c)
        place = (v - 2, c - 1, c - 1)
        bulk[place] = -1
        expect(strategy, (x, bulk, p0), f"bulk: expected non-negative weights, got -1 at {list(place)}")


def test_the_operator_raises_where_a_compiler_or_a_transform_calls_it():
    x, bulk, p0 = chain()
    bulk[0, 2, 1] = -0.5
    message = r"^bulk: expected non-negative weights, got -0.5 at \[.*0, 2, 1\]"
    with pytest.raises(ValueError, match=message):
        torch.vmap(lambda x: logchain.product(x, bulk, p0))(x)
    with pytest.raises(ValueError, match=message):
        torch.func.grad(lambda x: logchain.product(x, bulk, p0).sum())(x)
    with pytest.raises(ValueError, match=message):
        torch.compile(logchain.product, backend="eager", fullgraph=True)(x, bulk, p0)


def structures():
    def wrong(*shape):
        values = torch.rand(shape) + 0.1
        values[(-1,) * (len(shape) - 1) + (-2,)] = -0.5
        return values

    matrix, arcs = torch.rand(2, 2), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    blocks = torch.rand(2, 2, 2)
    return {
        "values": transitions.Banded(wrong(2, 4), (0, 1)),
        "values ": transitions.Sparse(arcs, wrong(4)),
        "right": transitions.LowRank(torch.rand(4, 2), wrong(4, 2)),
        "diagonal": transitions.LowRank(torch.rand(4, 2), torch.rand(4, 2), wrong(4)),
        "matrices[1]": transitions.Kronecker(matrix, wrong(2, 2)),
        "blocks": transitions.BlockDiagonal(wrong(2, 2, 2)),
        "right ": transitions.Monarch(blocks, wrong(2, 2, 2)),
    }


STRUCTURED = [q for q in QUESTIONS if q not in (*STRATEGIES[1:], "memory_budget", "MAX", "semiring")]


@pytest.mark.parametrize("question", STRUCTURED)
@pytest.mark.parametrize("field", structures())
def test_fields_of_structures_are_named(question, field):
    structure = structures()[field]
    if structure.sums and question in ("viterbi", "topk_paths"):
        return
    x, p0 = torch.randn(N, V, 4), torch.ones(4)
    message = f"bulk.{field.strip()}: expected non-negative weights, got -0.5 at "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        QUESTIONS[question](x, structure, p0)
    steps = structure.map(lambda one: torch.stack([one.abs()] * (V - 2) + [one]))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}" + r"\[4, "):
        QUESTIONS[question](x, steps, p0)
    questions_of(question, x, steps, p0, lengths=V - 1)
    questions_of(question, x[:, :1], structure, p0)
    with pytest.raises(ValueError, match=r"^p0: expected non-negative weights, got -1 at \[0\]"):
        QUESTIONS[question](x, structure.map(torch.abs), -p0)


def test_values_of_bands_without_a_source_have_no_influence():
    values = torch.rand(2, 4)
    values[1, 0] = -1  # offset 1 leads into no first state
    x, p0 = torch.randn(N, V, 4), torch.ones(4)
    assert logchain.product(x, transitions.Banded(values, (0, 1)), p0).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"lag": 1}, {"viterbi": True}, {"validate": True}])
def test_a_stream_names_what_its_update_was_given(options):
    x, bulk, p0 = chain()
    bad = bulk.clone()
    bad[0, 2, 1] = -0.5
    stream = logchain.Stream(bad, p0, **options)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^bulk: expected non-negative weights, got -0.5 at \[0, 2, 1\]; "):
            stream.update(x)
    stream = logchain.Stream(bad, p0, **options)
    stream.update(x[:, :1])  # no transition leads into a first variable
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^bulk: expected non-negative weights, got -0.5 at \[0, 2, 1\]; "):
            stream.update(x[:, 1:])
    stream = logchain.Stream(None, p0, **options)
    pieces = torch.cat([bad, *[bulk] * (V - 1)])
    log_norm = stream.update(x, pieces).log_norm
    torch.testing.assert_close(log_norm, logchain.product(x, bulk, p0))
    with pytest.raises(ValueError, match=r"^bulk_piece: expected non-negative weights, got -0.5 at \[0, 2, 1\]; "):
        stream.update(x, pieces)
    torch.testing.assert_close(stream.log_norm, log_norm)  # nothing has changed
    with pytest.raises(ValueError, match=r"^p0: expected non-negative weights, got -1 at \[0\]; "):
        logchain.Stream(bulk, -torch.ones(C), **options).update(x)
    with pytest.raises(ValueError, match=r"^bulk: expected non-negative weights, got -0.5"):
        logchain.Stream(bad.requires_grad_(), p0, **options).update(x)


def test_a_stream_whose_pieces_repeat():
    x, bulk, p0 = chain()
    stream = logchain.Stream(bulk, p0)
    for _ in range(3):
        stream.update(x)
    bulk[0, 1, 1] = -1  # in the memory that the stream holds
    with pytest.raises(ValueError, match=r"^bulk: expected non-negative weights, got -1 at \[0, 1, 1\]; "):
        stream.update(x)


def test_sequences_some_of_which_start_with_the_piece():
    x, bulk, p0 = chain()
    bad = bulk.clone()
    bad[0, 2, 1] = -0.5
    stream = logchain.Stream(None, p0)
    stream.update(x, bulk)
    stream.reset(torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"^bulk_piece: expected non-negative weights, got -0.5 at \[0, 2, 1\]; "):
        stream.update(x, torch.cat([bad, *[bulk] * (V - 1)]))


def test_a_stream_of_structures():
    x, structure, p0 = torch.randn(N, V, 4), structures()["values"], torch.ones(4)
    with pytest.raises(ValueError, match=r"^bulk\.values: expected non-negative weights, got -0.5 at "):
        logchain.Stream(structure, p0).update(x)


def test_nan_stays_the_business_of_its_sequence():
    x, bulk, p0 = chain(own=True)
    bulk[0, 2, 1, 1] = torch.nan
    for strategy in STRATEGIES:
        found = logchain.product(x, bulk, p0, strategy=strategy)
        assert found.isnan().tolist() == [True, False]
    bulk[1, 2, 0, 0] = -1
    for question in QUESTIONS:
        if question not in ("memory_budget", "check"):
            expect(question, (x, bulk, p0), "bulk: expected non-negative weights, got -1 at [1, 2, 0, 0]")


def test_the_error_is_a_value_error_to_everybody():
    import pickle
    import traceback

    x, bulk, p0 = chain()
    with pytest.raises(ValueError, match="bulk: expected") as caught:
        logchain.product(x, -bulk, p0)
    assert traceback.format_exception_only(caught.value)[0].startswith("ValueError: bulk: expected non-negative")
    assert type(pickle.loads(pickle.dumps(caught.value))) is ValueError


@pytest.mark.parametrize("strategy", ["sequential", "chunked", "tree", "overlapped"])
@pytest.mark.parametrize("own", [False, True], ids=["one", "own"])
def test_on_a_gpu_a_negative_sum_makes_its_sequence_nan(kernels, strategy, own):
    x, bulk, p0 = (operand.to(kernels) for operand in chain(own=own, v=4))
    bulk[(0, 1, 1, 0) if own else (0, 1, 0)] = -50.0
    expected = [True, not own]
    assert logchain.product(x, bulk, p0, strategy=strategy).isnan().tolist() == expected
    if strategy == "sequential":
        assert logchain.marginals(x, bulk, p0).log_norm.isnan().tolist() == expected
        path = logchain.viterbi(x, bulk, p0)
        assert path.score.isnan().tolist() == expected
        assert (path.states[0] == -1).all()
        assert logchain.topk_paths(x, bulk, p0, 2).scores.isnan().all(-1).tolist() == expected
        p0[1] = -1
        assert logchain.product(x, bulk.abs(), p0).isnan().all()
        assert logchain.viterbi(x, bulk.abs(), p0).score.isnan().all()
