// Who goes first, who waits, and who is taken back: priorities, edges, tiny staging, several threads, the end.
#include <algorithm>
#include <thread>

#include "engine_fixture.h"

using fixture::ApplyToModel;
using fixture::EngineOptions;
using fixture::Geometry;
using fixture::Placement;
using fixture::Placements;
using fixture::RandomGradients;
using fixture::Run;
using fixture::StoreOptions;
using fixture::TempDirectory;
using fixture::TestBlock;
using fixture::TestGradients;

// Many blocks of all placements at once, updates opened and armed in random order with random priorities, three buffers.
TEST(concurrent_blocks_with_tiny_staging) {
  for (uint32_t seed = 0; seed < 6; ++seed) {
    std::mt19937 random(seed);
    const TempDirectory directory;
    const std::vector<Placement> placements = Placements();
    const auto num_blocks = static_cast<int32_t>(placements.size());
    std::vector<TestBlock> blocks(placements.size());
    Run run;
    REQUIRE(run.OpenStore(directory, StoreOptions(num_blocks)));
    int64_t staged = 0;
    for (int32_t i = 0; i < num_blocks; ++i) {
      const Placement& p = placements[static_cast<size_t>(i)];
      const auto num_elements = static_cast<int64_t>(16 * (1 + random() % 1500));
      const hetero_block_geometry g = Geometry(i, p.dtype, num_elements, p.weights_on_disk, p.state_on_disk);
      REQUIRE(blocks[static_cast<size_t>(i)].Open(run.store, g, &random));
      staged = std::max(staged, hetero_block_staged_bytes(&g));
    }
    REQUIRE(run.StartEngine(EngineOptions(staged, 3 + seed % 3, 1 + static_cast<int32_t>(seed % 3))));
    for (const TestBlock& block : blocks) REQUIRE_EQ(run.StoreModel(block, 1), 0);
    for (size_t i = 0; i < blocks.size(); ++i) CHECK_EQ(run.Complete(run.Fetch(blocks[i])), 0);
    int64_t commit = run.Commit(1);
    for (int64_t step = 2; step < 5; ++step) {
      std::vector<size_t> order(blocks.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), random);
      std::vector<int64_t> tickets(blocks.size());
      for (const size_t i : order) {
        tickets[i] = run.OpenUpdate(blocks[i], placements[i].resident);
        REQUIRE(tickets[i] > 0);
      }
      std::shuffle(order.begin(), order.end(), random);
      std::vector<TestGradients> gradients(blocks.size());
      for (const size_t i : order) {
        gradients[i] = RandomGradients(blocks[i].geometry.num_elements, step, &random);
        REQUIRE_EQ(run.Arm(tickets[i], gradients[i], step, static_cast<int64_t>(random() % 5)), 0);
        ApplyToModel(gradients[i], &blocks[i]);
      }
      CHECK_EQ(run.Complete(commit), 0);
      commit = run.Commit(step);
      for (const size_t i : order) CHECK_EQ(run.Complete(tickets[i]), 0);
      for (const TestBlock& block : blocks) CHECK(run.Holds(block));
    }
    CHECK_EQ(run.Complete(commit), 0);
    hetero_engine_stats stats{};
    CHECK_EQ(hetero_engine_get_stats(run.engine, &stats), 0);
    CHECK_LE(stats.staging_in_use_peak_bytes, stats.staging_bytes);
    CHECK_GT(stats.bytes_written, 0);
    CHECK_EQ(run.StopEngine(), 0);
    for (TestBlock& block : blocks) block.Close();
  }
}

