// Updates that run before their verdict: kept or taken back at any moment, in every placement, bit for bit.
#include <algorithm>
#include <thread>

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

bool WeightsInMemoryEqual(const TestBlock& block) {
  return memcmp(block.weights, block.expected_weights.data(), block.expected_weights.size()) == 0;
}

// Three steps: the update of each is tried with other gradients first and taken back at `moment`, or kept.
void TrainOneBlock(const Placement& p, Moment moment, bool digests, uint32_t seed) {
  const int64_t num_elements = 4096 * static_cast<int64_t>(seed % 4) + 48;
  OneBlock made(p, num_elements, digests, seed);
  auto& [random, directory, block, run] = made;
  if (p.resident) CHECK_EQ(run.Complete(run.Fetch(block)), 0);
  for (int64_t step = 2; step < 5; ++step) {
    const TestGradients wrong = RandomGradients(num_elements, step, &random);
    const TestGradients right = RandomGradients(num_elements, step, &random);
    const int64_t tried = Speculate(run, block, p.resident, wrong, step);
    REQUIRE(tried > 0);
    Reach(run, tried, moment, &random);
    const int64_t discard = Discard(run, block);
    REQUIRE(discard > 0);
    CHECK_EQ(run.Complete(tried), 0);
    if (step == 2) {  // nothing has happened
      CHECK_EQ(run.Complete(discard), 0);
      CHECK(run.Holds(block));
      if (!p.weights_on_disk) CHECK(WeightsInMemoryEqual(block));
      int64_t newest_step = 0;
      CHECK_GE(hetero_block_slot(block.handle, &newest_step), 0);
      CHECK_EQ(newest_step, 1);
    }
    if (p.resident && p.weights_on_disk) CHECK(run.Fetch(block) > 0);
    const bool again = step == 3;  // a second try may be one more speculation, and is kept
    const int64_t ticket = again ? Speculate(run, block, p.resident, right, step) : run.OpenUpdate(block, p.resident);
    REQUIRE(ticket > 0);
    if (again) {
      Reach(run, ticket, moment, &random);
      CHECK_EQ(hetero_keep_update(run.engine, block.handle), 0);
    } else {
      REQUIRE_EQ(run.Arm(ticket, right, step), 0);
    }
    ApplyToModel(right, &block);
    CHECK_EQ(run.Wait(ticket, HETERO_READY), 0);
    if (p.resident) CHECK(WeightsInMemoryEqual(block));
    CHECK_EQ(run.Complete(ticket), 0);
    CHECK(run.Holds(block));
    CHECK_EQ(run.Complete(run.Commit(step)), 0);
  }
  CHECK_EQ(run.StopEngine(), 0);
  block.Close();
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
    std::mt19937 random(21);
    const TempDirectory directory;
    TestBlock block;
    Run run;
    REQUIRE(run.OpenStore(directory, StoreOptions(1)));
    const hetero_block_geometry g = Geometry(0, HETERO_F32, 4096 * 2 + 16, true, state_on_disk);
    REQUIRE(block.Open(run.store, g, &random));
    for (std::vector<float>& array : block.expected_state) std::fill(array.begin(), array.end(), 0.0f);
    REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 3, 1)));
    memcpy(block.weights, block.expected_weights.data(), block.expected_weights.size());
    CHECK_EQ(run.Complete(run.Store(block, {}, true, 0)), 0);
    CHECK_EQ(run.Complete(run.Commit(0)), 0);
    const TestGradients gradients = RandomGradients(g.num_elements, 1, &random);
    const int64_t tried = Speculate(run, block, true, gradients, 1);
    CHECK_EQ(run.Wait(tried), 0);
    CHECK_EQ(run.Complete(Discard(run, block)), 0);
    CHECK(run.Holds(block));
    CHECK_EQ(run.Complete(run.Fetch(block)), 0);
    CHECK(WeightsInMemoryEqual(block));
    run.StopEngine();
    block.Close();
  }
}

