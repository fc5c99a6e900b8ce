"""The baseline that the library started from is wrong in the two ways that it is shown for."""

import numpy as np
import torch

from logchain import demo, reference
from tests.benchmarks import forum


def test_forum_code_has_the_faults_that_it_is_shown_for():
    """Each of the two paddings of five matrices counts every state once more; underflow stops at log(1e-10)."""
    odd, even = demo.dense_chain(10, 6, 40), demo.dense_chain(10, 9, 40)
    excess = forum.product(*odd).double().numpy() - reference.product(*odd)
    np.testing.assert_allclose(excess, 2 * np.log(40), atol=0.1)
    np.testing.assert_allclose(forum.product(*even).numpy(), reference.product(*even), atol=1e-5)
    shifted = np.array([[0.0, -200.0]]), np.array([[-200.0], [0.0]])
    floored = forum.matmul(*map(torch.from_numpy, shifted))
    np.testing.assert_allclose(floored, np.log(1e-10), rtol=1e-12)
