"""The library's operators are torch's own: `opcheck`, `compile`, `export`, `torch.func` and autocast agree."""

import itertools

import pytest
import torch
from torch.utils._pytree import tree_leaves

import logchain
from tests.autograd.test_derivatives import pairwise
from tests.families import F32, F64, FAMILIES
from tests.subjects import OTHERS, STRATEGIES, SUBJECTS, floating
from tests.test_contract import leaves

OPS = torch.ops.logchain


def as_tuple(name):
    return lambda *operands, **options: tuple(SUBJECTS[name](*operands, **options).values())


# subjects that are one operator of torch, or a few
QUERIES = {name: as_tuple(name) for name in OTHERS if name not in ("stream", "total")}
COMPILED = QUERIES | {name: as_tuple(name) for name in STRATEGIES if name != "sequential"}
WITH_PRODUCT = QUERIES | {"product": as_tuple("product")}
# products of matrices, and the shapes of their operands
OF_MATRICES = {
    "matmul": (logchain.matmul, [(3, 1, 4, 5), (2, 5, 6)]),
    "matrix_product": (logchain.matrix_product, [(2, 5, 3, 3)]),
    "prefix_products": (logchain.prefix_products, [(2, 5, 3, 3)]),
}


def problem(query, dtype=F64, each=False):
    """A function that returns a tuple, and its operands."""
    if query in WITH_PRODUCT:
        return WITH_PRODUCT[query], FAMILIES["dense"](dtype, v=4, c=3, each=each)[:3]
    function, shapes = OF_MATRICES[query]
    return lambda *operands: (function(*operands),), [torch.randn(shape, dtype=dtype) for shape in shapes]


# chains and their lengths
DENSE = FAMILIES["dense"](F64, v=4, c=3)
CHAINS = {
    "shared": (DENSE, None),
    "each": (FAMILIES["dense"](F64, v=4, c=3, each=True), None),
    "recomputed": (FAMILIES["detour"](F64, v=4, c=3), None),
    "lengths": (DENSE, torch.tensor([[4, 4], [1, 2], [3, 1]])),
    "one variable": (FAMILIES["dense"](F64, v=1, c=3), None),
}


@pytest.mark.parametrize(("name", "v", "segments"), [("dense", 4, (1, 0)), ("left_to_right", 6, (3, 2))])
def test_opcheck_of_log_norm(name, v, segments):
    operands = x, bulk, p0 = leaves(FAMILIES[name](F64, v=v, c=3))
    lengths, log = torch.tensor([[v, v], [1, 2], [3, 1]]), False
    torch.library.opcheck(OPS.log_norm.default, (*operands, lengths, log, True, *segments))
    with torch.no_grad():
        torch.library.opcheck(OPS.log_norm.default, (*operands, lengths, log, False, *segments))
        kept = OPS.log_norm(*operands, lengths, log, True, *segments)
    grad = torch.randn_like(kept[0]).requires_grad_()
    for by_log in (False, True):
        arguments = (grad, *operands, lengths, *kept, log, by_log, True, True, True, *segments)
        torch.library.opcheck(OPS.log_norm_backward.default, arguments)
        along = [torch.randn_like(operand) for operand in operands]
        with torch.no_grad():
            arguments = (grad, *operands, lengths, *along, log, by_log)
            torch.library.opcheck(OPS.log_norm_second.default, arguments)
    with torch.no_grad():
        arguments = (grad, *operands, lengths, *kept, log, False, True, False, False, *segments)
        assert [tuple(t.shape) for t in OPS.log_norm_backward(*arguments)] == [tuple(x.shape), (0,), (0,)]


def test_opcheck_of_messages_and_best_paths():
    chain, lengths = CHAINS["lengths"]
    arguments = (*leaves(chain), lengths, chain.log_params)
    torch.library.opcheck(OPS.messages.default, arguments)
    with torch.no_grad():
        found = OPS.messages(*arguments)
        torch.library.opcheck(OPS.messages_backward.default, (*map(torch.randn_like, found), *arguments))
        for k in (None, 2):
            torch.library.opcheck(OPS.best_paths.default, (*arguments, k))


