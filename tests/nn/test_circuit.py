"""What every circuit can be asked, against the probability of every value of all variables."""

import copy

import numpy as np
import pytest
import torch

from logchain import nn
from tests.contract import of_steps
from tests.nn import circuits

K = 3
KINDS = {
    "chain": (nn.ChainCircuit, {}, circuits.chain),
    "cp": (nn.TreeCircuit, {}, circuits.tree),
    "tucker": (nn.TreeCircuit, {"layer": "tucker"}, circuits.tree),
}
SIZES = [(4, 2, 2), (3, 3, 1), (5, 1, 2), (1, 2, 2), (2, 2, 1)]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def made(kind, v=4, c=2, t=2, seed=0, **options):
    make, more, _ = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    if not options:
        options = {"num_categories": K}
    return make(v, c, t, generator=generator, **options, **more)


def table_of(kind, circuit, best=False):
    return KINDS[kind][2](circuits.weights_of(circuit), best)


def some_observed(n, v, seed=1):
    return torch.rand(n, v, generator=torch.Generator().manual_seed(seed)) < 0.5


@pytest.mark.parametrize("v, c, t", SIZES)
def test_probabilities_are_those_of_the_enumeration_and_sum_to_one(kind, v, c, t):
    circuit = made(kind, v, c, t)
    found = circuit.log_prob(circuits.values(K, v))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.detach(), np.log(table_of(kind, circuit)).ravel(), rtol=1e-6, atol=2e-6)
    wide = circuit.double().log_prob(circuits.values(K, v)).detach()
    np.testing.assert_allclose(wide, np.log(table_of(kind, circuit)).ravel(), rtol=1e-13, atol=1e-13)
    assert abs(wide.exp().sum().item() - 1) < 1e-13


@pytest.mark.parametrize("v, c, t", SIZES)
def test_marginals_and_conditionals_are_those_of_the_enumeration(kind, v, c, t):
    circuit = made(kind, v, c, t).double()
    table, data = table_of(kind, circuit), circuits.values(K, v)
    observed = some_observed(len(data), v)
    log_prob, conditionals = circuit.log_prob(data, observed), circuit.conditionals(data, observed)
    for i, (row, seen) in enumerate(zip(data.numpy(), observed.numpy(), strict=True)):
        joint = circuits.given(table, row, seen)
        np.testing.assert_allclose(log_prob[i].item(), np.log(joint.sum()), atol=1e-12)
        for variable in range(v):
            others = tuple(axis for axis in range(v) if axis != variable)
            np.testing.assert_allclose(conditionals[i, variable], joint.sum(others) / joint.sum(), atol=1e-12)


