// The engine against a naive model: every placement, dtype, residency and back end, random segments.
#include <algorithm>

#include "engine_fixture.h"

using fixture::ApplyToModel;
using fixture::EngineOptions;
using fixture::Geometry;
using fixture::OneBlock;
using fixture::Placement;
using fixture::Placements;
using fixture::RandomGradients;
using fixture::Run;
using fixture::StoreOptions;
using fixture::TempDirectory;
using fixture::TestBlock;
using fixture::TestGradients;

namespace {

// Stores, then updates three times with commits, checking every array after each step.
void TrainOneBlock(const Placement& p, int64_t num_elements, bool digests, uint32_t seed) {
  OneBlock made(p, num_elements, digests, seed);
  auto& [random, directory, block, run] = made;
  CHECK(run.Holds(block));
  for (int64_t step = 2; step < 5; ++step) {
    if (p.resident) CHECK_EQ(run.Complete(run.Fetch(block)), 0);
    const TestGradients gradients = RandomGradients(num_elements, step, &random);
    const int64_t ticket = run.OpenUpdate(block, p.resident);
    REQUIRE_EQ(run.Arm(ticket, gradients, step), 0);
    ApplyToModel(gradients, &block);
    CHECK_EQ(run.Wait(ticket, HETERO_READY), 0);
    if (p.resident) CHECK_EQ(memcmp(block.weights, block.expected_weights.data(), block.expected_weights.size()), 0);
    CHECK_EQ(run.Complete(ticket), 0);
    CHECK(run.Holds(block));
    int64_t newest_step = 0;
    CHECK_GE(hetero_block_slot(block.handle, &newest_step), 0);
    CHECK_EQ(newest_step, step);
    CHECK_EQ(run.Complete(run.Commit(step)), 0);
    if (!p.resident) {
      CHECK_EQ(run.Complete(run.Fetch(block)), 0);
      CHECK_EQ(memcmp(block.weights, block.expected_weights.data(), block.expected_weights.size()), 0);
    }
  }
  CHECK_EQ(run.StopEngine(), 0);
  block.Close();
}

}  // namespace

TEST(every_placement_equals_the_naive_model) {
  uint32_t seed = 1;
  for (const Placement& p : Placements()) {
    for (const int64_t num_elements : {16, 4096, 4096 * 5 + 48}) TrainOneBlock(p, num_elements, seed % 2 == 0, seed), ++seed;
  }
}

TEST(released_weights_come_back_by_fetch) {
  std::mt19937 random(7);
  const TempDirectory directory;
  TestBlock block;
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(1)));
  const hetero_block_geometry geometry = Geometry(0, HETERO_BF16, 4096 * 3 + 16, true, true);
  REQUIRE(block.Open(run.store, geometry, &random));
  REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&geometry), 3, 1)));
  memcpy(block.weights, block.expected_weights.data(), block.expected_weights.size());
  CHECK_EQ(run.Complete(run.Store(block, block.WholePatches(false), true, 0)), 0);
  const hetero_task task{};
  CHECK_EQ(run.Complete(hetero_submit_release(run.engine, block.handle, &task)), 0);
  const std::vector<uint8_t> zeros(block.expected_weights.size());
  CHECK_EQ(memcmp(block.weights, zeros.data(), zeros.size()), 0);
  CHECK_EQ(run.Complete(run.Fetch(block)), 0);
  CHECK_EQ(memcmp(block.weights, block.expected_weights.data(), block.expected_weights.size()), 0);
  CHECK(run.Holds(block));
  run.StopEngine();
  block.Close();
}

