// Errors of the back ends of io.h, bad options, the choice of a back end, and injected faults.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <latch>
#include <thread>

#include "check.h"
#include "io.h"
#include "io_faulty.h"
#include "io_fixture.h"

using fixture::Backends;
using fixture::Buffer;
using fixture::Contains;
using fixture::Make;
using fixture::Options;
using fixture::Prepare;
using fixture::TempFile;
using fixture::Transfer;
using fixture::Waited;
using hetero::Fault;
using hetero::FaultKind;
using hetero::IoBackend;
using hetero::IoFaulty;
using hetero::IoKind;
using hetero::IoRequest;
using hetero::MakeIoBackend;
using hetero::Status;

namespace {

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
