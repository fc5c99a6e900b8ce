"""What a fit meets where the likelihood has no maximum, as an error and as a warning."""


class DegenerateError(ValueError):
    """A likelihood that grows without bound, as that of a Gaussian whose variance reaches 0, or is no finite number.

    A start of `logchain.nn.fit` that meets it is set aside if others do not; other errors end the fit.

    Args:
        found: what was expected, and what came.
        advice: what may avoid it.

    >>> import torch
    >>> from logchain.nn import HMM
    >>> data = torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0])  # an outlier that a state has for itself
    >>> HMM(2, "gaussian").fit(data, restarts=3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    logchain.nn.degenerate.DegenerateError: maximise: expected positive variances, got 0 for unit ...
    """

    def __init__(self, found: str, advice: str = "") -> None:
        super().__init__(f"{found}: {advice}" if advice else found)
        self.found, self.advice = found, advice


class DegenerateWarning(RuntimeWarning):
    """Some of the starts of `logchain.nn.fit` were set aside; it says of each what its `DegenerateError` was.

    >>> import warnings
    >>> import torch
    >>> from logchain.nn import HMM
    >>> data = torch.tensor([0.0, 0.1, 0.3, 0.2, 1.0, 1.1, 0.9, 1.6])
    >>> hmm, generator = HMM(3, "gaussian"), torch.Generator().manual_seed(0)
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     fitted = hmm.fit(data, restarts=20, generator=generator)
    >>> 0 < fitted.set_aside < 20, caught[0].category.__name__
    (True, 'DegenerateWarning')
    """
