// Which slot is written: never the one that a record or another name holds.
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "trained_fixture.h"

using fixture::ApplyToModel;
using fixture::Content;
using fixture::Expected;
using fixture::Geometry;
using fixture::kTrainedElements;
using fixture::RandomGradients;
using fixture::SmallFiles;
using fixture::StoreOptions;
using fixture::TestBlock;
using fixture::TestGradients;
using fixture::Trained;

TEST(a_block_that_is_written_again_before_a_commit_leaves_the_committed_slot_alone) {
  for (const int32_t dtype : {HETERO_F32, HETERO_BF16}) {
    Trained t(StoreOptions(1), Geometry(0, dtype, kTrainedElements, true, true));
    for (int64_t step = 2; step < 5; ++step) {
      int64_t written_by = 0;
      const int32_t committed = hetero_block_slot(t.block.handle, &written_by);
      const std::string name = t.directory.File(committed == 0 ? "block-00000.a" : "block-00000.b");
      const std::vector<uint8_t> before = Content(name);
      for (int again = 0; again < 3; ++again) {
        CHECK_EQ(t.Update(step), 0);
        CHECK(t.run.Holds(t.block));
        CHECK_EQ(hetero_block_slot(t.block.handle, &written_by), 1 - committed);
      }
      std::fill_n(t.block.expected.weights.begin() + 4096, 5000, static_cast<uint8_t>(step));
      if (dtype == HETERO_F32) {
        const hetero_patch patch{1024, 1250, t.block.expected.weights.data() + 4096, -1};
        CHECK_EQ(t.run.Complete(t.run.Store(t.block, {patch}, false, step)), 0);
      } else {
        CHECK_EQ(t.run.StoreModel(t.block, step), 0);
      }
      CHECK(t.run.Holds(t.block));
      CHECK(Content(name) == before);
      CHECK_EQ(t.run.Complete(t.run.Commit(step)), 0);
    }
    const Expected before = t.block.expected;
    CHECK_EQ(t.Update(5), 0);
    CHECK_EQ(t.Update(5), 0);
    t.End();
    int64_t step = 0;
    CHECK_GE(t.Reopen(&step), 0);
    CHECK_EQ(step, 4);
    t.block.expected = before;
    CHECK(t.run.Holds(t.block));
    CHECK_EQ(t.Update(5), 0);  // and goes on: the slot that no record names is the one that was written twice
    CHECK(t.run.Holds(t.block));
  }
}

// Whatever comes before a record, all of it submitted at once: the record names what was submitted last.
TEST(any_order_of_rewrites_verdicts_and_commits_ends_at_the_last_record) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    Trained t(StoreOptions(1), Geometry(0, seed % 2 == 0 ? HETERO_F32 : HETERO_F16, kTrainedElements, true, true), seed);
    std::deque<TestGradients> alive;
    std::vector<int64_t> tickets;
    Expected last = t.block.expected;
    int64_t committed = 1, step = 2;
    int64_t rewrites = 0;  // since the last commit
    std::vector<std::pair<std::string, std::vector<uint8_t>>> snapshots;
    const hetero_task task{};
    const auto update = [&](int64_t ticket) {
      alive.push_back(RandomGradients(kTrainedElements, step, &t.random));
      REQUIRE(ticket > 0);
      CHECK_EQ(t.run.Arm(ticket, alive.back(), step), 0);
      tickets.push_back(ticket);
    };
    for (int i = 0; i < 14; ++i) {
      const uint32_t what = t.random() % 6;
      if (what < 2) {
        update(t.run.OpenUpdate(t.block, false));
        ApplyToModel(alive.back(), &t.block);
        ++rewrites;
      } else if (what == 2) {
        const int64_t opened = t.run.OpenUpdate(t.block, false);
        CHECK_EQ(hetero_cancel_update(t.run.engine, opened), 0);
        tickets.push_back(opened);
      } else if (what < 5) {
        const int64_t tried = hetero_open_speculative_update(t.run.engine, t.block.handle, 0, &task);
        if (rewrites > 0) {
          CHECK_EQ(tried, HETERO_ESTATE);
          continue;
        }
        update(tried);
        if (what == 3) {
          CHECK_EQ(hetero_keep_update(t.run.engine, t.block.handle), 0);
          ApplyToModel(alive.back(), &t.block);
          ++rewrites;
        } else {
          tickets.push_back(hetero_submit_discard(t.run.engine, t.block.handle, &task));
        }
      } else {
        tickets.push_back(t.run.Commit(step));
        if (t.random() % 2 == 0) {  // a snapshot of it, whatever is written afterwards
          CHECK_EQ(t.run.Wait(tickets.back()), 0);
          const int32_t slot = hetero_block_committed_slot(t.block.handle);
          const std::string kept = t.directory.File("kept." + std::to_string(step));
          CHECK_EQ(link(t.directory.File(slot == 0 ? "block-00000.a" : "block-00000.b").c_str(), kept.c_str()), 0);
          snapshots.emplace_back(kept, Content(kept));
        }
        committed = step++;
        rewrites = 0;
        last = t.block.expected;
      }
    }
    for (const int64_t ticket : tickets) CHECK_EQ(t.run.Complete(ticket), 0);
    CHECK(t.run.Holds(t.block));
    for (const auto& [kept, content] : snapshots) CHECK(Content(kept) == content);
    t.End();
    int64_t recovered = 0;
    CHECK_GE(t.Reopen(&recovered), 0);
    CHECK_EQ(recovered, committed);
    t.block.expected = last;
    CHECK(t.run.Holds(t.block));
  }
}