TEST(one_file_passes_through_memory_that_is_lent_to_it) {
  std::mt19937 random(17);
  const TempDirectory directory;
  TestBlock block;
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(1)));
  const hetero_block_geometry geometry = Geometry(0, HETERO_U8, 4096 * 5, true, false);
  REQUIRE(block.Open(run.store, geometry, &random));
  REQUIRE(run.StartEngine(EngineOptions(4096, 3, 1)));
  const std::vector<uint8_t> zeros(block.expected_weights.size());
  const auto bytes = static_cast<int64_t>(zeros.size());
  auto* lent = static_cast<uint8_t*>(hetero_reserve(2 * bytes));
  REQUIRE(lent != nullptr);
  memcpy(lent, block.expected_weights.data(), zeros.size());
  CHECK_EQ(hetero_block_bind(block.handle, lent), 0);
  CHECK_EQ(run.Complete(run.Store(block, {}, true, 0)), 0);
  CHECK_EQ(hetero_block_bind(block.handle, lent + bytes), 0);
  CHECK_EQ(run.Complete(run.Fetch(block)), 0);
  CHECK_EQ(memcmp(lent + bytes, block.expected_weights.data(), zeros.size()), 0);
  CHECK_EQ(memcmp(block.weights, zeros.data(), zeros.size()), 0);  // the memory it was opened with has been left alone
  for (uint8_t& byte : block.expected_weights) byte ^= 0xff;  // in place: a file with one slot is written as often as one likes
  memcpy(lent, block.expected_weights.data(), zeros.size());
  CHECK_EQ(hetero_block_bind(block.handle, lent), 0);
  CHECK_EQ(run.Complete(run.Store(block, {}, true, 0)), 0);
  CHECK(run.Holds(block));
  run.StopEngine();
  block.Close();
  CHECK_EQ(hetero_unreserve(lent, 2 * bytes), 0);
}

TEST(other_memory_is_bound_only_where_it_can_be) {
  std::mt19937 random(18);
  const TempDirectory directory;
  TestBlock block;
  TestBlock in_memory;
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(1)));
  const hetero_block_geometry g = Geometry(0, HETERO_F32, 4096, true, true);
  REQUIRE(block.Open(run.store, g, &random));
  REQUIRE(in_memory.Open(nullptr, Geometry(1, HETERO_F32, 4096, false, false), &random));
  REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 3, 1)));
  CHECK_EQ(hetero_block_bind(nullptr, block.weights), HETERO_EINVAL);
  CHECK_EQ(hetero_block_bind(block.handle, nullptr), HETERO_EINVAL);
  CHECK_EQ(hetero_block_bind(block.handle, block.weights + 64), HETERO_EINVAL);
  CHECK_EQ(hetero_block_bind(in_memory.handle, in_memory.weights), HETERO_EINVAL);
  const int64_t ticket = run.OpenUpdate(block, true);
  CHECK_EQ(hetero_block_bind(block.handle, block.weights), HETERO_ESTATE);
  CHECK_EQ(hetero_cancel_update(run.engine, ticket), 0);
  CHECK_EQ(hetero_block_bind(block.handle, block.weights), 0);
  run.StopEngine();
  block.Close();
  in_memory.Close();
}

TEST(step_zero_stores_weights_only_and_state_reads_as_zeros) {
  std::mt19937 random(8);
  const TempDirectory directory;
  TestBlock block;
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(1)));
  const hetero_block_geometry geometry = Geometry(0, HETERO_F32, 4096 * 2 + 16, true, true);
  REQUIRE(block.Open(run.store, geometry, &random));
  for (std::vector<float>& array : block.expected_state) std::fill(array.begin(), array.end(), 0.0f);
  REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&geometry), 3, 1)));
  const int64_t ticket = run.Store(block, {{0, geometry.num_elements, block.expected_weights.data(), -1}}, false, 0);
  CHECK_EQ(run.Wait(ticket), 0);
  hetero_times times{};
  CHECK_EQ(hetero_ticket_times(run.engine, ticket, &times), 0);
  CHECK_EQ(times.bytes_written, hetero::RoundUp(geometry.num_elements * 4, 4096) + 4096);
  CHECK(run.Holds(block));
  CHECK_EQ(run.Complete(run.Commit(0)), 0);
  const TestGradients gradients = RandomGradients(geometry.num_elements, 1, &random);
  const int64_t update = run.OpenUpdate(block, false);
  CHECK_EQ(run.Arm(update, gradients, 1), 0);
  ApplyToModel(gradients, &block);
  CHECK_EQ(run.Complete(update), 0);
  CHECK(run.Holds(block));
  run.StopEngine();
  block.Close();
}

