"""Meta and fake tensors give results and gradients of the right shapes, or are refused by name."""

import functools

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

import logchain
from logchain import transitions
from tests.subjects import OTHERS, STRATEGIES
from tests.transitions.structures import MAKE, WITH_PATHS, C, numbers

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16

FUNCTIONS = {name: lambda *o, call=call, **k: tuple(call(*o, **k).values()) for name, call in OTHERS.items()}
del FUNCTIONS["stream"]
FUNCTIONS |= {"product": logchain.product, "sample": lambda *o, **k: logchain.sample(*o, 5, **k)}
# what a structure answers too
OF_STRUCTURES = [name for name in FUNCTIONS if name not in ("divergence", "total")]


def chain(dtype=F32, *, v=6, c=4, batch=(3, 2), each=False, log=False) -> list[Tensor]:
    lead, steps = (batch, v - 1) if each else ((), 1)
    x, bulk, p0 = torch.randn(*batch, v, c), torch.rand(*lead, steps, c, c) + 0.1, torch.rand(*lead, c) + 0.1
    return [t.to(dtype).requires_grad_() for t in ((x, bulk.log(), p0.log()) if log else (x, bulk, p0))]


def described(function, operands, device):
    """Shapes, dtypes and whether there is a gradient, of results and gradients, all of which are on the device."""
    found = [t for t in tree_leaves(function(*operands)) if isinstance(t, Tensor)]
    graphs = [t for t in found if t.requires_grad]
    if graphs:
        gradients = torch.autograd.grad(sum(t.sum() for t in graphs), operands, allow_unused=True)
        found += [t for t in gradients if t is not None]
    assert {t.device.type for t in found} == {device}
    return [(t.shape, t.dtype, t.requires_grad) for t in found]


def without_values(function, operands, *, fake=True):
    """Compare with the shapes of a computation on a CPU."""
    expected = described(function, operands, "cpu")
    on_meta = [t.detach().to("meta").requires_grad_(t.requires_grad) for t in operands]
    assert described(function, on_meta, "meta") == expected
    if fake:
        mode = FakeTensorMode()
        operands = [mode.from_tensor(t) for t in operands]
        with mode:
            assert described(function, operands, "cpu") == expected


