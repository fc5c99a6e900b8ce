"""The contract: every public function of a chain, on every backend, for every family; then each property once."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.backends import on, parameter
from tests.conftest import INTERPRETED
from tests.contract import Truth, assert_contract, poisoned_memory
from tests.expected import Expected, expected
from tests.families import F32, F64, FAMILIES, LARGE, Chain, dense
from tests.layouts import BATCHES, STEPS, STRANGE, broadcast, poisoned, relaid
from tests.subjects import PRODUCTS, SUBJECTS, Found, floating

# of dtype, `each` and `log`: every two of them meet in every way
CHOICES = [(F32, False, False), (F32, True, True), (F64, False, True), (F64, True, False)]

# families that shifted sums get wrong, or whose chains are impossible
HARD = ["dense", "detour", "left_to_right", "one_dead", "sparse", "log_far"]

# subjects that large families meet
FOR_LARGE = ["product", "sequential", "segments:3:2", "tree", "packed", "counts", "messages", "viterbi"]

# subjects that cut long chains alone
LONG = ["memory_budget"]

# subjects that Triton's kernels compute
ON_GPU = ["product", "segments:3:2", "tree", "memory_budget", "stream", "marginals", "counts", "viterbi"]

# subjects whose log-partition has posteriors as gradients
DIFFERENTIATED = {*PRODUCTS, "stream", "marginals", "counts", "filtered", "total"}

# subjects that can be differentiated twice
TWICE = {*PRODUCTS, "stream", "filtered", "log_prob", "total"} - {"memory_budget"}


def rows() -> list:
    """Every subject, family and choice of dtype, `each` and `log` meet in pairs; product in C meets all choices.

    Long chains meet torch operations in few rows.
    """
    found = []
    for i, subject in enumerate(SUBJECTS):
        choices = CHOICES if subject not in LONG else CHOICES[:2] * 2  # truths of long chains are of float32
        for j, name in enumerate(FAMILIES):
            if name in LARGE and subject not in FOR_LARGE:
                continue
            some = [choices[(i + j) % 4]] if subject != "product" else choices
            if name == "n40":  # in float32
                found += [parameter("cpu", subject, name, *choice) for choice in CHOICES[:2]]
                continue
            found += [parameter("cpu", subject, name, *choice) for choice in some]
            if subject == "product" or name in HARD or (name not in LARGE and subject not in LONG):
                found.append(parameter("plain", subject, name, *choices[(i + j + 2) % 4]))
    for i, subject in enumerate(ON_GPU):
        names = [name for name in FAMILIES if name not in LARGE] if subject == "product" else HARD[i % 3 :: 3]
        found += [parameter("gpu", subject, name, *CHOICES[(i + j) % 2]) for j, name in enumerate(names)]
    return found


def case(backend: str, subject: str, name: str, dtype: torch.dtype, each: bool, log: bool) -> Expected:
    if backend != "gpu" and subject not in LONG:
        return expected(name, dtype, each, log)
    sizes = {} if name[-1].isdigit() else {"v": 5 if backend == "gpu" else 240, "c": 4}
    chain = FAMILIES[name](dtype, n=2, t=1, each=each, log=log, **sizes)
    return Expected(chain, Truth(chain))


@pytest.mark.parametrize(("backend", "subject", "name", "dtype", "each", "log"), rows())
def test_values_and_gradients(backend, subject, name, dtype, each, log, request):
    if backend == "gpu" and each:
        request.getfixturevalue("both_ends")
    known, call = case(backend, subject, name, dtype, each, log), SUBJECTS[subject]
    with on(backend) as device:
        operands = [operand.to(device) for operand in known.chain[:3]]
        found = call(*operands, log_params=known.chain.log_params)
        known.check(found)
        if subject in DIFFERENTIATED:
            log_norm = lambda **operands: call(**operands)["log_norm"]  # noqa: E731
            assert_contract(known.chain, truth=known.truth, device=device, call=log_norm)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """A backend, which computes in the test with tensors on a CPU; Triton's scans begin at both ends."""
    if request.param == "gpu":
        if not INTERPRETED:
            pytest.skip("tensors on a CPU are for the interpreter")
        request.getfixturevalue("both_ends")
    with on(request.param):
        yield request.param


