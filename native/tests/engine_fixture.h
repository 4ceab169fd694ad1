// What the store and engine tests share: a private directory, a small training run with its naive model, waiting with a limit.
//
// Everything goes through the C interface, as Python does it; only the I/O back end may be one of the test's own.
#ifndef HETERO_TESTS_ENGINE_FIXTURE_H_
#define HETERO_TESTS_ENGINE_FIXTURE_H_

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "api_engine_handles.h"
#include "check.h"
#include "hetero/api.h"
#include "kernels.h"
#include "store_layout.h"

namespace fixture {

constexpr double kLimitSeconds = 120;  // no wait of a test may last longer: a hang is a failure, not a stuck job

class TempDirectory {
 public:
  TempDirectory() {
    const char* base = getenv("TMPDIR");
    std::string name = std::string(base != nullptr ? base : "/tmp") + "/hetero-test-" + std::string(6, 'X');
    if (mkdtemp(name.data()) != nullptr) path_ = name;
  }
  ~TempDirectory() {
    Clear();
    rmdir(path_.c_str());
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string File(const std::string& name) const { return path_ + "/" + name; }
  void Clear() const {
    DIR* directory = opendir(path_.c_str());
    while (const dirent* entry = directory != nullptr ? readdir(directory) : nullptr) unlink(File(entry->d_name).c_str());
    if (directory != nullptr) closedir(directory);
  }

 private:
  std::string path_;
};

inline hetero_store_options StoreOptions(int32_t num_blocks, bool digests = true) {
  hetero_store_options o{};
  for (int i = 0; i < 16; ++i) o.uuid[i] = static_cast<uint8_t>(i * 7 + 1);
  o.create = 1;
  o.direct_io = 1;
  o.durability = HETERO_DURABILITY_PROCESS;
  o.verify_digests = digests ? 1 : 0;
  o.num_blocks = num_blocks;
  o.user_bytes = 64;
  return o;
}

inline hetero_block_geometry Geometry(int32_t id, int32_t dtype, int64_t num_elements, bool weights_on_disk,
                                      bool state_on_disk) {
  hetero_block_geometry g{};
  g.id = id;
  g.weight_dtype = dtype;
  g.num_elements = num_elements;
  g.num_state = dtype == HETERO_U8 ? 0 : dtype == HETERO_F32 ? 2 : 3;
  g.weights_on_disk_file = weights_on_disk ? 1 : 0;
  g.state_on_disk_file = state_on_disk ? 1 : 0;
  g.num_slots = g.num_state == 0 ? 1 : 2;
  g.chunk_elements = 4096;
  return g;
}

inline hetero_engine_options EngineOptions(int64_t chunk_bytes, int64_t num_buffers, int32_t update_threads) {
  hetero_engine_options o{};
  o.io_backend = HETERO_IO_POOL;
  o.io_threads = 2;
  o.queue_depth = 4;
  o.update_threads = update_threads;
  o.chunk_bytes_max = hetero::RoundUp(chunk_bytes, hetero::kPageBytes);
  o.staging_bytes = o.chunk_bytes_max * num_buffers;
  return o;
}

// What a block must hold, as bytes and plain arrays.
struct Expected {
  std::vector<uint8_t> weights;
  std::vector<std::vector<float>> state;
};

// A block with its weight memory and the naive model of what it must hold.
struct TestBlock {
  hetero_block_geometry geometry{};
  hetero_block* handle = nullptr;
  uint8_t* weights = nullptr;
  int64_t weight_memory_bytes = 0;
  Expected expected;

  TestBlock() = default;
  TestBlock(const TestBlock&) = delete;
  TestBlock& operator=(const TestBlock&) = delete;
  ~TestBlock() {
    Close();
    if (weights != nullptr) (void)hetero_unreserve(weights, weight_memory_bytes);
  }
  void Close() {
    if (handle != nullptr) CHECK_EQ(hetero_block_close(std::exchange(handle, nullptr)), 0);
  }
  [[nodiscard]] bool master() const { return geometry.num_state == 3; }
  [[nodiscard]] int64_t width() const { return hetero::DtypeBytes(geometry.weight_dtype); }

  // Reserves the memory once, fills the model with random numbers, opens the block.
  bool Open(hetero_store* store, const hetero_block_geometry& g, std::mt19937* random, int32_t disk = 0) {
    geometry = g;
    if (weights == nullptr) {
      weight_memory_bytes = hetero::RoundUp(g.num_elements * width(), 1 << 21);
      weights = static_cast<uint8_t*>(hetero_reserve(weight_memory_bytes));
      RandomModel(random);
    }
    handle = hetero_block_open_on(store, &geometry, weights, disk);
    return handle != nullptr;
  }

