"""Peak memory against the memory contract, and allocations that do not grow with the length of the chain."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import logchain
from logchain import demo
from logchain.autograd.operator import IMPLEMENTATIONS
from logchain.memory import peak_bytes
from tests.families import FAMILIES, Chain

SLACK = 10_000_000


def message_bytes(x):
    return x.numel() * 4


@pytest.mark.parametrize("mode", [demo.forward, demo.forward_backward])
def test_the_forums_case_takes_two_messages(mode):
    chain = demo.dense_chain(500, 40, 200)
    assert peak_bytes(lambda: mode(chain)) <= 2 * message_bytes(chain.x) + SLACK


def test_a_slice_of_messages_is_all_that_is_kept_without_gradients():
    chain = demo.dense_chain(100, 400, 64)
    assert peak_bytes(lambda: demo.forward(chain)) <= message_bytes(chain.x) / 2


@pytest.mark.parametrize("transitions", [None, "sum"])
def test_posteriors_and_expected_counts_take_two_messages(transitions):
    """The results, the messages, and counts in the shape of `bulk`: no matrix for each sequence."""
    chain = demo.dense_chain(100, 400, 64)
    counts = chain.bulk.numel() * 4 if transitions else 0

    def question():
        return [value for value in logchain.marginals(*chain, transitions=transitions) if value is not None]

    assert peak_bytes(question) <= 2 * message_bytes(chain.x) + counts + SLACK


@pytest.mark.parametrize("name", ["left_to_right", "banded", "peaked", "sparse"])
def test_hard_chains_take_two_messages(name):
    chain = FAMILIES[name](dtype=torch.float32, n=64, t=1, v=100, c=100)
    assert peak_bytes(lambda: demo.forward_backward(demo.Chain(*chain[:3]))) <= 2 * message_bytes(chain.x) + SLACK


def test_a_broadcast_operand_is_never_expanded():
    x = torch.randn(200, 1, 20, 100)
    expanded = 200 * 19 * 100 * 100 * 4
    for bulk in (torch.rand(1, 1, 19, 100, 100), torch.rand(1, 1, 1, 100, 100)):
        chain = demo.Chain(x, bulk, torch.rand(1, 1, 100))
        assert peak_bytes(lambda chain=chain: demo.forward_backward(chain)) < expanded / 20


class Allocations(TorchDispatchMode):
    """Counts results that are no view of an argument, inside the library's own operators too."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        if function.namespace == "logchain":
            with self:
                return IMPLEMENTATIONS[function._opname](*args, **(kwargs or {}))
        out = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.count += sum(t.untyped_storage()._cdata not in known for t in tensors)
        return out


def allocations(chain: Chain, **options) -> int:
    leaves = [tensor.detach().requires_grad_() for tensor in chain[:3]]
    with Allocations() as seen, logchain.rescues() as rescued:
        logchain.product(*leaves, log_params=chain.log_params, **options).sum().backward()
    assert rescued.sequences == 0
    return seen.count


def variants(v, dtype):
    chain = FAMILIES["dense"](dtype=dtype, n=5, t=2, v=v, c=4)
    own = torch.rand(5, 2, v - 1, 4, 4, dtype=dtype)
    one_hot = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=dtype)
    holes = (torch.arange(16).view(4, 4) % 3 > 0).to(dtype)
    return {
        "shared": chain,
        "own": chain._replace(bulk=own),
        "own along one axis": chain._replace(bulk=own[:1]),
        "one matrix": chain._replace(bulk=own[:1, :1, :1]),
        "logarithms": Chain(chain.x, chain.bulk.log(), chain.p0.log(), True),
        "scaled": chain._replace(bulk=chain.bulk * 2.0**-40),
        "half": chain._replace(x=chain.x.bfloat16(), bulk=chain.bulk.bfloat16()),
        "zeros": chain._replace(bulk=chain.bulk * holes),
        "one start": chain._replace(p0=one_hot),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", variants(3, torch.float32))
def test_allocations_do_not_grow_with_v(name, dtype):
    short, long = (variants(v, dtype)[name] for v in (20, 80))
    assert allocations(short) == allocations(long)
    lengths = torch.tensor([1, 5, 20, 10, 4])
    assert allocations(short, lengths=lengths) == allocations(long, lengths=lengths * 4)
