"""A selection of combinations has every value, and the other combinations are marked."""

import pytest

from tests.support.combinations import combined, crossed, numbered


def chosen(pairs):
    return [pair.values for pair in pairs if not pair.marks]


@pytest.mark.parametrize(("rows", "columns", "each"), [(9, 6, 2), (9, 2, 1), (2, 4, 2), (3, 3, 3)])
def test_each_value_is_chosen_and_no_pair_is_lost(rows, columns, each):
    pairs = crossed(range(rows), range(columns), each=each)
    assert {pair.values for pair in pairs} == {(i, j) for i in range(rows) for j in range(columns)}
    firsts, seconds = zip(*chosen(pairs), strict=True)
    assert all(firsts.count(i) == each for i in range(rows))
    assert {*seconds} == {*range(columns)}
    marks = {mark.name for pair in pairs for mark in pair.marks}
    assert marks == ({"exhaustive"} if each < columns else set())


@pytest.mark.parametrize(("rows", "columns", "each"), [(2, 5, 2), (3, 2, 3), (3, 2, 0)])
def test_a_selection_that_misses_a_value_is_refused(rows, columns, each):
    with pytest.raises(ValueError, match=f"{each} of {columns} values for each of {rows}"):
        crossed(range(rows), range(columns), each=each)


def test_every_combination_has_the_id_of_its_values():
    axes = numbered("n", [(1, 2), (3, 4)]), {"a": "a", "b": "b"}
    found = combined(lambda n, letter: n == (1, 2) or letter == "b", *axes)
    marks = {pair.id: {mark.name for mark in pair.marks} for pair in found}
    assert marks == {"n0-a": set(), "n0-b": set(), "n1-a": {"exhaustive"}, "n1-b": set()}
    assert [pair.values for pair in found][1:3] == [((1, 2), "b"), ((3, 4), "a")]
