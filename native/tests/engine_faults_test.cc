// What the store promises when things go wrong: every operation failing in turn, late and reordered completions, kill -9.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <latch>

#include "engine_fixture.h"
#include "io_faulty.h"
#include "training_fixture.h"

using fixture::BlockGeometry;
using fixture::EngineOptions;
using fixture::GradientsOf;
using fixture::kBlocks;
using fixture::StoreOptions;
using fixture::TempDirectory;
using fixture::TestBlock;
using fixture::TestGradients;
using fixture::Training;
using hetero::Fault;
using hetero::FaultKind;
using hetero::IoFaulty;

namespace {

constexpr int64_t kSteps = 4;

std::unique_ptr<hetero::IoBackend> Pool() {
  std::unique_ptr<hetero::IoBackend> pool;
  REQUIRE_OK(MakeIoBackend(EngineOptions(4096, 3, 1), &pool));
  return pool;
}

// Trains over a faulty device until the first error, then recovers without faults. True when no operation failed.
bool TrainFaulty(const hetero_store_options& options, int64_t n, int error, FaultKind kind) {
  const TempDirectory directory;
  Training training;
  REQUIRE(training.Open(directory, options, true, std::make_unique<IoFaulty>(Pool(), IoFaulty::FailNth(n, error, kind))));
  int64_t acknowledged = training.Initialize() == 0 ? 1 : -1;
  int32_t code = acknowledged == 1 ? 0 : HETERO_EIO;
  for (int64_t step = 2; step <= kSteps && code == 0; ++step) {
    code = training.Step(step);
    if (code == 0) acknowledged = step;
  }
  if (code != 0) {
    // Poisoned: nothing is accepted any more, and the text says why.
    CHECK_EQ(training.run.Fetch(training.blocks[0]), HETERO_EPOISONED);
    CHECK(strstr(hetero_last_error(), "(injected)") != nullptr);
  }
  const int32_t want = code == 0 ? 0 : error == ENOSPC ? HETERO_ENOSPC : HETERO_EIO;
  if (acknowledged >= 1) CHECK_EQ(code, want);
  CHECK_EQ(training.Close(), want);
  REQUIRE(training.Open(directory, options, false));
  const int64_t recovered = training.RecoverAndCheck();
  CHECK_GE(recovered, acknowledged);
  CHECK_LE(recovered, acknowledged < 0 ? 1 : acknowledged + 1);
  if (recovered > 0) {
    CHECK_EQ(training.Step(recovered + 1), 0);
    training.AdvanceModel(recovered + 1);
    for (const TestBlock& block : training.blocks) CHECK(training.run.Holds(block));
  }
  CHECK_EQ(training.Close(), 0);
  return code == 0;
}

void FailEveryOperation(int32_t durability, int error, FaultKind kind) {
  hetero_store_options options = StoreOptions(kBlocks);
  options.durability = durability;
  int64_t n = 0;
  while (n < 500 && !TrainFaulty(options, n, error, kind)) ++n;
  CHECK_GT(n, 30);
  CHECK_LT(n, 500);
}

// Trains over a device that lies about operation n, and recovers: whatever is read is right, or refused. True when there was no
// operation n.
bool TrainDeceived(int64_t n, FaultKind kind, std::mt19937* random, int64_t* refused) {
  const TempDirectory directory;
  Training training;
  hetero_store_options options = StoreOptions(kBlocks);
  options.verify_digests = 1;
  const auto bit = static_cast<uint32_t>((*random)());
  const auto plan = [=](int64_t index, const hetero::IoRequest&) {
    return Fault{index == n ? kind : FaultKind::kNone, 0, 0, bit};
  };
  auto faulty = std::make_unique<IoFaulty>(Pool(), plan);
  IoFaulty* const device = faulty.get();
  REQUIRE(training.Open(directory, options, true, std::move(faulty)));
  int32_t code = training.Initialize();
  for (int64_t step = 2; step <= kSteps && code == 0; ++step) code = training.Step(step);
  const bool over = device->num_submitted() <= n;
  CHECK(code == 0 || code == HETERO_ECORRUPT);
  CHECK_EQ(training.Close(), code);
  REQUIRE(training.Open(directory, options, false));
  int64_t step = 0;
  const int64_t recovered = hetero_store_recover(training.run.store, &step, nullptr, 0);
  CHECK(recovered == 0 || recovered == HETERO_ECORRUPT);
  bool whole = code == 0 && recovered == 0;
  if (recovered == 0) {
    training.AdvanceModel(step);
    for (const TestBlock& block : training.blocks) {
      if (training.run.Holds(block)) continue;
      CHECK_EQ(hetero_engine_error(training.run.engine), HETERO_ECORRUPT);
      whole = false;
    }
  }
  *refused += whole ? 0 : 1;
  (void)training.Close();
  return over;
}

// The child: recovers, trains, and tells each acknowledged step through the pipe, until it is killed.
[[noreturn]] void TrainUntilKilled(const TempDirectory& directory, bool create, int pipe_fd) {
  Training training;
  if (!training.Open(directory, StoreOptions(kBlocks), create)) {
    fprintf(stderr, "child: %s\n", hetero_last_error());
    _exit(1);
  }
  int64_t step = create ? 1 : 0;
  if (create ? training.Initialize() != 0 : (step = training.RecoverAndCheck()) < 1) _exit(2);
  for (;;) {
    if (write(pipe_fd, &step, sizeof(step)) != sizeof(step)) _exit(3);
    if (training.Step(++step) != 0) _exit(4);
  }
}

}  // namespace

