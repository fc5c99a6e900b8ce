"""What is compiled for devices that are not here: one module for each kernel file, with `cases(target)`.

`cases` lists, of the configurations that the file's launchers can choose on a target, those that need the most
registers or shared memory: where these compile without a spill, the others do.
"""

import pkgutil

from tests.kernels.gpu.compiled import TARGETS


def modules() -> list[str]:
    """The modules of this package; a leading underscore says that a module tests the tests."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))


def targets(module: str) -> list[str]:
    """The targets that a module is compiled for. Kernels of chains are fitted to the shared memory that there is."""
    return [target for target in TARGETS if target != "sm_86" or module.startswith("chain_")]
