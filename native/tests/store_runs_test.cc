// Weights that are read in place from files of somebody else: random runs at any offset against plain copies; every refusal.
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine_fixture.h"

using fixture::EngineOptions;
using fixture::Run;
using fixture::TempDirectory;
using hetero::RoundUp;

namespace {

// What open() answers when asked for direct I/O: 0, or the error of a file system that cannot.
int direct_error = 0;
int direct_opens = 0;

}  // namespace

// Takes the place of the C library's in this program.
extern "C" int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const int mode = (flags & O_CREAT) != 0 ? va_arg(arguments, int) : 0;
  va_end(arguments);
  if ((flags & O_DIRECT) != 0) {
    ++direct_opens;
    if (direct_error != 0) {
      errno = direct_error;
      return -1;
    }
  }
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

namespace {

int64_t ModifiedNs(const std::string& path) {
  struct stat info{};
  CHECK_EQ(stat(path.c_str(), &info), 0);
  return static_cast<int64_t>(info.st_mtim.tv_sec) * 1'000'000'000 + info.st_mtim.tv_nsec;
}

void Write(const std::string& path, const std::vector<uint8_t>& content) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  REQUIRE(fd >= 0);
  CHECK_EQ(write(fd, content.data(), content.size()), static_cast<ssize_t>(content.size()));
  CHECK_EQ(fsync(fd), 0);
  close(fd);
}

// A block over runs of files with random content, and what it must hold.
struct Source {
  TempDirectory directory;
  std::vector<std::string> paths;
  std::vector<std::vector<uint8_t>> contents;
  std::vector<hetero_run_file> files;
  std::vector<hetero_run> runs;
  std::vector<uint8_t> expected;
  hetero_block_geometry geometry{};
  hetero_block* block = nullptr;
  uint8_t* weights = nullptr;
  int64_t memory_bytes = 0;
  Run run;

  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  ~Source() {
    (void)run.StopEngine();
    Close();
    if (weights != nullptr) (void)hetero_unreserve(weights, memory_bytes);
  }
  void Close() {
    if (block != nullptr) CHECK_EQ(hetero_block_close(std::exchange(block, nullptr)), 0);
  }

  void AddFile(int64_t bytes, std::mt19937* random) {
    std::vector<uint8_t> content(static_cast<size_t>(bytes));
    for (uint8_t& byte : content) byte = static_cast<uint8_t>((*random)());
    paths.push_back(directory.File("file-" + std::to_string(paths.size())));
    Write(paths.back(), content);
    contents.push_back(std::move(content));
  }

  // Runs in random order in memory; most of them follow each other in their file.
  void AddRuns(std::mt19937* random) {
    const auto below = [&](int64_t n) { return static_cast<int64_t>((*random)() % static_cast<uint64_t>(n)); };
    for (size_t file = 0; file < contents.size(); ++file) {
      const auto size = static_cast<int64_t>(contents[file].size());
      for (int64_t at = below(100); at < size;) {
        const int64_t bytes = std::min(size - at, 1 + (below(3) == 0 ? below(30000) : below(500)));
        runs.push_back({0, at, bytes, static_cast<int32_t>(file)});
        at += bytes + (below(3) == 0 ? below(9000) : 0);
      }
    }
    std::shuffle(runs.begin(), runs.end(), *random);
    int64_t offset = 64 * below(3);
    for (hetero_run& r : runs) {
      r.offset = offset;
      offset = RoundUp(offset + r.bytes, 64) + 64 * below(2);
    }
    geometry = fixture::Geometry(7, HETERO_U8, offset + 16, true, false);
    geometry.chunk_elements = 4096 * (1 + below(8));
    expected.assign(static_cast<size_t>(geometry.num_elements), 0);
    for (const hetero_run& r : runs)
      std::copy_n(contents[static_cast<size_t>(r.file)].begin() + r.file_offset, r.bytes, expected.begin() + r.offset);
  }

  bool Open(int32_t direct_io) {
    files.clear();
    for (size_t i = 0; i < paths.size(); ++i)
      files.push_back({paths[i].c_str(), static_cast<int64_t>(contents[i].size()), ModifiedNs(paths[i])});
    return OpenAs(direct_io);
  }
  bool OpenAs(int32_t direct_io) {
    if (weights == nullptr) {
      memory_bytes = RoundUp(geometry.num_elements, 1 << 21);
      weights = static_cast<uint8_t*>(hetero_reserve(memory_bytes));
    }
    block = hetero_block_open_runs(&geometry, weights, files.data(), static_cast<int32_t>(files.size()), runs.data(),
                                   static_cast<int32_t>(runs.size()), direct_io);
    return block != nullptr;
  }
  void Start(int32_t backend) {
    hetero_engine_options o = EngineOptions(std::max<int64_t>(geometry.chunk_elements, 8192), 3, 2);
    o.io_backend = backend;
    REQUIRE(run.StartEngine(o));
  }
  [[nodiscard]] int32_t Fetch() const {
    const hetero_task task{};
    return run.Complete(hetero_submit_fetch(run.engine, block, &task));
  }
  [[nodiscard]] bool HoldsInMemory() const { return std::equal(expected.begin(), expected.end(), weights); }
};

