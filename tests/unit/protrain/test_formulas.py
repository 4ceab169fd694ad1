"""ProTrain's formulas against sums by hand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.protrain import KEEP, RECOMPUTE, SWAP, block_of, hardware_of, model_of, space_with

from lightning_hetero.ir.model import BackwardOperator, OperatorProfile
from lightning_hetero.planners.protrain.formulas import (
    ChunkTimes,
    OperatorMemory,
    backward_operators,
    backward_prefetch_s,
    backward_s,
    best_chunk_params,
    forward_prefetch_s,
    forward_s,
    interleave,
    iteration_s,
    pack,
    peak_base_bytes,
    peak_bytes,
    reduce_offload_s,
    swap_interval,
    wasted_params,
)
from lightning_hetero.planners.protrain.search_space import Configuration

# ---- chunk size (B.1) ----------------------------------------------------------------------------


def test_a_block_never_straddles_two_chunks() -> None:
    assert pack([3, 3, 3, 2, 4], 6) == ((0, 1), (2, 3), (4,))
    assert wasted_params([3, 3, 3, 2, 4], 6) == 18 - 15


def test_the_chunk_size_of_least_waste_is_chosen() -> None:
    # 6 would hold one block of 4 each and waste 2 x 8; 8 holds two and wastes nothing.
    assert best_chunk_params([6] + [4] * 8, interval=1, span=4) == 8
    assert best_chunk_params([6] + [4] * 8, interval=1, span=1) == 6


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    st.integers(1, 9),
    st.integers(0, 60),
)
def test_the_chunk_size_equals_that_of_the_whole_grid(sizes: list[int], interval: int, span: int) -> None:
    start = -(-max(sizes) // interval) * interval
    grid = range(start, start + min(span, max(sizes)) + 1, interval)
    assert best_chunk_params(sizes, interval=interval, span=span) == min(grid, key=lambda p: wasted_params(sizes, p))


def test_the_chunks_of_table_4() -> None:
    # GPT-2 10B: 48 layers of hidden size 4096, one chunk each, and one for the embeddings: 49
    # chunks.
    h = 4096
    ten = [50257 * h + 1024 * h, *[12 * h * h + 13 * h] * 48]
    assert len(pack(ten, best_chunk_params(ten))) == 49
    # GPT-2 1B with the table's 32 layers, at hidden size 1600 (the paper does not give it): 12
    # chunks.
    h = 1600
    one = [50257 * h + 1024 * h, *[12 * h * h + 13 * h] * 32]
    assert len(pack(one, best_chunk_params(one))) == 12


# ---- activations (3.1.1) -------------------------------------------------------------------------


def test_figure_2_swaps_the_first_block_of_each_interval_and_leaves_the_last_blocks_alone() -> None:
    kinds = interleave(8, swap=2, checkpoint=4, interval=3)
    assert kinds == (SWAP, RECOMPUTE, RECOMPUTE, SWAP, RECOMPUTE, RECOMPUTE, KEEP, KEEP)


def test_recomputed_blocks_beyond_the_intervals_follow_the_last_one() -> None:
    assert interleave(6, swap=1, checkpoint=4, interval=2) == (SWAP, RECOMPUTE, RECOMPUTE, RECOMPUTE, RECOMPUTE, KEEP)
    assert interleave(5, swap=2, checkpoint=1, interval=2) == (SWAP, RECOMPUTE, SWAP, KEEP, KEEP)


@given(st.integers(0, 12), st.integers(1, 5), st.data())
def test_the_interleaving_has_the_counts_that_were_asked_for(num_blocks: int, interval: int, data: st.DataObject) -> None:
    swap = data.draw(st.integers(0, num_blocks // interval))
    checkpoint = data.draw(st.integers(0, num_blocks - swap))
    kinds = interleave(num_blocks, swap=swap, checkpoint=checkpoint, interval=interval)
    assert (len(kinds), kinds.count(SWAP), kinds.count(RECOMPUTE)) == (num_blocks, swap, checkpoint)
    assert [i for i, kind in enumerate(kinds) if kind is SWAP] == [n * interval for n in range(swap)]


def test_the_interval_is_as_many_blocks_as_hide_one_swap_out() -> None:
    blocks = [block_of(forward_s=2.0, activation_bytes=10)] * 4
    assert swap_interval(blocks, 1.0) == 5  # 10 s to swap, 2 s a block
    assert swap_interval(blocks, 1000.0) == 1
    assert swap_interval(blocks, 0.0) == 0


# ---- run time (A.1), against sums by hand --------------------------------------------------------


def _times(**changes: tuple[float, ...]) -> ChunkTimes:
    fields = {
        "forward": (2.0, 3.0, 4.0),
        "backward": (4.0, 6.0, 8.0),
        "gather": (0.5, 0.5, 0.5),
        "reduce": (0.25, 0.25, 0.25),
        "upload": (5.0, 5.0, 1.0),
        "upload_again": (7.0, 7.0, 7.0),
        "offload": (3.0, 3.0, 9.0),
        "gpu_update": (1.0, 1.0, 1.0),
        "cpu_update": (10.0, 10.0, 10.0),
    }
    return ChunkTimes(**(fields | changes))


def test_equation_4() -> None:
    assert [forward_prefetch_s(_times(), i, persistent=1) for i in (1, 2, 3, 4)] == [0.5, 5.5, 1.5, 0.0]


def test_equation_6() -> None:
    assert [reduce_offload_s(_times(), i, persistent=1) for i in (1, 2, 3, 4, 5)] == [0.25, 3.25, 9.25, 0.0, 0.0]


def test_equation_7() -> None:
    assert [backward_prefetch_s(_times(), i, persistent=1, buffers=1) for i in (0, 1, 2, 3)] == [0.0, 0.0, 7.5, 0.0]
    assert backward_prefetch_s(_times(), 3, persistent=1, buffers=0) == 7.5


def test_equation_3() -> None:
    # max(0, 0.5) + max(2, 5.5) + max(3, 1.5) + max(4, 0)
    assert forward_s(_times(), persistent=1) == 0.5 + 5.5 + 3.0 + 4.0


def test_equation_5_and_its_tail() -> None:
    # i=1: max(4+0, 0, 3.25); i=2: max(6+1, 0, 9.25); i=3: max(8, 7.5, 0); i=4: max(0, 0, 0); the
    # first chunk's gradients: 0.25
    assert backward_s(_times(), (0.0, 1.0, 0.0), persistent=1, buffers=1) == 4.0 + 9.25 + 8.0 + 0.0 + 0.25
    # without a buffer the last chunk arrives before anything computes
    assert backward_s(_times(), (0.0, 1.0, 0.0), persistent=1, buffers=0) == 4.0 + 9.25 + 8.0 + 7.5 + 0.25


def test_equation_2_takes_the_slower_of_device_and_cpu() -> None:
    times, recompute = _times(), (0.0, 1.0, 0.0)
    assert iteration_s(times, recompute, persistent=1, buffers=1) == 13.0 + max(21.5 + 1.0, 20.0)
    slow = _times(cpu_update=(30.0, 30.0, 30.0))
    assert iteration_s(slow, recompute, persistent=1, buffers=1) == 13.0 + 60.0


def test_a_chunk_costs_as_much_as_its_blocks_and_each_device_copies_its_shard() -> None:
    model = model_of(block_of(), block_of(num_trainable_params=4), block_of())
    hardware = hardware_of(world_size=4, collective_bytes_per_s=16.0)
    times = space_with(model, hardware, 16).times(0)
    assert times.forward == (4.0, 2.0)
    assert times.backward == (8.0, 4.0)
    assert times.gather == (16 * 2 * 3 / 4 / 16, 8 * 2 * 3 / 4 / 16)
    assert times.reduce == (12 * 2 * 3 / 4 / 16, 8 * 2 * 3 / 4 / 16)
    assert times.upload == times.upload_again == (16 * 2 / 4 / 8, 8 * 2 / 4 / 8)
    assert times.offload == (12 * 2 / 4 / 8, 8 * 2 / 4 / 8)
    assert times.gpu_update == (12 / 4 / 64, 8 / 4 / 64)
    assert times.cpu_update == (12 / 4, 8 / 4)


def test_transfers_beside_a_swap_run_at_the_reduced_bandwidth() -> None:
    # Block 0 leaves while block 1 computes (the interval is 2): chunk 2 arrives then, and in
    # backward chunk 0 arrives and the gradients of chunk 2 leave. The two directions share 10
    # bytes/s of DRAM: 5 each instead of 8.
    model = model_of(*[block_of(activation_bytes=24)] * 4)
    space = space_with(model, hardware_of(host_dram_bytes_per_s=10.0), 8)
    assert space.swap_interval == 2
    alone, beside = 16 / 8, 16 / 5
    busy = {1, 2}
    times = space.times(1)
    assert times.upload == tuple(beside if i - 1 in busy else alone for i in range(4))
    assert times.upload_again == tuple(beside if i + 1 in busy else alone for i in range(4))
    assert times.offload == tuple(beside if i - 1 in busy else alone for i in range(4))
    assert space.times(0).upload == (alone,) * 4
    measured = replace(space, hardware=hardware_of(contention={"copy|copy": 2.0}))
    assert measured.times(1).upload == (alone, alone, 2 * alone, 2 * alone)


# ---- memory (A.2) --------------------------------------------------------------------------------


def test_equations_8_and_9_walk_operator_by_operator() -> None:
    rows = [
        OperatorMemory(cur_prior=1, peak_prior=2, cur_op=3, peak_op=20, act=50),
        OperatorMemory(cur_prior=0, peak_prior=70, cur_op=-4, peak_op=5, act=30),
    ]
    # cur(0) = 100 + 80 = 180; peaks 180 + 2, 180 + 1 + 20 = 201; cur(1) = 180 + 1 + 3 - 50 = 134;
    # peaks 134 + 70 = 204, 139.
    assert peak_base_bytes(100, rows) == 204
    assert peak_base_bytes(100, rows[:1]) == 171  # 150 + 1 + 20
    assert peak_base_bytes(7, []) == 7


def test_a_profile_is_walked_from_its_last_operator_and_frees_all_activations() -> None:
    outputs = tuple(OperatorProfile(name=name, flop=1.0, bytes=size) for name, size in (("a", 3), ("b", 4)))
    first = block_of(transient_bytes=5, operators=outputs)
    model = model_of(first, block_of(activation_bytes=20, transient_bytes=1))
    assert [(o.act, o.peak_op) for o in backward_operators(model)] == [(20, 1), (4, 5), (3, 5), (3, 5)]
    assert peak_base_bytes(100, backward_operators(model)) == 100 + 30 + 1
    assert peak_base_bytes(100, backward_operators(model_of(*reversed(model.blocks)))) == 100 + 30 + 5


def test_gaps_and_operators_of_a_recorded_backward_reach_equations_8_and_9() -> None:
    fields = ("gap_peak_bytes", "before_bytes", "peak_bytes", "after_bytes", "freed_bytes")
    figures = {"late": (7, 2, 12, 5, 6), "early": (5, 4, 30, 1, 1)}
    late, early = (BackwardOperator(name=n, **dict(zip(fields, row, strict=True))) for n, row in figures.items())
    model = model_of(block_of(activation_bytes=20, transient_bytes=99, backward=(early,)), block_of(backward=(late, early)))
    assert backward_operators(model) == (
        OperatorMemory(cur_prior=2, peak_prior=7, cur_op=3, peak_op=10, act=6),
        OperatorMemory(cur_prior=-1, peak_prior=0, cur_op=-3, peak_op=26, act=4),  # and what the block saves besides
        OperatorMemory(cur_prior=3, peak_prior=4, cur_op=-3, peak_op=26, act=20),
    )
    # 30 bytes are saved; then 24, then 20: the peaks are 30 + 12, 24 + 30 and 20 + 30.
    assert peak_base_bytes(100, backward_operators(model)) == 100 + 54


def test_equation_10() -> None:
    blocks = [block_of(activation_bytes=10, boundary_bytes=2)] * 3
    assert peak_bytes(100, persistent=7, buffers=5, blocks=blocks, kinds=(SWAP, RECOMPUTE, KEEP)) == 100 + 7 + 5 - 10 - 8
    assert peak_bytes(100, persistent=0, buffers=0, blocks=blocks, kinds=(SWAP, RECOMPUTE, RECOMPUTE)) == 100 - 10 - 16 + 8


def test_a_configuration_adds_up_on_both_tiers() -> None:
    model = model_of(*[block_of(activation_bytes=24)] * 4, constant_device_bytes=100, constant_host_bytes=1000)
    space = space_with(model, hardware_of(), 8)
    config = Configuration(persistent_chunks=1, chunk_buffers=2, swap_blocks=1, checkpoint_blocks=2)
    # Eq. 10: all that is saved, 96, without one swapped block and two recomputed ones but for their
    # inputs; a persistent chunk has 2 + 12 bytes a parameter, a buffer 2. And on its way: the
    # swapped block, and gradients of two.
    assert space.device_bytes(config) == 100 + (96 - 24 - 2 * 22) + 8 * 14 + 2 * 8 * 2 + 24 + 2 * 8 * 2
    # three chunks of 2 + 12 bytes a parameter, and of gradients on their way; one block's
    # activations
    assert space.host_bytes(config) == 1000 + 3 * 8 * 14 + 3 * 8 * 2 + 24
    everything = Configuration(persistent_chunks=4, chunk_buffers=0, swap_blocks=0, checkpoint_blocks=0)
    assert space.host_bytes(everything) == 1000


def test_as_many_gradients_wait_on_the_host_as_there_is_room_for() -> None:
    model = model_of(*[block_of(activation_bytes=24)] * 8)
    config = Configuration(persistent_chunks=1, chunk_buffers=3, swap_blocks=0, checkpoint_blocks=0)
    least = 7 * 8 * 14 + 4 * 16  # four of them
    depths = [
        space_with(model, hardware_of(host_memory_bytes=least + spare), 8).gradient_depth(config) for spare in (0, 15, 16, 10**6)
    ]
    assert depths == [4, 4, 5, 7]
