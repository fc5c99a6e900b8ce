"""Changes of the sources that the tests have to see are still possible, and the slow job sees one of each kind."""

import pytest

from tests.mutants import MUTANTS, ROOT, copied, is_caught

# one in so many is tried here, and all by `python -m tests.mutants`
EACH = 25


def test_every_change_has_its_place():
    names = [mutant.name for mutant in MUTANTS]
    assert len(MUTANTS) >= 40 and len(set(names)) == len(names)
    places = {mutant.name: (ROOT / mutant.file).read_text().count(mutant.old) for mutant in MUTANTS}
    assert {name: count for name, count in places.items() if count != 1} == {}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS[::EACH], ids=lambda mutant: mutant.name)
def test_changes_are_seen(mutant, tmp_path):
    assert is_caught(mutant, copied(tmp_path))
