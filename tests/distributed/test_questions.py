"""Marginals, best paths, draws and entropies of a chain on several ranks are those of one process."""

import itertools
from functools import partial
from unittest.mock import patch

import pytest
import torch

import logchain
from logchain import distributed
from tests.contract import of_steps
from tests.distributed.chains import Case, chain
from tests.distributed.test_product import LONG, SIZES, STRATEGIES, in_blocks

F32, F64 = torch.float32, torch.float64


def marginals(rank: int, case: Case, strategy: str):
    """Posteriors for each kind of transitions."""
    options = {**case.options, "strategy": strategy}
    return [distributed.marginals(*case.of(rank), transitions=kind, **options) for kind in (None, "sum", "full")]


def full_of(case: Case, rank: int) -> slice:
    """The transitions of a chain that lead into variables of a rank."""
    start, stop = max(0, case.variables(rank).start - 1), case.variables(rank).stop - 1
    return slice(start, max(start, stop))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("one_matrix", [True, False])
def test_marginals(teams, ranks, strategy, one_matrix):
    for sizes, (own, lengths) in itertools.product(SIZES[ranks][:4], [((), False), ((2,), True)]):
        case = chain(sizes, 3, one_matrix=one_matrix, batch=(2,), own=own, lengths=lengths)
        counts = {len(range(*case.matrices(rank).indices(99))) for rank in range(ranks)}
        if not one_matrix and counts == {1}:
            continue
        one = [logchain.marginals(*case[:3], transitions=kind, **case.options) for kind in (None, "sum", "full")]
        bound = 4 * of_steps(sum(sizes), 3, 20.0, dtype=F64)
        for rank, found in enumerate(teams(ranks).values(marginals, case, strategy)):
            for other, whole in zip(found, one, strict=True):
                torch.testing.assert_close(other.states, whole.states[:, case.variables(rank)], rtol=bound, atol=1e-15)
                torch.testing.assert_close(other.log_norm, whole.log_norm, rtol=1e-15, atol=bound)
            torch.testing.assert_close(
                found[1].transitions, one[1].transitions[..., case.matrices(rank), :, :], rtol=bound, atol=1e-15
            )
            torch.testing.assert_close(
                found[2].transitions, one[2].transitions[:, full_of(case, rank)], rtol=bound, atol=1e-15
            )
            assert found[0].transitions is None


@pytest.mark.parametrize("lengths", [False, True])
def test_blocks_of_the_batch_follow_each_other(teams, lengths):
    case = chain((4, 3, 5), 3, batch=(5,), lengths=lengths)
    one = logchain.marginals(*case[:3], transitions="full", **case.options)
    for rank, found in enumerate(teams(3).values(in_blocks, case, "vectors", 3, marginals)):
        torch.testing.assert_close(found[2].states, one.states[:, case.variables(rank)])
        torch.testing.assert_close(found[2].transitions, one.transitions[:, full_of(case, rank)])
        torch.testing.assert_close(found[1].transitions[0], one.transitions.sum((0, 1)))
    paths = torch.cat(teams(3).values(in_blocks, case, "vectors", 2, partial(draws, count=20_000, seed=5)), -1)
    shares = torch.stack([(paths == state).double().mean(0) for state in range(3)], -1)
    torch.testing.assert_close(shares, one.states, rtol=0, atol=2.5 / 20_000**0.5)


def best(rank: int, case: Case):
    return distributed.viterbi(*case.of(rank), **case.options)


