// Who goes first, who waits, and who is taken back: priorities, edges, tiny staging, several threads, the end.
#include <algorithm>
#include <thread>

#include "engine_fixture.h"

using fixture::ApplyToModel;
using fixture::EngineOptions;
using fixture::Geometry;
using fixture::OnDisk;
using fixture::PlacedGeometries;
using fixture::Placement;
using fixture::Placements;
using fixture::RandomGradients;
using fixture::Run;
using fixture::Setup;
using fixture::TestBlock;
using fixture::TestGradients;

// Many blocks of all placements at once, updates opened and armed in random order with random priorities, three buffers.
TEST(concurrent_blocks_with_tiny_staging) {
  for (uint32_t seed = 0; seed < 6; ++seed) {
    Setup t(PlacedGeometries(seed), seed);
    const std::vector<Placement> placements = Placements();
    std::vector<TestBlock>& blocks = t.blocks;
    t.Begin(3 + seed % 3, 1 + static_cast<int32_t>(seed % 3));
    for (const TestBlock& block : blocks) CHECK_EQ(t.run.Complete(t.run.Fetch(block)), 0);
    int64_t commit = t.run.Commit(1);
    for (int64_t step = 2; step < 5; ++step) {
      std::vector<size_t> order(blocks.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), t.random);
      std::vector<int64_t> tickets(blocks.size());
      for (const size_t i : order) {
        tickets[i] = t.run.OpenUpdate(blocks[i], placements[i].resident);
        REQUIRE(tickets[i] > 0);
      }
      std::shuffle(order.begin(), order.end(), t.random);
      std::vector<TestGradients> gradients(blocks.size());
      for (const size_t i : order) {
        gradients[i] = RandomGradients(blocks[i].geometry.num_elements, step, &t.random);
        REQUIRE_EQ(t.run.Arm(tickets[i], gradients[i], step, static_cast<int64_t>(t.random() % 5)), 0);
        ApplyToModel(gradients[i], &blocks[i]);
      }
      CHECK_EQ(t.run.Complete(commit), 0);
      commit = t.run.Commit(step);
      for (const size_t i : order) CHECK_EQ(t.run.Complete(tickets[i]), 0);
      for (const TestBlock& block : blocks) CHECK(t.run.Holds(block));
    }
    CHECK_EQ(t.run.Complete(commit), 0);
    hetero_engine_stats stats{};
    CHECK_EQ(hetero_engine_get_stats(t.run.engine, &stats), 0);
    CHECK_LE(stats.staging_in_use_peak_bytes, stats.staging_bytes);
    CHECK_GT(stats.bytes_written, 0);
    CHECK_EQ(t.End(), 0);
  }
}

// Opened updates read ahead but leave room; an armed one that comes last still completes.
TEST(opened_updates_never_starve_an_armed_one) {
  Setup t(OnDisk(6, HETERO_F32, 4096 * 8), 3);
  t.Begin(5, 2);
  std::vector<int64_t> tickets;
  for (const TestBlock& block : t.blocks) tickets.push_back(t.run.OpenUpdate(block, false));
  for (size_t i = t.blocks.size(); i-- > 0;) {
    const TestGradients gradients = RandomGradients(t.blocks[i].geometry.num_elements, 2, &t.random);
    CHECK_EQ(hetero_poll(t.run.engine, tickets[i]), 0);
    CHECK_EQ(t.run.Arm(tickets[i], gradients, 2), 0);
    ApplyToModel(gradients, &t.blocks[i]);
    CHECK_EQ(t.run.Complete(tickets[i]), 0);
    CHECK(t.run.Holds(t.blocks[i]));
  }
}

