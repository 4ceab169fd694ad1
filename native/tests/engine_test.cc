// The engine against a naive model: every placement, dtype, residency and back end, random segments.
#include <algorithm>

#include "engine_fixture.h"

using fixture::ApplyToModel;
using fixture::EngineOptions;
using fixture::Geometry;
using fixture::Placement;
using fixture::Placements;
using fixture::RandomGradients;
using fixture::Setup;
using fixture::StoreOptions;
using fixture::TestBlock;
using fixture::TestGradients;

namespace {

// Stores, then updates three times with commits, checking every array after each step.
void TrainOneBlock(const Placement& p, int64_t num_elements, bool digests, uint32_t seed) {
  Setup t({Geometry(0, p, num_elements)}, seed, StoreOptions(1, digests));
  t.Begin(3, 2);
  CHECK(t.run.Holds(t.block));
  for (int64_t step = 2; step < 5; ++step) {
    if (p.resident) CHECK_EQ(t.run.Complete(t.run.Fetch(t.block)), 0);
    const TestGradients gradients = RandomGradients(num_elements, step, &t.random);
    const int64_t ticket = t.run.OpenUpdate(t.block, p.resident);
    REQUIRE_EQ(t.run.Arm(ticket, gradients, step), 0);
    ApplyToModel(gradients, &t.block);
    CHECK_EQ(t.run.Wait(ticket, HETERO_READY), 0);
    if (p.resident) CHECK(t.block.HoldsInMemory());
    CHECK_EQ(t.run.Complete(ticket), 0);
    CHECK(t.run.Holds(t.block));
    int64_t newest_step = 0;
    CHECK_GE(hetero_block_slot(t.block.handle, &newest_step), 0);
    CHECK_EQ(newest_step, step);
    CHECK_EQ(t.run.Complete(t.run.Commit(step)), 0);
    if (!p.resident) {
      CHECK_EQ(t.run.Complete(t.run.Fetch(t.block)), 0);
      CHECK(t.block.HoldsInMemory());
    }
  }
  CHECK_EQ(t.End(), 0);
}

}  // namespace

TEST(every_placement_equals_the_naive_model) {
  uint32_t seed = 1;
  for (const Placement& p : Placements()) {
    for (const int64_t num_elements : {16, 4096, 4096 * 5 + 48}) TrainOneBlock(p, num_elements, seed % 2 == 0, seed), ++seed;
  }
}

TEST(released_weights_come_back_by_fetch) {
  Setup t(Geometry(0, HETERO_BF16, 4096 * 3 + 16, true, true), 7);
  t.Start(3, 1);
  t.block.Load();
  CHECK_EQ(t.run.Complete(t.run.Store(t.block, t.block.WholePatches(false), true, 0)), 0);
  const hetero_task task{};
  CHECK_EQ(t.run.Complete(hetero_submit_release(t.run.engine, t.block.handle, &task)), 0);
  const std::vector<uint8_t> zeros(t.block.expected.weights.size());
  CHECK_EQ(memcmp(t.block.weights, zeros.data(), zeros.size()), 0);
  CHECK_EQ(t.run.Complete(t.run.Fetch(t.block)), 0);
  CHECK(t.block.HoldsInMemory());
  CHECK(t.run.Holds(t.block));
}

TEST(one_file_passes_through_memory_that_is_lent_to_it) {
  Setup t(Geometry(0, HETERO_U8, 4096 * 5, true, false), 17);
  REQUIRE(t.run.StartEngine(EngineOptions(4096, 3, 1)));
  const std::vector<uint8_t> zeros(t.block.expected.weights.size());
  const auto bytes = static_cast<int64_t>(zeros.size());
  auto* lent = static_cast<uint8_t*>(hetero_reserve(2 * bytes));
  REQUIRE(lent != nullptr);
  memcpy(lent, t.block.expected.weights.data(), zeros.size());
  CHECK_EQ(hetero_block_bind(t.block.handle, lent), 0);
  CHECK_EQ(t.run.Complete(t.run.Store(t.block, {}, true, 0)), 0);
  CHECK_EQ(hetero_block_bind(t.block.handle, lent + bytes), 0);
  CHECK_EQ(t.run.Complete(t.run.Fetch(t.block)), 0);
  CHECK_EQ(memcmp(lent + bytes, t.block.expected.weights.data(), zeros.size()), 0);
  CHECK_EQ(memcmp(t.block.weights, zeros.data(), zeros.size()), 0);  // the memory it was opened with has been left alone
  for (uint8_t& byte : t.block.expected.weights)
    byte ^= 0xff;  // in place: a file with one slot is written as often as one likes
  memcpy(lent, t.block.expected.weights.data(), zeros.size());
  CHECK_EQ(hetero_block_bind(t.block.handle, lent), 0);
  CHECK_EQ(t.run.Complete(t.run.Store(t.block, {}, true, 0)), 0);
  CHECK(t.run.Holds(t.block));
  t.run.StopEngine();
  t.block.Close();
  CHECK_EQ(hetero_unreserve(lent, 2 * bytes), 0);
}