# torch operations compute what other subjects ask of them in these, too
IN_TORCH = ["product", "segments:3:2", "marginals", "messages", "viterbi", "topk_paths", "stream", "banded", "low rank"]
PAIRED = [("cpu", name) for name in SUBJECTS] + [("plain", name) for name in IN_TORCH] + [("gpu", "product")]
EACH_SUBJECT = pytest.mark.parametrize(
    ("backend", "subject"), [parameter(*pair) for pair in PAIRED], indirect=["backend"]
)


def small(each: bool = False, **sizes: int) -> Chain:
    return dense(F64, each=each, **({"v": 6, "c": 4} | sizes))


CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def leaves(chain: Chain) -> list[torch.Tensor]:
    return [operand.detach().clone().requires_grad_() for operand in chain[:3]]


def total(found: Found, but: str = "") -> torch.Tensor:
    return sum((t.sin() * (1 + i)).sum() for i, t in enumerate(floating({k: t for k, t in found.items() if k != but})))


def assert_same(found: Found, wanted: Found, **options) -> None:
    torch.testing.assert_close(found, wanted, equal_nan=True, **options)


def assert_same_gradients(one: torch.Tensor, other: torch.Tensor, operands, **options) -> None:
    unused = {"allow_unused": True, "materialize_grads": True}
    torch.testing.assert_close(*(torch.autograd.grad(value, operands, **unused) for value in (one, other)), **options)


