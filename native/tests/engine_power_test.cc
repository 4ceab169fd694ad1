// Power loss at every moment: the real engine over a device whose cache is volatile.
//
// The files themselves play the cache. The back end remembers what every sector held before each write that no flush has
// covered; when the power fails, later operations fail and each such sector falls back to a random one of its contents.
#include <fcntl.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "engine_fixture.h"
#include "training_fixture.h"

using fixture::EngineOptions;
using fixture::kBlocks;
using fixture::StoreOptions;
using fixture::TempDirectory;
using fixture::TestBlock;
using fixture::Training;
using hetero::IoBackend;
using hetero::IoKind;
using hetero::IoRequest;
using hetero::Status;

namespace {

constexpr int64_t kSectorBytes = 512;
using Sector = std::vector<uint8_t>;

// Outlives the back end: the contents that sectors may fall back to, by path and sector number.
struct VolatileCache {
  std::mutex mutex;
  int64_t operations_left = 0;
  int64_t num_failed = 0;
  std::map<std::string, std::map<int64_t, std::vector<Sector>>> older;

  void LosePower(std::mt19937* random) const {
    for (const auto& [path, sectors] : older) {
      const int fd = open(path.c_str(), O_WRONLY);
      REQUIRE(fd >= 0);
      for (const auto& [sector, contents] : sectors) {
        const size_t choice = (*random)() % (contents.size() + 1);  // the last choice: what was written survived
        if (choice == contents.size()) continue;
        CHECK_EQ(pwrite(fd, contents[choice].data(), kSectorBytes, sector * kSectorBytes), ssize_t{kSectorBytes});
      }
      close(fd);
    }
  }
};

class IoVolatile final : public IoBackend {
 public:
  IoVolatile(std::unique_ptr<IoBackend> inner, VolatileCache* cache) : inner_(std::move(inner)), cache_(cache) {}
  [[nodiscard]] int32_t kind() const override { return inner_->kind(); }

  void Submit(IoRequest* request) override {
    auto* proxy = new Proxy{*request, request, cache_, false, {}, {}};
    {
      const std::lock_guard<std::mutex> lock(cache_->mutex);
      proxy->fails = --cache_->operations_left < 0;
      cache_->num_failed += proxy->fails ? 1 : 0;
      if (!proxy->fails && request->kind == IoKind::kWrite) proxy->before = Before(*request);
      if (!proxy->fails && request->kind == IoKind::kDataSync) proxy->covered = Covered(request->path);
    }
    if (proxy->fails) proxy->request.kind = IoKind::kDataSync;  // transfers nothing, completes on the back end's thread
    proxy->request.context = proxy;
    proxy->request.done = &IoVolatile::Done;
    inner_->Submit(&proxy->request);
  }

 private:
  struct Proxy {
    IoRequest request;
    IoRequest* original;
    VolatileCache* cache;
    bool fails;
    std::vector<Sector> before;         // of a write: what its sectors held
    std::map<int64_t, size_t> covered;  // of a flush: sector -> how many of its older contents it makes history
  };

  static std::vector<Sector> Before(const IoRequest& request) {
    const int fd = open(request.path, O_RDONLY);
    std::vector<Sector> before;
    for (int64_t at = request.offset; at < request.offset + request.bytes; at += kSectorBytes) {
      before.emplace_back(kSectorBytes);
      CHECK_EQ(pread(fd, before.back().data(), kSectorBytes, at), ssize_t{kSectorBytes});
    }
    close(fd);
    return before;
  }

  // A flush covers the writes that had completed when it was submitted.
  std::map<int64_t, size_t> Covered(const std::string& path) const {
    std::map<int64_t, size_t> covered;
    for (const auto& [sector, contents] : cache_->older[path]) covered[sector] = contents.size();
    return covered;
  }

  static void Settle(Proxy* proxy) {
    const std::lock_guard<std::mutex> lock(proxy->cache->mutex);
    auto& sectors = proxy->cache->older[proxy->original->path];
    for (const auto& [sector, count] : proxy->covered) {
      std::vector<Sector>& contents = sectors[sector];
      contents.erase(contents.begin(), contents.begin() + static_cast<int64_t>(std::min(count, contents.size())));
      if (contents.empty()) sectors.erase(sector);
    }
    int64_t sector = proxy->original->offset / kSectorBytes;
    for (Sector& before : proxy->before) {
      if (proxy->original->dsync) {
        sectors.erase(sector);
      } else {
        sectors[sector].push_back(std::move(before));
      }
      ++sector;
    }
  }

  static void Done(IoRequest* done, const Status& status) {
    const std::unique_ptr<Proxy> proxy(static_cast<Proxy*>(done->context));
    IoRequest* original = proxy->original;
    original->started_ns = done->started_ns;
    original->finished_ns = done->finished_ns;
    if (proxy->fails) return original->done(original, hetero::Fail(HETERO_EIO, "%s: power lost", original->path));
    Settle(proxy.get());
    original->done(original, status);
  }

  std::unique_ptr<IoBackend> inner_;
  VolatileCache* cache_;
};

// Trains until the power fails at operation n, then recovers. True when the run ended before.
bool TrainUntilPowerFails(int64_t n, uint32_t seed) {
  const TempDirectory directory;
  hetero_store_options options = StoreOptions(kBlocks);
  options.durability = HETERO_DURABILITY_POWER;
  options.direct_io = 0;  // the test edits the same files
  VolatileCache cache;
  cache.operations_left = n;
  std::mt19937 random(seed);
  int64_t acknowledged = -1;
  {
    Training training;
    std::unique_ptr<IoBackend> pool;
    REQUIRE_OK(MakeIoBackend(EngineOptions(4096, 3, 1), &pool));
    REQUIRE(training.Open(directory, options, true, std::make_unique<IoVolatile>(std::move(pool), &cache)));
    int32_t code = training.Initialize();
    for (int64_t step = 2; code == 0; ++step) {
      acknowledged = step - 1;
      code = step <= 4 ? training.Step(step) : 1;
    }
    (void)training.Close();
  }
  cache.LosePower(&random);
  Training training;
  REQUIRE(training.Open(directory, options, false));
  const int64_t recovered = training.RecoverAndCheck();
  CHECK_GE(recovered, acknowledged);
  CHECK_LE(recovered, acknowledged < 0 ? 1 : acknowledged + 1);
  CHECK_EQ(training.Close(), 0);
  return cache.num_failed == 0;
}

}  // namespace

TEST(power_loss_at_any_operation_leaves_a_committed_step) {
  int64_t n = 0;
  while (n < 500 && !TrainUntilPowerFails(n, static_cast<uint32_t>(n))) ++n;
  CHECK_GT(n, 30);
  CHECK_LT(n, 500);
}