TEST(a_frozen_block_has_one_slot_and_is_written_in_place) {
  const hetero_block_geometry g = Geometry(0, HETERO_U8, kTrainedElements, true, false);
  Trained t(StoreOptions(1), g);
  CHECK(t.run.Holds(t.block));
  for (int round = 0; round < 3; ++round) {  // piece by piece, without commits
    std::fill_n(t.block.expected.weights.begin() + 3500 * round, 5000, static_cast<uint8_t>(round));
    const hetero_patch patch{3500 * round, 5000, t.block.expected.weights.data() + 3500 * round, -1};
    CHECK_EQ(t.run.Complete(t.run.Store(t.block, {patch}, false, 0)), 0);
    CHECK(t.run.Holds(t.block));
  }
  CHECK_EQ(t.run.OpenUpdate(t.block, true), HETERO_EINVAL);
  CHECK_EQ(t.run.Complete(t.run.Commit(2)), 0);
  t.End();
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step), 0);
  CHECK_EQ(t.run.Complete(t.run.Fetch(t.block)), 0);
  CHECK(t.block.HoldsInMemory());
  CHECK_NE(access(t.directory.File("block-00000.b").c_str(), F_OK), 0);
}

TEST(a_slot_with_other_names_is_never_written) {
  Trained t;
  CHECK_EQ(t.Step(2), 0);
  std::vector<std::vector<uint8_t>> before;
  for (const char* slot : {"a", "b"}) {
    const std::string name = t.directory.File(std::string("block-00000.") + slot);
    CHECK_EQ(link(name.c_str(), t.directory.File(std::string("kept.") + slot).c_str()), 0);
    before.push_back(Content(name));
  }
  for (int64_t step = 3; step <= 5; ++step) {
    CHECK_EQ(t.Step(step), 0);
  }
  CHECK(Content(t.directory.File("kept.a")) == before[0]);
  CHECK(Content(t.directory.File("kept.b")) == before[1]);
  CHECK_NE(access(t.directory.File("block-00000.a.new").c_str(), F_OK), 0);
  t.End();
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step), 0);
  CHECK_EQ(step, 5);
  CHECK(t.run.Holds(t.block));
}

