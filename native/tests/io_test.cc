// The contract of io.h over every back end that this machine allows.
#include "io.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <latch>
#include <random>
#include <thread>

#include "check.h"
#include "io_faulty.h"

using hetero::Fault;
using hetero::FaultKind;
using hetero::IoBackend;
using hetero::IoFaulty;
using hetero::IoKind;
using hetero::IoRequest;
using hetero::MakeIoBackend;
using hetero::Status;

// ---- the pool's system calls, made unreliable on demand ----------------------------------------------------------------

namespace {

std::atomic<bool> unreliable{false};
std::atomic<bool> dsync_unsupported{false};
std::atomic<int64_t> num_short{0}, num_refused{0}, num_synced{0};

// 0: do it. Else the errno to fail with; may shorten `bytes`.
int Disturb(size_t* bytes) {
  if (!unreliable) return 0;
  thread_local std::mt19937 random(7);
  const unsigned dice = random() % 8;
  if (dice == 0 || dice == 1) {
    ++num_refused;
    return dice == 0 ? EINTR : EAGAIN;
  }
  if (dice < 5 && *bytes > 1) {
    *bytes = 1 + random() % (*bytes - 1);
    ++num_short;
  }
  return 0;
}

}  // namespace

// These stand before libc's: the pool calls them. io_uring never does.
extern "C" ssize_t pread(int fd, void* data, size_t bytes, off_t offset) {
  if ((errno = Disturb(&bytes)) != 0) return -1;
  return syscall(SYS_pread64, fd, data, bytes, offset);
}
extern "C" ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  if ((errno = Disturb(&bytes)) != 0) return -1;
  return syscall(SYS_pwrite64, fd, data, bytes, offset);
}
extern "C" ssize_t pwritev2(int fd, const iovec* vector, int, off_t offset, int flags) {
  iovec part = *vector;
  if ((errno = dsync_unsupported ? EOPNOTSUPP : Disturb(&part.iov_len)) != 0) return -1;
  return syscall(SYS_pwritev2, fd, &part, 1L, offset, 0L, flags);
}
extern "C" int fdatasync(int fd) {
  ++num_synced;
  return static_cast<int>(syscall(SYS_fdatasync, fd));
}