@pytest.mark.parametrize("sizes", [(2, 3, 4, 5), (1, 1, 1, 1)], ids=str)
def test_opcheck_of_matmul(sizes):
    g, m, k, n = sizes
    a, b = torch.randn(g, m, k, dtype=F64, requires_grad=True), torch.randn(g, k, n, dtype=F64, requires_grad=True)
    weight = torch.randn(g, m, n, dtype=F64, requires_grad=True)
    torch.library.opcheck(OPS.log_matmul.default, (a, b))
    torch.library.opcheck(OPS.log_matmul_backward.default, (weight, a, b, True, True))
    with torch.no_grad():
        torch.library.opcheck(OPS.log_matmul_second.default, (weight, a, b, torch.rand_like(a), torch.rand_like(b)))


def test_a_compiled_product_takes_other_sizes():
    torch._dynamo.reset()
    compiled = torch.compile(logchain.product, fullgraph=True, dynamic=True, backend="aot_eager")
    for v, c in ((4, 3), (7, 5), (9, 2)):
        chain = FAMILIES["dense"](F32, v=v, c=c)
        torch.testing.assert_close(compiled(*chain[:3]), logchain.product(*chain[:3]))


def test_a_compiled_length_out_of_range_is_still_an_error():
    torch._dynamo.reset()
    chain = FAMILIES["dense"](F32, v=4, c=3)
    compiled = torch.compile(logchain.product, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="lengths: expected values from 1 to v = 4, got 0 to 9"):
        compiled(*chain[:3], lengths=torch.tensor([4, 0, 9]))


def total(found):
    return sum((t * (1 + i)).cos().sum() for i, t in enumerate(floating(dict(enumerate(found)))))


# every query with one of the chains, and the product with all
COMPILED_CHAINS = list(zip(COMPILED, itertools.cycle(["lengths", "each", "recomputed", "one variable"]), strict=False))
COMPILED_CHAINS += [("product", name) for name in CHAINS]


