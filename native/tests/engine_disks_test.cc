// Blocks on several disks: no disk waits for another, and each has its queue depth and staging memory.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "engine_fixture.h"

using fixture::ApplyToModel;
using fixture::EngineOptions;
using fixture::OnDisk;
using fixture::RandomGradients;
using fixture::Run;
using fixture::StoreOptions;
using fixture::TempDirectory;
using fixture::TestBlock;
using fixture::TestGradients;
using hetero::IoBackend;
using hetero::IoRequest;

namespace {

constexpr int32_t kDisks = 2;

// A pool that keeps what the first disk is given until it is told to go on, and counts what each has in flight.
class Stalled final : public IoBackend {
 public:
  explicit Stalled(const hetero_engine_options& options) { REQUIRE_OK(MakeIoBackend(options, &pool_, kDisks)); }

  void Submit(IoRequest* request) override {
    {
      const std::lock_guard lock(mutex_);
      ++num_given_[request->disk];
      if (stalls_ && request->disk == 0) {
        kept_.push_back(request);
        return;
      }
    }
    pool_->Submit(request);
  }
  [[nodiscard]] int32_t kind() const override { return pool_->kind(); }

  void Stall() {
    const std::lock_guard lock(mutex_);
    stalls_ = true;
    num_given_[0] = 0;
  }
  // How much the first disk was given meanwhile.
  int64_t GoOn() {
    std::vector<IoRequest*> kept;
    int64_t given = 0;
    {
      const std::lock_guard lock(mutex_);
      stalls_ = false;
      kept.swap(kept_);
      given = num_given_[0];
    }
    for (IoRequest* request : kept) pool_->Submit(request);
    return given;
  }

 private:
  std::unique_ptr<IoBackend> pool_;
  std::mutex mutex_;
  std::vector<IoRequest*> kept_;
  int64_t num_given_[kDisks] = {};
  bool stalls_ = false;
};

TEST(a_disk_that_stalls_holds_up_neither_reads_nor_updates_on_another) {
  const TempDirectory first, second;
  std::mt19937 random(3);
  const std::vector<hetero_block_geometry> geometries = OnDisk(2, HETERO_F32, 4096 * 8);
  std::vector<TestBlock> blocks(2);
  Run run;
  REQUIRE(run.OpenStore(first, StoreOptions(2)));
  REQUIRE_EQ(hetero_store_add_directory(run.store, second.path().c_str()), 1);
  for (int32_t disk = 0; disk < kDisks; ++disk) {
    REQUIRE(blocks[static_cast<size_t>(disk)].Open(run.store, geometries[static_cast<size_t>(disk)], &random, disk));
  }
  const hetero_engine_options options = EngineOptions(hetero_block_staged_bytes(geometries.data()), 3 * kDisks, 2);
  auto owned = std::make_unique<Stalled>(options);
  Stalled* backend = owned.get();
  REQUIRE(run.StartEngine(options, std::move(owned), kDisks));
  for (const TestBlock& block : blocks) REQUIRE_EQ(run.StoreModel(block, 1), 0);
  REQUIRE_EQ(run.Complete(run.Commit(1, "")), 0);

  backend->Stall();
  const int64_t fetch = run.Fetch(blocks[0]);
  std::vector<int64_t> tickets;
  std::vector<TestGradients> all;
  for (const TestBlock& block : blocks) all.push_back(RandomGradients(block.geometry.num_elements, 2, &random));
  for (size_t i = 0; i < blocks.size(); ++i) {  // the first one takes what it can get, and gets nothing done
    TestBlock& block = blocks[i];
    const TestGradients& gradients = all[i];
    tickets.push_back(run.OpenUpdate(block, false));
    CHECK_EQ(run.Arm(tickets.back(), gradients, 2), 0);
    ApplyToModel(gradients, &block);
    if (i == 1) CHECK_EQ(run.Complete(tickets[1]), 0);
  }
  CHECK_EQ(hetero_poll(run.engine, fetch), 0);
  CHECK_EQ(hetero_poll(run.engine, tickets[0]), 0);
  CHECK_LE(backend->GoOn(), options.queue_depth);
  CHECK_EQ(run.Complete(fetch), 0);
  CHECK_EQ(run.Complete(tickets[0]), 0);
  for (TestBlock& block : blocks) CHECK(run.Holds(block));
  CHECK_EQ(run.StopEngine(), 0);
  for (TestBlock& block : blocks) block.Close();
}

TEST(each_disk_needs_staging_memory_of_its_own) {
  Run run;
  CHECK(!run.StartEngine(EngineOptions(4096, 5, 1), nullptr, kDisks));
  CHECK(run.StartEngine(EngineOptions(4096, 6, 1), nullptr, kDisks));
  CHECK_EQ(hetero_engine_resize_staging(run.engine, 5 * 4096), HETERO_EINVAL);
}

}  // namespace