TEST(any_failed_operation_leaves_the_committed_step) { FailEveryOperation(HETERO_DURABILITY_PROCESS, EIO, FaultKind::kFail); }

TEST(any_torn_operation_leaves_the_committed_step) { FailEveryOperation(HETERO_DURABILITY_PROCESS, ENOSPC, FaultKind::kTear); }

TEST(any_failed_operation_or_flush_leaves_the_committed_step_with_power_durability) {
  FailEveryOperation(HETERO_DURABILITY_POWER, EIO, FaultKind::kFail);
}

TEST(flipped_bits_and_lost_writes_are_right_or_refused) {
  std::mt19937 random(11);
  for (const FaultKind kind : {FaultKind::kFlip, FaultKind::kLose}) {
    int64_t n = 0;
    int64_t refused = 0;
    while (n < 500 && !TrainDeceived(n, kind, &random, &refused)) ++n;
    CHECK_GT(n, 30);
    CHECK_LT(n, 500);
    CHECK_GT(refused, n / 8);  // of the others nothing was read again
  }
}

TEST(late_and_reordered_completions_change_nothing) {
  for (uint32_t seed = 0; seed < 5; ++seed) {
    const TempDirectory directory;
    Training training;
    std::mt19937 random(seed);
    const auto plan = [&random](int64_t, const hetero::IoRequest&) {
      return random() % 2 == 0 ? Fault{} : Fault{FaultKind::kDelay, 0, static_cast<int64_t>(random() % 3000)};
    };
    REQUIRE(training.Open(directory, StoreOptions(kBlocks), true, std::make_unique<IoFaulty>(Pool(), plan)));
    CHECK_EQ(training.Initialize(), 0);
    for (int64_t step = 2; step <= 6; ++step) CHECK_EQ(training.Step(step), 0);
    training.AdvanceModel(6);
    for (const TestBlock& block : training.blocks) CHECK(training.run.Holds(block));
    CHECK_EQ(training.Close(), 0);
  }
}

TEST(the_next_step_reads_ahead_of_a_commit_but_writes_after_it) {
  const TempDirectory directory;
  Training training;
  struct Event {
    int64_t ns;
    hetero::IoKind kind;
  };
  std::vector<Event> events;  // of the block files, from the second step on; the plan is called under a lock
  std::atomic<bool> recording = false;
  std::latch first_read(1);
  const auto plan = [&](int64_t, const hetero::IoRequest& request) {
    if (!recording) return Fault{};
    if (strstr(request.path, "COMMIT") != nullptr) return Fault{FaultKind::kHold};
    events.push_back({hetero::MonotonicNs(), request.kind});
    if (!first_read.try_wait()) first_read.count_down();
    return Fault{};
  };
  auto faulty = std::make_unique<IoFaulty>(Pool(), plan);
  IoFaulty* const device = faulty.get();
  REQUIRE(training.Open(directory, StoreOptions(kBlocks), true, std::move(faulty)));
  CHECK_EQ(training.Initialize(), 0);
  recording = true;
  const int64_t commit = training.run.Commit(1);
  const TestGradients gradients = GradientsOf(2, 0);
  const int64_t update = training.run.OpenUpdate(training.blocks[0], false);
  CHECK_EQ(training.run.Arm(update, gradients, 2), 0);
  first_read.wait();
  CHECK_EQ(hetero_wait(training.run.engine, update, HETERO_DONE, 0.03), HETERO_ETIMEDOUT);  // in which it could write
  device->Release();
  CHECK_EQ(training.run.Wait(update), 0);
  hetero_times times{};
  CHECK_EQ(hetero_ticket_times(training.run.engine, commit, &times), 0);
  CHECK_EQ(training.Close(), 0);
  int64_t early_reads = 0;
  for (const Event& event : events) {
    if (event.kind == hetero::IoKind::kWrite) CHECK_GE(event.ns, times.done_ns);
    early_reads += event.kind == hetero::IoKind::kRead && event.ns < times.done_ns ? 1 : 0;
  }
  CHECK_GT(early_reads, 0);
}

