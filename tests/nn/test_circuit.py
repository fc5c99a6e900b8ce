"""Circuits against the probability of every value of all variables, and the sum layer against scipy."""

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch

from logchain import nn
from logchain.memory import peak_bytes
from tests.contract import assert_values, of_steps, ulp, value_bound
from tests.nn.hmms import dense, trained
from tests.seeded import seeded

K = 3
# variables, states, repetitions, and a structure of transitions with its leading axes
SIZES = [
    (4, 2, 2, None, ()),
    (3, 3, 1, None, ()),
    (5, 1, 2, None, ()),
    (1, 2, 2, None, ()),
    (3, 4, 2, "banded", (2, 2)),
    (3, 4, 2, "sparse", (1, 2)),
    (3, 4, 2, "low rank and diagonal", (2, 1)),
    (3, 4, 2, "monarch", ()),
]


def make(v=4, c=2, t=2, seed=0, **options):
    generator = seeded(seed)
    options = {"emission": nn.Categorical((t, v, c), K, generator=generator)} | options
    return nn.ChainCircuit(v, c, t, generator=generator, **options)


def weights_of(circuit):
    """The linear weights of each part, in float64, normalized here."""
    parts = {}
    for name, part in circuit.named_modules():
        if isinstance(part, nn.LogWeights):
            linear = np.exp(part.logits.detach().double().numpy())
            parts[name] = linear / linear.sum(part.dim, keepdims=True)
    if isinstance(circuit.transition(), torch.Tensor):
        parts["transition"] = parts.pop("transition.weights.0")
    return parts


def terms_of(circuit):
    """The probability of every value, an axis of K for each variable, with each repetition and path of states."""
    w = weights_of(circuit)
    inputs, p0, mixing = w["emission.weights"], w["initial"], w["mixing"]
    t, v, _, c = inputs.shape
    bulk = np.broadcast_to(w["transition"] if "transition" in w else dense(circuit.transition), (t, v - 1, c, c))
    terms = {}
    for hidden in itertools.product(range(t), *[range(c)] * v):
        r, *path = hidden
        weight = mixing[r] * p0[r, path[0]]
        weight *= math.prod(bulk[r, i, path[i], path[i + 1]] for i in range(v - 1))
        terms[hidden] = weight * outer([inputs[r, i, :, path[i]] for i in range(v)])
    return terms


def outer(tables):
    """The products of all their entries, with the axes of all."""
    return functools.reduce(np.multiply.outer, tables)


def all_values(v):
    """All values of all variables (K^v, v), in the order of a flattened table."""
    return torch.tensor(list(itertools.product(range(K), repeat=v)))


def where_observed(table, data, observed):
    """The table, with zeros where a value differs from what is observed."""
    allowed = [np.arange(K) == value if seen else np.ones(K) for value, seen in zip(data, observed, strict=True)]
    return table * outer(allowed)


def some_observed(n, v, seed=1):
    return torch.rand(n, v, generator=seeded(seed)) < 0.5


@pytest.mark.parametrize(("v", "c", "t", "structure", "lead"), SIZES)
def test_probabilities_posteriors_and_explanations_equal_the_enumeration(v, c, t, structure, lead):
    transition = trained(structure, seeded(1), lead=lead) if structure else None
    circuit, data = make(v, c, t, transition=transition), all_values(v)
    single = circuit.log_prob(data).detach()
    assert single.dtype == torch.float32
    circuit = circuit.double()
    terms, observed = terms_of(circuit), some_observed(len(data), v)
    table, best = sum(terms.values()), np.maximum.reduce(list(terms.values()))
    np.testing.assert_allclose(single, np.log(table).ravel(), rtol=1e-6, atol=2e-6)
    every = circuit.log_prob(data).detach()
    np.testing.assert_allclose(every, np.log(table).ravel(), rtol=1e-13, atol=1e-13)
    assert abs(every.exp().sum().item() - 1) < 1e-13
    log_prob, conditionals = circuit.log_prob(data, observed), circuit.conditionals(data, observed)
    posterior = circuit.posterior(data, observed).states
    for i, (row, seen) in enumerate(zip(data.numpy(), observed.numpy(), strict=True)):
        joint = where_observed(table, row, seen)
        np.testing.assert_allclose(log_prob[i].item(), np.log(joint.sum()), atol=1e-12)
        for variable in range(v):
            others = tuple(axis for axis in range(v) if axis != variable)
            np.testing.assert_allclose(conditionals[i, variable], joint.sum(others) / joint.sum(), atol=1e-12)
        states = np.zeros((t, v, c))
        for (r, *path), term in terms.items():
            states[r, range(v), path] += where_observed(term, row, seen).sum() / joint.sum()
        np.testing.assert_allclose(posterior[i].detach(), states, atol=1e-12)
    if structure and "rank" in structure:  # whose entries are sums
        return
    explained = circuit.decode(data, observed)
    assert (explained.data == data)[observed].all() and explained.data.dtype == data.dtype
    for i, (row, seen) in enumerate(zip(data.numpy(), observed.numpy(), strict=True)):
        most = where_observed(best, row, seen).max()
        np.testing.assert_allclose(np.exp(explained.score[i].item()), most, rtol=1e-12)
        hidden = explained.repetition[i].item(), *explained.states[i].tolist()
        np.testing.assert_allclose(terms[hidden][tuple(explained.data[i])], most, rtol=1e-12)