void Small(Source* source, uint32_t seed) {
  std::mt19937 random(seed);
  source->AddFile(20000 + seed % 97, &random);
  source->AddRuns(&random);
}

}  // namespace

TEST(random_runs_are_fetched_and_read_bit_for_bit) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    Source source;
    for (uint32_t i = 0; i < 1 + seed % 3; ++i) source.AddFile(1 + static_cast<int64_t>(random() % 150000), &random);
    source.AddRuns(&random);
    REQUIRE(source.Open(static_cast<int32_t>(seed % 4 != 0)));
    source.Start(seed % 2 == 0 ? HETERO_IO_POOL : HETERO_IO_AUTO);
    std::fill_n(source.weights, source.expected.size(), static_cast<uint8_t>(0xee));
    CHECK_EQ(source.Fetch(), 0);
    CHECK(source.HoldsInMemory());
    const hetero_task task{};
    CHECK_EQ(source.run.Complete(hetero_submit_release(source.run.engine, source.block, &task)), 0);
    std::vector<std::vector<uint8_t>> found;
    std::vector<hetero_patch> patches;
    for (int i = 0; i < 5; ++i) {
      const auto offset = static_cast<int64_t>(random() % static_cast<uint64_t>(source.geometry.num_elements));
      const auto numel = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(source.geometry.num_elements - offset));
      found.emplace_back(static_cast<size_t>(numel), static_cast<uint8_t>(0xee));
      patches.push_back({offset, numel, found.back().data(), -1});
    }
    CHECK_EQ(source.run.Complete(hetero_submit_read(source.run.engine, source.block, patches.data(), 5, &task)), 0);
    for (size_t i = 0; i < found.size(); ++i)
      CHECK(std::equal(found[i].begin(), found[i].end(), source.expected.begin() + patches[i].offset));
    CHECK_EQ(source.Fetch(), 0);
    CHECK(source.HoldsInMemory());
  }
}

TEST(runs_that_follow_each_other_cost_two_pages_at_most) {
  std::mt19937 random(3);
  Source source;
  source.AddFile(1'000'003, &random);
  constexpr int64_t kRuns = 50;
  for (int64_t i = 0; i < kRuns; ++i) source.runs.push_back({20000 * i, 101 + 19997 * (kRuns - 1 - i), 19997, 0});
  source.geometry = fixture::Geometry(0, HETERO_U8, 20000 * kRuns, true, false);
  source.geometry.chunk_elements = 65536;
  REQUIRE(source.Open(1));
  source.Start(HETERO_IO_POOL);
  CHECK_EQ(source.Fetch(), 0);
  for (const hetero_run& r : source.runs)
    CHECK(
        std::equal(source.weights + r.offset, source.weights + r.offset + r.bytes, source.contents[0].begin() + r.file_offset));
  hetero_engine_stats stats{};
  CHECK_EQ(hetero_engine_get_stats(source.run.engine, &stats), 0);
  const int64_t beyond = hetero_engine_bytes_beyond(source.run.engine);
  CHECK_EQ(stats.bytes_read - beyond, 19997 * kRuns);
  CHECK_LE(beyond, 2 * hetero::kPageBytes);
}

