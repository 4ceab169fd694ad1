// Updates that run before their verdict: kept or taken back at any moment, in every placement, bit for bit.
#include <algorithm>
#include <thread>

#include "engine_fixture.h"

using fixture::ApplyToModel;
using fixture::Geometry;
using fixture::OnDisk;
using fixture::PlacedGeometries;
using fixture::Placement;
using fixture::Placements;
using fixture::RandomGradients;
using fixture::Run;
using fixture::Setup;
using fixture::StoreOptions;
using fixture::TestBlock;
using fixture::TestGradients;

namespace {

int64_t Speculate(const Run& run, const TestBlock& block, bool resident, const TestGradients& gradients, int64_t step) {
  const hetero_task task{};
  const int64_t ticket = hetero_open_speculative_update(run.engine, block.handle, resident ? 1 : 0, &task);
  if (ticket > 0) CHECK_EQ(run.Arm(ticket, gradients, step), 0);
  return ticket;
}

int64_t Discard(const Run& run, const TestBlock& block) {
  const hetero_task task{};
  return hetero_submit_discard(run.engine, block.handle, &task);
}

enum class Moment { kAtOnce, kSoon, kReady, kDone };

void Reach(const Run& run, int64_t ticket, Moment moment, std::mt19937* random) {
  if (moment == Moment::kSoon) std::this_thread::sleep_for(std::chrono::microseconds((*random)() % 400));
  if (moment == Moment::kReady) CHECK_EQ(run.Wait(ticket, HETERO_READY), 0);
  if (moment == Moment::kDone) CHECK_EQ(run.Wait(ticket), 0);
}

// Three steps: the update of each is tried with other gradients first and taken back at `moment`, or kept.
void TrainOneBlock(const Placement& p, Moment moment, bool digests, uint32_t seed) {
  const int64_t num_elements = 4096 * static_cast<int64_t>(seed % 4) + 48;
  Setup t({Geometry(0, p, num_elements)}, seed, StoreOptions(1, digests));
  t.Begin(3, 2);
  if (p.resident) CHECK_EQ(t.run.Complete(t.run.Fetch(t.block)), 0);
  for (int64_t step = 2; step < 5; ++step) {
    const TestGradients wrong = RandomGradients(num_elements, step, &t.random);
    const TestGradients right = RandomGradients(num_elements, step, &t.random);
    const int64_t tried = Speculate(t.run, t.block, p.resident, wrong, step);
    REQUIRE(tried > 0);
    Reach(t.run, tried, moment, &t.random);
    const int64_t discard = Discard(t.run, t.block);
    REQUIRE(discard > 0);
    CHECK_EQ(t.run.Complete(tried), 0);
    if (step == 2) {  // nothing has happened
      CHECK_EQ(t.run.Complete(discard), 0);
      CHECK(t.run.Holds(t.block));
      if (!p.weights_on_disk) CHECK(t.block.HoldsInMemory());
      int64_t newest_step = 0;
      CHECK_GE(hetero_block_slot(t.block.handle, &newest_step), 0);
      CHECK_EQ(newest_step, 1);
    }
    if (p.resident && p.weights_on_disk) CHECK(t.run.Fetch(t.block) > 0);
    const bool again = step == 3;  // a second try may be one more speculation, and is kept
    const int64_t ticket = again ? Speculate(t.run, t.block, p.resident, right, step) : t.run.OpenUpdate(t.block, p.resident);
    REQUIRE(ticket > 0);
    if (again) {
      Reach(t.run, ticket, moment, &t.random);
      CHECK_EQ(hetero_keep_update(t.run.engine, t.block.handle), 0);
    } else {
      REQUIRE_EQ(t.run.Arm(ticket, right, step), 0);
    }
    ApplyToModel(right, &t.block);
    CHECK_EQ(t.run.Wait(ticket, HETERO_READY), 0);
    if (p.resident) CHECK(t.block.HoldsInMemory());
    CHECK_EQ(t.run.Complete(ticket), 0);
    CHECK(t.run.Holds(t.block));
    CHECK_EQ(t.run.Complete(t.run.Commit(step)), 0);
  }
  CHECK_EQ(t.End(), 0);
}

}  // namespace

TEST(an_update_is_kept_or_taken_back_at_any_moment) {
  uint32_t seed = 1;
  for (const Placement& p : Placements()) {
    for (const Moment moment : {Moment::kAtOnce, Moment::kSoon, Moment::kReady, Moment::kDone})
      TrainOneBlock(p, moment, seed % 2 == 0, seed), ++seed;
  }
}

