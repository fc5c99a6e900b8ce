"""What the conditional random field refuses, by name."""

import pytest
import torch

from logchain.nn import LinearChainCRF


def wrong(**changed):
    arguments = {"emissions": torch.zeros(2, 3, 5), "tags": torch.zeros(2, 3, dtype=torch.int64), "mask": None}
    return LinearChainCRF(5, batch_first=True)(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: LinearChainCRF(0), ValueError, "num_tags: expected a positive integer, got 0"),
        (lambda: LinearChainCRF(2.0), TypeError, "num_tags: expected a positive integer, got 2.0"),
        (lambda: LinearChainCRF(2, batch_first=1), TypeError, "batch_first: expected True or False, got 1"),
        (lambda: wrong(emissions=[0]), TypeError, "emissions: expected a torch.Tensor, got list"),
        (lambda: wrong(emissions=torch.zeros(2, 3, 4)), ValueError, r"emissions: .*\[n, v, 5\], got \[2, 3, 4\]"),
        (lambda: wrong(emissions=torch.zeros(2, 0, 5)), ValueError, r"emissions: .*at least one step.*\[2, 0, 5\]"),
        (lambda: wrong(tags=[0]), TypeError, "tags: expected a torch.Tensor, got list"),
        (lambda: wrong(tags=torch.zeros(2, 3)), TypeError, "tags: expected integers, got float32"),
        (lambda: wrong(tags=torch.zeros(3, 2).long()), ValueError, r"tags: expected shape \[2, 3\], got \[3, 2\]"),
        (lambda: wrong(tags=torch.full((2, 3), 5)), ValueError, "tags: expected values from 0 to 4, got 5 to 5"),
        (lambda: wrong(tags=torch.full((2, 3), -1)), ValueError, "tags: expected values from 0 to 4, got -1 to -1"),
        (lambda: wrong(mask=[[1]]), TypeError, "mask: expected a torch.Tensor, got list"),
        (lambda: wrong(mask=torch.ones(3, 2).bool()), ValueError, r"mask: expected shape \[2, 3\], got \[3, 2\]"),
        (lambda: wrong(mask=torch.ones(2, 3)), TypeError, "mask: expected bool or integers, got float32"),
        (lambda: wrong(mask=torch.ones(2, 3, device="meta").bool()), ValueError, "mask: expected device cpu, got meta"),
        (lambda: wrong(tags=torch.ones(2, 3, device="meta").int()), ValueError, "tags: expected device cpu, got meta"),
        (lambda: wrong(reduction="max"), ValueError, "reduction: expected 'none' or .*, got 'max'"),
    ],
)
def test_wrong_arguments(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
