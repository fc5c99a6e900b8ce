"""`logchain.nn.HMM` behaves as a module, beside what all models do: half precision, compilation, gradients."""

import pytest
import torch

from logchain.nn import Categorical
from tests.nn.hmms import F64, LENGTHS, V, array, categories, close, random_hmm


@pytest.mark.parametrize("options", [{}, {"initial": "stationary"}], ids=str)
def test_compiled_whole(options):
    hmm, data = random_hmm(**options), categories(5, V)
    ends = torch.tensor(LENGTHS)
    compiled = torch.compile(hmm.log_prob, fullgraph=True, backend="aot_eager")
    close(compiled(data, lengths=ends), array(hmm.log_prob(data, lengths=ends)))


def test_every_parameter_has_a_gradient():
    """Which data-parallel training asks for."""
    for hmm in (random_hmm(), random_hmm(initial="stationary"), random_hmm("gaussian", num_features=None)):
        data = categories(5, V) if isinstance(hmm.emission, Categorical) else torch.randn(5, V, dtype=F64)
        hmm(data).sum().backward()
        assert all(parameter.grad is not None for parameter in hmm.parameters())
