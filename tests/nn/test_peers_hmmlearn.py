"""hmmlearn's own tests of its GaussianHMM, with `HMM` in the place of its engine: it computes, and hmmlearn asks.

Only the class that the tests make is another: it starts where hmmlearn does, and then fits, scores and decodes through
`HMM.from_hmmlearn`, `HMM.fit` and `HMM.to_hmmlearn`. The tests themselves are those of the installed package.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from logchain.nn import HMM

hmmlearn = pytest.importorskip("hmmlearn.hmm", exc_type=ImportError)
# its tests make numpy warn of underflow wherever they are imported
with np.errstate():
    theirs = pytest.importorskip("hmmlearn.tests.test_gaussian_hmm", exc_type=ImportError)

# what is fitted, by hmmlearn's letters
PARTS = {"s": ("initial",), "t": ("transition",), "mc": ("emission",)}


def padded(samples, lengths):
    """Samples [v, d] of sequences one behind the other as data [n, v, d], and their lengths."""
    lengths = [len(samples)] if lengths is None else list(lengths)
    pieces = torch.from_numpy(np.array(samples, dtype=np.float64)).split(lengths)
    return torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True), torch.tensor(lengths)


class Engine(hmmlearn.GaussianHMM):
    """A GaussianHMM of which hmmlearn keeps the parameters and draws the first ones; `HMM` does the rest."""

    def fit(self, X, lengths=None):
        data, sizes = padded(X, lengths)
        self._init(np.array(X, dtype=np.float64), sizes.tolist())
        self._check()
        hmm = HMM.from_hmmlearn(self)
        for letters, parts in PARTS.items():
            for part in parts:
                getattr(hmm, part).requires_grad_(set(letters) <= set(self.params))
        hmm.fit(data, lengths=sizes, restarts=0, max_iterations=self.n_iter, tolerance=self.tol)
        fitted = hmm.to_hmmlearn()
        for name in ("startprob_", "transmat_", "means_", "_covars_"):
            setattr(self, name, getattr(fitted, name))
        return self

    def score(self, X, lengths=None):
        data, sizes = padded(X, lengths)
        return HMM.from_hmmlearn(self).log_prob(data, lengths=sizes).sum().item()

    def score_samples(self, X, lengths=None):
        data, sizes = padded(X, lengths)
        states = HMM.from_hmmlearn(self).posterior(data, lengths=sizes).states.detach()
        return self.score(X, lengths), np.concatenate([one[:v] for one, v in zip(states.numpy(), sizes, strict=True)])

    def decode(self, X, lengths=None, algorithm=None):
        data, sizes = padded(X, lengths)
        path = HMM.from_hmmlearn(self).decode(data, lengths=sizes)
        states = [one[:v] for one, v in zip(path.states.numpy(), sizes, strict=True)]
        return path.score.sum().item(), np.concatenate(states)


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    monkeypatch.setattr(theirs, "hmm", SimpleNamespace(GaussianHMM=Engine))


class TestSpherical(theirs.TestGaussianHMMWithSphericalCovars):
    @pytest.mark.parametrize("implementation", ["scaling", "log"])
    def test_underflow_from_scaling(self, implementation):
        if implementation == "log":
            super().test_underflow_from_scaling(implementation)
        else:  # it asks for an error, where nothing underflows
            with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
                super().test_underflow_from_scaling(implementation)


class TestDiagonal(theirs.TestGaussianHMMWithDiagonalCovars):
    pass


class TestTied(theirs.TestGaussianHMMWithTiedCovars):
    pass


class TestFull(theirs.TestGaussianHMMWithFullCovars):
    pass