// The slot that a record on the disk names is whole until the next record is there, however early its next rewrite is
// announced.
TEST(a_committed_slot_with_other_names_keeps_its_file_until_the_next_record) {
  Trained t;
  CHECK_EQ(hetero_block_committed_slot(t.block.handle), 0);
  const std::string a = t.directory.File("block-00000.a");
  CHECK_EQ(link(a.c_str(), t.directory.File("kept.a").c_str()), 0);
  const std::vector<uint8_t> before = Content(a);
  CHECK_EQ(t.Update(2), 0);

  TestBlock memory;  // whatever else the commit waits for
  REQUIRE(memory.Open(nullptr, Geometry(0, HETERO_F32, kTrainedElements, false, false), &t.random));
  const int64_t gate = t.run.OpenUpdate(memory, true);
  const hetero_task after_gate{0, &gate, 1};
  const int64_t commit = hetero_submit_commit(t.run.engine, t.run.store, 2, "", 0, &after_gate);
  const TestGradients gradients = RandomGradients(kTrainedElements, 3, &t.random);
  const int64_t update = t.run.OpenUpdate(t.block, false);
  CHECK_EQ(t.run.Arm(update, gradients, 3), 0);
  CHECK(Content(a) == before);
  CHECK_EQ(hetero_cancel_update(t.run.engine, gate), 0);
  CHECK_EQ(t.run.Complete(commit), 0);
  CHECK_EQ(t.run.Complete(update), 0);
  ApplyToModel(gradients, &t.block);
  CHECK(t.run.Holds(t.block));
  CHECK(Content(t.directory.File("kept.a")) == before);
  CHECK(Content(a) != before);
  CHECK_EQ(t.run.Complete(gate), 0);
  t.run.StopEngine();
  memory.Close();
}

TEST(no_space_for_a_fresh_file_stops_the_engine_before_anything_is_written) {
  Trained t;
  CHECK_EQ(t.Step(2), 0);
  const std::string a = t.directory.File("block-00000.a");
  CHECK_EQ(link(a.c_str(), t.directory.File("kept.a").c_str()), 0);
  const std::vector<uint8_t> before = Content(a);
  const Expected held = t.block.expected;
  {
    const SmallFiles full(100 << 10);
    CHECK_EQ(t.Update(3), HETERO_ENOSPC);
  }
  CHECK(strstr(hetero_last_error(), "block-00000.a.new needs ") != nullptr);
  CHECK_EQ(t.run.Commit(3), HETERO_EPOISONED);
  CHECK(Content(a) == before);
  CHECK_NE(access(t.directory.File("block-00000.a.new").c_str(), F_OK), 0);
  t.End();
  int64_t step = 0;
  CHECK_GE(t.Reopen(&step), 0);
  CHECK_EQ(step, 2);
  t.block.expected = held;
  CHECK(t.run.Holds(t.block));
}

TEST(a_retired_block_is_in_no_later_record) {
  Trained t;
  CHECK_EQ(hetero_block_committed_slot(t.block.handle), 0);
  CHECK_EQ(t.Update(2), 0);
  CHECK_EQ(t.Update(2), 0);
  CHECK_EQ(hetero_block_committed_slot(t.block.handle), 0);
  CHECK_EQ(t.run.Complete(t.run.Commit(2)), 0);
  CHECK_EQ(hetero_block_committed_slot(t.block.handle), 1);
  CHECK_EQ(hetero_block_retire(t.block.handle), 0);
  CHECK_EQ(hetero_block_committed_slot(t.block.handle), 1);  // the last record still does
  CHECK_EQ(hetero_store_names(t.run.store, 0), 1);
  CHECK_EQ(t.run.Complete(t.run.Commit(3)), 0);
  CHECK_EQ(hetero_block_committed_slot(t.block.handle), 2);
  CHECK_EQ(hetero_block_retire(nullptr), HETERO_EINVAL);
  CHECK_EQ(hetero_block_committed_slot(nullptr), HETERO_EINVAL);
  CHECK_EQ(hetero_store_names(nullptr, 0), HETERO_EINVAL);
  CHECK_EQ(hetero_store_names(t.run.store, 0), 0);
  CHECK_EQ(hetero_store_names(t.run.store, -1), HETERO_EINVAL);
  t.End();
  int64_t step = 0;
  CHECK_GE(t.Reopen(&step), 0);
  CHECK_EQ(step, 3);
  CHECK_EQ(hetero_block_committed_slot(t.block.handle), 2);
  CHECK_EQ(hetero_block_slot(t.block.handle, &step), HETERO_ESTATE);
}