def test_what_is_nan_is_not_observed(kind):
    circuit, data = made(kind), circuits.values(K, 4)[20:40]
    observed = some_observed(20, 4)
    holes = data.float().masked_fill(~observed, torch.nan)
    torch.testing.assert_close(circuit.log_prob(holes), circuit.log_prob(data, observed), rtol=0, atol=0)
    # what stands where nothing is observed has no influence, though it be no category
    wild = data.masked_fill(~observed, -7)
    torch.testing.assert_close(circuit.log_prob(wild, observed), circuit.log_prob(data, observed), rtol=0, atol=0)
    drawn = circuit.sample_conditional(holes, generator=torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.float32 and not drawn.isnan().any()
    assert (drawn[0] == data)[observed].all()


@pytest.mark.parametrize("v, c, t", SIZES)
def test_the_most_probable_explanation_is_that_of_the_enumeration(kind, v, c, t):
    circuit = made(kind, v, c, t).double()
    best, data = table_of(kind, circuit, best=True), circuits.values(K, v)
    observed = some_observed(len(data), v)
    found = circuit.mpe(data, observed)
    assert (found.data == data)[observed].all() and found.data.dtype == data.dtype
    for i, (row, seen) in enumerate(zip(data.numpy(), observed.numpy(), strict=True)):
        joint = circuits.given(best, row, seen)
        np.testing.assert_allclose(np.exp(found.log_prob[i].item()), joint.max(), rtol=1e-12)
        np.testing.assert_allclose(joint[tuple(found.data[i])], joint.max(), rtol=1e-12)


def test_posteriors_of_hidden_units_are_shares(kind):
    circuit, data = made(kind).double(), circuits.values(K, 4)
    found = circuit.posterior(data)
    assert found.shape == (K**4, 2, 4, 2)
    torch.testing.assert_close(found.sum((-1, -3)), torch.ones(K**4, 4, dtype=torch.float64))
    # p(unit, value) of the last variable, from p(value | unit), is the probability of the value
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    prior = circuit.posterior(data[:1], nothing)[0, :, -1]  # (t, c)
    weights = circuits.weights_of(circuit)["input.weights"][:, -1]
    np.testing.assert_allclose(
        np.einsum("tc,tkc->k", prior, weights), table_of(kind, circuit).sum((0, 1, 2)), atol=1e-12
    )


def test_samples_have_the_frequencies_of_the_table(kind):
    circuit = made(kind, 3)
    table, n = table_of(kind, circuit), 20_000
    drawn = circuit.sample(n, torch.Generator().manual_seed(3))
    assert drawn.shape == (n, 3) and drawn.dtype == torch.int64
    assert torch.equal(drawn, circuit.sample(n, torch.Generator().manual_seed(3)))
    assert_frequencies(drawn, table)


def test_conditional_samples_have_the_frequencies_of_the_table(kind):
    circuit = made(kind, 3, seed=5)
    data, observed = torch.tensor([[0, 2, 1], [1, 0, 0]]), torch.tensor([[False, True, False], [False, False, False]])
    drawn = circuit.sample_conditional(data, observed, 20_000, torch.Generator().manual_seed(3))
    assert drawn.shape == (20_000, 2, 3)
    for i in range(2):
        joint = circuits.given(table_of(kind, circuit), data[i].numpy(), observed[i].numpy())
        assert_frequencies(drawn[:, i], joint / joint.sum())


def assert_frequencies(drawn, table):
    """Within four standard deviations of every cell, and nothing where the table is 0."""
    counts = np.zeros(table.shape)
    np.add.at(counts, tuple(drawn.numpy().T), 1)
    assert (counts[table == 0] == 0).all()
    assert (np.abs(counts - len(drawn) * table) <= 4 * np.sqrt(len(drawn) * table)).all()


def test_an_em_step_takes_the_shares_of_the_expected_counts(kind):
    circuit = made(kind, 3).double()
    data = torch.randint(K, (7, 3), generator=torch.Generator().manual_seed(2))
    counts = np.zeros((K,) * 3)
    np.add.at(counts, tuple(data.numpy().T), 1)
    expected = circuits.expected_counts(KINDS[kind][2], circuits.weights_of(circuit), counts)
    before = circuit.log_prob(data).sum().item()
    found = nn.em_step(circuit, [lambda: circuit.log_prob(data).sum()])
    assert abs(found.item() - before) < 1e-12
    after = circuits.weights_of(circuit)
    assert after.keys() == expected.keys()
    for name, array in expected.items():
        dim = dict(circuit.named_modules())[name].dim
        np.testing.assert_allclose(after[name], array / array.sum(dim, keepdims=True), atol=1e-7, err_msg=name)


@pytest.mark.parametrize("missing", [False, True])
def test_a_fit_by_em_never_falls_and_ends_at_a_stationary_point(kind, missing):
    circuit = made(kind, 3, seed=4).double()
    data = torch.randint(K, (30, 3), generator=torch.Generator().manual_seed(2))
    observed = some_observed(30, 3) if missing else None
    report = circuit.fit(data, observed=observed, max_iterations=25, generator=torch.Generator().manual_seed(0))
    history = np.array(report.history)
    assert (np.diff(history) >= -1e-9).all() and history[-1] > history[0] + 1
    assert abs(circuit.log_prob(data, observed).sum().item() - report.log_likelihood) < 1e-9


def test_a_fit_by_gradients_raises_the_likelihood(kind):
    circuit = made(kind, 3)
    data = torch.randint(K, (30, 3), generator=torch.Generator().manual_seed(2)) * torch.tensor([1, 0, 1])
    report = circuit.fit(data, method="gradient", max_iterations=5, generator=torch.Generator().manual_seed(0))
    assert report.log_likelihood > report.history[0] + 5


def test_what_is_impossible_is_minus_infinity_with_gradient_zero_and_has_no_conditionals(kind):
    circuit = made(kind, 3)
    weights = circuit.input.weights
    weights.set(torch.tensor([0.5, 0.5, 0.0])[:, None].expand(weights.logits.shape))
    data = torch.tensor([[0, 1, 1], [0, 2, 1]])
    found = circuit.log_prob(data)
    assert found[0].isfinite() and found[1] == -torch.inf
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in circuit.parameters())
    assert (circuit.posterior(data)[1] == 0).all()
    for question in (circuit.conditionals, circuit.mpe, circuit.sample_conditional):
        with pytest.raises(ValueError, match=r"^data: expected what is possible, got log-probability -inf 1 times$"):
            question(data)