TEST(patches_keep_everything_else) {
  for (const bool on_disk : {false, true}) {
    std::mt19937 random(9);
    const TempDirectory directory;
    TestBlock block;
    Run run;
    REQUIRE(run.OpenStore(directory, StoreOptions(1)));
    const hetero_block_geometry geometry = Geometry(0, HETERO_F32, 4096 * 3 + 160, on_disk, on_disk);
    REQUIRE(block.Open(run.store, geometry, &random));
    REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&geometry), 3, 2)));
    CHECK_EQ(run.StoreModel(block, 1), 0);
    for (int64_t round = 0; round < 6; ++round) {
      CHECK_EQ(run.Complete(run.Commit(round)), 0);
      std::vector<hetero_patch> patches;
      std::vector<std::vector<float>> data;
      for (int32_t array = -1; array < 2; ++array) {
        const auto numel = static_cast<int64_t>(1 + random() % 6000);
        const auto offset = static_cast<int64_t>(random() % static_cast<uint64_t>(geometry.num_elements - numel));
        std::vector<float> values(static_cast<size_t>(numel), static_cast<float>(round * 10 + array));
        float* model = array < 0 ? reinterpret_cast<float*>(block.expected_weights.data())
                                 : block.expected_state[static_cast<size_t>(array)].data();
        std::copy(values.begin(), values.end(), model + offset);
        patches.push_back({offset, numel, values.data(), array});
        data.push_back(std::move(values));
      }
      CHECK_EQ(run.Complete(run.Store(block, patches, false, round + 2)), 0);
      CHECK(run.Holds(block));
    }
    run.StopEngine();
    block.Close();
  }
}

TEST(blocks_and_stores_in_use_are_not_closed) {
  std::mt19937 random(12);
  const TempDirectory directory;
  TestBlock block;
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(1)));
  const hetero_block_geometry g = Geometry(0, HETERO_F32, 4096, true, true);
  REQUIRE(block.Open(run.store, g, &random));
  REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 3, 1)));
  const int64_t ticket = run.OpenUpdate(block, true);
  CHECK_EQ(hetero_block_close(block.handle), HETERO_ESTATE);
  CHECK_EQ(hetero_store_close(run.store), HETERO_ESTATE);
  const int64_t commit = run.Commit(1);
  CHECK_EQ(hetero_wait(run.engine, commit, HETERO_DONE, 0.02), HETERO_ETIMEDOUT);  // it waits for every writer before it
  CHECK_EQ(hetero_cancel_update(run.engine, ticket), 0);
  CHECK_EQ(run.Wait(commit), 0);
  CHECK_EQ(run.StopEngine(), 0);
  block.Close();
}

TEST(every_back_end_gives_the_same_bits) {
  for (const int32_t backend : {HETERO_IO_AUTO, HETERO_IO_URING, HETERO_IO_POOL, HETERO_IO_SYNTHETIC}) {
    std::mt19937 random(13);
    const TempDirectory directory;
    TestBlock block;
    Run run;
    REQUIRE(run.OpenStore(directory, StoreOptions(1)));
    const hetero_block_geometry g = Geometry(0, HETERO_BF16, 4096 * 9 + 16, true, true);
    REQUIRE(block.Open(run.store, g, &random));
    hetero_engine_options options = EngineOptions(hetero_block_staged_bytes(&g), 4, 2);
    options.io_backend = backend;
    options.synthetic_read_bytes_per_s = options.synthetic_write_bytes_per_s = 1e9;
    if (!run.StartEngine(options)) {
      CHECK_EQ(backend, HETERO_IO_URING);  // the only one that a machine may refuse
      block.Close();
      continue;
    }
    if (backend != HETERO_IO_AUTO) CHECK_EQ(hetero_engine_io_backend(run.engine), backend);
    REQUIRE_EQ(run.StoreModel(block, 1), 0);
    for (int64_t step = 2; step < 4; ++step) {
      CHECK_EQ(run.Complete(run.Commit(step)), 0);
      const TestGradients gradients = RandomGradients(g.num_elements, step, &random);
      const int64_t ticket = run.OpenUpdate(block, false);
      REQUIRE_EQ(run.Arm(ticket, gradients, step), 0);
      ApplyToModel(gradients, &block);
      CHECK_EQ(run.Complete(ticket), 0);
      CHECK(run.Holds(block));
    }
    CHECK_EQ(run.StopEngine(), 0);
    block.Close();
  }
}
