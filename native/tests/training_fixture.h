// A training run whose content at a step is a function of the step, so that any recovered step can be checked bit for bit.
#ifndef HETERO_TESTS_TRAINING_FIXTURE_H_
#define HETERO_TESTS_TRAINING_FIXTURE_H_

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "engine_fixture.h"
#include "io.h"

namespace fixture {

constexpr int32_t kBlocks = 2;
constexpr int64_t kElements[kBlocks] = {4096 * 2 + 48, 4096};

inline hetero_block_geometry BlockGeometry(int32_t i) {
  return Geometry(i, i == 0 ? HETERO_F32 : HETERO_BF16, kElements[i], true, true);
}

// A step that updates every block a second time before its commit, as two optimizers with common blocks do.
inline bool IsTwofold(int64_t step) { return step % 2 == 0; }

inline TestGradients GradientsOf(int64_t step, int32_t block, bool second = false) {
  std::mt19937 random(static_cast<uint32_t>((second ? step + 2000 : step) * kBlocks + block));
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
      for (int32_t i = 0; i < kBlocks; ++i) {
        ApplyToModel(GradientsOf(model_step + 1, i), &blocks[i]);
        if (IsTwofold(model_step + 1)) ApplyToModel(GradientsOf(model_step + 1, i, true), &blocks[i]);
      }
    }
  }
  bool Open(const TempDirectory& directory, hetero_store_options options, bool create,
            std::unique_ptr<hetero::IoBackend> backend = nullptr) {
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
  // One step; the second block's weights are resident, so that fetches take part. Every third step's updates are speculative
  // and kept, every third one's are tried with other gradients, taken back and done again. The first error. Every second step
  // is twofold.
  int32_t Step(int64_t step) {
    TestGradients gradients[kBlocks], wrong[kBlocks], second[kBlocks];
    int64_t tickets[5 * kBlocks + 2];
    int32_t n = 0;
    const hetero_task task{};
    tickets[n++] = run.Fetch(blocks[1]);
    for (int32_t i = 0; step % 3 == 0 && i < kBlocks; ++i) {
      wrong[i] = GradientsOf(step + 1000, i);
      tickets[n] = hetero_open_speculative_update(run.engine, blocks[i].handle, i, &task);
      Arm(tickets[n++], wrong[i], step, i);
    }
    for (int32_t i = 0; step % 3 == 0 && i < kBlocks; ++i) {
      tickets[n++] = hetero_submit_discard(run.engine, blocks[i].handle, &task);
      if (i == 1) tickets[n++] = run.Fetch(blocks[i]);
    }
    const int32_t first = n;
    for (int32_t i = 0; i < kBlocks; ++i) {
      tickets[n++] = step % 3 == 1 ? hetero_open_speculative_update(run.engine, blocks[i].handle, i, &task)
                                   : run.OpenUpdate(blocks[i], i == 1);
    }
    for (int32_t i = kBlocks; i-- > 0;) {
      gradients[i] = GradientsOf(step, i);
      Arm(tickets[first + i], gradients[i], step, i);
    }
    for (int32_t i = 0; step % 3 == 1 && i < kBlocks; ++i) (void)hetero_keep_update(run.engine, blocks[i].handle);
    for (int32_t i = 0; IsTwofold(step) && i < kBlocks; ++i) {
      second[i] = GradientsOf(step, i, true);
      tickets[n] = run.OpenUpdate(blocks[i], i == 1);
      Arm(tickets[n++], second[i], step, i);
    }
    tickets[n++] = run.Commit(step);
    return CompleteAll(tickets, n);
  }
  void Arm(int64_t ticket, const TestGradients& gradients, int64_t step, int64_t priority) const {
    if (ticket > 0 && run.Arm(ticket, gradients, step, priority) != 0) (void)hetero_cancel_update(run.engine, ticket);
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

}  // namespace fixture

#endif  // HETERO_TESTS_TRAINING_FIXTURE_H_
