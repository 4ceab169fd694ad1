"""Every element has one owner, and a change of the number of ranks moves every element once."""

from collections import Counter
from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.ir.shards import Shards, by_element, by_parameter, copies

LENGTHS = st.lists(st.integers(1, 300), min_size=0, max_size=8)
RANKS = st.integers(1, 9)
MULTIPLES = st.sampled_from((1, 16, 128))
LAYOUTS = st.sampled_from((by_element, by_parameter))


def filled(shards: Shards) -> list[list[object]]:
    """Each rank's slice: who is where; zeros are padding."""
    slices: list[list[object]] = [[0] * shards.slice_elements for _ in range(shards.ranks)]
    for piece in shards.pieces():
        for i in range(piece.num_elements):
            assert slices[piece.rank][piece.offset + i] == 0, "two owners of one place"
            slices[piece.rank][piece.offset + i] = (piece.param, piece.start + i)
    return slices


@given(layout=LAYOUTS, lengths=LENGTHS, ranks=RANKS, multiple=MULTIPLES)
def test_every_element_has_one_owner(layout, lengths, ranks, multiple):
    shards = layout(lengths, ranks, multiple=multiple)
    found = Counter(who for own in filled(shards) for who in own if who)
    assert found == Counter((param, i) for param, length in enumerate(lengths) for i in range(length))
    assert shards.slice_elements % multiple == 0
    assert all(offset % multiple == 0 for offset in shards.offsets)


@given(lengths=LENGTHS, ranks=RANKS, multiple=MULTIPLES)
def test_a_gathered_buffer_has_the_parameters_where_one_rank_has_them(lengths, ranks, multiple):
    one, several = by_element(lengths, 1, multiple=multiple), by_element(lengths, ranks, multiple=multiple)
    assert several.offsets == one.offsets
    assert several.num_elements - one.num_elements < ranks * multiple


@given(lengths=LENGTHS, ranks=RANKS, multiple=MULTIPLES)
def test_a_parameter_that_is_not_cut_has_one_owner(lengths, ranks, multiple):
    pieces = list(by_parameter(lengths, ranks, multiple=multiple).pieces())
    assert [(piece.param, piece.start, piece.num_elements) for piece in pieces] == [(i, 0, n) for i, n in enumerate(lengths)]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), ranks=st.integers(1, 4), multiple=st.sampled_from((1, 16)))
def test_slices_of_whole_parameters_are_as_short_as_their_order_allows(lengths, ranks, multiple):
    sizes = [-(-length // multiple) * multiple for length in lengths]
    longest = []
    for ends in product(range(len(sizes) + 1), repeat=ranks - 1):
        cuts = (0, *sorted(ends), len(sizes))
        longest.append(max(sum(sizes[a:b]) for a, b in pairwise(cuts)))
    assert by_parameter(lengths, ranks, multiple=multiple).slice_elements == min(longest)


@given(lengths=LENGTHS, before=st.tuples(LAYOUTS, RANKS, MULTIPLES), after=st.tuples(LAYOUTS, RANKS, MULTIPLES))
def test_another_number_of_ranks_moves_every_element_once(lengths, before, after):
    source, target = (layout(lengths, ranks, multiple=multiple) for layout, ranks, multiple in (before, after))
    has, gets = filled(source), [[0] * target.slice_elements for _ in range(target.ranks)]
    for copy in copies(source, target):
        assert copy.num_elements > 0
        for i in range(copy.num_elements):
            assert gets[copy.target][copy.target_offset + i] == 0, "an element moves twice"
            gets[copy.target][copy.target_offset + i] = has[copy.source][copy.source_offset + i]
    assert gets == filled(target)


@given(lengths=LENGTHS, layout=LAYOUTS, ranks=RANKS, multiple=MULTIPLES)
def test_the_same_ranks_move_nothing_elsewhere(lengths, layout, ranks, multiple):
    shards = layout(lengths, ranks, multiple=multiple)
    assert all((c.source, c.source_offset) == (c.target, c.target_offset) for c in copies(shards, shards))