def test_a_repetition_that_is_impossible_is_never_drawn(kind):
    circuit = made(kind, 3)
    shares = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])  # the first repetition has no 0, the other nothing else
    circuit.input.weights.set(shares[:, None, :, None].expand(2, 3, K, 2))
    observed = torch.tensor([True, False, False])
    drawn = circuit.sample_conditional(
        torch.tensor([1, 0, 0]), observed, 500, generator=torch.Generator().manual_seed(0)
    )
    assert (drawn > 0).all() and drawn.shape == (500, 3)
    found = circuit.mpe(torch.tensor([1, 0, 0]), observed)
    assert found.repetition == 0 and (found.data > 0).all()


@pytest.mark.parametrize(
    "options, data",
    [
        ({"input": "bernoulli"}, torch.tensor([[0, 1, 1], [1, 1, 0]])),
        ({"input": "binomial", "total_count": 4}, torch.tensor([[0, 4, 1], [2, 3, 0]])),
        ({"input": "gaussian"}, torch.tensor([[0.5, -1.0, 2.0], [1.0, torch.nan, 0.0]])),
        ({"input": nn.Gaussian((2, 3, 2), 2)}, torch.arange(12.0).view(2, 3, 2)),
        ({"input": nn.Poisson((2, 3, 2))}, torch.tensor([[0, 4, 1], [2, 3, 0]])),
        ({"input": nn.Mixture(nn.Categorical((2, 3, 2, 4), 5))}, torch.tensor([[0, 4, 1], [2, 3, 0]])),
    ],
)
def test_families_of_inputs(kind, options, data):
    circuit = made(kind, 3, **options)
    circuit.input.reset_parameters(torch.Generator().manual_seed(0))
    log_prob = circuit.log_prob(data)
    assert log_prob.shape == (2,) and log_prob.isfinite().all()
    observed = torch.tensor([[True, False, True], [False, True, True]])
    again = circuit.sample_conditional(data, observed, 5, torch.Generator().manual_seed(0))
    assert again.shape == (5, *data.shape)
    known = observed.view(2, 3, *[1] * (data.dim() - 2)) & ~data.isnan()
    assert (again == data)[:, known.expand(data.shape)].all()
    completed, other = circuit.mpe(data, observed), circuit.mpe(torch.where(known, data, again[0]))
    # completions that are the same are summed in another order: each is within the contract
    bound = 2 * (torch.finfo(torch.float32).eps * other.log_prob.abs() + of_steps(3, 3, dtype=torch.float32))
    assert (completed.log_prob >= other.log_prob - bound).all()
    assert circuit.sample(4).shape == (4, *data.shape[1:])
    if isinstance(circuit.input, nn.Gaussian | nn.Poisson):
        with pytest.raises(TypeError, match=r"^input: expected a family with finitely many values, got (Gauss|Poiss)"):
            circuit.conditionals(data)
    else:
        torch.testing.assert_close(circuit.conditionals(data, observed).sum(-1), torch.ones(2, 3))


def test_a_mask_may_leave_out_the_axis_of_an_event():
    circuit = made("chain", 3, input=nn.Gaussian((2, 3, 2), 3))
    data = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0))
    observed = some_observed(4, 3)
    alone, every = observed[0], observed[:1].expand(4, 3)
    torch.testing.assert_close(circuit.log_prob(data, alone), circuit.log_prob(data, every), rtol=0, atol=0)
    wide = observed[..., None].expand(4, 3, 3)
    torch.testing.assert_close(circuit.log_prob(data, observed), circuit.log_prob(data, wide), rtol=0, atol=0)
    torch.testing.assert_close(circuit.mpe(data, observed).data, circuit.mpe(data, wide).data, rtol=0, atol=0)
    parts = wide.clone()
    parts[0, 0] = torch.tensor([True, False, True])
    assert circuit.log_prob(data, parts).isfinite().all()
    with pytest.raises(ValueError, match=r"^data: expected each event whole or missing"):
        circuit.mpe(data, parts)


