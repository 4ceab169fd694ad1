// What the store promises when things go wrong: every operation failing in turn, late and reordered completions, kill -9.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>

#include "engine_fixture.h"
#include "io_faulty.h"

using fixture::ApplyToModel;
using fixture::EngineOptions;
using fixture::Geometry;
using fixture::RandomGradients;
using fixture::Run;
using fixture::StoreOptions;
using fixture::TempDirectory;
using fixture::TestBlock;
using fixture::TestGradients;
using hetero::Fault;
using hetero::FaultKind;
using hetero::IoFaulty;

namespace {

constexpr int32_t kBlocks = 2;
constexpr int64_t kElements[kBlocks] = {4096 * 2 + 48, 4096};

hetero_block_geometry BlockGeometry(int32_t i) { return Geometry(i, i == 0 ? HETERO_F32 : HETERO_BF16, kElements[i], true, true); }

TestGradients GradientsOf(int64_t step, int32_t block) {
  std::mt19937 random(static_cast<uint32_t>(step * kBlocks + block));
  return RandomGradients(kElements[block], step, &random);
}

// Two blocks on disk whose content at a step is a function of the step: any recovered step can be checked.
struct Training {
  TestBlock blocks[kBlocks];
  Run run;
  int64_t model_step = -1;

  void ResetModel() {
    std::mt19937 random(99);
    for (TestBlock& block : blocks) block.RandomModel(&random);
    model_step = 1;
  }
  void AdvanceModel(int64_t step) {
    if (model_step < 0 || model_step > step) ResetModel();
    for (; model_step < step; ++model_step) {
      for (int32_t i = 0; i < kBlocks; ++i) ApplyToModel(GradientsOf(model_step + 1, i), &blocks[i]);
    }
  }
  bool Open(const TempDirectory& directory, hetero_store_options options, bool create, std::unique_ptr<hetero::IoBackend> backend = nullptr) {
    options.create = create ? 1 : 0;
    if (!run.OpenStore(directory, options)) return false;
    std::mt19937 random(99);
    int64_t staged = 0;
    for (int32_t i = 0; i < kBlocks; ++i) {
      const hetero_block_geometry g = BlockGeometry(i);
      staged = std::max(staged, hetero_block_staged_bytes(&g));
      if (!blocks[i].Open(run.store, g, &random)) return false;
    }
    return run.StartEngine(EngineOptions(staged, 4, 2), std::move(backend));
  }
  int32_t Close() {
    const int32_t code = run.StopEngine();
    for (TestBlock& block : blocks) block.Close();
    run.CloseStore();
    return code;
  }
  // The first store as step 1. The first error.
  int32_t Initialize() {
    ResetModel();
    int64_t tickets[kBlocks + 1];
    int32_t n = 0;
    std::vector<hetero_patch> patches[kBlocks];
    for (; n < kBlocks; ++n) {
      patches[n] = blocks[n].WholePatches(true);
      tickets[n] = run.Store(blocks[n], patches[n], false, 1);
    }
    tickets[n++] = run.Commit(1);
    return CompleteAll(tickets, n);
  }
  // One step; the second block's weights are resident, so that fetches take part. The first error.
  int32_t Step(int64_t step) {
    TestGradients gradients[kBlocks];
    int64_t tickets[kBlocks + 2];
    int32_t n = 0;
    tickets[n++] = run.Fetch(blocks[1]);
    for (int32_t i = 0; i < kBlocks; ++i) tickets[n++] = run.OpenUpdate(blocks[i], i == 1);
    for (int32_t i = kBlocks; i-- > 0;) {
      gradients[i] = GradientsOf(step, i);
      if (tickets[i + 1] > 0 && run.Arm(tickets[i + 1], gradients[i], step, i) != 0) (void)hetero_cancel_update(run.engine, tickets[i + 1]);
    }
    tickets[n++] = run.Commit(step);
    return CompleteAll(tickets, n);
  }
  int32_t CompleteAll(const int64_t* tickets, int32_t n) const {
    int32_t first = 0;
    for (int32_t i = 0; i < n; ++i) {
      const int32_t code = run.Complete(tickets[i]);
      CHECK_NE(code, HETERO_ETIMEDOUT);
      if (first == 0 || first == HETERO_EPOISONED) first = code != 0 ? code : first;
    }
    return first;
  }
  // Recovers and checks that the content is the recovered step's, bit for bit. The step, or -1 when nothing was committed.
  int64_t RecoverAndCheck() {
    int64_t step = -1;
    char user[64];
    const int64_t code = hetero_store_recover(run.store, &step, user, sizeof(user));
    if (code == HETERO_ESTATE) return -1;
    CHECK_GE(code, 0);
    if (code < 0) fprintf(stderr, "recover: %s\n", hetero_last_error());
    AdvanceModel(step);
    for (const TestBlock& block : blocks) CHECK(run.Holds(block));
    return step;
  }
};

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
    // Killed at a random moment after its first acknowledged step.
    int64_t step = 0;
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