  void RandomModel(std::mt19937* random) {
    std::normal_distribution<float> normal(0.0f, 1.0f);
    expected.state.assign(static_cast<size_t>(geometry.num_state),
                          std::vector<float>(static_cast<size_t>(geometry.num_elements)));
    for (size_t k = 0; k < expected.state.size(); ++k) {
      const bool second_moment = k + 1 == expected.state.size();
      for (float& x : expected.state[k]) x = second_moment ? std::abs(normal(*random)) : normal(*random);
    }
    expected.weights.resize(static_cast<size_t>(geometry.num_elements * width()));
    if (geometry.weight_dtype == HETERO_F32) {
      for (int64_t i = 0; i < geometry.num_elements; ++i)
        reinterpret_cast<float*>(expected.weights.data())[i] = normal(*random);
    } else {
      for (uint8_t& byte : expected.weights) byte = static_cast<uint8_t>((*random)() & 0x3f);  // finite in every dtype
    }
  }

  // Puts the model's weights into the weight memory.
  void Load() const { memcpy(weights, expected.weights.data(), expected.weights.size()); }
  [[nodiscard]] bool HoldsInMemory() const { return memcmp(weights, expected.weights.data(), expected.weights.size()) == 0; }

  // Patches that give every array its model content.
  [[nodiscard]] std::vector<hetero_patch> WholePatches(bool weights_too) const {
    std::vector<hetero_patch> patches;
    if (weights_too) patches.push_back({0, geometry.num_elements, expected.weights.data(), -1});
    for (size_t k = 0; k < expected.state.size(); ++k)
      patches.push_back({0, geometry.num_elements, expected.state[k].data(), static_cast<int32_t>(k)});
    return patches;
  }
};

// The gradients of one update: random disjoint segments whose offsets are multiples of 16.
struct TestGradients {
  std::vector<std::vector<uint8_t>> buffers;
  std::vector<hetero_segment> segments;
  std::vector<hetero_hyper> hypers;
  double scale = 1.0;
};

inline TestGradients RandomGradients(int64_t num_elements, int64_t step, std::mt19937* random) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>((*random)() % static_cast<uint64_t>(n)); };
  TestGradients g;
  g.scale = below(2) == 0 ? 1.0 : 0.37;
  for (int i = 0; i < 2; ++i) {
    g.hypers.push_back({1e-2 * (i + 1), 0.9, 0.99, 1e-8, 0.1 * i, static_cast<double>(step), i == 0 ? HETERO_ADAMW : 0});
  }
  const bool whole = below(4) == 0;
  for (int64_t offset = whole ? 0 : 16 * below(20); offset < num_elements;) {
    const int64_t longest = num_elements - offset;
    const int64_t numel = whole ? longest : 1 + below(std::min<int64_t>(longest, below(3) == 0 ? 9000 : 700));
    const int32_t dtype = static_cast<int32_t>(below(3));
    std::vector<uint8_t> buffer(static_cast<size_t>(numel * hetero::DtypeBytes(dtype)));
    if (dtype == HETERO_F32) {
      std::normal_distribution<float> normal(0.0f, 1.0f);
      for (int64_t i = 0; i < numel; ++i) reinterpret_cast<float*>(buffer.data())[i] = normal(*random);
    } else {
      for (uint8_t& byte : buffer) byte = static_cast<uint8_t>((*random)() & 0x3f);
    }
    g.segments.push_back({offset, numel, buffer.data(), dtype, static_cast<int32_t>(below(2))});
    g.buffers.push_back(std::move(buffer));
    offset = hetero::RoundUp(offset + numel, 16) + (whole ? 0 : 16 * below(30));
  }
  return g;
}

// The model's update: whole segments, plain arrays.
inline void ApplyToModel(const TestGradients& g, TestBlock* block) {
  const bool master = block->master();
  float* param = master ? block->expected.state[0].data() : reinterpret_cast<float*>(block->expected.weights.data());
  for (const hetero_segment& s : g.segments) {
    void* copy = master ? block->expected.weights.data() + s.offset * block->width() : nullptr;
    CHECK_EQ(hetero_adam(param + s.offset, block->expected.state[master ? 1 : 0].data() + s.offset,
                         block->expected.state[master ? 2 : 1].data() + s.offset, s.grad, s.grad_dtype, copy,
                         block->geometry.weight_dtype, s.numel, &g.hypers[static_cast<size_t>(s.hyper)], g.scale, 1),
             0);
  }
}

// One store and one engine.
struct Run {
  hetero_store* store = nullptr;
  hetero_engine* engine = nullptr;

  Run() = default;
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  ~Run() {
    StopEngine();
    CloseStore();
  }
  int32_t StopEngine() { return engine != nullptr ? hetero_engine_destroy(std::exchange(engine, nullptr)) : 0; }
  void CloseStore() {
    if (store != nullptr) CHECK_EQ(hetero_store_close(std::exchange(store, nullptr)), 0);
  }

