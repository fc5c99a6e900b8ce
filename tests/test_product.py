"""`logchain.product` keeps the accuracy contract, in values and gradients, on every family, shape, dtype and layout."""

import functools

import numpy as np
import pytest
import torch

import logchain
from logchain import reference
from tests.contract import Truth, assert_contract, assert_values, poisoned_memory
from tests.families import FAMILIES, Chain, Draw, dense

F32, F64 = torch.float32, torch.float64
NAN = float("nan")


@functools.cache
def drawn(name: str, dtype: torch.dtype, each: bool, log: bool) -> tuple[Chain, Truth]:
    chain = FAMILIES[name](dtype, each=each)
    chain = chain.logs() if log else chain
    return chain, Truth(chain)


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


BATCHES = [
    ((3, 2), (1, 1), (1, 1)),
    ((3, 2), (3, 1), (1, 2)),
    ((3, 2), (1, 2), (3, 1)),
    ((3, 2), (3, 2), (3, 2)),
    ((3, 2), (), ()),
    ((3, 2), (2,), (1,)),
    ((), (), ()),
    ((4,), (1,), ()),
    ((4,), (4,), (4,)),
    ((2, 3, 2), (3, 1), (2, 1, 2)),
    ((2, 3, 2), (2, 1, 1), (1, 1, 2)),
    ((0, 2), (1, 2), (0, 1)),
    ((0, 2), (0, 2), ()),
]


@pytest.mark.parametrize("steps", ["full", "one"])
@pytest.mark.parametrize("v", [1, 2, 5])
@pytest.mark.parametrize(("batch", "bulk_batch", "p0_batch"), BATCHES, ids=str)
def test_batch_axes_broadcast(batch, bulk_batch, p0_batch, v, steps):
    draw = Draw(0, 1, 1, v, 4, False)
    size = v - 1 if steps == "full" else 1
    bulk, p0 = 0.1 + draw.uniform(*bulk_batch, size, 4, 4), 0.1 + draw.uniform(*p0_batch, 4)
    chain = Chain(draw.normal(*batch, v, 4), bulk, p0)
    assert_contract(chain.to(F32))
    assert_contract(chain.to(F32).logs())


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
    lengths = [3, 5, 1]
    chain = dense(F32, v=5, each=True)
    clean = Truth(chain.logs() if log else chain, lengths)
    for i, end in enumerate(lengths):
        chain.x[i, :, end:] = NAN
        chain.bulk[i, :, end - 1 :] = NAN
    chain = chain.logs() if log else chain
    x, bulk, p0 = (tensor.clone().requires_grad_() for tensor in chain[:3])
    out = logchain.product(x, bulk, p0, log_params=log, lengths=lengths)
    assert_values(out, clean.log_norm, clean.value_bound())
    out.sum().backward()
    for i, end in enumerate(lengths):
        assert (x.grad[i, :, end:] == 0).all() and (bulk.grad[i, :, end - 1 :] == 0).all()
        np.testing.assert_allclose(x.grad[i].double(), clean.states[i], rtol=0, atol=clean.gradient_bound[i].max())
    assert p0.grad.isfinite().all()


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


@pytest.mark.parametrize("name", ["dense", "offsets", "one_dead"])
def test_out_dtype(name):
    chain = FAMILIES[name](F32)
    truth = Truth(chain)
    for dtype in (F32, F64):
        assert_contract(chain, truth=truth, out_dtype=dtype)
    wide = logchain.product(*chain[:3], out_dtype=F64)
    assert torch.equal(wide.float(), logchain.product(*chain[:3]))


@pytest.mark.parametrize("options", [{"strategy": "auto"}, {"strategy": "sequential"}, {"validate": True}], ids=str)
@pytest.mark.parametrize("name", ["dense", "detour", "sparse", "one_dead"])
def test_options_that_change_no_number(name, options):
    assert_contract(FAMILIES[name](F32), **options)
    assert_contract(FAMILIES[name](F32, v=5), [5, 1, 3], **options)


def strange(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in another layout."""
    if how == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "reversed axes":
        return tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))
    if how == "sliced":
        wide = torch.full([2 * size + 1 for size in tensor.shape], NAN, dtype=tensor.dtype)
        view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
        return view.copy_(tensor)
    return torch.cat([tensor, torch.full_like(tensor, NAN)], dim=-1)[..., : tensor.shape[-1]]


@pytest.mark.parametrize("how", ["transposed", "reversed axes", "sliced", "offset rows"])
@pytest.mark.parametrize("name", ["dense", "bakis_jump", "detour", "sparse"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_strange_strides(name, how, each):
    chain = FAMILIES[name](F32, each=each)
    views = chain._replace(**{key: strange(getattr(chain, key), how) for key in ("x", "bulk", "p0")})
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
    chain, truth = drawn(name, F32, True, False)
    dirty = {key: getattr(chain, key).clone().requires_grad_() for key in ("x", "bulk", "p0")}
    with torch.no_grad():
        dirty[operand][1, 0].flatten()[-1] = NAN
    out = logchain.product(**dirty)
    assert out[1, 0].isnan() and out.isnan().sum() == 1
    clean = torch.ones(3, 2, dtype=torch.bool)
    clean[1, 0] = False
    assert_values(out[clean], truth.log_norm[clean], truth.value_bound()[clean])
    out.sum().backward()
    error = np.abs(dirty["x"].grad[clean].double().numpy() - truth.states[clean])
    assert (error <= truth.gradient_bound[clean][:, None, None]).all()


def test_posteriors_of_a_long_chain():
    draw = Draw(0, 1, 1, 16384, 8, False)
    x = draw.x() - 32.0
    chain = Chain(x, draw.bulk()[..., :1, :, :], draw.p0()).to(F32)
    truth = reference.marginals(*chain[:3])
    assert -6e5 < truth.log_norm.item() < -5e5
    x = chain.x.requires_grad_()
    out = logchain.product(*chain[:3])
    assert abs(out.item() - truth.log_norm.item()) <= np.spacing(np.float32(5e5)) + 2.0**-20 * 128
    out.backward()
    assert np.abs(x.grad.double().numpy() - truth.states).max() < 1e-5
