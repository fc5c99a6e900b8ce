"""Hidden Markov models and circuits whose steps lie on several ranks have the losses and gradients of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from logchain.nn import HMM, ChainCircuit

F64 = torch.float64
SIZES = {2: (7, 6), 3: (5, 0, 8)}


def data_of(emission: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if emission == "categorical":
        return torch.randint(0, 4, (3, 13), generator=generator)
    data = torch.randn(3, 13, generator=generator, dtype=F64)
    data[0, 3] = torch.nan
    return data


def model_of(emission: str, initial: str = "free", num_steps: int | None = None) -> HMM:
    generator = torch.Generator().manual_seed(0)
    categories = 4 if emission == "categorical" else None
    return HMM(
        3, emission, num_categories=categories, initial=initial, num_steps=num_steps, generator=generator
    ).double()


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in model.named_parameters()}


def variables(rank: int, ranks: int) -> slice:
    start = sum(SIZES[ranks][:rank])
    return slice(start, start + SIZES[ranks][rank])


def loss_of_rank(rank: int, ranks: int, options: tuple, lengths: list[int] | None):
    model, data = model_of(*options), data_of(options[0])[:, variables(rank, ranks)]
    if lengths is not None and options[0] == "categorical":  # what lies behind may be no category at all
        inside = torch.arange(13)[variables(rank, ranks)] < torch.tensor(lengths)[:, None]
        data = torch.where(inside, data, 99)
    loss = -model.log_prob(data, lengths=lengths, group=dist.group.WORLD).sum()
    loss.backward()
    return loss.detach(), gradients_of(model)


MODELS = [
    ("categorical",),
    ("gaussian",),
    ("poisson",),
    ("gaussian", "stationary"),
    ("gaussian", "free", 13),
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", MODELS)
@pytest.mark.parametrize("lengths", [None, [13, 4, 9]])
def test_losses_and_gradients(teams, ranks, options, lengths):
    model, data = model_of(*options), data_of(options[0]).abs()
    data = data_of(options[0]) if options[0] != "poisson" else data.nan_to_num(0).round()
    one = -model.log_prob(data, lengths=lengths).sum()
    one.backward()
    run = counts_of_rank if options[0] == "poisson" else loss_of_rank
    for loss, gradients in teams(ranks).values(run, ranks, options, lengths):
        torch.testing.assert_close(loss, one.detach(), rtol=1e-13, atol=1e-12)
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def counts_of_rank(rank: int, ranks: int, options: tuple, lengths: list[int] | None):
    model = model_of(*options)
    data = data_of("poisson").abs().nan_to_num(0).round()[:, variables(rank, ranks)]
    loss = -model.log_prob(data, lengths=lengths, group=dist.group.WORLD).sum()
    loss.backward()
    return loss.detach(), gradients_of(model)


def trained(rank: int, ranks: int, steps: int) -> list[torch.Tensor]:
    model, data = model_of("gaussian"), data_of("gaussian")
    data = data if ranks == 1 else data[:, variables(rank, ranks)]
    optimiser = torch.optim.Adam(model.parameters(), 0.05)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = -model.log_prob(data, group=None if ranks == 1 else dist.group.WORLD).mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return losses


def test_training_is_that_of_one_process(teams):
    one = torch.stack(trained(0, 1, 10))
    for losses in teams(2).values(trained, 2, 10):
        torch.testing.assert_close(torch.stack(losses), one, rtol=1e-11, atol=0)
    assert one[-1] < one[0]


def in_ddp(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Four ranks: two halves of the batch, each with two halves of the steps."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = torch.nn.parallel.DistributedDataParallel(model_of("gaussian"))
    data = torch.cat([data_of("gaussian"), data_of("gaussian") + 1])
    part = data[3 * (rank // 2) :][:3, variables(rank % 2, 2)]
    loss = -model(part, group=halves[rank // 2]).sum()
    loss.backward()
    return loss.detach(), gradients_of(model.module)


def test_sequences_and_steps_sharded_at_once(teams):
    model, data = model_of("gaussian"), torch.cat([data_of("gaussian"), data_of("gaussian") + 1])
    (-model.log_prob(data).sum() / 2).backward()  # DistributedDataParallel takes means
    for _, gradients in teams(4).values(in_ddp):
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12)


class Transition(torch.nn.Module):
    """Logits of transitions from a covariate of each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 9, dtype=F64).view(3, 3))

    def forward(self, covariates: torch.Tensor) -> torch.Tensor:
        return self.weight * covariates[..., None, None]


