"""Models on several ranks, which hold sequences (DDP, FSDP2) or steps (`group`), learn what one process learns."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from logchain.nn import HMM, ChainCircuit, LinearChainCRF

pytestmark = pytest.mark.xdist_group("ranks")

F64 = torch.float64
STEPS, SEQUENCES, V = 4, 6, 9
LENGTHS = torch.tensor([9, 5, 1, 7, 9, 3])

# float64 sums in another order, over a few steps of an optimizer that divides by their size
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def model_of(kind):
    """The model, the same in every process."""
    torch.manual_seed(1)
    models = {
        "gaussian": lambda: HMM(3, "gaussian", num_features=4),
        "stationary": lambda: HMM(3, "gaussian", num_features=4, initial="stationary"),
        "matrices": lambda: HMM(3, "gaussian", num_features=4, num_steps=V),
        "categorical": lambda: HMM(3, "categorical", num_categories=4),
        "crf": lambda: LinearChainCRF(4, batch_first=True),
        "circuit": lambda: ChainCircuit(V, 3, 2, num_categories=4),
    }
    return models[kind]().double()


def data_of(kind):
    generator = torch.Generator().manual_seed(0)
    if kind in ("categorical", "circuit"):
        return torch.randint(0, 4, (SEQUENCES, V), generator=generator)
    return torch.randn(SEQUENCES, V, 4, generator=generator, dtype=F64)


def loss_of(model, kind, sequences):
    """The mean over some sequences of a batch, by the model's `forward`."""
    data, lengths = data_of(kind)[sequences], LENGTHS[sequences]
    if kind == "circuit":
        return -model(data).mean()
    if kind == "crf":
        tags, mask = data_of("categorical")[sequences], torch.arange(V) < lengths[:, None]
        return -model(data, tags, mask, reduction="mean")
    return -model(data, lengths=lengths).mean()


OPTIMIZERS = {"sgd": lambda of: torch.optim.SGD(of, 0.1), "adam": lambda of: torch.optim.Adam(of)}


def trained(model, kind, optimizer, sequences=slice(None)):
    steps, losses = OPTIMIZERS[optimizer](model.parameters()), []
    for _ in range(STEPS):
        steps.zero_grad()
        losses.append(loss_of(model, kind, sequences))
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        steps.step()
    return torch.stack(losses).detach()


def trained_on_rank(rank, kind, wrapper, optimizer):
    """The mean of both ranks' losses, and the parameters after all steps."""
    model, half = model_of(kind), SEQUENCES // 2
    wrap = {
        "ddp": DistributedDataParallel,
        "fsdp2": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))),
    }
    wrapped = wrap[wrapper](model)
    losses = trained(wrapped, kind, optimizer, slice(half * rank, half * rank + half))
    dist.all_reduce(losses)
    if wrapper == "ddp":
        return losses / 2, model.state_dict()
    whole = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return losses / 2, {name: value.clone() for name, value in whole.items()}


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("gaussian", "sgd"), ("gaussian", "adam"), ("categorical", "sgd"), ("crf", "sgd"), ("circuit", "sgd")],
)
def test_wrapped_models_learn_what_one_process_learns(teams, kind, wrapper, optimizer):
    model = model_of(kind)
    expected = trained(model, kind, optimizer)
    assert expected[-1] < expected[0]
    for rank, (losses, state) in enumerate(teams(2).values(trained_on_rank, kind, wrapper, optimizer)):
        torch.testing.assert_close(losses, expected, **CLOSE)
        if rank == 0 or wrapper == "ddp":  # the first rank gathers the parameters of FSDP2
            torch.testing.assert_close(dict(state), dict(model.state_dict()), **CLOSE)


def write_sharded(rank, kind, method):
    model = fully_shard(model_of(kind), mesh=init_device_mesh("cpu", (2,)))
    register_fsdp_forward_method(model, method)
    getattr(model, method)(data_of(kind))


@pytest.mark.parametrize("kind", ["categorical", "circuit"])
@pytest.mark.parametrize("method", ["fit", "initialise"])
def test_sharded_parameters_are_not_written(teams, kind, method):
    """FSDP2 would drop what these methods write."""
    for outcome in teams(2).run(write_sharded, kind, method):
        assert isinstance(outcome.error, ValueError) and "expected one that is not sharded yet" in str(outcome.error)


SIZES = {1: (V,), 2: (5, 4), 3: (4, 0, 5)}


