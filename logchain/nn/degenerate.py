"""Exceptions for likelihoods without a maximum."""


class DegenerateError(ValueError):
    """A likelihood that grows without bound, as that of a Gaussian whose variance reaches 0, or is no finite number.

    A start of `logchain.nn.fit` that meets it is skipped if others do not; other errors end the fit.

    >>> import torch
    >>> from logchain.nn import HMM, Gaussian, NormalInverseWishart
    >>> data, generator = torch.tensor([0.0, 1.0, 5.0]), torch.Generator().manual_seed(0)
    >>> try:
    ...     report = HMM(2, "gaussian").fit(data, generator=generator)
    ... except DegenerateError as error:
    ...     print(str(error).split(": ")[-1])
    pass prior=NormalInverseWishart(scale, dof) to the Gaussian, or have fewer units
    >>> HMM(2, Gaussian(2, prior=NormalInverseWishart(0.1, 3.0))).fit(data, generator=generator).set_aside
    0
    """


class DegenerateWarning(RuntimeWarning):
    """Some of the starts of `logchain.nn.fit` were skipped; it says of each what its `DegenerateError` was."""