def test_missing_variables_are_imputed_by_expectations():
    """The mean of a variable conditional on another is a sum over repetitions and the states of both."""
    circuit = make(2, 2, 2, emission=nn.Gaussian((2, 2, 2), 3, generator=seeded())).double()
    data = torch.randn(4, 2, 3, dtype=torch.float64, generator=seeded(1))
    w, first = weights_of(circuit), np.exp(circuit.emission(data[:, None]).detach().numpy())[:, :, 0]
    joint = np.einsum("r,rj,nrj,rjk->nrk", w["mixing"], w["initial"], first, w["transition"][:, 0])
    shares = joint / joint.sum((1, 2), keepdims=True)
    means = np.einsum("nrk,rkd->nd", shares, circuit.emission.means.detach().numpy()[:, 1])
    imputed = circuit.impute(data, torch.tensor([True, False]))
    assert torch.equal(imputed[:, 0], data[:, 0])
    np.testing.assert_allclose(imputed[:, 1], means, atol=1e-12)
    # a part of a vector, given the other part
    whole = make(1, 1, 1, emission=nn.Gaussian((1, 1, 1), 2, "full"))
    whole.emission.set(torch.tensor([1.0, -1.0]), torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
    np.testing.assert_allclose(whole.impute(torch.tensor([[4.0, torch.nan]])), [[4.0, -1 + 0.5 * (4 - 1)]])
    bits, observed = make(3, emission="bernoulli"), torch.tensor([True, False, False])
    likely = bits.conditionals(torch.tensor([1.0, 0, 0]), observed).argmax(-1)
    assert torch.equal(bits.impute(torch.tensor([1, 0, 0]), observed), likely)


def test_posteriors_of_long_data_are_those_of_float64():
    v, noise = 300, seeded(4)
    circuit = make(v, emission=nn.Gaussian((2, v, 2), generator=seeded()))
    with torch.no_grad():  # nearly the same in both repetitions, so that both are likely
        circuit.emission.means[1] = circuit.emission.means[0]
        for part in (circuit.transition.weights[0], circuit.initial):
            part.logits[1] = part.logits[0] + 0.05 * torch.randn(part.logits[0].shape, generator=noise)
    data = 25 + 0.01 * torch.randn(16, v, generator=noise)
    assert (circuit.log_prob(data) < -8.8e4).all()
    exact = copy.deepcopy(circuit).double().posterior(data.double()).states
    assert exact.sum((-1, -2)).min() > 0.01 * v
    assert (circuit.posterior(data).states - exact).abs().max() < 1e-5


def test_missing_values_are_nan_or_masked():
    circuit, data, observed = make(), all_values(4)[20:40], some_observed(20, 4)
    expected = circuit.log_prob(data, observed)
    missing = data.float().masked_fill(~observed, torch.nan)
    assert torch.equal(circuit.log_prob(missing), expected)
    # values that are not observed have no influence, even if they are no categories
    assert torch.equal(circuit.log_prob(data.masked_fill(~observed, -7), observed), expected)
    lengths = torch.arange(20) % 4 + 1
    ends = circuit.log_prob(data, torch.arange(4) < lengths[:, None])
    assert torch.equal(circuit.log_prob(data, lengths=lengths), ends)
    drawn = circuit.sample_conditional(missing, generator=seeded())
    assert drawn.dtype == torch.float32 and not drawn.isnan().any()
    assert (drawn[0] == data)[observed].all()
    # integers do not round what is filled in
    circuit, data, observed = make(2, emission="gaussian"), torch.tensor([[3, 0]]), torch.tensor([[True, False]])
    for found in (circuit.decode(data, observed).data, circuit.sample_conditional(data, observed)[0]):
        assert found[0, 0] == 3 and found[0, 1] != found[0, 1].round()


def test_data_and_masks_broadcast_over_leading_axes_and_events():
    circuit, data = make(3, emission=nn.Gaussian((2, 3, 2), 3)), torch.randn(12, 3, 3, generator=seeded())
    observed, mask = some_observed(12, 3), torch.tensor([True, False, True])
    wide = observed[..., None].expand(data.shape)
    for one, other in ((observed, wide), (mask, mask.expand(12, 3))):
        assert torch.equal(circuit.log_prob(data, one), circuit.log_prob(data, other))
        assert torch.equal(circuit.posterior(data, one).states, circuit.posterior(data, other).states)
        assert torch.equal(circuit.decode(data, one).data, circuit.decode(data, other).data)
    drawn = circuit.sample_conditional(data, mask, 2, seeded())
    assert torch.equal(drawn[:, :, mask], data[:, mask].expand(2, 12, 2, 3))
    found = circuit.log_prob(data)
    torch.testing.assert_close(circuit.log_prob(data.view(3, 4, 3, 3)), found.view(3, 4))
    torch.testing.assert_close(circuit.log_prob(data[5]), found[5])
    assert circuit.sample_conditional(data.view(3, 4, 3, 3), num_samples=2).shape == (2, 3, 4, 3, 3)


def test_impossible_data_and_repetitions_have_probability_zero():
    circuit = make(3)
    weights = circuit.emission.weights
    weights.set(torch.tensor([0.5, 0.5, 0.0])[:, None].expand(weights.logits.shape))
    data = torch.tensor([[0, 1, 1], [0, 2, 1]])
    found = circuit.log_prob(data)
    assert found[0].isfinite() and found[1] == -torch.inf
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in circuit.parameters())
    assert (circuit.posterior(data).states[1] == 0).all()
    for method in (circuit.conditionals, circuit.decode, circuit.sample_conditional):
        with pytest.raises(ValueError, match="^data: expected what is possible, .* -inf 1 times; give "):
            method(data)
    # the first repetition has no 0, the other nothing else
    shares = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    weights.set(shares[:, None, :, None].expand(2, 3, K, 2))
    data, observed = torch.tensor([1, 0, 0]), torch.tensor([True, False, False])
    drawn, completed = circuit.sample_conditional(data, observed, 500, seeded()), circuit.decode(data, observed)
    assert drawn.shape == (500, 3) and (drawn > 0).all()
    assert completed.repetition == 0 and (completed.data > 0).all()