def assert_compiled_alike(function, operands, dynamic=False, **tolerance):
    """One graph has the results and the gradients of a function that returns a tuple."""
    torch._dynamo.reset()
    results = []
    for call in (function, torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")):
        varied = leaves(operands)
        found = call(*varied)
        results.append((*found, *torch.autograd.grad(total(found), varied)))
    torch.testing.assert_close(*results, **tolerance)


@pytest.mark.parametrize(("query", "name"), COMPILED_CHAINS)
def test_every_query_compiles_into_one_graph(query, name):
    chain, lengths = CHAINS[name]

    def function(x, bulk, p0):
        found = SUBJECTS[query](x + 1, bulk * 1.5, p0 * 0.5, log_params=chain.log_params, lengths=lengths)
        return tuple(t * 2 for t in found.values())

    dynamic = query == "product" and name in ("each", "lengths")
    assert_compiled_alike(function, chain, dynamic, **({"rtol": 0, "atol": 0} if query == "product" else {}))


@pytest.mark.parametrize("name", OF_MATRICES)
def test_products_of_matrices_compile_into_one_graph(name):
    function, operands = problem(name)
    assert_compiled_alike(lambda *o: (function(*(2 * one for one in o))[0] + 1,), operands, rtol=0, atol=0)


EXPORTED_CHAINS = [(query, "shared") for query in QUERIES] + [("product", name) for name in CHAINS]


@pytest.mark.parametrize(("query", "name"), EXPORTED_CHAINS)
def test_every_query_is_exported(query, name):
    chain, lengths = CHAINS[name]

    class Module(torch.nn.Module):
        def forward(self, x, bulk, p0):
            return tuple(SUBJECTS[query](x + 1, bulk, p0, log_params=chain.log_params, lengths=lengths).values())

    program = torch.export.export(Module(), chain[:3])
    assert any("logchain." in str(node.target) for node in program.graph.nodes)
    results = program.module()(*chain[:3]), Module()(*chain[:3])
    torch.testing.assert_close(*results, **({"rtol": 0, "atol": 0} if query == "product" else {}))


IN_DIMS = [(0, None, None), (0, 0, 0), (None, 0, None), (None, None, 0), (-3, 2, 1)]
MAPPED = [(query, IN_DIMS[(i + j) % 5]) for i, query in enumerate(WITH_PRODUCT) for j in (0, 2)]
MAPPED += [("matmul", in_dims) for in_dims in ((0, 0), (0, None), (None, 0), (1, 2))]
MAPPED += [(name, (dim,)) for name in ("matrix_product", "prefix_products") for dim in (0, 1)]


def slope(function):
    return lambda *o: torch.func.grad(lambda *o: total(tree_leaves(function(*o))), argnums=tuple(range(len(o))))(*o)


def slope_by_autograd(function):
    def gradients(*operands):
        varied = leaves(operands)
        return torch.autograd.grad(total(function(*varied)), varied)

    return gradients


@pytest.mark.parametrize(("query", "in_dims"), MAPPED, ids=str)
def test_vmap_of_every_query_is_a_loop(query, in_dims):
    function, operands = problem(query, each=in_dims[1:2] == (0,))
    scale = torch.linspace(0.5, 2.0, 5, dtype=F64)
    stacked = [
        operand if dim is None else (operand[None] * scale.view(-1, *(1,) * operand.dim())).movedim(0, dim)
        for operand, dim in zip(operands, in_dims, strict=True)
    ]
    rows = [[t if dim is None else t.select(dim, i) for t, dim in zip(stacked, in_dims, strict=True)] for i in range(5)]
    for mapped, alone in ((function, function), (slope(function), slope_by_autograd(function))):
        found = torch.vmap(mapped, in_dims=in_dims)(*stacked)
        expected = zip(*(alone(*row) for row in rows), strict=True)
        torch.testing.assert_close(found, tuple(map(torch.stack, expected)))


@pytest.mark.parametrize(("family", "lengths"), [("detour", None), ("dense", [[3], [2]])])
def test_hessians(family, lengths):
    """Forward over reverse, reverse over reverse and reverse over forward are what autograd finds."""
    chain = FAMILIES[family](F64, n=2, t=1, v=3, c=3)

    def function(x, bulk, p0):
        return logchain.product(x, bulk, p0, log_params=chain.log_params, lengths=lengths).cos().sum()

    expected = torch.autograd.functional.hessian(function, chain[:3])
    everything = (0, 1, 2)
    jacfwd, jacrev = torch.func.jacfwd, torch.func.jacrev
    for first, second in ((jacrev, jacfwd), (jacrev, jacrev), (jacfwd, jacrev)):
        found = second(first(function, argnums=everything), argnums=everything)(*chain[:3])
        torch.testing.assert_close(found, expected)
    found = torch.func.hessian(function, argnums=everything)(*chain[:3])
    torch.testing.assert_close(found[0][1], expected[0][1])


def along(function):
    """The derivative along fixed tangents, in forward mode."""
    return lambda *o: torch.func.jvp(function, o, tuple(operand.detach().cos() for operand in o))[1]


NESTED = {
    "along of slope": lambda f: along(slope(f)),
    "slope of along": lambda f: slope(along(f)),
    "slope of slope": lambda f: slope(slope(f)),
}
NESTED |= {
    f"map of {name}": lambda f, nested=nested: torch.vmap(nested(f), in_dims=(0, None, None))
    for name, nested in NESTED.items()
}


@pytest.mark.parametrize("nested", NESTED)
def test_nested_transforms_agree_with_the_definition(nested):
    x, bulk, p0, _ = FAMILIES["dense"](F64, n=2, t=2, v=3, c=2)
    operands = (x, bulk[0, 0].log(), p0[0, 0].log())
    functions = pairwise, lambda *o: logchain.product(*o, log_params=True)
    expected, results = (NESTED[nested](function) for function in functions)
    torch.testing.assert_close(results(*operands), expected(*operands))


def test_forward_derivatives_of_forward_derivatives_are_refused():
    chain = FAMILIES["dense"](F64, v=3, c=2)
    with pytest.raises(NotImplementedError, match="jvp"):
        along(along(logchain.product))(*chain[:3])


@pytest.mark.parametrize("query", ["filtered", "messages", "log_prob", "product"])
def test_gradients_at_mapped_weights_of_zero_are_zero(query):
    chain = FAMILIES["dense"](F64, v=3, c=2)
    bulk = torch.stack([chain.bulk, chain.bulk * 2.0])
    bulk[..., 0, 1] = 0.0

    def function(bulk):
        return total(torch.vmap(lambda bulk: tuple(WITH_PRODUCT[query](chain.x, bulk, chain.p0)))(bulk))

    gradient = torch.func.grad(function)(bulk)
    assert gradient.isfinite().all() and (gradient[..., 0, 1] == 0).all() and (gradient != 0).any()


def test_a_compiled_product_keeps_messages_for_gradients_alone():
    chain, flags = FAMILIES["dense"](F64, v=3, c=2), []

    def backend(graph, _):
        flags.extend(node.args[5] for node in graph.graph.nodes if "log_norm" in str(node.target))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(logchain.product, fullgraph=True, backend=backend)
    compiled(*chain[:3])
    compiled(*leaves(chain))
    assert flags == [False, True]


def test_compiled_messages_have_gradients_by_one_operator():
    """A graph of each step's operations would take minutes to compile."""
    chain, sizes = FAMILIES["dense"](F64, v=40, c=3), []

    def backend(graph, _):
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    def messages(*operands):
        return total(tuple(logchain.forward_backward(*operands)))

    torch._dynamo.reset()
    operands = leaves(chain)
    compiled = torch.compile(messages, fullgraph=True, backend=backend)(*operands)
    expected = torch.autograd.grad(messages(*operands), operands)
    gradients = torch.autograd.grad(compiled, operands, create_graph=True)
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-9)
    assert len(sizes) == 1 and sizes[0] < 40
    with pytest.raises(RuntimeError, match="expected one derivative inside torch.compile"):
        compiled = torch.compile(messages, fullgraph=True, backend=backend)(*operands)
        (first,) = torch.autograd.grad(compiled, operands[0], create_graph=True)
        torch.autograd.grad(first.sum(), operands[0])


