"""A chain as the launchers of the fused kernels want it, held to the accuracy contract."""

import numpy as np
import pytest
import torch

from logchain import reference
from tests.contract import TENSOR_CORES as K
from tests.contract import Truth, assert_values, of_steps
from tests.families import Chain

backward_chain = pytest.importorskip("logchain.kernels.gpu.backward_chain")
forward_chain = pytest.importorskip("logchain.kernels.gpu.forward_chain")

F32, F64 = torch.float32, torch.float64
NAN = float("nan")

# the first shares a set of matrices among 6 sequences, the second gives each its own
SHARED, EACH = False, True
BOTH = pytest.mark.parametrize("each", [SHARED, EACH], ids=["dot", "vector"])


def few(each: bool) -> dict:
    """Six sequences that share matrices, or two that do not: the interpreter takes its time for each program."""
    return {"each": True, "n": 2, "t": 1} if each else {"each": False, "n": 3, "t": 2}


class Problem:
    """A chain [n, t] as the launchers want it: 6 sequences that share one set, or 6 sets of one sequence."""

    def __init__(self, chain: Chain, device: str, lengths=None):
        self.chain, self.lengths, self.device = chain, lengths, device
        x, bulk, p0 = (operand.to(device) for operand in chain[:3])
        batch, (v, c) = x.shape[:-2], x.shape[-2:]
        steps = bulk.shape[-3]
        self.g = bulk[..., 0, 0, 0].numel() if steps else batch.numel() if bulk.shape[:-3] == batch else 1
        self.m = batch.numel() // self.g
        self.x = x.movedim(-2, 0).reshape(v, self.g, self.m, c)
        self.bulk = bulk.movedim(-3, 0).reshape(steps, self.g, c, c)
        start = p0 if chain.log_params else p0.double().log()
        self.start = start.expand(*batch, c).reshape(self.g, self.m, c)
        self.ends = None
        if lengths is not None:
            lengths = lengths.reshape(lengths.shape + (1,) * (len(batch) - lengths.dim()))
            self.ends = lengths.expand(batch).reshape(self.g, self.m).to(device)

    def forward(self, **options):
        options = {"log_params": self.chain.log_params, "keep": False} | options
        return forward_chain.forward(self.x, self.bulk, self.start, self.ends, **options)

    def value(self, **options):
        """The log-partition [*B] on the CPU."""
        return self.forward(**options)[0].reshape(self.chain.x.shape[:-2]).cpu()

    def backward(self, messages, weight, log_norm=None, **options):
        options = {"log_params": self.chain.log_params} | options
        log_norm = torch.zeros(self.g, self.m, dtype=F64, device=self.device) if log_norm is None else log_norm
        return backward_chain.backward(self.x, self.bulk, self.ends, messages, log_norm, weight, **options)

    def of_batch(self, values: np.ndarray) -> np.ndarray:
        """[*B, v, ...] as (v, g, m, ...)."""
        values = values.reshape(self.g, self.m, *values.shape[len(self.chain.x.shape) - 2 :])
        return np.moveaxis(values, 2, 0)

    def assert_contract(self, slack: float = 0.0):
        truth = Truth(self.chain, self.lengths)
        log_norm, messages = self.forward(keep=True)
        assert_values(log_norm.reshape(truth.log_norm.shape).cpu(), truth.log_norm, truth.value_bound(k=K) + slack)
        self.assert_messages(messages, slack)
        self.assert_gradients(messages, truth, slack)

    def assert_gradients(self, messages, truth, slack: float = 0.0):
        """Posteriors times weights in `grad_x`, and transition posteriors from messages and r, within the contract."""
        weight = torch.arange(self.g * self.m).cos().reshape(self.g, self.m).to(messages)
        grad_x = torch.full_like(self.x, NAN)
        start, r = self.backward(messages, weight, grad_x=grad_x, want_r=True)
        states, reach = (self.of_batch(array) for array in (truth.states, truth.reach.states))
        bound = slack + self.of_batch(truth.gradient_bound(truth.states, K))
        weight = weight.cpu().double().numpy()[..., None]
        found = grad_x.cpu().double().numpy()
        assert (found[reach == 0] == 0).all()
        if grad_x.dtype in (torch.bfloat16, torch.float16):
            bound = bound + torch.finfo(grad_x.dtype).eps * states
        error = np.abs(found - weight * states)
        assert (error <= bound).all(), f"error {error.max():.3g}, {(error / bound).max():.3g} times the bound"
        error = np.abs(start.cpu().double().numpy() - weight * states[0])
        assert (error <= bound[0]).all()
        log_bulk = self.bulk.cpu().double()
        log_bulk = log_bulk if self.chain.log_params else log_bulk.log()
        a, b = messages[:-1].cpu().double(), r[1:].cpu().double()
        joint = (a[..., :, None] + log_bulk[:, :, None] + b[..., None, :]).exp().numpy()
        error = np.abs(joint - self.of_batch(truth.transitions))
        bound = slack + self.of_batch(truth.gradient_bound(truth.transitions, K))
        assert (error <= bound).all(), f"error {error.max():.3g} of transitions"

    def assert_messages(self, messages, slack: float = 0.0):
        """A maximum of 0, -inf exactly where nothing passes and behind the end, and right between."""
        options = {"log_params": self.chain.log_params, "lengths": self.lengths}
        truth = reference.forward_backward(*(t.double().numpy() for t in self.chain[:3]), **options).forward
        truth = truth.reshape(-1, *truth.shape[-2:]).swapaxes(0, 1).reshape(messages.shape)
        found = messages.cpu().double().numpy()
        np.testing.assert_array_equal(np.isneginf(found), np.isneginf(truth))
        top = truth.max(-1, keepdims=True)
        truth = truth - np.where(np.isneginf(top), 0.0, top)
        shift = np.where(np.isneginf(top), 0.0, found.max(-1, keepdims=True))
        assert (shift == 0.0).all()
        found = found - shift
        possible = np.isfinite(truth)
        deepest = np.abs(np.where(possible, truth, 0.0)).max((0, -1), keepdims=True)
        deepest = np.broadcast_to(deepest, truth.shape)[possible]
        allowed = slack + of_steps(len(truth), truth.shape[-1], deepest, dtype=F32, k=K)
        error = np.abs(found[possible] - truth[possible])
        assert (error <= allowed).all(), f"{(error / allowed).max():.3g} times the bound"