@pytest.mark.parametrize(("structure", "missing"), [(None, True), ("low rank and diagonal", False)])
def test_draws_have_the_frequencies_of_the_table(structure, missing):
    transition = trained(structure, seeded(1), lead=(2, 1)) if structure else None
    circuit, n = make(3, 4 if structure else 2, seed=5, transition=transition), 10_000
    data, observed = torch.tensor([[0, 2, 1], [1, 0, 0]]), torch.tensor([[False, True, False], [False, False, False]])
    if missing:
        drawn = circuit.sample_conditional(data, observed, n, seeded(3))
    else:
        drawn = circuit.sample(2 * n, seeded(3)).data.view(n, 2, 3)
        assert torch.equal(drawn, circuit.sample(2 * n, seeded(3)).data.view(n, 2, 3))
    assert drawn.shape == (n, 2, 3) and drawn.dtype == torch.int64
    for i in range(2):
        joint = where_observed(sum(terms_of(circuit).values()), data[i].numpy(), observed[i].numpy() & missing)
        table, counts = joint / joint.sum(), np.zeros(joint.shape)
        np.add.at(counts, tuple(drawn[:, i].numpy().T), 1)
        # within four standard deviations of every cell, and nothing where the table is 0
        assert (counts[table == 0] == 0).all()
        assert (np.abs(counts - n * table) <= 4 * np.sqrt(n * table)).all()