  // O_DIRECT where the file system has it.
  bool OpenStore(const TempDirectory& directory, hetero_store_options options) {
    store = hetero_store_open(directory.path().c_str(), &options);
    if (store == nullptr && options.direct_io != 0 && strstr(hetero_last_error(), "O_DIRECT") != nullptr) {
      options.direct_io = 0;
      store = hetero_store_open(directory.path().c_str(), &options);
    }
    return store != nullptr;
  }
  bool StartEngine(const hetero_engine_options& options, std::unique_ptr<hetero::IoBackend> backend = nullptr,
                   int32_t num_disks = 1) {
    std::unique_ptr<hetero::Engine> made;
    const hetero::Status status = hetero::Engine::Create(options, std::move(backend), &made, num_disks);
    hetero::Report(status);
    engine = hetero::ToHandle(made.release());
    return engine != nullptr;
  }
  [[nodiscard]] int32_t Wait(int64_t ticket, int32_t what = HETERO_DONE) const {
    return ticket < 0 ? static_cast<int32_t>(ticket) : hetero_wait(engine, ticket, what, kLimitSeconds);
  }
  // Waits for DONE and forgets the ticket.
  [[nodiscard]] int32_t Complete(int64_t ticket) const {
    const int32_t code = Wait(ticket);
    if (ticket > 0) (void)hetero_release_ticket(engine, ticket);
    return code;
  }

  [[nodiscard]] int64_t Store(const TestBlock& block, const std::vector<hetero_patch>& patches, bool from_memory,
                              int64_t step) const {
    const hetero_task task{};
    return hetero_submit_store(engine, block.handle, patches.data(), static_cast<int32_t>(patches.size()), from_memory ? 1 : 0,
                               step, &task);
  }
  // Weights and state of the model, however the block holds them.
  [[nodiscard]] int32_t StoreModel(const TestBlock& block, int64_t step) const {
    return Complete(Store(block, block.WholePatches(true), false, step));
  }
  [[nodiscard]] int64_t Fetch(const TestBlock& block) const {
    const hetero_task task{};
    return hetero_submit_fetch(engine, block.handle, &task);
  }
  [[nodiscard]] int64_t Commit(int64_t step, const std::string& user = "") const {
    const hetero_task task{};
    return hetero_submit_commit(engine, store, step, user.data(), static_cast<int64_t>(user.size()), &task);
  }
  [[nodiscard]] int64_t OpenUpdate(const TestBlock& block, bool resident, int64_t priority = 0) const {
    const hetero_task task{priority, nullptr, 0};
    return hetero_open_update(engine, block.handle, resident ? 1 : 0, &task);
  }
  [[nodiscard]] int32_t Arm(int64_t ticket, const TestGradients& g, int64_t step, int64_t priority = 0) const {
    return hetero_arm_update(engine, ticket, g.segments.data(), static_cast<int32_t>(g.segments.size()), g.hypers.data(),
                             static_cast<int32_t>(g.hypers.size()), g.scale, step, priority);
  }

  // Reads every array of the block and compares it with the model, bit for bit. False on the first difference.
  [[nodiscard]] bool Holds(const TestBlock& block) const {
    std::vector<uint8_t> weights(block.expected.weights.size());
    std::vector<std::vector<float>> state;
    for (const std::vector<float>& array : block.expected.state) state.emplace_back(array.size());
    std::vector<hetero_patch> patches{{0, block.geometry.num_elements, weights.data(), -1}};
    for (size_t k = 0; k < state.size(); ++k)
      patches.push_back({0, block.geometry.num_elements, state[k].data(), static_cast<int32_t>(k)});
    const hetero_task task{};
    const int64_t ticket =
        hetero_submit_read(engine, block.handle, patches.data(), static_cast<int32_t>(patches.size()), &task);
    if (Complete(ticket) != 0) return false;
    bool same = weights == block.expected.weights;
    for (size_t k = 0; k < state.size(); ++k)
      same = same && memcmp(state[k].data(), block.expected.state[k].data(), state[k].size() * sizeof(float)) == 0;
    return same;
  }
};

// Where a block lives, and whether its weights are in memory when it is updated.
struct Placement {
  int32_t dtype;
  bool weights_on_disk;
  bool state_on_disk;
  bool resident;
};

inline std::vector<Placement> Placements() {
  std::vector<Placement> all;
  for (const int32_t dtype : {HETERO_F32, HETERO_BF16, HETERO_F16}) {
    for (const bool weights : {false, true}) {
      for (const bool state : {false, true}) {
        all.push_back({dtype, weights, state, true});
        if (weights) all.push_back({dtype, weights, state, false});
      }
    }
  }
  return all;
}

