// What is found again: the newest record, and the slots that it names.
#include <string.h>
#include <unistd.h>

#include <utility>

#include "store_commit.h"
#include "trained_fixture.h"

using fixture::EditFile;
using fixture::Expected;
using fixture::Geometry;
using fixture::kTrainedElements;
using fixture::Setup;
using fixture::StoreOptions;
using fixture::TestBlock;
using fixture::Trained;

TEST(recover_finds_the_newest_commit_after_the_ring_went_round) {
  Trained t;
  for (int64_t step = 2; step < 40; ++step) {
    CHECK_EQ(t.Step(step, "user " + std::to_string(step)), 0);
  }
  t.End();
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step), int64_t{7});
  CHECK_EQ(step, 39);
  CHECK(t.run.Holds(t.block));
  CHECK_EQ(hetero_block_slot(t.block.handle, &step), 0);
  // Training goes on from there.
  CHECK_EQ(t.Step(40), 0);
  CHECK(t.run.Holds(t.block));
}

TEST(an_uncommitted_step_is_forgotten) {
  Trained t;
  CHECK_EQ(t.Step(2), 0);
  const Expected before = t.block.expected;
  CHECK_EQ(t.Update(3), 0);
  t.End();
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step), 0);
  CHECK_EQ(step, 2);
  t.block.expected = before;
  CHECK(t.run.Holds(t.block));
}

TEST(a_torn_newest_record_falls_back_to_the_one_before) {
  Trained t;
  CHECK_EQ(t.run.Complete(t.run.Commit(2, "two")), 0);
  t.End();
  const int64_t record_bytes = hetero::RecordBytes(1, 64);
  EditFile(t.directory.File("COMMIT"), 2 * record_bytes + 60, [](uint8_t* byte) { *byte ^= 1; });
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step), 3);
  CHECK_EQ(step, 1);
  t.End();
  EditFile(t.directory.File("COMMIT"), 1 * record_bytes + 60, [](uint8_t* byte) { *byte ^= 1; });
  CHECK_EQ(t.Reopen(&step), HETERO_ECORRUPT);
}

TEST(nothing_stored_is_an_error_before_any_io) {
  Setup t(Geometry(0, HETERO_BF16, kTrainedElements, true, true), 42);
  t.Start(3, 1);
  int64_t step = 0;
  CHECK_EQ(hetero_block_slot(t.block.handle, &step), HETERO_ESTATE);
  CHECK_EQ(t.run.Fetch(t.block), HETERO_ESTATE);
  CHECK_EQ(t.run.OpenUpdate(t.block, false), HETERO_ESTATE);
  CHECK_EQ(t.run.OpenUpdate(t.block, true), HETERO_ESTATE);  // its master is nowhere
  CHECK(strstr(hetero_last_error(), "master") != nullptr);
  CHECK_EQ(hetero_store_recover(t.run.store, &step, nullptr, 0), HETERO_ESTATE);
}

TEST(without_durability_slots_flip_in_memory_only) {
  hetero_store_options options = StoreOptions(1);
  options.durability = HETERO_DURABILITY_NONE;
  Trained t(options);
  for (int64_t step = 2; step < 5; ++step) {
    CHECK_EQ(t.Update(step), 0);
    CHECK(t.run.Holds(t.block));
    CHECK_EQ(t.run.Complete(t.run.Commit(step)), 0);
  }
  t.End();
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step, options), HETERO_ESTATE);
}

TEST(durability_power_commits_and_recovers) {
  hetero_store_options options = StoreOptions(1);
  options.durability = HETERO_DURABILITY_POWER;
  Trained t(options);
  CHECK_EQ(t.Step(2), 0);
  t.End();
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step, options), 0);
  CHECK_EQ(step, 2);
  CHECK(t.run.Holds(t.block));
}

TEST(a_block_opened_after_recovery_needs_only_its_committed_slot) {
  for (const bool half : {false, true}) {  // of the other slot: what a process leaves that dies while it makes the file
    Trained t;
    const Expected before = t.block.expected;
    CHECK_EQ(t.Update(2), 0);  // slot b; the commit names a
    t.End();
    const std::string b = t.directory.File("block-00000.b");
    CHECK_EQ(half ? truncate(b.c_str(), 4096) : unlink(b.c_str()), 0);
    hetero_store_options options = StoreOptions(1);
    options.create = 0;
    REQUIRE(t.run.OpenStore(t.directory, options));
    int64_t step = 0;
    char user[64];
    CHECK_EQ(hetero_store_recover(t.run.store, &step, user, sizeof(user)), int64_t{3});
    CHECK_EQ(step, 1);
    const hetero_block_geometry g = t.block.geometry;
    REQUIRE(t.block.Open(t.run.store, g, &t.random));
    t.Start(4, 2);
    t.block.expected = before;
    CHECK(t.run.Holds(t.block));
    CHECK_EQ(t.Step(2), 0);
    CHECK(t.run.Holds(t.block));
    t.End();
    CHECK_EQ(unlink(b.c_str()), 0);
    CHECK_EQ(t.Reopen(&step), -101);
  }
}

TEST(the_id_of_a_discarded_block_serves_another_one) {
  Trained t(StoreOptions(2));
  const hetero_block_geometry second = Geometry(1, HETERO_F32, kTrainedElements, true, false);
  TestBlock other;
  REQUIRE(other.Open(t.run.store, second, &t.random));
  REQUIRE_EQ(t.run.StoreModel(other, 2), 0);
  const int64_t commit = t.run.Commit(2);
  CHECK_EQ(t.run.Wait(commit), 0);
  CHECK_EQ(hetero_block_discard(std::exchange(t.block.handle, nullptr)), 0);
  for (const char* name : {"block-00000.a", "block-00000.b"}) CHECK_EQ(unlink(t.directory.File(name).c_str()), 0);
  CHECK_EQ(t.run.Complete(t.run.Commit(3)), 0);
  const hetero_block_geometry first = Geometry(0, HETERO_F32, kTrainedElements * 2, true, true);
  TestBlock heir;
  REQUIRE(heir.Open(t.run.store, first, &t.random));
  int64_t step = 0;
  CHECK_EQ(hetero_block_slot(heir.handle, &step), HETERO_ESTATE);  // nothing of its predecessor
  REQUIRE_EQ(t.run.StoreModel(heir, 4), 0);
  CHECK_EQ(t.run.Complete(t.run.Commit(4)), 0);
  CHECK(t.run.Holds(heir));
  CHECK(t.run.Holds(other));
  t.run.StopEngine();
  heir.Close();
  other.Close();
}