@pytest.mark.parametrize(
    "options, data",
    [
        ({"emission": "bernoulli"}, torch.tensor([[0, 1, 1], [1, 1, 0]])),
        ({"emission": "gaussian"}, torch.tensor([[0.5, -1.0, 2.0], [1.0, torch.nan, 0.0]])),
        ({"emission": nn.Gaussian((2, 3, 2), 2)}, torch.arange(12.0).view(2, 3, 2)),
        ({"emission": nn.Poisson((2, 3, 2))}, torch.tensor([[0, 4, 1], [2, 3, 0]])),
        ({"emission": nn.Mixture(nn.Categorical((2, 3, 2, 4), 5))}, torch.tensor([[0, 4, 1], [2, 3, 0]])),
    ],
)
def test_inputs_of_every_family_are_completed(options, data):
    circuit = make(3, **options)
    circuit.emission.reset_parameters(seeded())
    observed = torch.tensor([[True, False, True], [False, True, True]])
    drawn = circuit.sample_conditional(data, observed, 5, seeded())
    assert drawn.shape == (5, *data.shape)
    known = observed.view(2, 3, *[1] * (data.dim() - 2)) & ~data.isnan()
    assert (drawn == data)[:, known.expand(data.shape)].all()
    completed, other = circuit.decode(data, observed), circuit.decode(torch.where(known, data, drawn[0]))
    # the same completions are summed in another order, each within the contract
    bound = 2 * (torch.finfo(torch.float32).eps * other.score.abs() + of_steps(3, 3, dtype=torch.float32))
    assert (completed.score >= other.score - bound).all()
    if not isinstance(circuit.emission, nn.Gaussian | nn.Poisson):
        conditionals = circuit.conditionals(data, observed)
        torch.testing.assert_close(conditionals.sum(-1), torch.ones(2, 3))
        hit = conditionals.gather(-1, data[..., None])[..., 0]
        assert (hit[observed] == 1).all() and (hit[~observed] < 1).all()


def test_training_step_holds_a_few_tensors_of_the_size_of_the_messages():
    n, v, c = 64, 20, 32
    circuit, data = make(v, c, 1, emission=nn.Categorical((1, v, c), 4)), torch.randint(4, (n, v), generator=seeded(1))

    def step():
        return torch.autograd.grad(circuit.log_prob(data).sum(), list(circuit.parameters()))

    messages, parameters = n * v * c * 4, sum(4 * parameter.numel() for parameter in circuit.parameters())
    step()
    # potentials, messages, the posteriors, and one more for what is computed again
    assert peak_bytes(step) < 4 * messages + 6 * parameters + 2**20


@pytest.mark.parametrize(("lead", "dtype"), [((), torch.float32), ((2, 3), torch.float64)], ids=str)
def test_sum_layer_mixes_and_its_gradients_are_shares(lead, dtype):
    layer = nn.SumLayer(4, 6, lead, generator=seeded()).to(dtype)
    # log-values far apart and far from 0, some of them impossible, and one row without anything possible
    x = 5 * torch.randn(7, *lead, 4, dtype=dtype, generator=seeded(1))
    x += 1e3 * torch.randn(x.shape[:-1], dtype=dtype, generator=seeded(2))[..., None].sign()
    x[torch.rand(x.shape, generator=seeded(3)) < 0.2] = -torch.inf
    x.view(-1, 4)[0] = -torch.inf
    terms = x.double()[..., None] + layer.weights.logits.detach().double().log_softmax(-2)
    found, truth = layer(x.requires_grad_()), terms.logsumexp(-2).numpy()
    assert found.shape == (7, *lead, 6) and found.dtype == dtype
    # within the contract of a single product, whose weights are rounded once more
    assert_values(found, truth, ulp(truth, dtype) + value_bound(truth, 2, 4, dtype=dtype))
    found.masked_fill(found == -torch.inf, 0).sum().backward()
    shares = terms.softmax(-2).nan_to_num()
    torch.testing.assert_close(x.grad.double(), shares.sum(-1), rtol=0, atol=1e-6)
    # a logit's gradient is zero in sum over the inputs
    flow = shares.sum(0)
    expected = flow - layer.weights().detach().double().exp() * flow.sum(-2, keepdim=True)
    torch.testing.assert_close(layer.weights.logits.grad.double(), expected, rtol=0, atol=1e-5)


def test_sum_layer_compiles_and_has_half_precision_and_second_derivatives():
    layer, x = nn.SumLayer(4, 3, (5,), generator=seeded()), torch.randn(6, 5, 4, generator=seeded(1))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    half, rounded = copy.deepcopy(layer).bfloat16(), x.bfloat16()
    found = half(rounded)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), half.double()(rounded.double()), rtol=0, atol=1e-5)
    leaf = x[:2].double().requires_grad_()
    assert torch.autograd.gradcheck(layer.double(), (leaf,)) and torch.autograd.gradgradcheck(layer, (leaf,))