@pytest.mark.parametrize(
    ("dtype", "each", "log", "lengths"),
    [(F32, False, False, None), (F64, True, True, [6, 3, 1]), (BF16, False, True, "meta")],
    ids=["float32", "float64", "bfloat16"],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_have_the_shapes_of_a_cpu(function, dtype, each, log, lengths):
    def run(*operands):
        ends = torch.full((3,), 6, device=operands[0].device) if lengths == "meta" else lengths
        return FUNCTIONS[function](*operands, log_params=log, lengths=ends)

    without_values(run, chain(dtype, each=each, log=log))


@pytest.mark.parametrize("sizes", [{"v": 1}, {"batch": (0, 2)}, {"batch": ()}], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_few_variables_or_sequences_have_the_shapes_of_a_cpu(function, sizes):
    without_values(FUNCTIONS[function], chain(**sizes))
    without_values(FUNCTIONS[function], [t.detach() for t in chain(**sizes)])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_packed_sequences_have_the_shapes_of_a_cpu(function):
    each = list(FUNCTIONS).index(function) % 2
    x, bulk, p0 = chain(v=12, batch=())
    bulk = bulk.detach().repeat(12, 1, 1).requires_grad_() if each else bulk
    offsets = torch.tensor([0, 5, 6, 12])
    # a fake mode hides the offsets too
    without_values(lambda *o: FUNCTIONS[function](*o, cu_seqlens=offsets), [x, bulk, p0], fake=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_schedules_have_the_shapes_of_a_cpu(strategy):
    for dtype, options in ((F32, {}), (F64, {"lengths": [30, 7, 1]})):
        product = functools.partial(logchain.product, strategy=strategy, **options)
        without_values(product, chain(dtype, v=30, each=bool(options)))


@pytest.mark.parametrize("lengths", [None, [6, 3, 1]], ids=str)
@pytest.mark.parametrize("function", OF_STRUCTURES)
def test_structures_have_the_shapes_of_a_cpu(function, lengths):
    """One structure for each function and choice of lengths, in turn."""
    kinds = WITH_PATHS if function in ("viterbi", "topk_paths") else list(MAKE)
    make = MAKE[kinds[(OF_STRUCTURES.index(function) + 3 * bool(lengths)) % len(kinds)]]
    (x, _, p0), whole = chain(c=C, batch=(3,)), make(numbers(0, F32), 5 if lengths else 1)
    operands = [x, p0, *(t.requires_grad_() for t in whole.parameters)]

    def run(x, p0, *parameters):
        # the indices of arcs have to be without values, too
        like = whole if x.device.type == "meta" or type(x) is Tensor else make(torch.ones)
        return FUNCTIONS[function](x, like.with_parameters(*parameters), p0, lengths=lengths)

    without_values(run, operands)


def test_products_of_matrices():
    a, b = torch.randn(3, 1, 4, 5, requires_grad=True), torch.randn(2, 5, 6, dtype=F64, requires_grad=True)
    without_values(logchain.matmul, [a, b])
    for function in (logchain.matrix_product, logchain.prefix_products):
        without_values(function, [torch.randn(3, 7, 4, 4, dtype=BF16, requires_grad=True)])
    stack = torch.randn(3, 7, 4, 4)
    without_values(lambda stack: logchain.matrix_product(stack.clone(), inplace=True), [stack])
    without_values(lambda a, b: logchain.matmul(a, b, out=a.new_empty(3, 3)), [torch.randn(3, 4), torch.randn(4, 3)])


@pytest.mark.parametrize(
    "transform",
    [
        lambda *o: torch.func.grad(lambda *o: logchain.product(*o).sum(), argnums=(0, 1, 2))(*o),
        lambda *o: torch.func.jvp(logchain.product, o, o),
        lambda *o: torch.func.hessian(lambda x: logchain.product(x, *o[1:]).sum())(o[0]),
        lambda *o: torch.vmap(logchain.product, in_dims=(0, None, None))(*o),
    ],
    ids=["grad", "jvp", "hessian", "vmap"],
)
def test_transforms_have_the_shapes_of_a_cpu(transform):
    without_values(transform, [t.detach() for t in chain()])


def second_derivatives(*operands):
    value = logchain.product(*operands, lengths=[6, 3, 1])
    return torch.autograd.grad(value.sum(), operands, create_graph=True)


def with_a_budget(*operands):
    return [logchain.product(*operands, memory_budget=budget, lengths=[200]) for budget in (10**4, 10**9)]


@pytest.mark.parametrize(("run", "sizes"), [(second_derivatives, {}), (with_a_budget, {"v": 300, "batch": (1,)})])
def test_derivatives_have_the_shapes_of_a_cpu(run, sizes):
    without_values(run, chain(**sizes))


def test_autocast_and_fake_tensors_outside_their_mode():
    operands, mode = chain(), FakeTensorMode()
    expected = described(logchain.product, operands, "cpu")
    with torch.autocast("cpu", dtype=BF16):
        assert described(logchain.product, [mode.from_tensor(t) for t in operands], "cpu") == expected
        without_values(logchain.product, operands)


@pytest.mark.parametrize("options", [{}, {"lag": 2}, {"dtype": F64, "filtered": False}], ids=str)
def test_streams(options):
    def results(x, bulk, p0):
        stream = logchain.Stream(bulk, p0, **options)
        found = [*stream.update(x[..., :3, :]), *stream.update(x[..., 3:, :], lengths=[[3, 0]] * 3)]
        return [*found, stream.log_norm, *stream.flush()]

    without_values(results, chain())
    without_values(results, [t.detach() for t in chain()])


def test_values_that_are_needed_are_missed_by_name():
    x, bulk, p0 = (t.detach().to("meta") for t in chain(batch=()))
    assert logchain.plan(x, bulk, p0).schedule
    calls = {
        "x": lambda: logchain.check(x, bulk, p0),
        "cu_seqlens": lambda: logchain.product(x, bulk, p0, cu_seqlens=torch.tensor([0, 6], device="meta")),
        "x_piece": lambda: logchain.Stream(bulk, p0, viterbi=True).update(x),
        "indices": lambda: transitions.Sparse(torch.zeros(2, 3, device="meta").long(), torch.rand(3, device="meta")),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name}: expected a device that holds values, got meta$"):
            call()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t.detach()) for t in chain(batch=())]
        with pytest.raises(ValueError, match="^cu_seqlens: expected a tensor that holds values, got a fake one$"):
            logchain.product(*fake, cu_seqlens=torch.tensor([0, 6]))


def test_devices_are_not_mixed():
    operands = [t.detach() for t in chain()]
    names = ("x", "bulk", "p0")
    for i, name in enumerate(names):
        mixed = [t if i == j else t.to("meta") for j, t in enumerate(operands)]
        expected = "bulk: expected device cpu, got meta" if name == "x" else f"{name}: expected device meta, got cpu"
        for question in ("product", "marginals", "viterbi", "entropy"):
            with pytest.raises(ValueError, match=f"^{expected}$"):
                FUNCTIONS[question](*mixed)
    with pytest.raises(ValueError, match="^lengths: expected device cpu, got meta$"):
        logchain.product(*operands, lengths=torch.ones(3, dtype=torch.int64, device="meta"))


def test_lengths_of_the_host_are_checked():
    operands = [t.to("meta") for t in chain()]
    for lengths in ([0, 9, 9], torch.tensor([0, 9, 9])):
        with pytest.raises(ValueError, match="^lengths: expected values from 1 to v = 6, got 0 to 9$"):
            logchain.product(*operands, lengths=lengths)