def test_gradients_in_one_batch():
    x, p0, values = torch.randn(7, 3, dtype=F64), torch.rand(3, dtype=F64), torch.rand(3, 3, dtype=F64)
    banded, offsets = logchain.transitions.Banded(values, (0, 1, -1)), torch.tensor([0, 4, 7])
    functions = (
        lambda x: logchain.product(x.view(1, 7, 3), values, p0),
        lambda x: logchain.product(x.view(1, 7, 3), banded, p0),
        lambda x: logchain.product(x, values, p0, cu_seqlens=offsets),
    )
    for function in functions:
        for again in (False, True):
            leaf, jacobian = x.clone().requires_grad_(), torch.autograd.functional.jacobian
            pair = [jacobian(function, leaf, create_graph=again, vectorize=batch) for batch in (False, True)]
            torch.testing.assert_close(*pair)
            if again:
                torch.testing.assert_close(*(torch.autograd.grad(one.sin().sum(), leaf) for one in pair))


@pytest.mark.parametrize("query", ["product", "counts", "marginals"])
def test_jacobians_by_forward_and_reverse_mode_agree(query):
    chain = FAMILIES["sparse"](F64, v=4, c=3)
    for argument in range(3):
        rows, columns = (
            jacobian(WITH_PRODUCT[query], argnums=argument)(*chain[:3])
            for jacobian in (torch.func.jacrev, torch.func.jacfwd)
        )
        torch.testing.assert_close(rows, columns)


