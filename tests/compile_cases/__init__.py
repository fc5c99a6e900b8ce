"""What is compiled for devices that are not here: one module for each kernel file, with `cases(target)`.

`cases` lists every configuration that the file's launchers can choose on a target, one of `tests.compiled.TARGETS`. The
tests have about four minutes for all of them: what goes beyond is marked `by_hand`.
"""

import pkgutil


def modules() -> list[str]:
    """The modules of this package; a leading underscore says that a module tests the tests."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))