// Opened updates read ahead but leave room; an armed one that comes last still completes.
TEST(opened_updates_never_starve_an_armed_one) {
  std::mt19937 random(3);
  const TempDirectory directory;
  std::vector<TestBlock> blocks(6);
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(6)));
  int64_t staged = 0;
  for (int32_t i = 0; i < 6; ++i) {
    const hetero_block_geometry g = Geometry(i, HETERO_F32, 4096 * 8, true, true);
    staged = hetero_block_staged_bytes(&g);
    REQUIRE(blocks[static_cast<size_t>(i)].Open(run.store, g, &random));
  }
  REQUIRE(run.StartEngine(EngineOptions(staged, 5, 2)));
  for (const TestBlock& block : blocks) REQUIRE_EQ(run.StoreModel(block, 1), 0);
  CHECK_EQ(run.Complete(run.Commit(1)), 0);
  std::vector<int64_t> tickets;
  for (const TestBlock& block : blocks) tickets.push_back(run.OpenUpdate(block, false));
  for (size_t i = blocks.size(); i-- > 0;) {
    const TestGradients gradients = RandomGradients(blocks[i].geometry.num_elements, 2, &random);
    CHECK_EQ(hetero_poll(run.engine, tickets[i]), 0);
    CHECK_EQ(run.Arm(tickets[i], gradients, 2), 0);
    ApplyToModel(gradients, &blocks[i]);
    CHECK_EQ(run.Complete(tickets[i]), 0);
    CHECK(run.Holds(blocks[i]));
  }
  run.StopEngine();
  for (TestBlock& block : blocks) block.Close();
}

// The chunks that an opened update had read are read again, and once more counted.
TEST(an_armed_update_takes_staging_back_from_an_opened_one) {
  std::mt19937 random(14);
  const TempDirectory directory;
  TestBlock opened, armed;
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(2)));
  const hetero_block_geometry g = Geometry(0, HETERO_F32, 4096 * 8, true, true);
  REQUIRE(opened.Open(run.store, g, &random));
  REQUIRE(armed.Open(run.store, Geometry(1, HETERO_F32, 4096 * 8, true, true), &random));
  REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 5, 1)));
  for (const TestBlock* block : {&opened, &armed}) REQUIRE_EQ(run.StoreModel(*block, 1), 0);
  CHECK_EQ(run.Complete(run.Commit(1)), 0);
  const int64_t first = run.OpenUpdate(opened, false);
  const int64_t chunk_bytes = hetero_block_staged_bytes(&g);
  hetero_times times{};
  while (times.bytes_read < 3 * chunk_bytes) {
    std::this_thread::yield();
    REQUIRE_EQ(hetero_ticket_times(run.engine, first, &times), 0);
  }
  const TestGradients gradients = RandomGradients(g.num_elements, 2, &random);
  const int64_t second = run.OpenUpdate(armed, false);
  for (const int64_t ticket : {second, first}) {
    CHECK_EQ(run.Arm(ticket, gradients, 2), 0);
    CHECK_EQ(run.Wait(ticket), 0);
  }
  CHECK_EQ(hetero_ticket_times(run.engine, second, &times), 0);
  CHECK_EQ(times.bytes_read, 8 * chunk_bytes);
  CHECK_EQ(hetero_ticket_times(run.engine, first, &times), 0);
  CHECK_GT(times.bytes_read, 8 * chunk_bytes);
  for (TestBlock* block : {&opened, &armed}) {
    ApplyToModel(gradients, block);
    CHECK(run.Holds(*block));
  }
  run.StopEngine();
  opened.Close();
  armed.Close();
}

TEST(a_cancelled_update_leaves_the_block_as_it_was) {
  std::mt19937 random(4);
  const TempDirectory directory;
  TestBlock block;
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(1)));
  const hetero_block_geometry g = Geometry(0, HETERO_F16, 4096 * 4, true, true);
  REQUIRE(block.Open(run.store, g, &random));
  REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 4, 1)));
  REQUIRE_EQ(run.StoreModel(block, 1), 0);
  CHECK_EQ(run.Complete(run.Commit(1)), 0);
  const int64_t ticket = run.OpenUpdate(block, false);
  CHECK_EQ(hetero_release_ticket(run.engine, ticket), HETERO_ESTATE);
  CHECK_EQ(hetero_wait(run.engine, ticket, HETERO_DONE, 0.01), HETERO_ETIMEDOUT);
  CHECK_EQ(hetero_cancel_update(run.engine, ticket), 0);
  CHECK_EQ(hetero_cancel_update(run.engine, ticket), HETERO_ESTATE);
  CHECK_EQ(run.Complete(ticket), 0);
  CHECK(run.Holds(block));
  // The slot is free again.
  const TestGradients gradients = RandomGradients(g.num_elements, 2, &random);
  const int64_t again = run.OpenUpdate(block, false);
  CHECK_EQ(run.Arm(again, gradients, 2), 0);
  ApplyToModel(gradients, &block);
  CHECK_EQ(run.Complete(again), 0);
  CHECK(run.Holds(block));
  run.StopEngine();
  block.Close();
}

