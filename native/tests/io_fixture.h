// What the tests of io.h share: back ends, files, memory, requests that are waited for.
#ifndef HETERO_TESTS_IO_FIXTURE_H_
#define HETERO_TESTS_IO_FIXTURE_H_

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <latch>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "io.h"

namespace fixture {

using hetero::IoBackend;
using hetero::IoKind;
using hetero::IoRequest;
using hetero::MakeIoBackend;
using hetero::Status;

constexpr int64_t kMiB = 1 << 20;

inline hetero_engine_options Options(int32_t backend, int32_t queue_depth = 4, double bytes_per_s = 1e12) {
  hetero_engine_options options = {};
  options.io_backend = backend;
  options.io_threads = 3;
  options.queue_depth = queue_depth;
  options.synthetic_read_bytes_per_s = bytes_per_s;
  options.synthetic_write_bytes_per_s = bytes_per_s;
  return options;
}

inline std::unique_ptr<IoBackend> Make(const hetero_engine_options& options) {
  std::unique_ptr<IoBackend> backend;
  REQUIRE_OK(MakeIoBackend(options, &backend));
  return backend;
}

// Every back end there is here. io_uring may be forbidden (containers): said once, not failed.
inline std::vector<int32_t> Backends() {
  static const std::vector<int32_t> backends = [] {
    std::vector<int32_t> kinds = {HETERO_IO_POOL, HETERO_IO_SYNTHETIC};
    std::unique_ptr<IoBackend> backend;
    const Status status = MakeIoBackend(Options(HETERO_IO_URING), &backend);
    if (status.ok()) kinds.push_back(HETERO_IO_URING);
    if (!status.ok()) std::printf("not tested: %s\n", status.message().c_str());
    return kinds;
  }();
  return backends;
}

// An unlinked file in $TMPDIR.
class TempFile {
 public:
  explicit TempFile(int flags = 0) {
    const char* directory = std::getenv("TMPDIR");
    std::string name = std::string(directory != nullptr ? directory : "/tmp") + "/hetero-io-" + std::string(6, 'X');
    fd_ = mkostemp(name.data(), O_CLOEXEC | flags);
    error_ = fd_ < 0 ? errno : 0;
    if (fd_ >= 0 || flags != 0) unlink(name.c_str());  // O_DIRECT refused: the file was made all the same
  }
  ~TempFile() {
    if (fd_ >= 0) close(fd_);
  }
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;
  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] int error() const { return error_; }

 private:
  int fd_;
  int error_;
};

// Page-aligned memory.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : bytes_(bytes), data_(static_cast<char*>(aligned_alloc(4096, static_cast<size_t>(bytes)))) {}
  ~Buffer() { free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  [[nodiscard]] char* data() const { return data_; }
  [[nodiscard]] int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_;
  char* data_;
};

inline void Randomize(std::mt19937_64* random, char* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<char>((*random)());
}

// A request that counts a latch down and keeps its result.
struct Waited {
  IoRequest request;
  Status status;
  std::latch* latch = nullptr;
  std::atomic<int> num_done{0};
};

inline void Prepare(Waited* waited, std::latch* latch, IoKind kind, int fd, void* buffer, int64_t bytes, int64_t offset) {
  waited->latch = latch;
  waited->request.kind = kind;
  waited->request.fd = fd;
  waited->request.path = "block-00007.a";
  waited->request.buffer = buffer;
  waited->request.bytes = bytes;
  waited->request.offset = offset;
  waited->request.context = waited;
  waited->request.done = [](IoRequest* request, const Status& status) {
    auto* self = static_cast<Waited*>(request->context);
    self->status = status;
    ++self->num_done;
    self->latch->count_down();
  };
}

inline Status Transfer(IoBackend* backend, IoKind kind, int fd, void* buffer, int64_t bytes, int64_t offset,
                       bool dsync = false) {
  std::latch latch(1);
  Waited waited;
  Prepare(&waited, &latch, kind, fd, buffer, bytes, offset);
  waited.request.dsync = dsync;
  backend->Submit(&waited.request);
  latch.wait();
  CHECK_GT(waited.request.started_ns, 0);
  CHECK_GE(waited.request.finished_ns, waited.request.started_ns);
  return waited.status;
}

inline bool Contains(const Status& status, const std::string& part) {
  if (status.message().find(part) != std::string::npos) return true;
  check::Report(__FILE__, __LINE__, "'" + status.message() + "' lacks '" + part + "'");
  return false;
}

}  // namespace fixture

#endif  // HETERO_TESTS_IO_FIXTURE_H_
