"""Which numbers the modules are given."""


def check_count(name: str, value: object, least: int) -> None:
    """An integer that is no less."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected {least} or more, got {value}")


def check_step(step: object) -> None:
    """How much of the way expectation maximisation goes."""
    if not isinstance(step, (int, float)):
        raise TypeError(f"step: expected a number, got {step!r}")
    if not 0 <= step <= 1:
        raise ValueError(f"step: expected a number from 0 to 1, got {step}")