def steps_of(rank, ranks):
    """The variables of a rank, and the matrices that lead into them."""
    start = sum(SIZES[ranks][:rank])
    stop = start + SIZES[ranks][rank]
    return slice(start, stop), slice(max(0, start - 1), max(0, start - 1, stop - 1))


def by_steps(rank, ranks, kind):
    """The loss, its gradients and other results of a model whose steps lie on ranks, or of one process."""
    model, (variables, _) = model_of(kind), steps_of(rank, ranks)
    data, options = data_of(kind)[:, variables], {"lengths": LENGTHS, "group": dist.group.WORLD if ranks > 1 else None}
    loss = model.log_prob(data, **options).sum()
    loss.backward()
    posterior, path = model.posterior(data, transitions="sum", **options), model.decode(data, **options)
    draws = model.sample_posterior(data, 5, generator=torch.Generator().manual_seed(0), **options)
    whole = [loss.detach(), path.score, *(parameter.grad for parameter in model.parameters())]
    return whole, posterior.transitions, posterior.states, path.states, draws


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["gaussian", "stationary", "matrices", "categorical"])
def test_models_of_sharded_steps_equal_one_process(teams, kind, ranks):
    expected, counts, states, path, _ = by_steps(0, 1, kind)
    for rank, (whole, own_counts, own_states, own_path, draws) in enumerate(teams(ranks).values(by_steps, ranks, kind)):
        variables, steps = steps_of(rank, ranks)
        torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-12)
        own = counts[..., steps, :, :] if kind == "matrices" else counts
        torch.testing.assert_close([own_counts, own_states], [own, states[:, variables]], rtol=1e-10, atol=1e-12)
        assert torch.equal(own_path, path[:, variables])
        assert torch.equal(draws < 0, (path[:, variables] < 0).expand(5, -1, -1))


def circuit_of(rank, ranks):
    """A circuit in 2 repetitions, or the part of it that a rank has."""
    whole = model_of("circuit")
    if ranks == 1:
        return whole
    circuit = ChainCircuit(SIZES[ranks][rank], 3, 2, num_categories=4, group=dist.group.WORLD).double()
    variables, steps = steps_of(rank, ranks)
    state = whole.state_dict()
    state["input.weights.logits"] = state["input.weights.logits"][:, variables]
    state["bulk.logits"] = state["bulk.logits"][:, steps]
    circuit.load_state_dict(state)
    return circuit


def circuit_results(rank, ranks):
    circuit, data = circuit_of(rank, ranks), data_of("circuit")[:, steps_of(rank, ranks)[0]]
    loss = circuit.log_prob(data).sum()
    loss.backward()
    own = [
        circuit.input.weights.logits.grad.clone(),
        circuit.bulk.logits.grad.clone(),
        circuit.mpe(data.double()).states,
    ]
    whole = [loss.detach(), circuit.p0.logits.grad.clone(), circuit.mixing.logits.grad.clone()]
    return whole, own, circuit.fit(data, restarts=0, max_iterations=3).history


def test_a_circuit_of_sharded_variables_equals_one_process(teams):
    expected, parts, history = circuit_results(0, 1)
    assert history[-1] > history[0]
    for rank, (whole, own, own_history) in enumerate(teams(2).values(circuit_results, 2)):
        variables, steps = steps_of(rank, 2)
        own_parts = [part[:, some] for part, some in zip(parts, (variables, steps, variables), strict=True)]
        torch.testing.assert_close([whole, own], [expected, own_parts], rtol=1e-10, atol=1e-13)
        assert own_history == pytest.approx(history, rel=1e-12)


def wrong_model(rank, wrong):
    """A model of which something is wrong on rank 1."""
    if wrong == "circuit":
        model, data, options = circuit_of(rank, 2), data_of("circuit")[:, steps_of(rank, 2)[0]], {}
        model.mixing.logits.data[0] += rank
    else:
        model, data, options = model_of("categorical"), data_of("categorical"), {"group": dist.group.WORLD}
        model.transition.logits.data[0, 0] += rank
    model.log_prob(data, **options)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("model", "rank 1: parameters: expected the same values as on rank 0, got other values"),
        ("circuit", "rank 1: mixing and p0: expected the same weights as on rank 0"),
    ],
)
def test_a_wrong_model_on_one_rank_is_raised_on_all(teams, wrong, text):
    for outcome in teams(2).run(wrong_model, wrong):
        assert isinstance(outcome.error, ValueError) and str(outcome.error).startswith(text), outcome.trace