@pytest.mark.parametrize(("each", "padding"), [(False, 3.0), (True, 3.0), (True, torch.nan)])
@EACH_SUBJECT
def test_lengths_are_each_sequence_alone(backend, subject, each, padding):
    """Values and gradients, whatever the padding holds."""
    chain = small(each, c=4 if each else 18)  # few states, and more than a vector's
    v = chain.x.shape[-2]
    lengths = torch.tensor([[v, 1], [v // 2, v - 1], [2, v]])
    chain = Chain(*(torch.where(operand.isnan(), padding, operand) for operand in poisoned(chain, lengths)[:3]))
    operands, call = leaves(chain), SUBJECTS[subject]
    x, bulk, p0 = operands
    found, alone = call(*operands, lengths=lengths), {}
    summed = torch.zeros_like(bulk)
    for index in np.ndindex(3, 2):
        end, set_ = int(lengths[index]), index if each else (0, 0)
        alone[index] = call(x[index][:end], bulk[set_][: end - 1], p0[set_])
        for key, one in alone[index].items():
            many, fill = found[key], -torch.inf if key in ("forward", "backward") else 0.0
            if key == "counts":
                summed[set_][: end - 1] += one.detach()
                continue
            many = many[index]
            if one.dim():
                assert (many[len(one) :] == (fill if one.is_floating_point() else -1)).all()
                many = many[: len(one)]
            torch.testing.assert_close(many, one, **CLOSE)
    if "counts" in found:
        torch.testing.assert_close(found["counts"].detach(), summed, **CLOSE)
    together = total(found, "counts")
    apart = sum(total(one, "counts") for one in alone.values())
    assert_same_gradients(together, apart, operands, **CLOSE)


@pytest.mark.parametrize("operand", ["x", "bulk", "p0"])
@EACH_SUBJECT
def test_nan_stays_in_its_sequence(backend, subject, operand):
    chain, call = small(each=True, n=3, t=1), SUBJECTS[subject]
    clean = call(*chain[:3])
    operands = leaves(chain)
    with torch.no_grad():
        dirty = operands["x bulk p0".split().index(operand)][1, 0]
        dirty[(2,) * (dirty.dim() > 1)].view(-1)[-1] = torch.nan
    found, others = call(*operands), torch.tensor([True, False, True])
    for key, one in found.items():
        if (operand, key) != ("p0", "backward"):  # which does not depend on it
            assert (one[1].isnan() if one.is_floating_point() else one[1] == -1).any(), key
        torch.testing.assert_close(one[others], clean[key][others], **CLOSE)
    value = total({key: one[others] for key, one in found.items() if key != "counts"})
    for gradient in torch.autograd.grad(value, operands):
        assert gradient[others].isfinite().all()


LAYOUTS = [*STRANGE, "expanded"]
# every other layout of each subject, all with negative views, and all of product in C
LAID_OUT = [
    parameter(*pair, how)
    for i, pair in enumerate(PAIRED)
    for j, how in enumerate(LAYOUTS)
    if (i + j) % 2 or how == "negative view" or pair == ("cpu", "product")
]


@pytest.mark.parametrize(("backend", "subject", "how"), LAID_OUT, indirect=["backend"])
def test_strides(backend, subject, how):
    chain, call = small(each=True, n=2, t=2), SUBJECTS[subject]
    if how == "expanded":
        other = chain.x[:1].expand(2, -1, -1, -1), chain.bulk[..., :1, :, :].expand_as(chain.bulk), chain.p0
        chain = Chain(*(operand.clone(memory_format=torch.contiguous_format) for operand in other))
    else:
        other = [relaid(operand, how) for operand in chain[:3]]
    operands, straight = [operand.detach().requires_grad_() for operand in other], leaves(chain)
    found, wanted = call(*operands), call(*straight)
    assert_same(found, wanted, **CLOSE)
    gradients = (torch.autograd.grad(total(one), some) for one, some in ((found, operands), (wanted, straight)))
    torch.testing.assert_close(*gradients, **CLOSE)


@EACH_SUBJECT
def test_batch_axes_broadcast(backend, subject):
    """As copies do, in values and gradients, with one matrix for all steps or one for each."""
    for i, batches in enumerate(BATCHES if backend != "gpu" else BATCHES[1::3]):
        if subject == "packed" and 0 in batches[0]:
            continue
        chain, call = broadcast(batches, STEPS[i % len(STEPS)]), SUBJECTS[subject]
        operands = x, bulk, p0 = leaves(chain)
        (*batch, v, c), found = x.shape, call(*operands)
        copies = call(x, bulk.expand(*batch, v - 1, c, c).clone() if v > 1 else bulk, p0.expand(*batch, c).clone())
        if "counts" in found and v > 1:
            copies["counts"] = copies["counts"].sum_to_size(bulk.shape)
        assert_same(found, copies, **CLOSE)
        if x.numel():
            assert_same_gradients(total(found), total(copies), operands, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@EACH_SUBJECT
def test_half_types_are_computed_in_float32(backend, subject, dtype):
    halves = leaves(small().to(dtype))
    floats = [operand.detach().float().requires_grad_() for operand in halves]
    found, wanted = SUBJECTS[subject](*halves), SUBJECTS[subject](*floats)
    assert {one.dtype for one in found.values()} <= {F32, torch.int64}
    if subject == "divergence":  # the other chain has been rounded
        return
    assert_same(found, wanted)
    gradients = torch.autograd.grad(total(found), halves), torch.autograd.grad(total(wanted), floats)
    for one, other in zip(*gradients, strict=True):  # which torch may add up in halves
        rounding = 4 * torch.finfo(dtype).eps * float(other.abs().max())
        torch.testing.assert_close(one.float(), other, rtol=0, atol=rounding)


@pytest.mark.parametrize("operand", ["x", "bulk", "p0"])
@EACH_SUBJECT
def test_one_float64_operand_makes_the_arithmetic_wide(backend, subject, operand):
    chain = small().to(F32)
    mixed = chain._replace(**{operand: getattr(chain, operand).double()})
    found, wanted = SUBJECTS[subject](*mixed[:3]), SUBJECTS[subject](*chain.to(F64)[:3])
    assert_same(found, wanted, rtol=1e-6 if subject == "divergence" else 1e-11, atol=1e-11)


@pytest.mark.parametrize("wanted", ["x", "bulk", "p0", "x p0"])
@EACH_SUBJECT
def test_only_wanted_gradients(backend, subject, wanted):
    chain = small()
    operands = leaves(chain)
    every, some = torch.autograd.grad(total(SUBJECTS[subject](*operands)), operands), leaves(chain)
    for key, operand in zip(("x", "bulk", "p0"), some, strict=True):
        operand.requires_grad_(key in wanted.split())
    total(SUBJECTS[subject](*some)).backward()
    for operand, gradient in zip(some, every, strict=True):
        if operand.requires_grad:
            torch.testing.assert_close(operand.grad, gradient, **CLOSE)
        else:
            assert operand.grad is None


@pytest.mark.parametrize(
    ("v", "c", "batch"), [(1, 3, ()), (2, 1, (2, 3)), (1, 1, (2,)), (4, 2, (0,)), (5, 17, ()), (5, 17, (2, 3))]
)
@EACH_SUBJECT
def test_odd_sizes_and_memory_that_was_never_written(backend, subject, v, c, batch):
    if subject == "packed" and 0 in batch:
        pytest.skip("offsets of no sequence are refused")
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(*batch, v, c, generator=draw, dtype=F64)
    bulk, p0 = torch.rand(v - 1, c, c, generator=draw, dtype=F64), torch.rand(c, generator=draw, dtype=F64)
    operands = leaves(Chain(x, bulk, p0))
    options = {"lengths": [v - 1] * batch[0]} if len(batch) > 1 and v > 2 else {}  # a step that no sequence has
    wanted = SUBJECTS[subject](*operands, **options)
    with poisoned_memory():
        found = SUBJECTS[subject](*operands, **options)
        assert_same(found, wanted, rtol=0, atol=1e-13)
        if x.numel():
            for gradient in torch.autograd.grad(total(found), operands, allow_unused=not len(bulk)):
                assert gradient is None or gradient.isfinite().all()


OPTIONS = [(True, False, None), (True, True, [2, 3]), (False, False, [2, 3]), (False, True, None)]
DERIVED = [parameter("cpu", name, *OPTIONS[i % 4]) for i, name in enumerate(SUBJECTS)]
DERIVED += [parameter("cpu", name, *OPTIONS[(i + 1) % 4]) for i, name in enumerate(SUBJECTS)]
DERIVED += [parameter("plain", name, *OPTIONS[i % 4]) for i, name in enumerate(IN_TORCH)]


@pytest.mark.parametrize(("backend", "subject", "each", "log", "lengths"), DERIVED, indirect=["backend"])
def test_derivatives_agree_with_finite_differences(backend, subject, each, log, lengths):
    """The first ones, and the second ones of what is no derivative itself."""
    chain = dense(F64, n=2, t=1, v=3, c=2, each=each, log=log)

    def outputs(*operands):
        return tuple(floating(SUBJECTS[subject](*operands, log_params=log, lengths=lengths)))

    operands = leaves(chain)
    assert torch.autograd.gradcheck(outputs, operands)
    if subject in TWICE:
        assert torch.autograd.gradgradcheck(outputs, operands, fast_mode=True)


@EACH_SUBJECT
def test_zeros_have_no_gradient_and_disturb_no_other(backend, subject):
    chain = FAMILIES["sparse"](F64, n=2, t=1, v=4, c=4)
    operands = leaves(chain)
    gradients = torch.autograd.grad(total(SUBJECTS[subject](*operands)), operands)
    for gradient, operand, zero in zip(gradients, operands, (-torch.inf, 0.0, 0.0), strict=True):
        assert gradient.isfinite().all() and (gradient[operand == zero] == 0).all()


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_counts_of_one_matrix_are_sums_over_thousands_of_rows(each):
    chain = dense(F32, n=20, t=2, v=60, c=20, each=each)
    assert_contract(chain._replace(bulk=chain.bulk[..., :1, :, :]))


@pytest.mark.parametrize("subject", ["product", "marginals", "messages", "viterbi", "entropy"])
def test_threads_change_no_result(subject, set_threads):
    chain, found = dense(F32, n=2, t=1, v=700, c=24), []
    for count in (1, 2):
        set_threads(count)
        found.append(SUBJECTS[subject](*chain[:3]))
    assert_same(*found, rtol=1e-5, atol=1e-5)
