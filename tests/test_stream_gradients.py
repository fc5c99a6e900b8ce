"""What a stream returns can be differentiated, within a piece or back to the first one."""

import numpy as np
import pytest
import torch

from logchain.stream import Stream
from tests.contract import Truth, assert_gradient
from tests.families import FAMILIES
from tests.streams import division, each_step, joined

F32, F64 = torch.float32, torch.float64
NAN = float("nan")


def test_transforms():
    """Inside torch.compile a stream works, by graph breaks; torch.vmap and forward derivatives are refused."""
    chain = FAMILIES["dense"](F32, n=2, t=1)
    x, bulk, p0 = chain.x[:, 0], chain.bulk[0, 0, :1], chain.p0[0, 0]

    def last(x: torch.Tensor) -> torch.Tensor:
        stream = Stream(bulk, p0)
        stream.update(x[..., :7, :])
        return stream.update(x[..., 7:, :]).filtered

    with pytest.raises(NotImplementedError, match="expected no torch.vmap"):
        torch.vmap(last)(x)
    with pytest.raises(NotImplementedError, match="expected no forward derivative"):
        torch.func.jvp(last, (x,), (x,))
    torch.testing.assert_close(torch.compile(last, backend="eager")(x), last(x), rtol=0, atol=0)
    gradient = torch.func.grad(lambda x: last(x).square().sum())(x)
    x.requires_grad_()
    last(x).square().sum().backward()
    torch.testing.assert_close(gradient, x.grad)


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize(
    "name", ["dense", "sharp", "bakis_jump", "impossible", "one_dead", "sparse", "abyss", "offsets"]
)
def test_gradients(name, detach):
    """Those of the whole chain, back to the first piece; or those of the last piece alone, in which they are exact."""
    chain = FAMILIES[name](F64, each=True)
    truth, v = Truth(chain), chain.x.shape[-2]
    x, p0 = (tensor.clone().requires_grad_() for tensor in (chain.x, chain.p0))
    into = each_step(chain)
    into.requires_grad_()
    pieces, last = division(v, 4), 0
    stream = Stream(None, p0, log_params=chain.log_params, detach=detach)
    for start, stop in pieces:
        last = start if stop > start else last
        stream.update(x[..., start:stop, :], into[..., start:stop, :, :])
    stream.log_norm.sum().backward()
    bound = truth.gradient_bound
    if not detach:
        assert_gradient(x, truth.states, truth.reach.states, bound(truth.states))
        bulk = chain.bulk.clone()
        bulk.grad = into.grad[..., 1:, :, :]
        assert_gradient(bulk, truth.transitions, truth.reach.transitions, bound(truth.transitions), chain.log_params)
        first, reach = truth.states[..., 0, :], truth.reach.states[..., 0, :]
        assert_gradient(p0, first, reach, bound(first), chain.log_params)
        assert (into.grad[..., 0, :, :] == 0).all()
        return
    assert last > 0 and (p0.grad is None or (p0.grad == 0).all())
    error = np.abs(x.grad.numpy() - truth.states)[..., last:, :]
    assert (x.grad[..., :last, :] == 0).all() and (error <= bound(truth.states)[..., last:, :]).all()
    assert (into.grad[..., :last, :, :] == 0).all()


def test_posteriors_have_gradients():
    """First and second derivatives of all that a piece returns, by differences."""
    chain = FAMILIES["dense"](F64, n=2, t=1, v=4, c=2, each=True)
    lengths = torch.tensor([4, 3])

    def outputs(x, into, p0):
        stream = Stream(None, p0, lag=1, detach=False)
        parts = [stream.update(x[:, :2], into[:, :2]), stream.update(x[:, 2:], into[:, 2:], lengths=lengths - 2)]
        parts.append(stream.flush())
        return parts[-1].log_norm, joined(parts, 1), joined(parts, 2), stream.filtered

    into = each_step(chain)[:, 0]
    into[:, 0] = 1.0
    operands = [t.clone().requires_grad_() for t in (chain.x[:, 0], into, chain.p0[:, 0])]
    assert torch.autograd.gradcheck(outputs, operands)
    assert torch.autograd.gradgradcheck(outputs, operands, fast_mode=True)


def test_gradients_beside_nan():
    """NaN behind an end gives no gradient; NaN that counts, none to other sequences."""
    chain = FAMILIES["dense"](F64, n=3, t=1, v=6, c=3, each=True)
    x, into, p0 = chain.x[:, 0].clone(), each_step(chain)[:, 0].clone(), chain.p0[:, 0]
    x[1, 4:], into[1, 4:], x[2, 3, 0] = NAN, NAN, NAN
    x.requires_grad_(), into.requires_grad_()
    stream = Stream(None, p0, lag=1, detach=False)
    parts = [stream.update(x[:, :3], into[:, :3]), stream.update(x[:, 3:], into[:, 3:], lengths=[3, 1, 3])]
    parts.append(stream.flush())
    sums = [parts[-1].log_norm[:2].sum(), joined(parts, 1)[:2].square().sum(), joined(parts, 2)[:2].square().sum()]
    sum(sums).backward()
    assert x.grad[:2].isfinite().all() and into.grad[:2].isfinite().all()
    assert (x.grad[1, 4:] == 0).all() and (into.grad[1, 4:] == 0).all() and (x.grad[1, :4] != 0).any()
