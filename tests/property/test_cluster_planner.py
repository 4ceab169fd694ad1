"""Grouping, balancing and sharing out, against integer programmes and enumeration."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples

from lightning_hetero.parallel.planner.balancing import balance, balance_runs, runs_s, share_out
from lightning_hetero.parallel.planner.equations import pipeline_s
from lightning_hetero.parallel.planner.grouping import Packing, Problem, grouping, reference, vectors
from lightning_hetero.parallel.planner.step_time import one_f_one_b_s


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    counts = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    return Problem(
        counts=counts,
        powers=tuple(sorted(draw(st.lists(st.integers(1, 9), min_size=len(counts), max_size=len(counts))))),
        memories=tuple(map(float, draw(st.lists(st.integers(0, 5), min_size=len(counts), max_size=len(counts))))),
        least_bytes=draw(st.integers(0, 8)),
        micro_batches=draw(st.integers(1, 16)),
        most_stages=draw(st.integers(1, 6)),
    )


@examples(25)
@given(problems(), st.integers(1, 4))
def test_the_dynamic_programme_agrees_with_highs(problem: Problem, groups: int) -> None:
    expected, found = reference(problem, groups), grouping(problem, groups)
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    weakest, chosen = found
    assert weakest == pytest.approx(expected, rel=1e-6)
    assert len(chosen) == groups
    assert all(sum(column) <= n for column, n in zip(zip(*chosen, strict=True), problem.counts, strict=True))
    assert all(problem.holds(g) and sum(g) <= min(problem.most_stages, problem.micro_batches // groups) for g in chosen)
    assert min(problem.power(g, groups) for g in chosen) >= weakest


@given(st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple), st.data())
def test_a_packing_is_worth_most(counts: tuple[int, ...], data: st.DataObject) -> None:
    values = {v: data.draw(st.integers(0, 9)) for v in vectors(counts, 4)}
    packing = Packing(counts)
    for group, value in values.items():
        packing.add(group, value)
    worth = dict.fromkeys(itertools.product(*(range(n + 1) for n in counts)), 0)
    for whole in worth:
        for group, value in values.items():
            left = tuple(a - b for a, b in zip(whole, group, strict=True))
            if min(left) >= 0:
                worth[whole] = max(worth[whole], value + worth[left])
    assert packing.worth(counts) == worth[counts]
    best = packing.best()
    assert sum(values[g] for g in best) == worth[counts]
    assert all(sum(group[i] for group in best) <= n for i, n in enumerate(counts))


@st.composite
def tables(draw: st.DrawFn, convex: bool) -> list[list[float]]:
    """Seconds by number of layers, ascending; equal steps if ``convex``."""
    out = []
    for _ in range(draw(st.integers(1, 3))):
        length, start = draw(st.integers(0, 6)), draw(st.integers(0, 5))
        steps = (
            [draw(st.integers(1, 9))] * length if convex else draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))
        )
        out.append([float(t) for t in itertools.accumulate(steps, initial=start)])
    return out


@pytest.mark.parametrize("convex", [True, False])
@given(st.data(), st.integers(1, 8), st.integers(1, 6))
def test_balancing_finds_the_fastest_cut(convex: bool, data: st.DataObject, num_layers: int, micro_batches: int) -> None:
    times = data.draw(tables(convex))
    cuts = [c for c in itertools.product(*(range(1, len(t)) for t in times)) if sum(c) == num_layers]
    found = balance(times, num_layers, micro_batches)
    assert (found is None) == (not cuts)
    if found is not None:
        seconds = {c: pipeline_s([t[n] for t, n in zip(times, c, strict=True)], micro_batches) for c in cuts}
        assert seconds[found] == pytest.approx(min(seconds.values()))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 9))
def test_equation_1_bounds_the_time_of_1f1b(stages: list[int], micro_batches: int) -> None:
    played = one_f_one_b_s(stages, micro_batches)
    assert max(micro_batches * max(stages), sum(stages)) - 1e-9 <= played <= pipeline_s(stages, micro_batches) + 1e-9
    if len(set(stages)) == 1 or micro_batches == 1 or stages[-1] == max(stages):
        assert played == pytest.approx(pipeline_s(stages, micro_batches))


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(1, 9),
)
def test_micro_batches_are_shared_out_best(groups: list[tuple[list[int], int]], micro_batches: int) -> None:
    choices = itertools.product(*(range(least, micro_batches + 1) for _, least in groups))
    seconds = [
        max(pipeline_s(stages, k) for (stages, _), k in zip(groups, counts, strict=True))
        for counts in choices
        if sum(counts) == micro_batches
    ]
    found = share_out(groups, micro_batches)
    assert (found is None) == (not seconds)
    if found is not None:
        assert sum(found) == micro_batches
        assert max(pipeline_s(stages, k) for (stages, _), k in zip(groups, found, strict=True)) == min(seconds)


@given(st.data(), st.integers(1, 6), st.integers(1, 3), st.integers(1, 6))
def test_unequal_layers_are_cut_where_the_pipeline_is_fastest(
    data: st.DataObject, num_layers: int, depth: int, micro_batches: int
) -> None:
    def row(begin: int) -> tuple[float, ...]:
        held = data.draw(st.integers(0, num_layers - begin))
        return tuple(itertools.accumulate(data.draw(st.lists(st.integers(0, 9), min_size=held, max_size=held)), initial=0))

    tables = [tuple(row(begin) for begin in range(num_layers)) for _ in range(depth)]
    times = []
    for cut in itertools.product(range(1, num_layers + 1), repeat=depth):
        begins = list(itertools.accumulate(cut, initial=0))
        if sum(cut) == num_layers and all(n < len(rows[b]) for rows, b, n in zip(tables, begins, cut, strict=False)):
            times.append(pipeline_s(runs_s(tables, cut), micro_batches))
    found = balance_runs(tables, micro_batches)
    assert (found is None) == (not times)
    if found is not None:
        assert pipeline_s(runs_s(tables, found), micro_batches) == min(times)
