"""`logchain.product` keeps the accuracy contract, in values and gradients, on every family, shape, dtype and layout."""

import numpy as np
import pytest
import torch

import logchain
from logchain import reference
from tests.contract import (
    assert_contract,
    assert_nan_stays,
    assert_nothing_behind_matters,
    assert_values,
    drawn,
    poisoned_memory,
    value_bound,
)
from tests.families import FAMILIES, Chain, Draw, dense
from tests.layouts import BATCHES, STEPS, STRANGE, broadcast, strange

F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize("log", [False, True], ids=["given", "log_params"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_keeps_the_contract(name, dtype, each, log):
    chain, truth = drawn(name, dtype, each, log)
    assert_contract(chain, truth=truth)


@pytest.mark.parametrize("name", ["left_to_right", "bakis_jump", "banded", "sparse", "sharp"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_other_draws_and_many_sequences(name, each):
    for seed in (1, 2, 3):
        assert_contract(FAMILIES[name](F32, seed, each=each, n=8, t=1, v=33, c=17))


@pytest.mark.parametrize("name", ["sparse", "banded", "detour", "impossible", "one_dead", "bakis_jump"])
def test_one_matrix_for_every_step(name):
    chain = FAMILIES[name](F32, v=9)
    assert_contract(chain._replace(bulk=chain.bulk[..., 1:2, :, :]))


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_batch_axes_broadcast(batches, steps):
    chain = broadcast(batches, steps).to(F32)
    assert_contract(chain)
    assert_contract(chain.logs())


@pytest.mark.parametrize("name", ["dense", "sharp", "detour", "left_to_right", "one_dead", "log_far"])
@pytest.mark.parametrize("lengths", [[5, 1, 3], [[5, 5], [1, 2], [4, 3]], [5, 5, 5], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_lengths_keep_the_contract(name, lengths, each):
    assert_contract(FAMILIES[name](F32, each=each, v=5), lengths)
    assert_contract(FAMILIES[name](F64, each=each, v=5, n=3, t=2, c=3), torch.tensor(lengths))


def test_lengths_of_unbroadcast_chains_and_of_int32():
    chain = dense(F32, v=5, n=4, t=1)
    chain = Chain(chain.x[:, 0], chain.bulk[0, 0], chain.p0[0, 0])
    assert_contract(chain, torch.tensor([2, 5, 1, 3], dtype=torch.int32))


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
def test_nan_behind_the_end_has_no_influence(log):
    chain = dense(F32, v=5, each=True)
    assert_nothing_behind_matters(chain.logs() if log else chain, [3, 5, 1])


@pytest.mark.parametrize("name", ["dense", "sharp", "left_to_right"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_exact_on_their_rounded_inputs(name, dtype):
    chain = FAMILIES[name](dtype, v=9)
    assert_contract(chain)
    assert_contract(chain.logs())
    assert_contract(chain._replace(bulk=chain.bulk.float(), p0=chain.p0.float()))
    assert_contract(chain._replace(x=chain.x.float()))


@pytest.mark.parametrize("operand", ["x", "bulk", "p0"])
def test_one_float64_operand_makes_a_float64_result(operand):
    chain = dense(F32)
    chain = chain._replace(**{operand: getattr(chain, operand).double()})
    assert logchain.product(*chain[:3]).dtype == F64


@pytest.mark.parametrize("schedule", ["sequential", "chunked", "tree"])
@pytest.mark.parametrize("lengths", [None, [20, 18, 7]], ids=["whole", "lengths"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize(
    "weights", [(1e4, -1.0, 0.0), (-1e6, -1e5, -1e3), (1e7, 1e-3, 1.0), (1e-7, -1e-6, 0.0)], ids=str
)
def test_gradients_take_weights_of_any_size(weights, each, lengths, schedule):
    chain = dense(F32, each=each, n=3, t=1, v=20, c=3)
    chain.x[0, :, 3, 1] -= 20.0  # a posterior of 1e-9
    chain.x[1, :, 2, 0] = -torch.inf
    chain = chain._replace(bulk=1e-30 * chain.bulk, p0=1e-30 * chain.p0.expand(3, 1, 3))
    ends = None if lengths is None else torch.tensor(lengths)
    operands = [operand.clone().requires_grad_() for operand in chain[:3]]
    out = logchain.product(*operands, lengths=ends, strategy=schedule)
    found = torch.autograd.grad(out, operands, torch.tensor(weights)[:, None])
    x, bulk, p0 = (operand.double().numpy() for operand in chain[:3])
    truth = reference.marginals(x, bulk, p0, lengths=None if lengths is None else np.array(lengths)[:, None])
    over, states, transitions = torch.tensor(weights, dtype=F64)[:, None], *map(torch.from_numpy, truth[:2])
    counts = over[..., None, None, None] * transitions
    counts = counts if each else counts.sum((0, 1), keepdim=True)
    expected = over[..., None, None] * states, counts / chain.bulk, over[..., None] * states[:, :, 0] / chain.p0
    for gradient, value in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, value.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [{"strategy": "auto"}, {"strategy": "sequential"}], ids=str)
@pytest.mark.parametrize("name", ["dense", "detour", "sparse", "one_dead"])
def test_options_that_change_no_number(name, options):
    assert_contract(FAMILIES[name](F32), **options)
    assert_contract(FAMILIES[name](F32, v=5), [5, 1, 3], **options)


@pytest.mark.parametrize("how", STRANGE)
@pytest.mark.parametrize("name", ["dense", "bakis_jump", "detour", "sparse"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_strange_strides(name, how, each):
    chain = FAMILIES[name](F32, each=each)
    views = strange(chain, how)
    assert not views.x.is_contiguous() and torch.equal(views.x, chain.x)
    assert_contract(views)


def test_expanded_operands():
    chain = dense(F32, n=1, t=1)
    assert_contract(Chain(chain.x.expand(3, 2, -1, -1), chain.bulk.expand(3, 2, -1, -1, -1), chain.p0.expand(3, 2, -1)))
    assert_contract(chain._replace(bulk=chain.bulk[..., :1, :, :].expand(-1, -1, 16, -1, -1)))


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["dense", "detour", "bakis_jump", "sparse", "one_dead", "log_far", "v1"])
def test_poisoned_memory(name, each):
    chain, truth = drawn(name, F32, each, False)
    with poisoned_memory():
        assert_contract(chain, truth=truth)
        assert_contract(FAMILIES[name](F32, each=each, n=2), [1, chain.x.shape[-2]])


@pytest.mark.parametrize("wanted", ["x", "bulk", "p0", "x bulk", "x p0", "bulk p0"])
@pytest.mark.parametrize("name", ["dense", "bakis_jump", "detour", "one_dead"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_only_wanted_gradients(name, wanted, each):
    chain, truth = drawn(name, F32, each, False)
    assert_contract(chain, wanted=wanted, truth=truth)


@pytest.mark.parametrize("name", ["dense", "bakis_jump", "impossible"])
def test_no_grad_gives_the_same_values_and_no_graph(name):
    chain, truth = drawn(name, F32, False, False)
    x = chain.x.clone().requires_grad_()
    with torch.no_grad():
        out = logchain.product(x, chain.bulk, chain.p0)
    assert out.grad_fn is None and not out.requires_grad
    assert_values(out, truth.log_norm, truth.value_bound())


@pytest.mark.parametrize("operand", ["x", "bulk", "p0"])
@pytest.mark.parametrize("name", ["dense", "left_to_right", "sparse", "bakis_jump"])
def test_nan_stays_in_its_sequence(name, operand):
    assert_nan_stays(name, operand)


def test_posteriors_of_a_long_chain():
    draw = Draw(0, 1, 1, 16384, 8, False)
    x = draw.x() - 32.0
    chain = Chain(x, draw.bulk()[..., :1, :, :], draw.p0()).to(F32)
    truth = reference.marginals(*chain[:3])
    assert -6e5 < truth.log_norm.item() < -5e5
    x = chain.x.requires_grad_()
    out = logchain.product(*chain[:3])
    assert_values(out, truth.log_norm, value_bound(truth.log_norm, 16384, 8, dtype=F32))
    out.backward()
    assert np.abs(x.grad.double().numpy() - truth.states).max() < 1e-5