TEST(a_block_that_awaits_its_verdict_is_neither_rewritten_nor_committed) {
  std::mt19937 random(22);
  const TempDirectory directory;
  TestBlock block, in_memory;
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(1)));
  const hetero_block_geometry g = Geometry(0, HETERO_F32, 4096 * 2, true, true);
  REQUIRE(block.Open(run.store, g, &random));
  REQUIRE(in_memory.Open(nullptr, Geometry(1, HETERO_F32, 4096 * 2, false, false), &random));
  REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 3, 1)));
  for (const TestBlock* b : {&block, &in_memory}) REQUIRE_EQ(run.StoreModel(*b, 1), 0);
  CHECK_EQ(run.Complete(run.Commit(1)), 0);
  const hetero_task task{};
  const TestGradients gradients = RandomGradients(g.num_elements, 2, &random);
  for (TestBlock* b : {&block, &in_memory}) {
    CHECK_EQ(hetero_keep_update(run.engine, b->handle), HETERO_ESTATE);
    CHECK_EQ(Discard(run, *b), HETERO_ESTATE);
    const int64_t opened = hetero_open_speculative_update(run.engine, b->handle, 1, &task);
    CHECK_EQ(hetero_keep_update(run.engine, b->handle), HETERO_ESTATE);  // nobody has armed it
    CHECK_EQ(hetero_cancel_update(run.engine, opened), 0);
    CHECK_EQ(Discard(run, *b), HETERO_ESTATE);
    CHECK_EQ(run.Complete(run.Fetch(*b)), 0);
    const int64_t tried = Speculate(run, *b, true, gradients, 2);
    CHECK_EQ(run.OpenUpdate(*b, true), HETERO_ESTATE);
    CHECK_EQ(run.Store(*b, {}, true, 2), HETERO_ESTATE);
    if (b == &block) CHECK_EQ(run.Commit(2), HETERO_ESTATE);
    CHECK_EQ(run.Wait(tried), 0);
    if (b == &block) CHECK_EQ(run.Commit(2), HETERO_ESTATE);
    CHECK_EQ(hetero_keep_update(run.engine, b->handle), 0);
    CHECK_EQ(hetero_keep_update(run.engine, b->handle), HETERO_ESTATE);
    CHECK_EQ(Discard(run, *b), HETERO_ESTATE);
    ApplyToModel(gradients, b);
    CHECK(run.Holds(*b));
  }
  // What it was before the first update is in no slot that a second one leaves alone: only a commit makes that so.
  CHECK_EQ(hetero_open_speculative_update(run.engine, block.handle, 1, &task), HETERO_ESTATE);
  const int64_t again = run.OpenUpdate(block, true);
  CHECK_EQ(hetero_cancel_update(run.engine, again), 0);
  CHECK_EQ(hetero_open_speculative_update(run.engine, block.handle, 1, &task), HETERO_ESTATE);
  CHECK_EQ(run.Complete(run.Commit(2)), 0);
  CHECK_EQ(run.StopEngine(), 0);
  for (TestBlock* b : {&block, &in_memory}) b->Close();
}

// What a record says depends on the verdicts before it alone, whether their tasks are over or not.
TEST(a_commit_right_after_the_verdict_names_what_holds) {
  for (uint32_t seed = 0; seed < 12; ++seed) {
    std::mt19937 random(seed);
    const TempDirectory directory;
    TestBlock kept, discarded;
    Run run;
    REQUIRE(run.OpenStore(directory, StoreOptions(2)));
    const hetero_block_geometry g = Geometry(0, HETERO_BF16, 4096 * 6, true, true);
    REQUIRE(kept.Open(run.store, g, &random));
    REQUIRE(discarded.Open(run.store, Geometry(1, HETERO_F32, 4096 * 6, true, true), &random));
    const int64_t staged = std::max(hetero_block_staged_bytes(&g), hetero_block_staged_bytes(&discarded.geometry));
    REQUIRE(run.StartEngine(EngineOptions(staged, 3, 2)));
    for (const TestBlock* b : {&kept, &discarded}) REQUIRE_EQ(run.StoreModel(*b, 1), 0);
    CHECK_EQ(run.Complete(run.Commit(1)), 0);
    const TestGradients gradients = RandomGradients(g.num_elements, 2, &random);
    for (const TestBlock* b : {&kept, &discarded}) REQUIRE(Speculate(run, *b, false, gradients, 2) > 0);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    CHECK_EQ(hetero_keep_update(run.engine, kept.handle), 0);
    CHECK(Discard(run, discarded) > 0);
    CHECK_EQ(run.Complete(run.Commit(2)), 0);
    ApplyToModel(gradients, &kept);
    CHECK_EQ(run.StopEngine(), 0);
    kept.Close();
    discarded.Close();
    run.CloseStore();
    hetero_store_options options = StoreOptions(2);
    options.create = 0;
    REQUIRE(run.OpenStore(directory, options));
    REQUIRE(kept.Open(run.store, kept.geometry, &random));
    REQUIRE(discarded.Open(run.store, discarded.geometry, &random));
    int64_t step = 0;
    CHECK_GE(hetero_store_recover(run.store, &step, nullptr, 0), 0);
    CHECK_EQ(step, 2);
    REQUIRE(run.StartEngine(EngineOptions(staged, 3, 2)));
    CHECK(run.Holds(kept));
    CHECK(run.Holds(discarded));
    CHECK_EQ(run.StopEngine(), 0);
    kept.Close();
    discarded.Close();
  }
}