TEST(other_memory_is_bound_only_where_it_can_be) {
  Setup t(Geometry(0, HETERO_F32, 4096, true, true), 18);
  TestBlock in_memory;
  REQUIRE(in_memory.Open(nullptr, Geometry(1, HETERO_F32, 4096, false, false), &t.random));
  t.Start(3, 1);
  CHECK_EQ(hetero_block_bind(nullptr, t.block.weights), HETERO_EINVAL);
  CHECK_EQ(hetero_block_bind(t.block.handle, nullptr), HETERO_EINVAL);
  CHECK_EQ(hetero_block_bind(t.block.handle, t.block.weights + 64), HETERO_EINVAL);
  CHECK_EQ(hetero_block_bind(in_memory.handle, in_memory.weights), HETERO_EINVAL);
  const int64_t ticket = t.run.OpenUpdate(t.block, true);
  CHECK_EQ(hetero_block_bind(t.block.handle, t.block.weights), HETERO_ESTATE);
  CHECK_EQ(hetero_cancel_update(t.run.engine, ticket), 0);
  CHECK_EQ(hetero_block_bind(t.block.handle, t.block.weights), 0);
}

TEST(step_zero_stores_weights_only_and_state_reads_as_zeros) {
  const hetero_block_geometry geometry = Geometry(0, HETERO_F32, 4096 * 2 + 16, true, true);
  Setup t(geometry, 8);
  for (std::vector<float>& array : t.block.expected.state) std::fill(array.begin(), array.end(), 0.0f);
  t.Start(3, 1);
  const int64_t ticket = t.run.Store(t.block, {{0, geometry.num_elements, t.block.expected.weights.data(), -1}}, false, 0);
  CHECK_EQ(t.run.Wait(ticket), 0);
  hetero_times times{};
  CHECK_EQ(hetero_ticket_times(t.run.engine, ticket, &times), 0);
  CHECK_EQ(times.bytes_written, hetero::RoundUp(geometry.num_elements * 4, 4096) + 4096);
  CHECK(t.run.Holds(t.block));
  CHECK_EQ(t.run.Complete(t.run.Commit(0)), 0);
  CHECK_EQ(t.Update(1), 0);
  CHECK(t.run.Holds(t.block));
}

TEST(patches_keep_everything_else) {
  for (const bool on_disk : {false, true}) {
    const hetero_block_geometry geometry = Geometry(0, HETERO_F32, 4096 * 3 + 160, on_disk, on_disk);
    Setup t(geometry, 9);
    t.Start(3, 2);
    CHECK_EQ(t.run.StoreModel(t.block, 1), 0);
    for (int64_t round = 0; round < 6; ++round) {
      CHECK_EQ(t.run.Complete(t.run.Commit(round)), 0);
      std::vector<hetero_patch> patches;
      std::vector<std::vector<float>> data;
      for (int32_t array = -1; array < 2; ++array) {
        const auto numel = static_cast<int64_t>(1 + t.random() % 6000);
        const auto offset = static_cast<int64_t>(t.random() % static_cast<uint64_t>(geometry.num_elements - numel));
        std::vector<float> values(static_cast<size_t>(numel), static_cast<float>(round * 10 + array));
        float* model = array < 0 ? reinterpret_cast<float*>(t.block.expected.weights.data())
                                 : t.block.expected.state[static_cast<size_t>(array)].data();
        std::copy(values.begin(), values.end(), model + offset);
        patches.push_back({offset, numel, values.data(), array});
        data.push_back(std::move(values));
      }
      CHECK_EQ(t.run.Complete(t.run.Store(t.block, patches, false, round + 2)), 0);
      CHECK(t.run.Holds(t.block));
    }
  }
}

TEST(blocks_and_stores_in_use_are_not_closed) {
  Setup t(Geometry(0, HETERO_F32, 4096, true, true), 12);
  t.Start(3, 1);
  const int64_t ticket = t.run.OpenUpdate(t.block, true);
  CHECK_EQ(hetero_block_close(t.block.handle), HETERO_ESTATE);
  CHECK_EQ(hetero_store_close(t.run.store), HETERO_ESTATE);
  const int64_t commit = t.run.Commit(1);
  CHECK_EQ(hetero_wait(t.run.engine, commit, HETERO_DONE, 0.02), HETERO_ETIMEDOUT);  // it waits for every writer before it
  CHECK_EQ(hetero_cancel_update(t.run.engine, ticket), 0);
  CHECK_EQ(t.run.Wait(commit), 0);
  CHECK_EQ(t.End(), 0);
}

TEST(every_back_end_gives_the_same_bits) {
  for (const int32_t backend : {HETERO_IO_AUTO, HETERO_IO_URING, HETERO_IO_POOL, HETERO_IO_SYNTHETIC}) {
    Setup t(Geometry(0, HETERO_BF16, 4096 * 9 + 16, true, true), 13);
    hetero_engine_options options = t.Options(4, 2);
    options.io_backend = backend;
    options.synthetic_read_bytes_per_s = options.synthetic_write_bytes_per_s = 1e9;
    if (!t.run.StartEngine(options)) {
      CHECK_EQ(backend, HETERO_IO_URING);  // the only one that a machine may refuse
      continue;
    }
    if (backend != HETERO_IO_AUTO) CHECK_EQ(hetero_engine_io_backend(t.run.engine), backend);
    REQUIRE_EQ(t.run.StoreModel(t.block, 1), 0);
    for (int64_t step = 2; step < 4; ++step) {
      CHECK_EQ(t.run.Complete(t.run.Commit(step)), 0);
      REQUIRE_EQ(t.Update(step), 0);
      CHECK(t.run.Holds(t.block));
    }
    CHECK_EQ(t.End(), 0);
  }
}