def test_dual_numbers_have_the_derivative_of_jvp():
    chain = FAMILIES["dense"](F64, v=4, c=3)
    tangents = [torch.randn_like(operand) for operand in chain[:3]]
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(*pair) for pair in zip(chain[:3], tangents, strict=True)]
        along = torch.autograd.forward_ad.unpack_dual(logchain.product(*duals)).tangent
    torch.testing.assert_close(along, torch.func.jvp(logchain.product, chain[:3], tuple(tangents))[1])


def first(*operands):
    """A number of a chain, whose derivatives have the shapes of operands."""
    return logchain.product(*operands).cos().sum()


ALL_OPERANDS = {"argnums": (0, 1, 2)}


TRANSFORMED = {
    "grad of grad": lambda *o: torch.func.grad(lambda *o: torch.func.grad(first)(*o).sin().sum(), **ALL_OPERANDS)(*o),
    "jvp": lambda *o: torch.func.jvp(logchain.product, o, tuple(operand.sin() for operand in o)),
    "hessian": lambda *o: torch.func.hessian(first)(*o),
    "vmap": lambda *o: torch.vmap(logchain.product, in_dims=(0, None, None))(*o),
    "vmap of grad": lambda *o: torch.vmap(torch.func.grad(first, **ALL_OPERANDS), in_dims=(0, None, None))(*o),
    "grad of vmap": lambda *o: torch.func.grad(lambda x: TRANSFORMED["vmap"](x, *o[1:]).cos().sum())(o[0]),
    **{f"grad of {query}": slope(QUERIES[query]) for query in ("counts", "messages", "viterbi")},
}


@pytest.mark.parametrize("transform", TRANSFORMED)
def test_transforms_compile_into_one_graph(transform):
    torch._dynamo.reset()
    x, bulk, p0, _ = FAMILIES["dense"](F64, n=2, v=3, c=2)
    function, operands = TRANSFORMED[transform], (x, bulk[0, 0], p0[0, 0])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands), function(*operands))


@pytest.mark.parametrize("query", WITH_PRODUCT)
def test_gradients_from_outside_a_map(query):
    """Where every operand that needs a gradient is mapped, too."""
    chain, asked = FAMILIES["dense"](F64, v=4, c=3), WITH_PRODUCT[query]
    stacked = torch.stack([chain.x, chain.x * 0.5]).requires_grad_()
    mapped = torch.vmap(lambda x: tuple(asked(x, *chain[1:3])))
    loop = sum(total(asked(x, *chain[1:3])) for x in stacked)
    (expected,) = torch.autograd.grad(loop, stacked)
    (found,) = torch.autograd.grad(total(mapped(stacked)), stacked)
    torch.testing.assert_close(found, expected)
    found = torch.func.grad(lambda x: total(mapped(x)))(stacked.detach())
    torch.testing.assert_close(found, expected)


def test_vmap_over_lengths():
    chain = FAMILIES["dense"](F64, v=4, c=3)
    lengths = torch.tensor([[4, 1, 2], [3, 4, 1]])
    found = torch.vmap(lambda ends: logchain.product(*chain[:3], lengths=ends))(lengths)
    torch.testing.assert_close(found, torch.stack([logchain.product(*chain[:3], lengths=ends) for ends in lengths]))
    found = torch.vmap(lambda ends: logchain.viterbi(*chain[:3], lengths=ends))(lengths)
    for i, ends in enumerate(lengths):
        for one, other in zip(found, logchain.viterbi(*chain[:3], lengths=ends), strict=True):
            assert torch.equal(one[i], other)


@pytest.mark.parametrize("query", [*WITH_PRODUCT, *OF_MATRICES])
def test_autocast_changes_nothing(query):
    (function, operands), results = problem(query, F32), []
    for enabled in (False, True):
        varied = leaves(operands)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found = function(*varied)
        assert all(t.dtype in (F32, torch.int64) for t in found)
        results.append([*found, *torch.autograd.grad(total(found), varied)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