TEST(destroy_with_slow_transfers_in_flight_joins) {
  const TempDirectory directory;
  Training training;
  const auto plan = [](int64_t, const hetero::IoRequest&) { return Fault{FaultKind::kDelay, 0, 5000}; };
  REQUIRE(training.Open(directory, StoreOptions(kBlocks), true, std::make_unique<IoFaulty>(Pool(), plan)));
  CHECK_EQ(training.Initialize(), 0);
  const TestGradients gradients = GradientsOf(2, 0);
  const int64_t armed = training.run.OpenUpdate(training.blocks[0], false);
  CHECK_EQ(training.run.Arm(armed, gradients, 2), 0);
  CHECK(training.run.OpenUpdate(training.blocks[1], false) > 0);
  CHECK(training.run.Fetch(training.blocks[1]) > 0);
  CHECK_EQ(training.Close(), 0);
}

TEST(damage_poisons_the_engine_and_waits_name_it) {
  const TempDirectory directory;
  Training training;
  REQUIRE(training.Open(directory, StoreOptions(kBlocks), true));
  CHECK_EQ(training.Initialize(), 0);
  CHECK_EQ(training.Close(), 0);
  hetero::Layout layout;
  REQUIRE_OK(hetero::Layout::Make(BlockGeometry(0), &layout));
  FILE* file = fopen(directory.File("block-00000.a").c_str(), "r+b");
  REQUIRE(file != nullptr);
  CHECK_EQ(fseek(file, layout.StateOffset(1) + 4000, SEEK_SET), 0);
  CHECK_EQ(fputc(0xAA, file), 0xAA);
  CHECK_EQ(fclose(file), 0);
  REQUIRE(training.Open(directory, StoreOptions(kBlocks), false));
  int64_t step = 0;
  CHECK_EQ(hetero_store_recover(training.run.store, &step, nullptr, 0), 0);
  const int64_t bad = training.run.OpenUpdate(training.blocks[0], false);
  const int64_t unarmed = training.run.OpenUpdate(training.blocks[1], false);
  const int64_t commit = training.run.Commit(2);
  const TestGradients gradients = GradientsOf(2, 0);
  CHECK_EQ(training.run.Arm(bad, gradients, 2), 0);
  CHECK_EQ(training.run.Wait(bad), HETERO_ECORRUPT);
  CHECK(strstr(hetero_last_error(), "chunk 1") != nullptr);
  CHECK_EQ(training.run.Wait(unarmed), HETERO_EPOISONED);
  CHECK_EQ(training.run.Wait(commit, HETERO_READY), HETERO_EPOISONED);
  CHECK_EQ(training.run.Arm(unarmed, gradients, 2), HETERO_EPOISONED);
  CHECK_EQ(hetero_poll(training.run.engine, bad), HETERO_ECORRUPT);
  CHECK_EQ(training.Close(), HETERO_ECORRUPT);
}

TEST(kill_minus_nine_loses_no_acknowledged_step) {
  const TempDirectory directory;
  std::mt19937 random(123);
  int64_t acknowledged = -1;
  int64_t total = 0;
  bool create = true;
  for (int round = 0; round < 25; ++round) {
    int fds[2];
    REQUIRE_EQ(pipe(fds), 0);
    fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      close(fds[0]);
      TrainUntilKilled(directory, create, fds[1]);
    }
    close(fds[1]);
    // Killed at a random moment after a step of its own: however slow the machine, every round goes on by one.
    int64_t step = 0;
    for (int acknowledged_steps = 0; acknowledged_steps < 2; ++acknowledged_steps)
      REQUIRE_EQ(read(fds[0], &step, sizeof(step)), static_cast<ssize_t>(sizeof(step)));
    usleep(static_cast<useconds_t>(random() % 30000));
    kill(child, SIGKILL);
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status));
    do {
      acknowledged = step;
    } while (read(fds[0], &step, sizeof(step)) == static_cast<ssize_t>(sizeof(step)));
    close(fds[0]);
    create = false;
    Training training;
    REQUIRE(training.Open(directory, StoreOptions(kBlocks), false));
    const int64_t recovered = training.RecoverAndCheck();
    CHECK_GE(recovered, acknowledged);
    CHECK_LE(recovered, acknowledged + 1);
    CHECK_EQ(training.Close(), 0);
    total = recovered;
  }
  CHECK_GT(total, 25);
}