TEST(an_update_cancelled_before_it_starts_keeps_its_place) {
  std::mt19937 random(11);
  TestBlock block;
  Run run;
  REQUIRE(block.Open(nullptr, Geometry(0, HETERO_F32, 4096 * 2, false, false), &random));
  REQUIRE(run.StartEngine(EngineOptions(0, 0, 1)));
  REQUIRE_EQ(run.StoreModel(block, 1), 0);
  const int64_t first = run.OpenUpdate(block, true);
  const int64_t second = run.OpenUpdate(block, true);
  const int64_t third = run.OpenUpdate(block, true);
  const TestGradients gradients = RandomGradients(4096 * 2, 2, &random);
  CHECK_EQ(run.Arm(third, gradients, 3), 0);
  CHECK_EQ(hetero_cancel_update(run.engine, second), 0);
  CHECK_EQ(hetero_wait(run.engine, third, HETERO_DONE, 0.02), HETERO_ETIMEDOUT);
  CHECK_EQ(hetero_poll(run.engine, second), 0);
  CHECK_EQ(run.Arm(first, gradients, 2), 0);
  for (const int64_t ticket : {first, second, third}) CHECK_EQ(run.Wait(ticket), 0);
  ApplyToModel(gradients, &block);
  ApplyToModel(gradients, &block);
  CHECK(run.Holds(block));
  run.StopEngine();
  block.Close();
}

TEST(after_edges_order_tasks_of_different_blocks) {
  std::mt19937 random(5);
  std::vector<TestBlock> blocks(3);
  Run run;
  for (int32_t i = 0; i < 3; ++i)
    REQUIRE(blocks[static_cast<size_t>(i)].Open(nullptr, Geometry(i, HETERO_F32, 4096 * 2, false, false), &random));
  REQUIRE(run.StartEngine(EngineOptions(0, 0, 2)));
  const int64_t first = run.OpenUpdate(blocks[0], true);
  hetero_task task{0, &first, 1};
  const int64_t second = hetero_open_update(run.engine, blocks[1].handle, 1, &task);
  const TestGradients gradients = RandomGradients(4096 * 2, 1, &random);
  CHECK_EQ(run.Arm(second, gradients, 1), 0);
  CHECK_EQ(hetero_wait(run.engine, second, HETERO_DONE, 0.02), HETERO_ETIMEDOUT);
  CHECK_EQ(run.Arm(first, gradients, 1), 0);
  CHECK_EQ(run.Wait(second), 0);
  hetero_times early{}, late{};
  CHECK_EQ(hetero_ticket_times(run.engine, first, &early), 0);
  CHECK_EQ(hetero_ticket_times(run.engine, second, &late), 0);
  CHECK_LE(early.done_ns, late.started_ns);
  CHECK_EQ(hetero_release_ticket(run.engine, first), 0);
  CHECK_EQ(hetero_wait(run.engine, first, HETERO_DONE, 0), HETERO_ESTATE);
  const int64_t third = hetero_open_update(run.engine, blocks[2].handle, 1, &task);  // a released ticket counts as DONE
  CHECK_EQ(run.Arm(third, gradients, 1), 0);
  CHECK_EQ(run.Complete(third), 0);
  const int64_t unknown = 1000;
  task.after = &unknown;
  CHECK_EQ(hetero_open_update(run.engine, blocks[2].handle, 1, &task), HETERO_ESTATE);
  run.StopEngine();
  for (TestBlock& block : blocks) block.Close();
}

