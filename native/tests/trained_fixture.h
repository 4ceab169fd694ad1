// A store with one block that was stored and committed, and what is done to its files.
#ifndef HETERO_TESTS_TRAINED_FIXTURE_H_
#define HETERO_TESTS_TRAINED_FIXTURE_H_

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "engine_fixture.h"

namespace fixture {

constexpr int64_t kTrainedElements = 4096 * 3 + 32;

// One block on disk, stored and committed as step 1.
struct Trained : Setup {
  explicit Trained(const hetero_store_options& options = StoreOptions(1),
                   const hetero_block_geometry& g = Geometry(0, HETERO_F32, kTrainedElements, true, true), uint32_t seed = 42)
      : Setup({g}, seed, options) {
    Start(4, 2);
    Store("one");
  }
};

// While it lives no file may grow beyond a size: to whoever allocates one the disk is full.
class SmallFiles {
 public:
  explicit SmallFiles(rlim_t bytes) : handler_(signal(SIGXFSZ, SIG_IGN)) {
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before_), 0);
    const struct rlimit small{bytes, before_.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  }
  ~SmallFiles() {
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before_), 0);
    signal(SIGXFSZ, handler_);
  }
  SmallFiles(const SmallFiles&) = delete;
  SmallFiles& operator=(const SmallFiles&) = delete;

 private:
  struct rlimit before_{};
  void (*handler_)(int);
};

inline void EditFile(const std::string& path, int64_t offset, const std::function<void(uint8_t*)>& edit, int64_t bytes = 1) {
  const int fd = open(path.c_str(), O_RDWR);
  REQUIRE(fd >= 0);
  std::vector<uint8_t> content(static_cast<size_t>(bytes));
  CHECK_EQ(pread(fd, content.data(), content.size(), offset), bytes);
  edit(content.data());
  CHECK_EQ(pwrite(fd, content.data(), content.size(), offset), bytes);
  close(fd);
}

inline std::vector<uint8_t> Content(const std::string& path) {
  struct stat info{};
  const int fd = open(path.c_str(), O_RDONLY);
  if (fd < 0 || fstat(fd, &info) != 0) return {};
  std::vector<uint8_t> content(static_cast<size_t>(info.st_size));
  CHECK_EQ(pread(fd, content.data(), content.size(), 0), static_cast<ssize_t>(content.size()));
  close(fd);
  return content;
}

// Reads the whole block; the code.
inline int32_t ReadAll(const Trained& t) {
  std::vector<float> out(static_cast<size_t>(kTrainedElements));
  const std::vector<hetero_patch> patches{
      {0, kTrainedElements, out.data(), -1}, {0, kTrainedElements, out.data(), 0}, {0, kTrainedElements, out.data(), 1}};
  const hetero_task task{};
  return t.run.Complete(hetero_submit_read(t.run.engine, t.block.handle, patches.data(), 3, &task));
}

}  // namespace fixture

#endif  // HETERO_TESTS_TRAINED_FIXTURE_H_
