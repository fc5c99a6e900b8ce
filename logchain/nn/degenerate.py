"""What a fit meets where the likelihood has no maximum, as an error and as a warning."""


class DegenerateError(ValueError):
    """A likelihood that grows without bound, as that of a Gaussian whose variance reaches 0, or is no finite number.

    A start of `logchain.nn.fit` that meets it is set aside if others do not; other errors end the fit.

    Args:
        found: what was expected, and what came.
        advice: what may avoid it.

    >>> import torch
    >>> from logchain.nn import HMM
    >>> data, generator = torch.tensor([0.0, 1.0, 5.0]), torch.Generator().manual_seed(0)
    >>> try:
    ...     report = HMM(2, "gaussian").fit(data, generator=generator)
    ... except DegenerateError as error:
    ...     error.advice
    'give the Gaussian a prior_scatter, or have fewer units'
    >>> HMM(2, "gaussian", prior_scatter=0.1).fit(data, generator=generator).set_aside
    0
    """

    def __init__(self, found: str, advice: str = "") -> None:
        super().__init__(f"{found}: {advice}" if advice else found)
        self.found, self.advice = found, advice


class DegenerateWarning(RuntimeWarning):
    """Some of the starts of `logchain.nn.fit` were set aside; it says of each what its `DegenerateError` was.

    >>> import warnings
    >>> with warnings.catch_warnings():  # `Fit.set_aside` counts them all the same
    ...     warnings.simplefilter("ignore", DegenerateWarning)
    """
