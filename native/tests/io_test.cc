// The contract of io.h over every back end that this machine allows: transfers and concurrency.
#include "io.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <latch>
#include <random>
#include <thread>

#include "check.h"
#include "io_fixture.h"

using fixture::Backends;
using fixture::Buffer;
using fixture::kMiB;
using fixture::Make;
using fixture::Options;
using fixture::Prepare;
using fixture::Randomize;
using fixture::TempFile;
using fixture::Transfer;
using fixture::Waited;
using hetero::IoBackend;
using hetero::IoKind;
using hetero::IoRequest;
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

}  // namespace