// The chunks that an opened update had read are read again, and once more counted.
TEST(an_armed_update_takes_staging_back_from_an_opened_one) {
  Setup t(OnDisk(2, HETERO_F32, 4096 * 8), 14);
  TestBlock &opened = t.blocks[0], &armed = t.blocks[1];
  t.Begin(5, 1);
  const int64_t first = t.run.OpenUpdate(opened, false);
  const int64_t chunk_bytes = hetero_block_staged_bytes(&t.block.geometry);
  hetero_times times{};
  while (times.bytes_read < 3 * chunk_bytes) {
    std::this_thread::yield();
    REQUIRE_EQ(hetero_ticket_times(t.run.engine, first, &times), 0);
  }
  const TestGradients gradients = RandomGradients(t.block.geometry.num_elements, 2, &t.random);
  const int64_t second = t.run.OpenUpdate(armed, false);
  for (const int64_t ticket : {second, first}) {
    CHECK_EQ(t.run.Arm(ticket, gradients, 2), 0);
    CHECK_EQ(t.run.Wait(ticket), 0);
  }
  CHECK_EQ(hetero_ticket_times(t.run.engine, second, &times), 0);
  CHECK_EQ(times.bytes_read, 8 * chunk_bytes);
  CHECK_EQ(hetero_ticket_times(t.run.engine, first, &times), 0);
  CHECK_GT(times.bytes_read, 8 * chunk_bytes);
  for (TestBlock& block : t.blocks) {
    ApplyToModel(gradients, &block);
    CHECK(t.run.Holds(block));
  }
}

TEST(a_cancelled_update_leaves_the_block_as_it_was) {
  Setup t(Geometry(0, HETERO_F16, 4096 * 4, true, true), 4);
  t.Begin(4, 1);
  const int64_t ticket = t.run.OpenUpdate(t.block, false);
  CHECK_EQ(hetero_release_ticket(t.run.engine, ticket), HETERO_ESTATE);
  CHECK_EQ(hetero_wait(t.run.engine, ticket, HETERO_DONE, 0.01), HETERO_ETIMEDOUT);
  CHECK_EQ(hetero_cancel_update(t.run.engine, ticket), 0);
  CHECK_EQ(hetero_cancel_update(t.run.engine, ticket), HETERO_ESTATE);
  CHECK_EQ(t.run.Complete(ticket), 0);
  CHECK(t.run.Holds(t.block));
  // The slot is free again.
  CHECK_EQ(t.Update(2), 0);
  CHECK(t.run.Holds(t.block));
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
  Setup t(Geometry(0, HETERO_F32, 4096 * 6, true, true), 6);
  t.Begin(4, 1);
  CHECK(t.run.OpenUpdate(t.block, false) > 0);
  CHECK(t.run.Fetch(t.block) > 0);
  CHECK(t.run.Commit(2) > 0);
  CHECK_EQ(t.End(), 0);
  // The aborted commit wrote nothing.
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step), 0);
  CHECK_EQ(step, 1);
}

TEST(staging_is_resized_between_tasks_only) {
  const hetero_block_geometry g = Geometry(0, HETERO_F32, 4096 * 9 + 16, true, true);
  Setup t(g, 12);
  t.Begin(8, 2);
  const int64_t chunk = t.Options(8, 2).chunk_bytes_max;
  int64_t step = 1;
  for (const int64_t buffers : {3, 20, 4}) {
    const int64_t ticket = t.run.OpenUpdate(t.block, false);
    CHECK_EQ(hetero_engine_resize_staging(t.run.engine, buffers * chunk), HETERO_ESTATE);
    const TestGradients gradients = RandomGradients(g.num_elements, ++step, &t.random);
    REQUIRE_EQ(t.run.Arm(ticket, gradients, step), 0);
    ApplyToModel(gradients, &t.block);
    CHECK_EQ(t.run.Complete(ticket), 0);
    CHECK_EQ(hetero_engine_resize_staging(t.run.engine, 2 * chunk), HETERO_EINVAL);
    CHECK_EQ(hetero_engine_resize_staging(t.run.engine, buffers * chunk), 0);
    hetero_engine_stats stats{};
    CHECK_EQ(hetero_engine_get_stats(t.run.engine, &stats), 0);
    CHECK_EQ(stats.staging_bytes, buffers * chunk);
    CHECK(t.run.Holds(t.block));
    CHECK_EQ(t.run.Complete(t.run.Commit(step)), 0);
  }
  CHECK_EQ(t.End(), 0);
}

TEST(several_threads_use_one_engine) {
  constexpr int kThreads = 4;
  Setup t(OnDisk(kThreads, HETERO_BF16, 4096 * 4 + 32), 10);
  t.Begin(4, 2);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&run = t.run, &block = t.blocks[static_cast<size_t>(i)], seed = static_cast<uint32_t>(i)] {
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
}
