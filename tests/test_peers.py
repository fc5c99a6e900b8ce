"""On random models `logchain` and its peers agree, in values, posteriors, paths and divergences.

The peers' recursions are in float64: against them float32 is held to the contract, float64 to their own rounding.
"""

import numpy as np
import pytest
import torch

import logchain
from tests.adapted import peer
from tests.contract import gradient_bound, value_bound

F32, F64 = torch.float32, torch.float64
SIZES = pytest.mark.parametrize(("v", "c"), [(2, 2), (5, 3), (40, 17), (600, 4)])
BOTH = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
TORCH_STRUCT = pytest.mark.filterwarnings("ignore:.*does not define `arg_constraints`")


def draw(n, v, c, dtype=F64, matrices=1, seed=0):
    """Random x [n, v, c], bulk [matrices, c, c] and p0 [c] whose rows sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(n, v, c, generator=generator, dtype=F64)
    bulk = torch.randn(matrices, c, c, generator=generator, dtype=F64).softmax(-1)
    p0 = torch.randn(c, generator=generator, dtype=F64).softmax(-1)
    return x.to(dtype), bulk.to(dtype), p0.to(dtype)


def bounds(x, log_norm):
    """How far a value and a posterior may be off."""
    v, c = x.shape[-2:]
    if x.dtype == F64:
        return 1e-12 * v + 1e-12 * np.abs(log_norm), 1e-10
    return value_bound(log_norm, v, c, dtype=F32), gradient_bound(1.0, v, c, dtype=F32)


def answers(x, bulk, p0):
    """Log-partition, state posteriors and expected transition counts from `product` and its gradients."""
    x, log_bulk = x.clone().requires_grad_(), bulk.log().requires_grad_()
    log_norm = logchain.product(x, log_bulk, p0.log(), log_params=True)
    return tuple(
        out.detach().double().numpy() for out in (log_norm, *torch.autograd.grad(log_norm.sum(), (x, log_bulk)))
    )


def array(value):
    return np.asarray(value.detach() if isinstance(value, torch.Tensor) else value, np.float64)


def distance(out, truth):
    out, truth = array(out), array(truth)
    assert out.shape == truth.shape
    return np.abs(out - truth)


def hmmlearn_model(bulk, p0, implementation):
    """A model whose samples are their own log-likelihoods."""

    class Given(peer("hmmlearn.base").BaseHMM):
        def _check(self):
            pass

        def _compute_log_likelihood(self, samples):
            return samples

    model = Given(len(p0), params="st", implementation=implementation)
    model.startprob_, model.transmat_ = p0.double().numpy(), bulk[0].double().numpy()
    return model


@BOTH
@SIZES
@pytest.mark.parametrize("implementation", ["log", "scaling"])
def test_hmmlearn(implementation, v, c, dtype):
    x, bulk, p0 = draw(3, v, c, dtype)
    model = hmmlearn_model(bulk, p0, implementation)
    samples, lengths = x.double().flatten(0, 1).numpy(), [v] * 3
    log_norm, states, counts = answers(x, bulk, p0)
    theirs = np.array([model.score(sequence) for sequence in x.double().numpy()])
    value, share = bounds(x, theirs)
    assert (distance(log_norm, theirs) < value).all()
    assert (distance(states.reshape(-1, c), model.score_samples(samples, lengths)[1]) < share).all()
    statistics, _ = model._do_estep(samples, lengths)
    assert (distance(counts[0], statistics["trans"]) < 3 * v * share).all()
    assert (distance(states[:, 0].sum(0), statistics["start"]) < 3 * share).all()
    found = logchain.marginals(x, bulk, p0, transitions="sum")
    assert (distance(found.log_norm, theirs) < value).all()
    assert (distance(found.transitions[0], statistics["trans"]) < 3 * v * share).all()


def linear_chain(x, bulk, p0):
    """torch-struct's edges [n, v-1, to, from]; the first holds the first variable too."""
    edges = bulk.log().mT + x[:, 1:, :, None]
    first = torch.zeros_like(edges)
    first[:, 0] = (p0.log() + x[:, 0])[:, None, :]
    return peer("torch_struct").LinearChainCRF(edges + first)


@TORCH_STRUCT
@BOTH
@SIZES
@pytest.mark.parametrize("each", [False, True], ids=["one matrix", "a matrix of every step"])
def test_torch_struct(each, v, c, dtype):
    x, bulk, p0 = draw(2, v, c, dtype, v - 1 if each else 1)
    crf = linear_chain(x.double(), bulk.double(), p0.double())
    log_norm, states, counts = answers(x, bulk, p0)
    truth = array(crf.partition)
    value, share = bounds(x, truth)
    assert (distance(log_norm, truth) < value).all()
    edges = array(crf.marginals.mT)  # (n, v-1, from, to)
    assert (distance(states[:, 1:], edges.sum(2)) < share).all()
    assert (distance(states[:, 0], edges[:, 0].sum(2)) < share).all()
    assert (distance(counts, edges.sum(0) if each else edges.sum((0, 1))[None]) < 2 * v * share).all()
    found = logchain.marginals(x, bulk, p0, transitions="full")
    assert (distance(found.states[:, 1:], edges.sum(2)) < share).all()
    assert (distance(found.transitions, edges) < share).all()


@TORCH_STRUCT
@SIZES
def test_torch_struct_paths_and_information(v, c):
    p, q, k = draw(2, v, c), draw(2, v, c, seed=1), min(5, c**v)
    theirs, other = linear_chain(*p), linear_chain(*q)
    assert (distance(logchain.viterbi(*p).score, theirs.max) < 1e-9).all()
    assert (distance(logchain.topk_paths(*p, k).scores, theirs.kmax(k).T) < 1e-9).all()
    assert (distance(logchain.entropy(*p), theirs.entropy) < 1e-9 * v).all()
    assert (distance(logchain.kl_divergence(p, q), theirs.kl(other)) < 1e-9 * v).all()