TEST(a_first_update_is_taken_back_to_state_that_reads_as_zeros) {
  for (const bool state_on_disk : {false, true}) {
    const hetero_block_geometry g = Geometry(0, HETERO_F32, 4096 * 2 + 16, true, state_on_disk);
    Setup t(g, 21);
    for (std::vector<float>& array : t.block.expected.state) std::fill(array.begin(), array.end(), 0.0f);
    t.Start(3, 1);
    t.block.Load();
    CHECK_EQ(t.run.Complete(t.run.Store(t.block, {}, true, 0)), 0);
    CHECK_EQ(t.run.Complete(t.run.Commit(0)), 0);
    const TestGradients gradients = RandomGradients(g.num_elements, 1, &t.random);
    const int64_t tried = Speculate(t.run, t.block, true, gradients, 1);
    CHECK_EQ(t.run.Wait(tried), 0);
    CHECK_EQ(t.run.Complete(Discard(t.run, t.block)), 0);
    CHECK(t.run.Holds(t.block));
    CHECK_EQ(t.run.Complete(t.run.Fetch(t.block)), 0);
    CHECK(t.block.HoldsInMemory());
  }
}

TEST(a_block_that_awaits_its_verdict_is_neither_rewritten_nor_committed) {
  Setup t(Geometry(0, HETERO_F32, 4096 * 2, true, true), 22);
  TestBlock& block = t.block;
  TestBlock in_memory;
  REQUIRE(in_memory.Open(nullptr, Geometry(1, HETERO_F32, 4096 * 2, false, false), &t.random));
  t.Begin(3, 1);
  REQUIRE_EQ(t.run.StoreModel(in_memory, 1), 0);
  const hetero_task task{};
  const TestGradients gradients = RandomGradients(block.geometry.num_elements, 2, &t.random);
  for (TestBlock* b : {&block, &in_memory}) {
    CHECK_EQ(hetero_keep_update(t.run.engine, b->handle), HETERO_ESTATE);
    CHECK_EQ(Discard(t.run, *b), HETERO_ESTATE);
    const int64_t opened = hetero_open_speculative_update(t.run.engine, b->handle, 1, &task);
    CHECK_EQ(hetero_keep_update(t.run.engine, b->handle), HETERO_ESTATE);  // nobody has armed it
    CHECK_EQ(hetero_cancel_update(t.run.engine, opened), 0);
    CHECK_EQ(Discard(t.run, *b), HETERO_ESTATE);
    CHECK_EQ(t.run.Complete(t.run.Fetch(*b)), 0);
    const int64_t tried = Speculate(t.run, *b, true, gradients, 2);
    CHECK_EQ(t.run.OpenUpdate(*b, true), HETERO_ESTATE);
    CHECK_EQ(t.run.Store(*b, {}, true, 2), HETERO_ESTATE);
    if (b == &block) CHECK_EQ(t.run.Commit(2), HETERO_ESTATE);
    CHECK_EQ(t.run.Wait(tried), 0);
    if (b == &block) CHECK_EQ(t.run.Commit(2), HETERO_ESTATE);
    CHECK_EQ(hetero_keep_update(t.run.engine, b->handle), 0);
    CHECK_EQ(hetero_keep_update(t.run.engine, b->handle), HETERO_ESTATE);
    CHECK_EQ(Discard(t.run, *b), HETERO_ESTATE);
    ApplyToModel(gradients, b);
    CHECK(t.run.Holds(*b));
  }
  // What it was before the first update is in no slot that a second one leaves alone: only a commit makes that so.
  CHECK_EQ(hetero_open_speculative_update(t.run.engine, block.handle, 1, &task), HETERO_ESTATE);
  const int64_t again = t.run.OpenUpdate(block, true);
  CHECK_EQ(hetero_cancel_update(t.run.engine, again), 0);
  CHECK_EQ(hetero_open_speculative_update(t.run.engine, block.handle, 1, &task), HETERO_ESTATE);
  CHECK_EQ(t.run.Complete(t.run.Commit(2)), 0);
  CHECK_EQ(t.End(), 0);
}

// What a record says depends on the verdicts before it alone, whether their tasks are over or not.
TEST(a_commit_right_after_the_verdict_names_what_holds) {
  for (uint32_t seed = 0; seed < 12; ++seed) {
    Setup t({Geometry(0, HETERO_BF16, 4096 * 6, true, true), Geometry(1, HETERO_F32, 4096 * 6, true, true)}, seed);
    TestBlock &kept = t.blocks[0], &discarded = t.blocks[1];
    t.Begin(3, 2);
    const TestGradients gradients = RandomGradients(4096 * 6, 2, &t.random);
    for (const TestBlock& b : t.blocks) REQUIRE(Speculate(t.run, b, false, gradients, 2) > 0);
    std::this_thread::sleep_for(std::chrono::microseconds(t.random() % 2000));
    CHECK_EQ(hetero_keep_update(t.run.engine, kept.handle), 0);
    CHECK(Discard(t.run, discarded) > 0);
    CHECK_EQ(t.run.Complete(t.run.Commit(2)), 0);
    ApplyToModel(gradients, &kept);
    CHECK_EQ(t.End(), 0);
    int64_t step = 0;
    CHECK_GE(t.Reopen(&step), 0);
    CHECK_EQ(step, 2);
    CHECK(t.run.Holds(kept));
    CHECK(t.run.Holds(discarded));
    CHECK_EQ(t.End(), 0);
  }
}