namespace {

// ---- tools ---------------------------------------------------------------------------------------------------------------

constexpr int64_t kMiB = 1 << 20;

hetero_engine_options Options(int32_t backend, int32_t queue_depth = 4, double bytes_per_s = 1e12) {
  hetero_engine_options options = {};
  options.io_backend = backend;
  options.io_threads = 3;
  options.queue_depth = queue_depth;
  options.synthetic_read_bytes_per_s = bytes_per_s;
  options.synthetic_write_bytes_per_s = bytes_per_s;
  return options;
}

std::unique_ptr<IoBackend> Make(const hetero_engine_options& options) {
  std::unique_ptr<IoBackend> backend;
  REQUIRE_OK(MakeIoBackend(options, &backend));
  return backend;
}

// Every back end there is here. io_uring may be forbidden (containers): said once, not failed.
std::vector<int32_t> Backends() {
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

void Randomize(std::mt19937_64* random, char* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<char>((*random)());
}

// A request that counts a latch down and keeps its result.
struct Waited {
  IoRequest request;
  Status status;
  std::latch* latch = nullptr;
  std::atomic<int> num_done{0};
};

void Prepare(Waited* waited, std::latch* latch, IoKind kind, int fd, void* buffer, int64_t bytes, int64_t offset) {
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

Status Transfer(IoBackend* backend, IoKind kind, int fd, void* buffer, int64_t bytes, int64_t offset, bool dsync = false) {
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

bool Contains(const Status& status, const std::string& part) {
  if (status.message().find(part) != std::string::npos) return true;
  check::Report(__FILE__, __LINE__, "'" + status.message() + "' lacks '" + part + "'");
  return false;
}

// Writes disjoint random pieces, all submitted at once, then reads other pieces; compares with what must be there.
void TransferRandomly(IoBackend* backend, int fd, int64_t alignment, int rounds) {
  constexpr int64_t kFile = 2 * kMiB;
  constexpr int kPieces = 48;
  std::mt19937_64 random(static_cast<uint64_t>(alignment));
  Buffer expected(kFile), buffer(kFile);
  Randomize(&random, expected.data(), kFile);
  CHECK_OK(Transfer(backend, IoKind::kWrite, fd, expected.data(), kFile, 0));
  for (int round = 0; round < rounds; ++round) {
    const IoKind kind = round % 2 == 0 ? IoKind::kWrite : IoKind::kRead;
    std::vector<int64_t> cuts = {0, kFile};
    while (cuts.size() <= kPieces) cuts.push_back(static_cast<int64_t>(random() % (kFile / alignment)) * alignment);
    std::sort(cuts.begin(), cuts.end());
    if (kind == IoKind::kWrite) {
      Randomize(&random, expected.data(), kFile);
      memcpy(buffer.data(), expected.data(), kFile);
    } else {
      memset(buffer.data(), 0, kFile);
    }
    std::vector<Waited> pieces(kPieces);
    std::latch latch(kPieces);
    for (size_t i = 0; i < kPieces; ++i) {
      Prepare(&pieces[i], &latch, kind, fd, buffer.data() + cuts[i], cuts[i + 1] - cuts[i], cuts[i]);
    }
    std::vector<Waited*> order;
    for (Waited& piece : pieces) order.push_back(&piece);
    std::shuffle(order.begin(), order.end(), random);
    for (Waited* piece : order) backend->Submit(&piece->request);
    latch.wait();
    for (const Waited& piece : pieces) {
      CHECK_OK(piece.status);
      CHECK_EQ(piece.num_done, 1);
    }
    CHECK_EQ(memcmp(buffer.data(), expected.data(), kFile), 0);
  }
}

// ---- transfers ---------------------------------------------------------------------------------------------------------

TEST(random_transfers_equal_a_reference) {
  for (const int32_t kind : Backends()) {
    for (const int32_t depth : {1, 4, 64}) {
      const auto backend = Make(Options(kind, depth));
      CHECK_EQ(backend->kind(), kind);
      TempFile file;
      REQUIRE_EQ(file.error(), 0);
      TransferRandomly(backend.get(), file.fd(), 1, 6);
    }
  }
}

TEST(direct_transfers_equal_a_reference) {
  for (const int32_t kind : Backends()) {
    TempFile file(O_DIRECT);
    if (file.error() == EINVAL) {
      std::printf("not tested: O_DIRECT is refused in TMPDIR\n");
      return;
    }
    TransferRandomly(Make(Options(kind)).get(), file.fd(), 4096, 6);
  }
}

TEST(empty_transfers_and_data_syncs_succeed) {
  for (const int32_t kind : Backends()) {
    const auto backend = Make(Options(kind));
    TempFile file;
    CHECK_OK(Transfer(backend.get(), IoKind::kRead, file.fd(), nullptr, 0, 0));
    CHECK_OK(Transfer(backend.get(), IoKind::kWrite, file.fd(), nullptr, 0, 0));
    CHECK_OK(Transfer(backend.get(), IoKind::kDataSync, file.fd(), nullptr, 0, 0));
  }
}

TEST(durable_writes_arrive) {
  for (const bool refused : {false, true}) {
    dsync_unsupported = refused;
    for (const int32_t kind : Backends()) {
      const auto backend = Make(Options(kind));
      TempFile file;
      char text[] = "committed", back[sizeof(text)] = {};
      const int64_t synced_before = num_synced;
      CHECK_OK(Transfer(backend.get(), IoKind::kWrite, file.fd(), text, sizeof(text), 4096, true));
      CHECK_EQ(num_synced - synced_before, refused && kind != HETERO_IO_URING ? 1 : 0);
      CHECK_OK(Transfer(backend.get(), IoKind::kRead, file.fd(), back, sizeof(text), 4096));
      CHECK_EQ(std::string(back), std::string(text));
    }
  }
  dsync_unsupported = false;
}

// One system call moves 2 GiB - 4 KiB at most, one io_uring request of ours 1 GiB.
TEST(transfers_beyond_the_kernels_limit_are_continued) {
  constexpr int64_t kBytes = (int64_t{2} << 30) + 3 * 4096;
  constexpr int64_t kPiece = 16 * kMiB;
  const int memory = memfd_create("piece", MFD_CLOEXEC);
  REQUIRE_EQ(ftruncate(memory, kPiece), 0);
  // The same 16 MiB again and again: an address range of 2 GiB that needs no memory.
  auto* buffer = static_cast<char*>(mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  REQUIRE(buffer != MAP_FAILED);
  for (int64_t at = 0; at < kBytes; at += kPiece) {
    const auto bytes = static_cast<size_t>(std::min(kPiece, kBytes - at));
    REQUIRE(mmap(buffer + at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory, 0) != MAP_FAILED);
  }
  for (const int32_t kind : Backends()) {
    TempFile file(O_DIRECT);  // holes of a sparse file, past the page cache
    if (file.error() != 0) continue;
    REQUIRE_EQ(ftruncate(file.fd(), kBytes), 0);
    Buffer mark(4096);
    memset(mark.data(), kind + 1, 4096);
    const auto backend = Make(Options(kind));
    CHECK_OK(Transfer(backend.get(), IoKind::kWrite, file.fd(), mark.data(), 4096, kBytes - 4096));
    CHECK_OK(Transfer(backend.get(), IoKind::kRead, file.fd(), buffer, kBytes, 0));
    CHECK_EQ(memcmp(buffer + kBytes - 4096, mark.data(), 4096), 0);
  }
  munmap(buffer, kBytes);
  close(memory);
}

TEST(short_and_interrupted_system_calls_are_continued) {
  TempFile file;
  unreliable = true;
  TransferRandomly(Make(Options(HETERO_IO_POOL)).get(), file.fd(), 1, 4);
  unreliable = false;
  CHECK_GT(num_short, 100);
  CHECK_GT(num_refused, 50);
}

// ---- concurrency -------------------------------------------------------------------------------------------------------

// Writes its number again and again, each time from inside the `done` of the time before.
struct Chain {
  IoRequest request;
  IoBackend* backend = nullptr;
  std::latch* latch = nullptr;
  int64_t value = 0;
  int num_left = 50;

  static void Done(IoRequest* request, const Status& status) {
    auto* self = static_cast<Chain*>(request->context);
    CHECK_OK(status);
    if (--self->num_left == 0) return self->latch->count_down();
    self->value += 1000;
    self->backend->Submit(request);
  }
};

TEST(any_thread_and_done_itself_may_submit) {
  constexpr int kThreads = 4, kChains = 6;
  for (const int32_t kind : Backends()) {
    const auto backend = Make(Options(kind, 5));
    TempFile file;
    std::vector<Chain> chains(kThreads * kChains);
    std::latch latch(kThreads * kChains);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int c = t * kChains; c < (t + 1) * kChains; ++c) {
          Chain& chain = chains[static_cast<size_t>(c)];
          chain.backend = backend.get();
          chain.latch = &latch;
          chain.value = c;
          chain.request.kind = IoKind::kWrite;
          chain.request.fd = file.fd();
          chain.request.buffer = &chain.value;
          chain.request.bytes = sizeof(chain.value);
          chain.request.offset = c * static_cast<int64_t>(sizeof(chain.value));
          chain.request.context = &chain;
          chain.request.done = Chain::Done;
          backend->Submit(&chain.request);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    latch.wait();
    int64_t values[kThreads * kChains] = {};
    CHECK_OK(Transfer(backend.get(), IoKind::kRead, file.fd(), values, sizeof(values), 0));
    for (int c = 0; c < kThreads * kChains; ++c) CHECK_EQ(values[c], c + 49 * 1000);
  }
}

TEST(the_destructor_waits_for_what_was_submitted) {
  for (const int32_t kind : Backends()) {
    for (int round = 0; round < 20; ++round) {
      constexpr int kRequests = 32;
      TempFile file;
      Buffer buffer(kRequests * 4096);
      memset(buffer.data(), round, static_cast<size_t>(buffer.bytes()));
      std::vector<Waited> requests(kRequests);
      std::latch latch(kRequests);
      auto backend = Make(Options(kind, 3));
      for (int i = 0; i < kRequests; ++i) {
        Waited& request = requests[static_cast<size_t>(i)];
        Prepare(&request, &latch, IoKind::kWrite, file.fd(), buffer.data() + i * 4096, 4096, i * 4096);
        backend->Submit(&request.request);
      }
      backend.reset();
      CHECK(latch.try_wait());
      for (const Waited& request : requests) CHECK_OK(request.status);
    }
  }
}

TEST(the_synthetic_device_reads_while_it_writes) {
  hetero_engine_options options = Options(HETERO_IO_SYNTHETIC);
  options.synthetic_read_bytes_per_s = 10.0 * kMiB;
  options.synthetic_write_bytes_per_s = 1.0 * kMiB;  // the read is submitted before the first write is over
  const auto device = Make(options);
  TempFile file;
  REQUIRE_EQ(ftruncate(file.fd(), kMiB), 0);
  Buffer buffer(2 * kMiB);
  memset(buffer.data(), 1, static_cast<size_t>(buffer.bytes()));
  Waited requests[4];
  std::latch latch(4);
  for (int i = 0; i < 4; ++i) {
    const IoKind kind = i % 2 == 0 ? IoKind::kWrite : IoKind::kRead;
    Prepare(&requests[i], &latch, kind, file.fd(), buffer.data() + i * kMiB / 2, kMiB / 2, 0);
    device->Submit(&requests[i].request);
  }
  latch.wait();
  for (const Waited& waited : requests) {
    CHECK_OK(waited.status);
    const int64_t least_ns = waited.request.kind == IoKind::kRead ? 50'000'000 : 500'000'000;
    CHECK_GE(waited.request.finished_ns - waited.request.started_ns, least_ns);
  }
  CHECK_LT(requests[1].request.started_ns, requests[0].request.finished_ns);               // a read beside a write
  CHECK_GE(requests[2].request.started_ns, requests[0].request.started_ns + 500'000'000);  // writes one by one
  CHECK_GE(requests[3].request.started_ns, requests[1].request.started_ns + 50'000'000);   // and so reads
}

// ---- errors ------------------------------------------------------------------------------------------------------------

TEST(errors_name_operation_path_offset_length_and_errno) {
  for (const int32_t kind : Backends()) {
    const auto backend = Make(Options(kind));
    char data[512] = {};
    const Status read = Transfer(backend.get(), IoKind::kRead, -1, data, 512, 8192);
    CHECK_EQ(read.code(), HETERO_EIO);
    CHECK(Contains(read, "read of block-00007.a at offset 8192, 512 bytes: "));
    CHECK(Contains(read, "(errno 9)"));
    const Status write = Transfer(backend.get(), IoKind::kWrite, -1, data, 512, 0);
    CHECK(Contains(write, "write of block-00007.a at offset 0, 512 bytes: "));
    const Status sync = Transfer(backend.get(), IoKind::kDataSync, -1, nullptr, 0, 0);
    CHECK(Contains(sync, "fdatasync of block-00007.a: "));
    const int full = open("/dev/full", O_RDWR | O_CLOEXEC);
    REQUIRE(full >= 0);
    const Status no_space = Transfer(backend.get(), IoKind::kWrite, full, data, 512, 0);
    CHECK_EQ(no_space.code(), HETERO_ENOSPC);
    CHECK(Contains(no_space, "(errno 28)"));
    close(full);
  }
}

TEST(a_read_past_the_end_of_the_file_is_an_error) {
  for (const int32_t kind : Backends()) {
    for (const int flags : {0, O_DIRECT}) {
      TempFile file(flags);
      if (file.fd() < 0) continue;
      REQUIRE_EQ(ftruncate(file.fd(), 4096 + 100), 0);
      const auto backend = Make(Options(kind));
      Buffer buffer(8192);
      const Status partly = Transfer(backend.get(), IoKind::kRead, file.fd(), buffer.data(), 8192, 0);
      CHECK_EQ(partly.code(), HETERO_EIO);
      CHECK(Contains(partly, "read of block-00007.a at offset 0, 8192 bytes: the file ends after 4196 of them"));
      CHECK(Contains(Transfer(backend.get(), IoKind::kRead, file.fd(), buffer.data(), 4096, 8192), "ends after 0 of them"));
    }
  }
}

TEST(a_read_may_end_with_the_file_once_what_is_needed_has_come) {
  for (const int32_t kind : Backends()) {
    for (const int flags : {0, O_DIRECT}) {
      TempFile file(flags);
      if (file.fd() < 0) continue;
      const auto backend = Make(Options(kind));
      Buffer page(4096), buffer(8192);
      memset(page.data(), 7, 4096);
      CHECK_OK(Transfer(backend.get(), IoKind::kWrite, file.fd(), page.data(), 4096, 0));
      CHECK_OK(Transfer(backend.get(), IoKind::kWrite, file.fd(), page.data(), 4096, 4096));
      REQUIRE_EQ(ftruncate(file.fd(), 4096 + 100), 0);
      for (const int64_t needed : {1, 4196, 4197}) {
        memset(buffer.data(), 0, 8192);
        std::latch latch(1);
        Waited waited;
        Prepare(&waited, &latch, IoKind::kRead, file.fd(), buffer.data(), 8192, 0);
        waited.request.needed = needed;
        backend->Submit(&waited.request);
        latch.wait();
        CHECK_EQ(waited.status.code(), needed > 4196 ? HETERO_EIO : 0);
        CHECK_EQ(buffer.data()[needed > 4196 ? 4195 : needed - 1], 7);
      }
    }
  }
}

TEST(a_write_that_the_file_system_cuts_short_fails) {
  rlimit before = {};
  REQUIRE_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  for (const int32_t kind : Backends()) {
    const auto backend = Make(Options(kind));
    TempFile file;
    Buffer buffer(8192);
    memset(buffer.data(), 1, 8192);
    const rlimit low = {4096, before.rlim_max};
    REQUIRE_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
    const Status status = Transfer(backend.get(), IoKind::kWrite, file.fd(), buffer.data(), 8192, 0);
    REQUIRE_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    CHECK_EQ(status.code(), HETERO_EIO);
    CHECK(Contains(status, "(errno 27)"));
    struct stat info = {};
    REQUIRE_EQ(fstat(file.fd(), &info), 0);
    CHECK_EQ(info.st_size, 4096);
  }
  signal(SIGXFSZ, handler);
}

TEST(an_error_does_not_disturb_other_transfers) {
  for (const int32_t kind : Backends()) {
    const auto backend = Make(Options(kind, 3));
    TempFile file;
    constexpr int kRequests = 40;
    Buffer buffer(kRequests * 512);
    memset(buffer.data(), 3, static_cast<size_t>(buffer.bytes()));
    std::vector<Waited> requests(kRequests);
    std::latch latch(kRequests);
    for (int i = 0; i < kRequests; ++i) {
      Waited& request = requests[static_cast<size_t>(i)];
      Prepare(&request, &latch, IoKind::kWrite, i % 5 == 0 ? -1 : file.fd(), buffer.data() + i * 512, 512, i * 512);
      backend->Submit(&request.request);
    }
    latch.wait();
    for (int i = 0; i < kRequests; ++i) CHECK_EQ(requests[static_cast<size_t>(i)].status.ok(), i % 5 != 0);
  }
}

// ---- choosing ----------------------------------------------------------------------------------------------------------

TEST(bad_options_are_refused_by_name) {
  std::unique_ptr<IoBackend> backend;
  hetero_engine_options options = Options(HETERO_IO_POOL);
  options.io_threads = 0;
  CHECK(Contains(MakeIoBackend(options, &backend), "io_threads is 0; allowed: 1 to 256"));
  options = Options(HETERO_IO_POOL, 0);
  CHECK(Contains(MakeIoBackend(options, &backend), "queue_depth is 0; allowed: 1 to 1024"));
  CHECK(Contains(MakeIoBackend(Options(9), &backend), "io_backend is 9"));
  const Status status = MakeIoBackend(Options(HETERO_IO_SYNTHETIC, 4, 0), &backend);
  CHECK_EQ(status.code(), HETERO_EINVAL);
  CHECK(Contains(status, "synthetic_read_bytes_per_s is 0"));
  CHECK(backend == nullptr);
}

// As Docker's default profile does: `number` fails with EPERM on this thread and those it starts.
bool Forbid(uint32_t number) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {4, program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

TEST(a_denied_io_uring_is_named_and_auto_takes_the_pool) {
  for (const long number : {SYS_io_uring_setup, SYS_io_uring_enter}) {
    std::thread([number] {
      if (!Forbid(static_cast<uint32_t>(number))) {
        std::printf("not tested: seccomp is not available\n");
        return;
      }
      std::unique_ptr<IoBackend> backend;
      const Status status = MakeIoBackend(Options(HETERO_IO_URING), &backend);
      CHECK_EQ(status.code(), HETERO_EUNSUPPORTED);
      CHECK(Contains(status, "io_uring"));
      CHECK(Contains(status, "Use io_backend='pool'"));
      CHECK_OK(MakeIoBackend(Options(HETERO_IO_AUTO), &backend));
      CHECK(backend != nullptr && backend->kind() == HETERO_IO_POOL);
    }).join();
  }
}

TEST(auto_takes_io_uring_where_it_is_allowed) {
  const bool allowed = Backends().back() == HETERO_IO_URING;
  CHECK_EQ(Make(Options(HETERO_IO_AUTO))->kind(), allowed ? HETERO_IO_URING : HETERO_IO_POOL);
}

// ---- the faulty back end -------------------------------------------------------------------------------------------------

TEST(injected_faults_fail_tear_and_reorder) {
  TempFile file;
  Buffer ones(4096), back(4096);
  memset(ones.data(), 1, 4096);
  REQUIRE_EQ(ftruncate(file.fd(), 4096), 0);
  const auto write = [&](IoFaulty::Plan plan) {
    IoFaulty backend(Make(Options(HETERO_IO_POOL)), std::move(plan));
    return Transfer(&backend, IoKind::kWrite, file.fd(), ones.data(), 4096, 0);
  };
  const auto sum = [&] {
    CHECK_OK(Transfer(Make(Options(HETERO_IO_POOL)).get(), IoKind::kRead, file.fd(), back.data(), 4096, 0));
    return std::count(back.data(), back.data() + 4096, 1);
  };
  CHECK(Contains(write(IoFaulty::FailNth(0, ENOSPC)), "(errno 28) (injected)"));
  CHECK_EQ(sum(), 0);
  CHECK_EQ(write(IoFaulty::FailNth(0, EIO, FaultKind::kTear)).code(), HETERO_EIO);
  CHECK_EQ(sum(), 2048);
  CHECK_OK(write(IoFaulty::FailNth(1)));
  CHECK_EQ(sum(), 4096);

  std::latch latch(2);
  Waited late, early;
  IoFaulty backend(Make(Options(HETERO_IO_POOL)),
                   [](int64_t index, const IoRequest&) { return Fault{index == 0 ? FaultKind::kHold : FaultKind::kNone}; });
  Prepare(&late, &latch, IoKind::kRead, file.fd(), back.data(), 512, 0);
  Prepare(&early, &latch, IoKind::kRead, file.fd(), back.data() + 512, 512, 512);
  backend.Submit(&late.request);
  backend.Submit(&early.request);
  while (early.num_done == 0) std::this_thread::yield();
  CHECK_EQ(late.num_done, 0);
  backend.Release();
  latch.wait();
  CHECK_OK(late.status);
}

}  // namespace