def test_a_mask_of_the_variables_serves_all_data(kind):
    circuit, data = made(kind), circuits.values(K, 4)[:12]
    mask = torch.tensor([True, False, True, True])
    whole = mask.expand(12, 4)
    for method in ("log_prob", "posterior", "conditionals"):
        found = getattr(circuit, method)(data, mask)
        assert torch.equal(found, getattr(circuit, method)(data, whole))
        assert torch.equal(getattr(circuit, method)(data.view(3, 4, 4), mask), found.view(3, 4, *found.shape[1:]))
    assert torch.equal(circuit.mpe(data, mask).data, circuit.mpe(data, whole).data)
    drawn = circuit.sample_conditional(data, mask, 2, torch.Generator().manual_seed(0))
    assert torch.equal(drawn[..., mask], data[..., mask].expand(2, 12, 3))
    # the sizes of data and mask agree, and a batch is divided
    fits = [
        made(kind).fit(data[:4], observed=one, batch_size=2, max_iterations=2, restarts=0) for one in (mask, whole[:4])
    ]
    assert fits[0] == fits[1]


def test_any_leading_axes(kind):
    circuit, data = made(kind), circuits.values(K, 4)[:12]
    found = circuit.log_prob(data)
    torch.testing.assert_close(circuit.log_prob(data.view(3, 4, 4)), found.view(3, 4))
    torch.testing.assert_close(circuit(data[5]), found[5])
    assert circuit.conditionals(data[5]).shape == (4, K)
    assert circuit.sample_conditional(data.view(3, 4, 4), num_samples=2).shape == (2, 3, 4, 4)
    assert circuit.mpe(data[5]).states.shape == (4,)
    assert "num_variables=4, num_states=2, num_repetitions=2" in repr(circuit)


def test_the_repetitions_of_long_data_are_told_apart(kind):
    """At a log-likelihood of -9e4 float32 is 0.008 apart; posteriors are not."""
    v = 300
    circuit = made(kind, v, input=nn.Gaussian((2, v, 2), generator=torch.Generator().manual_seed(0)))
    noise = torch.Generator().manual_seed(4)
    with torch.no_grad():  # nearly the same in both, so that both are likely
        circuit.input.means[1] = circuit.input.means[0]
        for part in circuit.modules():
            if isinstance(part, nn.LogWeights) and part is not circuit.mixing:
                part.logits[1] = part.logits[0] + 0.05 * torch.randn(part.logits[0].shape, generator=noise)
    data = 25 + 0.01 * torch.randn(16, v, generator=noise)
    assert (circuit.log_prob(data) < -8.8e4).all()
    x = circuit.input(data[:, None]).double().detach()
    # what is common to all units of a variable changes no posterior
    x = (x - x.amax((1, 3), keepdim=True)).requires_grad_()
    wide = copy.deepcopy(circuit).double()
    (exact,) = torch.autograd.grad(wide._mixed(wide.components(x)).sum(), x)
    assert exact[:, :, 0].sum(-1).min() > 0.01
    assert (circuit.posterior(data) - exact).abs().max() < 1e-5


def test_a_start_depends_on_the_generator_and_the_data_alone(kind):
    data = torch.randint(K, (30, 4), generator=torch.Generator().manual_seed(2))
    one, other = made(kind, seed=0), made(kind, seed=1)
    for circuit in (one, other):
        circuit.initialise(data, generator=torch.Generator().manual_seed(3))
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_it_compiles_in_one_graph(kind):
    circuit, data = made(kind), circuits.values(K, 4)[:9]
    observed = some_observed(9, 4)
    compiled = torch.compile(lambda: circuit.log_prob(data, observed), fullgraph=True, backend="aot_eager")
    expected = circuit.log_prob(data, observed)
    torch.testing.assert_close(compiled(), expected)
    grads = torch.autograd.grad(expected.sum(), list(circuit.parameters()))
    again = torch.autograd.grad(compiled().sum(), list(circuit.parameters()))
    torch.testing.assert_close(again, grads)


def test_a_start_keeps_what_is_not_trained(kind):
    circuit = made(kind, 3)
    kept = [circuit.mixing.logits, *circuit.input.parameters()]
    for parameter in kept:
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in kept]
    circuit.initialise(torch.zeros(5, 3, dtype=torch.int64))
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))


def test_integers_do_not_round_what_is_filled_in():
    circuit = nn.ChainCircuit(2, 2, input="gaussian")
    data, observed = torch.tensor([[3, 0]]), torch.tensor([[True, False]])
    for found in (circuit.mpe(data, observed).data, circuit.sample_conditional(data, observed)[0]):
        assert found[0, 0] == 3 and found[0, 1] != found[0, 1].round()