// Many blocks of all placements at once, random verdicts at random moments, three buffers; every discarded one is done again.
TEST(concurrent_verdicts_with_tiny_staging) {
  for (uint32_t seed = 0; seed < 5; ++seed) {
    Setup t(PlacedGeometries(seed), seed);
    const std::vector<Placement> placements = Placements();
    std::vector<TestBlock>& blocks = t.blocks;
    t.Begin(3 + seed % 3, 1 + static_cast<int32_t>(seed % 3));
    for (const TestBlock& block : blocks) CHECK_EQ(t.run.Complete(t.run.Fetch(block)), 0);
    int64_t commit = t.run.Commit(1);
    for (int64_t step = 2; step < 5; ++step) {
      std::vector<TestGradients> gradients(blocks.size()), wrong(blocks.size());
      std::vector<int64_t> tickets;
      std::vector<bool> holds(blocks.size());
      for (size_t i = 0; i < blocks.size(); ++i) {
        gradients[i] = RandomGradients(blocks[i].geometry.num_elements, step, &t.random);
        wrong[i] = RandomGradients(blocks[i].geometry.num_elements, step, &t.random);
        holds[i] = t.random() % 2 == 0;
        tickets.push_back(Speculate(t.run, blocks[i], placements[i].resident, holds[i] ? gradients[i] : wrong[i], step));
        REQUIRE(tickets.back() > 0);
        ApplyToModel(gradients[i], &blocks[i]);
      }
      CHECK_EQ(t.run.Complete(commit), 0);
      for (size_t i = 0; i < blocks.size(); ++i) {
        if (holds[i]) {
          CHECK_EQ(hetero_keep_update(t.run.engine, blocks[i].handle), 0);
          continue;
        }
        tickets.push_back(Discard(t.run, blocks[i]));
        if (placements[i].resident && placements[i].weights_on_disk) tickets.push_back(t.run.Fetch(blocks[i]));
        tickets.push_back(t.run.OpenUpdate(blocks[i], placements[i].resident));
        REQUIRE_EQ(t.run.Arm(tickets.back(), gradients[i], step, static_cast<int64_t>(t.random() % 5)), 0);
      }
      commit = t.run.Commit(step);
      for (const int64_t ticket : tickets) CHECK_EQ(t.run.Complete(ticket), 0);
      for (const TestBlock& block : blocks) CHECK(t.run.Holds(block));
    }
    CHECK_EQ(t.run.Complete(commit), 0);
    CHECK_EQ(t.End(), 0);
  }
}

TEST(an_update_taken_back_while_a_commit_is_pending_is_forgotten) {
  Setup t(OnDisk(2, HETERO_F32, 4096 * 2), 23);
  TestBlock &slow = t.blocks[0], &quick = t.blocks[1];
  t.Begin(6, 1);
  const TestGradients gradients = RandomGradients(slow.geometry.num_elements, 2, &t.random);
  const int64_t opened = t.run.OpenUpdate(slow, false);
  const int64_t commit = t.run.Commit(2);  // waits for the opened update, and later writes wait for it
  const int64_t cancelled = t.run.OpenUpdate(quick, false);
  CHECK_EQ(hetero_cancel_update(t.run.engine, cancelled), 0);
  CHECK_EQ(t.run.Complete(cancelled), 0);
  const int64_t discarded = Speculate(t.run, quick, false, gradients, 3);
  CHECK_EQ(t.run.Complete(Discard(t.run, quick)), 0);
  CHECK_EQ(t.run.Complete(discarded), 0);
  CHECK_EQ(t.run.Arm(opened, gradients, 2), 0);
  ApplyToModel(gradients, &slow);
  CHECK_EQ(t.run.Complete(opened), 0);
  CHECK_EQ(t.run.Complete(commit), 0);
  CHECK(t.run.Holds(slow));
  CHECK(t.run.Holds(quick));
  CHECK_EQ(t.End(), 0);
}

TEST(an_engine_is_destroyed_before_the_verdict_and_the_committed_step_is_whole) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    const hetero_block_geometry g = Geometry(0, HETERO_F16, 4096 * 8, true, true);
    Setup t(g, seed);
    t.Begin(4, 2);
    const TestGradients gradients = RandomGradients(g.num_elements, 2, &t.random);
    REQUIRE(Speculate(t.run, t.block, false, gradients, 2) > 0);
    if (seed % 2 == 0) CHECK(Discard(t.run, t.block) > 0);
    CHECK_EQ(t.End(), 0);
    int64_t step = 0;
    CHECK_GE(t.Reopen(&step), 0);
    CHECK_EQ(step, 1);
    CHECK(t.run.Holds(t.block));
    CHECK_EQ(t.End(), 0);
  }
}
