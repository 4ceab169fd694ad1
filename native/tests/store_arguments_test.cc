// Arguments that are refused, by name.
#include <string.h>

#include <functional>

#include "trained_fixture.h"

using fixture::EngineOptions;
using fixture::Geometry;
using fixture::kTrainedElements;
using fixture::Trained;

TEST(bad_arguments_are_named) {
  Trained t;
  const auto geometry_fault = [&](const char* word, const std::function<void(hetero_block_geometry*)>& change) {
    hetero_block_geometry g = Geometry(0, HETERO_F32, kTrainedElements, false, false);
    change(&g);
    CHECK(hetero_block_open(t.run.store, &g, t.block.weights) == nullptr);
    CHECK(strstr(hetero_last_error(), word) != nullptr);
  };
  geometry_fault("weight_dtype", [](auto* g) { g->weight_dtype = 9; });
  geometry_fault("num_elements", [](auto* g) { g->num_elements = 17; });
  geometry_fault("num_state", [](auto* g) { g->num_state = -1; });
  geometry_fault("chunk_elements", [](auto* g) { g->chunk_elements = 100; });
  geometry_fault("num_slots", [](auto* g) { g->num_slots = 3; });
  geometry_fault("geometry.id", [](auto* g) { g->id = 7, g->weights_on_disk_file = 1; });
  geometry_fault("open already", [](auto* g) { g->weights_on_disk_file = 1; });
  hetero_block_geometry g = t.block.geometry;
  CHECK(hetero_block_open(t.run.store, &g, t.block.weights + 64) == nullptr);
  CHECK(hetero_block_open(nullptr, &g, t.block.weights) == nullptr);

  const hetero_task task{};
  float data[16] = {};
  const auto patch_fault = [&](const hetero_patch& patch) {
    CHECK_EQ(hetero_submit_store(t.run.engine, t.block.handle, &patch, 1, 0, 1, &task), HETERO_EINVAL);
    CHECK(strstr(hetero_last_error(), "patches[0]") != nullptr);
  };
  patch_fault({0, 16, data, 2});
  patch_fault({0, 16, data, -2});
  patch_fault({kTrainedElements - 15, 16, data, 0});
  patch_fault({-1, 16, data, 0});
  patch_fault({0, 0, data, 0});
  patch_fault({0, 16, nullptr, 0});

  const int64_t ticket = t.run.OpenUpdate(t.block, false);
  const auto arm_fault = [&](const char* word, const std::function<void(hetero_segment*, hetero_hyper*)>& change) {
    hetero_segment segments[2] = {{0, 16, data, HETERO_F32, 0}, {16, 16, data, HETERO_F32, 0}};
    hetero_hyper hyper{1e-3, 0.9, 0.99, 1e-8, 0, 1, HETERO_ADAMW};
    change(segments, &hyper);
    CHECK_EQ(hetero_arm_update(t.run.engine, ticket, segments, 2, &hyper, 1, 1.0, 2, 0), HETERO_EINVAL);
    CHECK(strstr(hetero_last_error(), word) != nullptr);
  };
  arm_fault("segments[0]", [](auto* s, auto*) { s->offset = 8; });
  arm_fault("segments[1]", [](auto* s, auto*) { s->numel = 17; });
  arm_fault("segments[1]", [](auto* s, auto*) { s[1].numel = kTrainedElements; });
  arm_fault("grad_dtype", [](auto* s, auto*) { s->grad_dtype = HETERO_U8; });
  arm_fault("grad", [](auto* s, auto*) { s->grad = nullptr; });
  arm_fault("hyper", [](auto* s, auto*) { s->hyper = 1; });
  arm_fault("betas", [](auto*, auto* h) { h->beta1 = 1.0; });
  arm_fault("step", [](auto*, auto* h) { h->step = 0; });
  CHECK_EQ(hetero_arm_update(t.run.engine, ticket, nullptr, 0, nullptr, 0, 1.0, 0, 0), HETERO_EINVAL);
  CHECK_EQ(hetero_cancel_update(t.run.engine, ticket), 0);
  CHECK_EQ(t.run.Commit(1, std::string(65, 'x')), HETERO_EINVAL);
  CHECK_EQ(hetero_wait(t.run.engine, ticket, 3, 0), HETERO_EINVAL);
  CHECK_EQ(hetero_submit_fetch(nullptr, t.block.handle, &task), HETERO_EINVAL);
  CHECK_EQ(hetero_submit_fetch(t.run.engine, nullptr, &task), HETERO_EINVAL);
  CHECK_EQ(hetero_submit_fetch(t.run.engine, t.block.handle, nullptr), HETERO_EINVAL);
  CHECK_EQ(t.run.Wait(ticket), 0);
  CHECK_EQ(hetero_block_close(t.block.handle), 0);
  t.block.handle = nullptr;
}

TEST(engine_options_are_checked) {
  const auto fault = [](const char* word, const std::function<void(hetero_engine_options*)>& change) {
    hetero_engine_options o = EngineOptions(8192, 3, 1);
    change(&o);
    CHECK(hetero_engine_create(&o) == nullptr);
    CHECK(strstr(hetero_last_error(), word) != nullptr);
  };
  fault("update_threads", [](auto* o) { o->update_threads = 0; });
  fault("queue_depth", [](auto* o) { o->queue_depth = 0; });
  fault("staging_bytes", [](auto* o) { o->staging_bytes = 2 * 8192; });
  fault("chunk_bytes_max", [](auto* o) { o->chunk_bytes_max = -1; });
  fault("io_backend", [](auto* o) { o->io_backend = 17; });
  Trained t;
  t.run.StopEngine();
  REQUIRE(t.run.StartEngine(EngineOptions(4096, 3, 1)));  // smaller than the block's chunks
  CHECK_EQ(t.run.OpenUpdate(t.block, false), HETERO_EINVAL);
  CHECK(strstr(hetero_last_error(), "chunk_bytes_max") != nullptr);
}