def assert_best(team, case: Case, run=best) -> None:
    one = logchain.viterbi(*case[:3], **case.options)
    for rank, found in enumerate(team.values(run, case)):
        assert torch.equal(found.states, one.states[..., case.variables(rank)]), rank
        torch.testing.assert_close(found.score, one.score, rtol=1e-14, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("one_matrix", [True, False])
def test_best_paths_with_ties(teams, ranks, one_matrix):
    for sizes, (batch, lengths), log_params in itertools.product(
        SIZES[ranks][:4], [((), False), ((3,), True)], [False, True]
    ):
        case = chain(sizes, 3, one_matrix=one_matrix, batch=batch, lengths=lengths, log_params=log_params)
        counts = {len(range(*case.matrices(rank).indices(99))) for rank in range(ranks)}
        if one_matrix or counts != {1}:
            assert_best(teams(ranks), case._replace(x=case.x.round()))


def test_best_paths_of_sequences_without_any(teams):
    case = chain((5, 4, 6), 3, batch=(5,), zeros=0.0)
    x = case.x.clone()
    x[0, 2], x[1, 7], x[2, 12], x[3, 3, 1] = -torch.inf, torch.nan, -torch.inf, torch.inf
    assert_best(teams(3), case._replace(x=x))
    ended = case._replace(x=x, lengths=torch.tensor([2, 7, 12, 15, 9]))
    assert_best(teams(3), ended)


def walks(rank: int, case: Case, run=best) -> int:
    """How many boundaries were refused."""
    with logchain.rescues() as seen:
        run(rank, case)
    return seen.boundaries


def test_best_paths_are_found_at_once_where_the_chain_forgets(teams):
    case = chain(LONG, 4, batch=(2,), zeros=0.0)
    assert_best(teams(3), case)
    assert teams(3).values(walks, case) == [0] * 3
    bulk = case.bulk.expand(sum(LONG) - 1, 4, 4).clone()
    bulk[LONG[0] - 60 : LONG[0] - 1] = torch.eye(4, dtype=F64)
    hard = case._replace(bulk=bulk)
    assert_best(teams(3), hard)
    assert min(teams(3).values(walks, hard)) > 0


def best_after_rounding(rank: int, case: Case):
    """Best paths where a message that was assumed to enter the second rank is another in its last bits."""
    from logchain.distributed.viterbi import _Walks

    begun_early = _Walks._begun_early

    def moved(self):
        assumed = begun_early(self)
        assumed[1, ..., 0] += 1e-12
        return assumed

    with patch.object(_Walks, "_begun_early", moved):
        return best(rank, case)


def test_best_paths_begin_from_the_bits_of_one_walk(teams):
    case = chain(LONG, 4, batch=(2,), zeros=0.0)
    assert_best(teams(3), case, best_after_rounding)
    assert min(teams(3).values(walks, case, best_after_rounding)) > 0


def entropy(rank: int, case: Case, strategy: str) -> torch.Tensor:
    return distributed.entropy(*case.of(rank), strategy=strategy, **case.options)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("one_matrix", [True, False])
def test_entropy(teams, ranks, strategy, one_matrix):
    for sizes, (own, lengths) in itertools.product(
        [(5, 4, 6)[:ranks], (0, 7, 3)[-ranks:]], [((), False), ((3,), True)]
    ):
        case = chain(sizes, 3, one_matrix=one_matrix, batch=(3,), own=own, lengths=lengths)
        x = case.x.clone()
        x[1, 0] = -torch.inf  # an impossible sequence
        x[0] += 1e5
        case = case._replace(x=x)
        one = logchain.entropy(*case[:3], **case.options)
        for found in teams(ranks).values(entropy, case, strategy):
            torch.testing.assert_close(found, one, rtol=1e-11, atol=1e-8)
            assert found[1] == 0


def test_entropy_is_computed_in_float64(teams):
    case = chain((5, 4, 6), 3, dtype=F32, batch=(3,))
    case = case._replace(x=case.x + 1e4)
    one = logchain.entropy(*(operand.double() for operand in case[:3]))
    for found in teams(3).values(entropy, case, "auto"):
        torch.testing.assert_close(found.double(), one, rtol=0, atol=1e-5)


def dtypes_of(module, x, bulk, p0) -> list[torch.dtype]:
    """Those of all answers."""
    tensors = *module.marginals(x, bulk, p0, transitions="full"), *module.viterbi(x, bulk, p0)
    return [tensor.dtype for tensor in (*tensors, module.entropy(x, bulk, p0), module.product(x, bulk, p0))]


def dtypes(rank: int, case: Case) -> list[torch.dtype]:
    return dtypes_of(distributed, *case.of(rank))


@pytest.mark.parametrize("dtype", [torch.bfloat16, F32, F64])
def test_dtypes_are_those_of_one_process(teams, dtype):
    case = chain((4, 3), 3, dtype=dtype, batch=(2,))
    assert teams(2).values(dtypes, case) == [dtypes_of(logchain, *case[:3])] * 2


def draws(rank: int, case: Case, strategy: str, count: int, seed: int, apart: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + apart * rank)  # only that of the first rank counts
    return distributed.sample(*case.of(rank), count, generator=generator, strategy=strategy, **case.options)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("one_matrix", [True, False])
def test_draws_are_those_of_the_posterior(teams, ranks, strategy, one_matrix):
    count = 20_000
    for lengths in (False, True):
        case = chain((4, 3, 4)[:ranks], 3, one_matrix=one_matrix, batch=(2,), lengths=lengths)
        states = torch.cat(teams(ranks).values(draws, case, strategy, count, 5), -1)
        truth = logchain.marginals(*case[:3], transitions="full", **case.options)
        taken = torch.nn.functional.one_hot(states.clamp(min=0), 3).double() * (states >= 0)[..., None]
        pairs = torch.einsum("sbvi,sbvj->bvij", taken[:, :, :-1], taken[:, :, 1:]) / count
        # five standard deviations of a share
        torch.testing.assert_close(taken.mean(0), truth.states, rtol=0, atol=2.5 / count**0.5)
        torch.testing.assert_close(pairs, truth.transitions, rtol=0, atol=2.5 / count**0.5)
        assert logchain.log_prob(*case[:3], states[:100], **case.options).isfinite().all()


def test_draws_repeat(teams):
    case = chain((4, 3), 3, batch=(2,))
    first, again, other = (torch.cat(teams(2).values(draws, case, "auto", 50, seed), -1) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_generator_of_the_first_rank_alone_counts(teams):
    case = chain((4, 3), 3, batch=(2,))
    for one, other in zip(*(teams(2).values(draws, case, "auto", 50, 1, apart) for apart in (1, 2)), strict=True):
        assert torch.equal(one, other)


def test_ranks_draw_with_numbers_of_their_own(teams):
    """The same steps on two ranks, which the same numbers would make the same, but that one rank draws a state more."""
    case = chain((2000, 2000), 2, zeros=0.0, scale=0.0)
    independent = case._replace(bulk=torch.ones(1, 2, 2, dtype=F64))
    first, second = teams(2).values(draws, independent, "auto", 1, 3)
    for further in (-1, 0, 1):
        assert 0.45 < (first.roll(further, -1) == second).double().mean() < 0.55


def test_impossible_sequences_have_no_draws(teams):
    case = chain((4, 3), 3, batch=(2,), zeros=0.0)
    x = case.x.clone()
    x[0, 5] = -torch.inf
    for states in teams(2).values(draws, case._replace(x=x), "auto", 10, 1):
        assert (states[:, 0] == -1).all() and (states[:, 1] >= 0).all()


def derivative(rank: int, question: str) -> None:
    x, bulk, p0 = (operand.requires_grad_() for operand in chain((4, 3), 3).of(rank))
    result = getattr(distributed, question)(x, bulk, p0)
    (result if isinstance(result, torch.Tensor) else result[1] if question == "viterbi" else result[0]).sum().backward()


@pytest.mark.parametrize("question", ["marginals", "viterbi", "entropy"])
def test_a_derivative_is_refused_by_name(teams, question):
    for outcome in teams(2).run(derivative, question):
        assert isinstance(outcome.error, NotImplementedError)
        assert "`product` alone has gradients" in str(outcome.error)


def wrong_draws(rank: int, count: object) -> None:
    distributed.sample(*chain((4, 3), 3).of(rank), count if rank == 1 else 2)


@pytest.mark.parametrize("count, kind", [(-1, ValueError), (1.5, TypeError), (3, ValueError)])
def test_a_wrong_number_of_draws(teams, count, kind):
    for outcome in teams(2).run(wrong_draws, count):
        assert type(outcome.error) is kind and "rank 1: num_samples" in str(outcome.error)


def without_c(rank: int, case: Case):
    """Best paths as a device takes them for which there are no loops in C."""
    from logchain import kernels
    from logchain.kernels.plain.viterbi import Messages

    messages = kernels.path_messages
    kernels.path_messages = lambda tensor: Messages
    try:
        return best(rank, case)
    finally:
        kernels.path_messages = messages


@pytest.mark.parametrize("lengths", [False, True])
def test_best_paths_on_other_devices(teams, lengths):
    case = chain((6, 0, 5), 3, batch=(3,), lengths=lengths)
    one = logchain.viterbi(*case[:3], **case.options)
    for rank, found in enumerate(teams(3).values(without_c, case)):
        assert torch.equal(found.states, one.states[..., case.variables(rank)])
        torch.testing.assert_close(found.score, one.score, rtol=1e-14, atol=1e-12)