TEST(destroy_never_hangs_on_unarmed_updates_and_waiting_tasks) {
  std::mt19937 random(6);
  const TempDirectory directory;
  TestBlock block;
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(1)));
  const hetero_block_geometry g = Geometry(0, HETERO_F32, 4096 * 6, true, true);
  REQUIRE(block.Open(run.store, g, &random));
  REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 4, 1)));
  REQUIRE_EQ(run.StoreModel(block, 1), 0);
  CHECK_EQ(run.Complete(run.Commit(1)), 0);
  CHECK(run.OpenUpdate(block, false) > 0);
  CHECK(run.Fetch(block) > 0);
  CHECK(run.Commit(2) > 0);
  CHECK_EQ(run.StopEngine(), 0);
  block.Close();
  // The aborted commit wrote nothing.
  run.CloseStore();
  hetero_store_options options = StoreOptions(1);
  options.create = 0;
  REQUIRE(run.OpenStore(directory, options));
  int64_t step = 0;
  CHECK_EQ(hetero_store_recover(run.store, &step, nullptr, 0), 0);
  CHECK_EQ(step, 1);
}

TEST(staging_is_resized_between_tasks_only) {
  std::mt19937 random(12);
  const TempDirectory directory;
  TestBlock block;
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(1)));
  const hetero_block_geometry g = Geometry(0, HETERO_F32, 4096 * 9 + 16, true, true);
  REQUIRE(block.Open(run.store, g, &random));
  const hetero_engine_options options = EngineOptions(hetero_block_staged_bytes(&g), 8, 2);
  const int64_t chunk = options.chunk_bytes_max;
  REQUIRE(run.StartEngine(options));
  REQUIRE_EQ(run.StoreModel(block, 1), 0);
  int64_t step = 1;
  for (const int64_t buffers : {3, 20, 4}) {
    CHECK_EQ(run.Complete(run.Commit(step)), 0);
    const int64_t ticket = run.OpenUpdate(block, false);
    CHECK_EQ(hetero_engine_resize_staging(run.engine, buffers * chunk), HETERO_ESTATE);
    const TestGradients gradients = RandomGradients(g.num_elements, ++step, &random);
    REQUIRE_EQ(run.Arm(ticket, gradients, step), 0);
    ApplyToModel(gradients, &block);
    CHECK_EQ(run.Complete(ticket), 0);
    CHECK_EQ(hetero_engine_resize_staging(run.engine, 2 * chunk), HETERO_EINVAL);
    CHECK_EQ(hetero_engine_resize_staging(run.engine, buffers * chunk), 0);
    hetero_engine_stats stats{};
    CHECK_EQ(hetero_engine_get_stats(run.engine, &stats), 0);
    CHECK_EQ(stats.staging_bytes, buffers * chunk);
    CHECK(run.Holds(block));
  }
  CHECK_EQ(run.StopEngine(), 0);
  block.Close();
}

TEST(several_threads_use_one_engine) {
  std::mt19937 random(10);
  const TempDirectory directory;
  constexpr int kThreads = 4;
  std::vector<TestBlock> blocks(kThreads);
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(kThreads)));
  const hetero_block_geometry shape = Geometry(0, HETERO_BF16, 4096 * 4 + 32, true, true);
  for (int32_t i = 0; i < kThreads; ++i) {
    hetero_block_geometry g = shape;
    g.id = i;
    REQUIRE(blocks[static_cast<size_t>(i)].Open(run.store, g, &random));
  }
  REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&shape), 4, 2)));
  for (const TestBlock& block : blocks) REQUIRE_EQ(run.StoreModel(block, 1), 0);
  CHECK_EQ(run.Complete(run.Commit(1)), 0);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&run, &block = blocks[static_cast<size_t>(i)], seed = static_cast<uint32_t>(i)] {
      std::mt19937 own(seed);
      const TestGradients gradients = RandomGradients(block.geometry.num_elements, 2, &own);
      const int64_t ticket = run.OpenUpdate(block, false);
      CHECK_EQ(run.Arm(ticket, gradients, 2, seed), 0);
      ApplyToModel(gradients, &block);
      CHECK_EQ(run.Wait(ticket, HETERO_READY), 0);
      CHECK_EQ(run.Complete(ticket), 0);
      CHECK(run.Holds(block));
    });
  }
  for (std::thread& thread : threads) thread.join();
  run.StopEngine();
  for (TestBlock& block : blocks) block.Close();
}