// Many blocks of all placements at once, random verdicts at random moments, three buffers; every discarded one is done again.
TEST(concurrent_verdicts_with_tiny_staging) {
  for (uint32_t seed = 0; seed < 5; ++seed) {
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
    for (const TestBlock& block : blocks) CHECK_EQ(run.Complete(run.Fetch(block)), 0);
    int64_t commit = run.Commit(1);
    for (int64_t step = 2; step < 5; ++step) {
      std::vector<TestGradients> gradients(blocks.size()), wrong(blocks.size());
      std::vector<int64_t> tickets;
      std::vector<bool> holds(blocks.size());
      for (size_t i = 0; i < blocks.size(); ++i) {
        gradients[i] = RandomGradients(blocks[i].geometry.num_elements, step, &random);
        wrong[i] = RandomGradients(blocks[i].geometry.num_elements, step, &random);
        holds[i] = random() % 2 == 0;
        tickets.push_back(Speculate(run, blocks[i], placements[i].resident, holds[i] ? gradients[i] : wrong[i], step));
        REQUIRE(tickets.back() > 0);
        ApplyToModel(gradients[i], &blocks[i]);
      }
      CHECK_EQ(run.Complete(commit), 0);
      for (size_t i = 0; i < blocks.size(); ++i) {
        if (holds[i]) {
          CHECK_EQ(hetero_keep_update(run.engine, blocks[i].handle), 0);
          continue;
        }
        tickets.push_back(Discard(run, blocks[i]));
        if (placements[i].resident && placements[i].weights_on_disk) tickets.push_back(run.Fetch(blocks[i]));
        tickets.push_back(run.OpenUpdate(blocks[i], placements[i].resident));
        REQUIRE_EQ(run.Arm(tickets.back(), gradients[i], step, static_cast<int64_t>(random() % 5)), 0);
      }
      commit = run.Commit(step);
      for (const int64_t ticket : tickets) CHECK_EQ(run.Complete(ticket), 0);
      for (const TestBlock& block : blocks) CHECK(run.Holds(block));
    }
    CHECK_EQ(run.Complete(commit), 0);
    CHECK_EQ(run.StopEngine(), 0);
    for (TestBlock& block : blocks) block.Close();
  }
}

TEST(an_update_taken_back_while_a_commit_is_pending_is_forgotten) {
  std::mt19937 random(23);
  const TempDirectory directory;
  TestBlock slow, quick;
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(2)));
  const hetero_block_geometry g = Geometry(0, HETERO_F32, 4096 * 2, true, true);
  REQUIRE(slow.Open(run.store, g, &random));
  REQUIRE(quick.Open(run.store, Geometry(1, HETERO_F32, 4096 * 2, true, true), &random));
  REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 6, 1)));
  for (const TestBlock* b : {&slow, &quick}) REQUIRE_EQ(run.StoreModel(*b, 1), 0);
  CHECK_EQ(run.Complete(run.Commit(1)), 0);
  const TestGradients gradients = RandomGradients(g.num_elements, 2, &random);
  const int64_t opened = run.OpenUpdate(slow, false);
  const int64_t commit = run.Commit(2);  // waits for the opened update, and later writes wait for it
  const int64_t cancelled = run.OpenUpdate(quick, false);
  CHECK_EQ(hetero_cancel_update(run.engine, cancelled), 0);
  CHECK_EQ(run.Complete(cancelled), 0);
  const int64_t discarded = Speculate(run, quick, false, gradients, 3);
  CHECK_EQ(run.Complete(Discard(run, quick)), 0);
  CHECK_EQ(run.Complete(discarded), 0);
  CHECK_EQ(run.Arm(opened, gradients, 2), 0);
  ApplyToModel(gradients, &slow);
  CHECK_EQ(run.Complete(opened), 0);
  CHECK_EQ(run.Complete(commit), 0);
  CHECK(run.Holds(slow));
  CHECK(run.Holds(quick));
  CHECK_EQ(run.StopEngine(), 0);
  slow.Close();
  quick.Close();
}

TEST(an_engine_is_destroyed_before_the_verdict_and_the_committed_step_is_whole) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    std::mt19937 random(seed);
    const TempDirectory directory;
    TestBlock block;
    Run run;
    REQUIRE(run.OpenStore(directory, StoreOptions(1)));
    const hetero_block_geometry g = Geometry(0, HETERO_F16, 4096 * 8, true, true);
    REQUIRE(block.Open(run.store, g, &random));
    REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 4, 2)));
    REQUIRE_EQ(run.StoreModel(block, 1), 0);
    CHECK_EQ(run.Complete(run.Commit(1)), 0);
    const TestGradients gradients = RandomGradients(g.num_elements, 2, &random);
    REQUIRE(Speculate(run, block, false, gradients, 2) > 0);
    if (seed % 2 == 0) CHECK(Discard(run, block) > 0);
    CHECK_EQ(run.StopEngine(), 0);
    block.Close();
    run.CloseStore();
    hetero_store_options options = StoreOptions(1);
    options.create = 0;
    REQUIRE(run.OpenStore(directory, options));
    REQUIRE(block.Open(run.store, g, &random));
    int64_t step = 0;
    CHECK_GE(hetero_store_recover(run.store, &step, nullptr, 0), 0);
    CHECK_EQ(step, 1);
    REQUIRE(run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 4, 2)));
    CHECK(run.Holds(block));
    CHECK_EQ(run.StopEngine(), 0);
    block.Close();
  }
}