TEST(a_file_system_without_direct_io_is_read_through_the_page_cache) {
  for (const int32_t backend : {HETERO_IO_POOL, HETERO_IO_AUTO}) {
    for (const int error : {0, EINVAL}) {
      std::mt19937 random(5);
      Source source;
      source.AddFile(100'003, &random);
      source.AddFile(7, &random);
      source.AddRuns(&random);
      direct_error = error;
      direct_opens = 0;
      const bool opened = source.Open(1);
      direct_error = 0;
      REQUIRE(opened);
      CHECK_EQ(direct_opens, 2);
      source.Start(backend);
      std::fill_n(source.weights, source.expected.size(), static_cast<uint8_t>(0xee));
      CHECK_EQ(source.Fetch(), 0);
      CHECK(source.HoldsInMemory());
      const int64_t beyond = hetero_engine_bytes_beyond(source.run.engine);
      CHECK(error == 0 ? beyond > 0 : beyond == 0);
    }
  }
}

TEST(another_error_of_open_is_not_taken_for_a_file_system_without_direct_io) {
  Source source;
  Small(&source, 4);
  direct_error = EACCES;
  const bool opened = source.Open(1);
  direct_error = 0;
  CHECK(!opened);
  CHECK(strstr(hetero_last_error(), source.paths[0].c_str()) != nullptr);
}

TEST(a_block_that_is_read_in_place_is_never_written) {
  Source source;
  Small(&source, 1);
  REQUIRE(source.Open(1));
  source.Start(HETERO_IO_POOL);
  const hetero_task task{};
  uint8_t byte = 1;
  const hetero_patch patch{0, 1, &byte, -1};
  CHECK_EQ(hetero_submit_store(source.run.engine, source.block, &patch, 1, 0, 1, &task), HETERO_EINVAL);
  CHECK_EQ(hetero_submit_store(source.run.engine, source.block, nullptr, 0, 1, 1, &task), HETERO_EINVAL);
  CHECK_EQ(hetero_open_update(source.run.engine, source.block, 1, &task), HETERO_EINVAL);
  CHECK_EQ(hetero_block_committed_slot(source.block), 2);
  CHECK_EQ(source.Fetch(), 0);
  CHECK(source.HoldsInMemory());
}

TEST(a_block_without_runs_is_zeros) {
  Source source;
  source.geometry = fixture::Geometry(7, HETERO_U8, 3 * 4096 + 16, true, false);
  source.expected.assign(static_cast<size_t>(source.geometry.num_elements), 0);
  REQUIRE(source.Open(1));
  source.Start(HETERO_IO_POOL);
  std::fill_n(source.weights, source.expected.size(), static_cast<uint8_t>(0xee));
  CHECK_EQ(source.Fetch(), 0);
  CHECK(source.HoldsInMemory());
  uint8_t byte = 1;
  const hetero_patch patch{4096, 1, &byte, -1};
  const hetero_task task{};
  CHECK_EQ(source.run.Complete(hetero_submit_read(source.run.engine, source.block, &patch, 1, &task)), 0);
  CHECK_EQ(byte, 0);
}

TEST(a_file_that_has_changed_is_refused_by_name) {
  Source source;
  Small(&source, 2);
  REQUIRE(source.Open(1));
  source.Start(HETERO_IO_POOL);
  CHECK_EQ(source.Fetch(), 0);
  const timespec times[2] = {{1, 0}, {1, 0}};
  CHECK_EQ(utimensat(AT_FDCWD, source.paths[0].c_str(), times, 0), 0);
  CHECK_EQ(source.Fetch(), HETERO_ECORRUPT);
  CHECK(strstr(hetero_last_error(), source.paths[0].c_str()) != nullptr);
  CHECK_EQ(source.run.StopEngine(), HETERO_ECORRUPT);
  source.Close();
  CHECK(!source.OpenAs(1));
  CHECK_EQ(hetero_last_code(), HETERO_ECORRUPT);
  CHECK(strstr(hetero_last_error(), source.paths[0].c_str()) != nullptr);
  CHECK(source.Open(1));
  source.Close();
  CHECK_EQ(truncate(source.paths[0].c_str(), 100), 0);
  CHECK(!source.Open(1));
  CHECK_EQ(hetero_last_code(), HETERO_ECORRUPT);
  CHECK_EQ(unlink(source.paths[0].c_str()), 0);
  CHECK(!source.OpenAs(1));
  CHECK_EQ(hetero_last_code(), HETERO_ECORRUPT);
  CHECK(strstr(hetero_last_error(), "is gone") != nullptr);
}

TEST(bad_arguments_of_runs_are_named) {
  const auto fault = [](const char* text, auto change) {
    Source source;
    Small(&source, 9);
    REQUIRE(source.Open(1));
    source.Close();
    change(&source);
    CHECK(!source.OpenAs(1));
    CHECK_EQ(hetero_last_code(), HETERO_EINVAL);
    CHECK(strstr(hetero_last_error(), text) != nullptr);
  };
  fault("runs[0]", [](Source* s) { s->runs[0].bytes = 0; });
  fault("runs[0]", [](Source* s) { s->runs[0].file = 1; });
  fault("runs[0]", [](Source* s) { s->runs[0].file = -1; });
  fault("runs[0]", [](Source* s) { s->runs[0].file_offset = -1; });
  fault("runs[0]", [](Source* s) { s->runs[0].file_offset = INT64_MAX; });
  fault("runs[0]", [](Source* s) { s->runs[0].offset = -64; });
  fault("runs[1]", [](Source* s) { s->runs[1].offset = s->runs[0].offset; });
  fault("leaves the block", [](Source* s) { s->runs.back().bytes = INT64_MAX; });
  fault("path", [](Source* s) { s->files[0].path = "file-0"; });
  fault("path", [](Source* s) { s->files[0].path = nullptr; });
  fault("runs[0]", [](Source* s) { s->files.clear(); });
  fault("1 slot", [](Source* s) { s->geometry.num_slots = 2; });
  fault("1 slot", [](Source* s) { s->geometry.weight_dtype = HETERO_F32; });
  fault("1 slot", [](Source* s) { s->geometry.weights_on_disk_file = 0; });
  CHECK(hetero_block_open_runs(nullptr, nullptr, nullptr, 0, nullptr, 0, 0) == nullptr);
  Source source;
  Small(&source, 9);
  REQUIRE(source.Open(1));
  const auto refused = [&source](int32_t num_files, int32_t num_runs) {
    const hetero_block* block =
        hetero_block_open_runs(&source.geometry, source.weights, nullptr, num_files, nullptr, num_runs, 0);
    return block == nullptr && strstr(hetero_last_error(), "as many as are passed") != nullptr;
  };
  CHECK(refused(1, 0));
  CHECK(refused(0, 1));
  CHECK(refused(-1, 0));
  CHECK(refused(0, -1));
  CHECK_EQ(hetero_engine_bytes_beyond(nullptr), HETERO_EINVAL);
}