def with_covariates(rank: int, ranks: int):
    model = HMM(3, "gaussian", transition=Transition(), generator=torch.Generator().manual_seed(0)).double()
    data, covariates = data_of("gaussian"), torch.linspace(0, 2, 12, dtype=F64).expand(3, 12)
    if ranks > 1:
        part = variables(rank, ranks)
        data, covariates = data[:, part], covariates[:, max(0, part.start - 1) : part.stop - 1]
    loss = model.log_prob(data, covariates=covariates, group=None if ranks == 1 else dist.group.WORLD).sum()
    loss.backward()
    return loss.detach(), gradients_of(model)


def test_covariates(teams):
    one, expected = with_covariates(0, 1)
    for loss, gradients in teams(2).values(with_covariates, 2):
        torch.testing.assert_close(loss, one, rtol=1e-13, atol=0)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12)


def asked(rank: int):
    model, data = model_of("gaussian"), data_of("gaussian")[:, variables(rank, 2)]
    options = {"lengths": [13, 4, 9], "group": dist.group.WORLD}
    draws = model.sample_posterior(data, 5, generator=torch.Generator().manual_seed(0), **options)
    return model.posterior(data, transitions="sum", **options), model.decode(data, **options), draws


def test_other_questions(teams):
    model, data = model_of("gaussian"), data_of("gaussian")
    posterior = model.posterior(data, lengths=[13, 4, 9], transitions="sum")
    path = model.decode(data, lengths=[13, 4, 9])
    for rank, (found, best, draws) in enumerate(teams(2).values(asked)):
        part = variables(rank, 2)
        torch.testing.assert_close(found.states, posterior.states[:, part], rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(found.transitions, posterior.transitions, rtol=1e-11, atol=1e-13)
        assert torch.equal(best.states, path.states[:, part])
        torch.testing.assert_close(best.score, path.score, rtol=1e-12, atol=0)
        assert torch.equal(draws < 0, (path.states[:, part] < 0).expand(5, -1, -1))


def wrong_model(rank: int) -> None:
    model = HMM(3, "gaussian", num_features=2 if rank == 1 else None).double()
    model.log_prob(torch.zeros(1, 4, *([2] if rank == 1 else []), dtype=F64), group=dist.group.WORLD)


def other_values(rank: int) -> None:
    model, data = model_of("categorical"), data_of("categorical")[:, variables(rank, 2)]
    if rank == 1:
        model.transition.logits.data = model.transition.logits.flip(-1)
    model.log_prob(data, group=dist.group.WORLD)


def frozen_parameter(rank: int) -> None:
    model, data = model_of("categorical"), data_of("categorical")[:, variables(rank, 2)]
    model.transition.logits.requires_grad_(rank == 0)
    model.log_prob(data, group=dist.group.WORLD)


def test_what_is_trained_has_to_agree(teams):
    for outcome in teams(2).run(frozen_parameter):
        assert isinstance(outcome.error, ValueError) and "rank 1: parameters: expected" in str(outcome.error)


def with_a_mask(rank: int, ranks: int, of_steps: bool) -> torch.Tensor:
    model, data, group = model_of("categorical"), data_of("categorical"), dist.group.WORLD if ranks > 1 else None
    observed = torch.rand(data.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    observed = observed[0] if of_steps else observed
    part = variables(rank, ranks) if ranks > 1 else slice(None)
    return model.log_prob(data[:, part], observed=observed[..., part], lengths=[13, 4, 9], group=group).detach()


@pytest.mark.parametrize("of_steps", [False, True], ids=["of the data", "of the steps"])
def test_a_mask_beside_lengths(teams, of_steps):
    expected = with_a_mask(0, 1, of_steps)
    for found in teams(2).values(with_a_mask, 2, of_steps):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def test_values_of_models_have_to_agree(teams):
    for outcome in teams(2).run(other_values):
        assert isinstance(outcome.error, ValueError)
        assert str(outcome.error) == "rank 1: parameters: expected the same values as on rank 0, got other values"


def test_models_have_to_agree(teams):
    for outcome in teams(2).run(wrong_model):
        assert isinstance(outcome.error, ValueError)
        assert "rank 1: parameters: expected names, shapes and dtypes " in str(outcome.error)


def circuit_of(rank: int, ranks: int) -> ChainCircuit:
    """A circuit of 13 variables in 2 repetitions, or the part of it that a rank has."""
    whole = ChainCircuit(13, 3, 2, num_categories=4, generator=torch.Generator().manual_seed(0)).double()
    if ranks == 1:
        return whole
    part = variables(rank, ranks)
    circuit = ChainCircuit(SIZES[ranks][rank], 3, 2, num_categories=4, group=dist.group.WORLD).double()
    with torch.no_grad():
        circuit.input.weights.logits.copy_(whole.input.weights.logits[:, part])
        circuit.bulk.logits.copy_(whole.bulk.logits[:, max(0, part.start - 1) : part.stop - 1])
        circuit.p0.logits.copy_(whole.p0.logits)
        circuit.mixing.logits.copy_(whole.mixing.logits)
    return circuit


def circuit_gradients(rank: int, ranks: int):
    circuit, data = circuit_of(rank, ranks), data_of("categorical")
    data = data if ranks == 1 else data[:, variables(rank, ranks)]
    loss = circuit.log_prob(data).sum()
    loss.backward()
    return loss.detach(), gradients_of(circuit), circuit.mpe(data.double()), circuit.posterior(data)


def test_circuits(teams):
    one, expected, completion, posterior = circuit_gradients(0, 1)
    for rank, (loss, gradients, best, states) in enumerate(teams(2).values(circuit_gradients, 2)):
        part = variables(rank, 2)
        torch.testing.assert_close(loss, one, rtol=1e-13, atol=0)
        own = {
            "p0.logits": expected["p0.logits"],
            "mixing.logits": expected["mixing.logits"],
            "bulk.logits": expected["bulk.logits"][:, max(0, part.start - 1) : part.stop - 1],
            "input.weights.logits": expected["input.weights.logits"][:, part],
        }
        for name, gradient in own.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-13)
        assert torch.equal(best.states, completion.states[:, part])
        assert torch.equal(best.repetition, completion.repetition)
        torch.testing.assert_close(states, posterior[:, :, part], rtol=1e-10, atol=1e-13)


def circuit_fit(rank: int, ranks: int):
    circuit, data = circuit_of(rank, ranks), data_of("categorical")
    data = data if ranks == 1 else data[:, variables(rank, ranks)]
    return circuit.fit(data, restarts=0, max_iterations=3).history


def test_circuits_learn_by_expectation_maximisation(teams):
    one = circuit_fit(0, 1)
    for history in teams(2).values(circuit_fit, 2):
        assert history == pytest.approx(one, rel=1e-12)
    assert one[-1] > one[0]


def degenerate_fit(rank: int) -> None:
    """The first variable of rank 1 has one value, of which the other rank knows nothing."""
    circuit = ChainCircuit(2, 2, input="gaussian", group=dist.group.WORLD)
    data = torch.arange(8.0).view(4, 2).sin()
    data[:, 0] = 3.0 if rank else data[:, 0]
    circuit.fit(data, restarts=0, max_iterations=3)


def test_a_variance_of_0_on_one_rank_ends_the_fit_on_all(teams):
    for outcome in teams(2).run(degenerate_fit):
        assert isinstance(outcome.error, ValueError)
        assert "rank 1: maximise: expected positive variances, got 0 for unit [0, 0, " in str(outcome.error)


def fit_at_rest(rank: int, options: dict) -> tuple[float, ...]:
    """The log-likelihoods of mini-batches in random order, with parameters that stay as they are."""
    torch.manual_seed(rank)
    optimiser = None if "step" in options else partial(torch.optim.SGD, lr=0.0)
    data = data_of("categorical").repeat(3, 1)[:, variables(rank, 2)]
    return circuit_of(rank, 2).fit(data, restarts=0, max_iterations=4, optimiser=optimiser, **options).history


@pytest.mark.parametrize("options", [{"batch_size": 2, "step": 1e-13}, {"batch_size": 2, "method": "gradient"}])
def test_mini_batches_are_of_the_same_sequences_on_all_ranks(teams, options):
    history = teams(2).values(fit_at_rest, options)[0]
    assert history == pytest.approx([history[-1]] * 5, rel=1e-9)


def circuit_refuses(rank: int, what: str) -> None:
    circuit, data = circuit_of(rank, 2), data_of("categorical")[:, variables(rank, 2)]
    if what == "sample":
        circuit.sample(2)
    elif what == "initialise":
        circuit.fit(data)
    elif what == "optimiser":
        circuit.fit(data, restarts=0, method="gradient")


@pytest.mark.parametrize("what", ["sample", "initialise", "optimiser"])
def test_what_circuits_on_ranks_do_not_offer(teams, what):
    for outcome in teams(2).run(circuit_refuses, what):
        assert isinstance(outcome.error, NotImplementedError | ValueError) and f"{what}: expected" in str(outcome.error)


def wrong_circuit(rank: int, wrong: str) -> None:
    group = dist.group.WORLD
    if wrong == "num_states":
        ChainCircuit(3, 2 + rank, num_categories=4, group=group)
    elif wrong == "num_variables":
        ChainCircuit(3 - 3 * rank, 2, num_categories=4, group=group)
    circuit, data = circuit_of(rank, 2), data_of("categorical")[:, variables(rank, 2)]
    if rank == 1:
        if wrong == "data":
            data = [1, 2]
        elif wrong == "sequences":
            data = data[:1]
        elif wrong == "mixing":
            circuit.mixing.logits.data[0] += 1
    if wrong == "method":
        circuit.fit(data, restarts=0, method="gradient" if rank else "em", optimiser=torch.optim.Adam if rank else None)
    circuit.log_prob(data)


@pytest.mark.parametrize(
    "wrong, text",
    [
        ("num_states", "rank 1: num_states: expected 2, as on rank 0, got 3"),
        ("num_variables", "rank 1: "),
        ("data", "rank 1: data: expected a torch.Tensor, got list"),
        ("sequences", "rank 1: data: expected sequences [3], as on rank 0, got sequences [1]"),
        ("mixing", "rank 1: mixing and p0: expected the same weights as on rank 0"),
        ("method", "rank 1: method: expected em, as on rank 0, got gradient"),
    ],
)
def test_what_is_wrong_with_a_circuit_on_one_rank_is_raised_on_all(teams, wrong, text):
    for outcome in teams(2).run(wrong_circuit, wrong):
        assert isinstance(outcome.error, ValueError | TypeError) and text in str(outcome.error), outcome.error


def few_steps(rank: int, ranks: int, circuit: bool):
    """The gradient of the matrices of a chain of three variables, two of them on the first rank, or on one process."""
    part = slice(None) if ranks == 1 else (slice(0, 2), slice(2, 3))[rank]
    generator, group = torch.Generator().manual_seed(0), None if ranks == 1 else dist.group.WORLD
    weights = torch.eye(2, dtype=F64)[None] + 0.5
    matrices = torch.cat([weights, weights.flip(-1)], 0).log()  # of one norm
    data = torch.tensor([[0, 1, 1]])[:, part]
    if not circuit:
        model = HMM(2, "categorical", num_categories=3, num_steps=3, generator=generator).double()
        model.transition.logits.data.copy_(matrices)
        model.log_prob(data, group=group).sum().backward()
        return model.transition.logits.grad
    model = ChainCircuit(data.shape[-1], 2, num_categories=3, group=group, generator=generator).double()
    drawn_by = torch.Generator().manual_seed(1)
    for weights, places in (model.input.weights, (slice(None), part)), (model.bulk, (slice(None), slice(0, 2))):
        drawn = torch.randn(1, 3, 3, 2, generator=drawn_by, dtype=F64) if weights is not model.bulk else matrices[None]
        some = places if weights is not model.bulk or ranks == 1 else (slice(None), slice(rank, rank + 1))
        weights.logits.data.copy_(drawn[some])
    for weights in model.p0, model.mixing:
        weights.logits.data.zero_()
    model.log_prob(data).sum().backward()
    return model.bulk.logits.grad[0]


@pytest.mark.parametrize("circuit", [False, True])
def test_a_matrix_for_each_of_few_steps(teams, circuit):
    expected = few_steps(0, 1, circuit)
    found = teams(2).values(few_steps, 2, circuit)
    found = torch.cat(found) if circuit else found[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def penalty(rank: int) -> None:
    model, data = model_of("categorical"), data_of("categorical")[:, variables(rank, 2)]
    loss = model.log_prob(data, group=dist.group.WORLD).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()


def test_a_second_derivative_is_refused(teams):
    for outcome in teams(2).run(penalty):
        assert isinstance(outcome.error, RuntimeError) and "expected one derivative" in str(outcome.error)


def test_parameters_of_a_new_circuit_are_those_of_the_first_rank(teams):
    first, second = teams(2).values(new_circuit)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def new_circuit(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rank)
    circuit = ChainCircuit(4, 3, 2, num_categories=4, group=dist.group.WORLD)
    return circuit.p0.logits.detach(), circuit.mixing.logits.detach()


def wrong_data(rank: int, wrong: str) -> None:
    model, data, options = model_of("categorical"), data_of("categorical")[:, variables(rank, 2)], {}
    if rank == 1:
        if wrong == "no tensor":
            data = [1, 2]
        elif wrong == "no steps":
            data = data[0, 0]
        elif wrong == "no category":
            data = data + 9
        elif wrong == "another mask":
            options["observed"] = torch.ones(2, 2, dtype=torch.bool)
        elif wrong == "covariates":
            options["covariates"] = torch.ones(1)
        elif wrong == "lengths of a module":
            model.emission, options["lengths"] = torch.nn.Embedding(4, 3).double(), [13, 4, 9]
    model.log_prob(data, group=dist.group.WORLD, **options)


@pytest.mark.parametrize(
    "wrong, kind, text",
    [
        ("no tensor", TypeError, "rank 1: data: expected a torch.Tensor"),
        ("no steps", ValueError, "rank 1: data: expected at least 1 axes"),
        ("no category", ValueError, "rank 1: "),
        ("another mask", ValueError, "rank 1: observed: expected"),
        ("covariates", ValueError, "rank 1: covariates: expected None"),
        ("lengths of a module", TypeError, "rank 1: lengths: expected None with a group"),
    ],
)
def test_wrong_data_on_one_rank_are_raised_on_all(teams, wrong, kind, text):
    for outcome in teams(2).run(wrong_data, wrong):
        assert type(outcome.error) is kind and text in str(outcome.error), (outcome.error, outcome.trace)