inline hetero_block_geometry Geometry(int32_t id, const Placement& p, int64_t num_elements) {
  return Geometry(id, p.dtype, num_elements, p.weights_on_disk, p.state_on_disk);
}

// Alike blocks, with weights and state on disk.
inline std::vector<hetero_block_geometry> OnDisk(int32_t num_blocks, int32_t dtype, int64_t num_elements) {
  std::vector<hetero_block_geometry> all;
  for (int32_t i = 0; i < num_blocks; ++i) all.push_back(Geometry(i, dtype, num_elements, true, true));
  return all;
}

// A block of every placement, of random size.
inline std::vector<hetero_block_geometry> PlacedGeometries(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<hetero_block_geometry> all;
  for (const Placement& p : Placements()) {
    all.push_back(Geometry(static_cast<int32_t>(all.size()), p, static_cast<int64_t>(16 * (1 + random() % 1500))));
  }
  return all;
}

// Blocks with random models in a store of their own, and an engine for them. All is closed when it goes.
struct Setup {
  std::mt19937 random;
  TempDirectory directory;
  std::vector<TestBlock> blocks;
  TestBlock& block;  // the first one
  Run run;

  Setup(const std::vector<hetero_block_geometry>& geometries, uint32_t seed, const hetero_store_options& options)
      : random(seed), blocks(geometries.size()), block(blocks.front()) {
    REQUIRE(run.OpenStore(directory, options));
    for (size_t i = 0; i < blocks.size(); ++i) REQUIRE(blocks[i].Open(run.store, geometries[i], &random));
  }
  Setup(const std::vector<hetero_block_geometry>& geometries, uint32_t seed)
      : Setup(geometries, seed, StoreOptions(static_cast<int32_t>(geometries.size()))) {}
  Setup(const hetero_block_geometry& geometry, uint32_t seed) : Setup(std::vector{geometry}, seed) {}
  Setup(const Setup&) = delete;
  Setup& operator=(const Setup&) = delete;
  ~Setup() { (void)End(); }

  // An engine with staging for so many of the largest chunks.
  [[nodiscard]] hetero_engine_options Options(int64_t num_buffers, int32_t update_threads) const {
    int64_t staged = 0;
    for (const TestBlock& b : blocks) staged = std::max(staged, hetero_block_staged_bytes(&b.geometry));
    return EngineOptions(staged, num_buffers, update_threads);
  }
  void Start(int64_t num_buffers, int32_t update_threads) { REQUIRE(run.StartEngine(Options(num_buffers, update_threads))); }
  // Every model, whole, as step 1.
  void Store(const std::string& user = "") const {
    for (const TestBlock& b : blocks) REQUIRE_EQ(run.StoreModel(b, 1), 0);
    REQUIRE_EQ(run.Complete(run.Commit(1, user)), 0);
  }
  void Begin(int64_t num_buffers, int32_t update_threads) {
    Start(num_buffers, update_threads);
    Store();
  }
  // Updates the first block, whose weights need not be in memory.
  int32_t Update(int64_t step) {
    const TestGradients gradients = RandomGradients(block.geometry.num_elements, step, &random);
    const int64_t ticket = run.OpenUpdate(block, false);
    if (ticket < 0) return static_cast<int32_t>(ticket);
    const int32_t armed = run.Arm(ticket, gradients, step);
    if (armed != 0) return armed;
    ApplyToModel(gradients, &block);
    return run.Complete(ticket);
  }
  // Updates it and commits that.
  int32_t Step(int64_t step, const std::string& user = "") {
    const int32_t code = Update(step);
    return code != 0 ? code : run.Complete(run.Commit(step, user));
  }
  // Closes everything, in order; the engine's code.
  int32_t End() {
    const int32_t code = run.StopEngine();
    for (TestBlock& b : blocks) b.Close();
    run.CloseStore();
    return code;
  }
  // Opens what is on disk again; the code of recover (or of the open that failed).
  int64_t Reopen(int64_t* step, hetero_store_options options) {
    options.create = 0;
    if (!run.OpenStore(directory, options)) return -100;
    for (TestBlock& b : blocks) {
      const hetero_block_geometry g = b.geometry;
      if (!b.Open(run.store, g, &random)) return -101;
    }
    if (!run.StartEngine(Options(4, 2))) return -102;
    char user[64];
    return hetero_store_recover(run.store, step, user, sizeof(user));
  }
  int64_t Reopen(int64_t* step) { return Reopen(step, StoreOptions(static_cast<int32_t>(blocks.size()))); }
};

}  // namespace fixture

#endif  // HETERO_TESTS_ENGINE_FIXTURE_H_
