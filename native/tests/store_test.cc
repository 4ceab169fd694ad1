// The slot files and the commit ring: layout, stamps, records, recovery, locks, space, and what damage is found.
#include "store.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "engine_fixture.h"
#include "store_commit.h"
#include "store_layout.h"

using fixture::ApplyToModel;
using fixture::EngineOptions;
using fixture::Geometry;
using fixture::RandomGradients;
using fixture::Run;
using fixture::StoreOptions;
using fixture::TempDirectory;
using fixture::TestBlock;
using fixture::TestGradients;
using hetero::kPageBytes;
using hetero::Layout;
using hetero::Rewrite;

namespace {

constexpr int64_t kElements = 4096 * 3 + 32;

// A store with one F32 block on disk, stored and committed as step 1.
struct Trained {
  TempDirectory directory;
  std::mt19937 random{42};
  TestBlock block;
  Run run;

  bool Begin(hetero_store_options options = StoreOptions(1),
             hetero_block_geometry g = Geometry(0, HETERO_F32, kElements, true, true)) {
    return run.OpenStore(directory, options) && block.Open(run.store, g, &random) &&
           run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 4, 2)) && run.StoreModel(block, 1) == 0 &&
           run.Complete(run.Commit(1, "one")) == 0;
  }
  int32_t Update(int64_t step) {
    const TestGradients gradients = RandomGradients(block.geometry.num_elements, step, &random);
    const int64_t ticket = run.OpenUpdate(block, false);
    if (ticket < 0) return static_cast<int32_t>(ticket);
    const int32_t armed = run.Arm(ticket, gradients, step);
    if (armed != 0) return armed;
    ApplyToModel(gradients, &block);
    return run.Complete(ticket);
  }
  void End() {
    run.StopEngine();
    block.Close();
    run.CloseStore();
  }
  // Opens what is on disk again; the code of recover (or of the open that failed).
  int64_t Reopen(int64_t* step, hetero_store_options options = StoreOptions(1)) {
    options.create = 0;
    if (!run.OpenStore(directory, options)) return -100;
    const hetero_block_geometry g = block.geometry;
    if (!block.Open(run.store, g, &random)) return -101;
    if (!run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 4, 2))) return -102;
    char user[64];
    return hetero_store_recover(run.store, step, user, sizeof(user));
  }
};

void EditFile(const std::string& path, int64_t offset, const std::function<void(uint8_t*)>& edit, int64_t bytes = 1) {
  const int fd = open(path.c_str(), O_RDWR);
  REQUIRE(fd >= 0);
  std::vector<uint8_t> content(static_cast<size_t>(bytes));
  CHECK_EQ(pread(fd, content.data(), content.size(), offset), bytes);
  edit(content.data());
  CHECK_EQ(pwrite(fd, content.data(), content.size(), offset), bytes);
  close(fd);
}

std::vector<uint8_t> Content(const std::string& path) {
  struct stat info{};
  const int fd = open(path.c_str(), O_RDONLY);
  if (fd < 0 || fstat(fd, &info) != 0) return {};
  std::vector<uint8_t> content(static_cast<size_t>(info.st_size));
  CHECK_EQ(pread(fd, content.data(), content.size(), 0), static_cast<ssize_t>(content.size()));
  close(fd);
  return content;
}

// Reads the whole block; the code.
int32_t ReadAll(const Trained& t) {
  std::vector<float> out(static_cast<size_t>(kElements));
  const std::vector<hetero_patch> patches{
      {0, kElements, out.data(), -1}, {0, kElements, out.data(), 0}, {0, kElements, out.data(), 1}};
  const hetero_task task{};
  return t.run.Complete(hetero_submit_read(t.run.engine, t.block.handle, patches.data(), 3, &task));
}

}  // namespace

TEST(sections_are_pages_apart_and_arrays_staggered) {
  for (const int32_t dtype : {HETERO_F32, HETERO_BF16}) {
    for (const int64_t n : {16, 4080, 4096, 4112, 8192, 100000}) {
      for (const int64_t chunk_elements : {4096, 16384, 1 << 20}) {
        hetero_block_geometry g = Geometry(0, dtype, n, true, true);
        g.chunk_elements = chunk_elements;
        Layout layout;
        REQUIRE_OK(Layout::Make(g, &layout));
        CHECK_EQ(layout.file_bytes(), hetero_block_file_bytes(&g));
        int64_t end = layout.WeightsOffset(0) + layout.weights_padded_bytes();
        for (int64_t chunk = 0; chunk < layout.num_chunks(); ++chunk) {
          CHECK_EQ(layout.WeightsOffset(chunk) % kPageBytes, 0);
          CHECK_EQ(layout.StateOffset(chunk), end);
          CHECK_EQ(layout.StateBytes(chunk) % kPageBytes, 0);
          int64_t array_end = 0;
          for (int32_t k = 0; k < g.num_state; ++k) {
            const int64_t offset = layout.ArrayOffset(chunk, k);
            CHECK_GE(offset, array_end);
            CHECK_EQ(offset % 64, 0);
            CHECK_EQ(offset % kPageBytes, (k + 1) * hetero::kStaggerBytes % kPageBytes);
            array_end = offset + layout.ChunkElements(chunk) * 4;
          }
          CHECK_LE(array_end, layout.FooterOffset(chunk));
          CHECK_LE(layout.staged_state_offset() + layout.StateBytes(chunk), layout.staged_bytes());
          end += layout.StateBytes(chunk);
        }
        CHECK_EQ(layout.file_bytes(), end);
      }
    }
  }
}

TEST(a_state_stamp_tells_every_difference) {
  Layout layout;
  REQUIRE_OK(Layout::Make(Geometry(3, HETERO_F32, kElements, true, true), &layout));
  const Rewrite written{{1, 2, 3}, 77, 5, 3, 1};
  std::vector<uint8_t> image(static_cast<size_t>(layout.StateBytes(1)), 9);
  SealState(layout, written, 1, true, image.data());
  CHECK_OK(CheckState(layout, written, 1, true, image.data(), "f"));
  for (int field = 0; field < 6; ++field) {
    Rewrite want = written;
    int64_t chunk = 1;
    if (field == 0) want.uuid[15] = 1;
    if (field == 1) want.write_id = 78;
    if (field == 2) want.step = 6;
    if (field == 3) want.block = 4;
    if (field == 4) want.slot = 0;
    if (field == 5) chunk = 0;
    CHECK_EQ(CheckState(layout, want, chunk, true, image.data(), "f").code(), HETERO_ECORRUPT);
  }
  // Any flipped bit: of the stamp always, of the payload with digests.
  for (size_t i = 0; i < image.size(); i += i + 200 < image.size() ? 97 : 1) {
    const bool payload = static_cast<int64_t>(i) < layout.FooterOffset(1);
    image[i] ^= 16;
    CHECK_EQ(CheckState(layout, written, 1, true, image.data(), "f").code(), HETERO_ECORRUPT);
    CHECK_EQ(CheckState(layout, written, 1, false, image.data(), "f").code(), payload ? 0 : HETERO_ECORRUPT);
    image[i] ^= 16;
  }
}

TEST(a_torn_or_random_commit_record_does_not_count) {
  hetero::CommitRecord record;
  record.uuid = {5, 6};
  record.sequence = 9;
  record.step = 8;
  record.blocks.resize(400, {8, 123, 1, 1});
  record.user = std::string(3000, 'u');
  const int64_t bytes = hetero::RecordBytes(400, 3000);
  std::vector<uint8_t> image(static_cast<size_t>(bytes));
  EncodeRecord(record, bytes, image.data());
  hetero::CommitRecord out;
  REQUIRE_OK(DecodeRecord(image.data(), bytes, record.uuid, 400, &out));
  CHECK_EQ(out.user, record.user);
  CHECK_EQ(out.step, 8);
  CHECK_EQ(out.blocks[399].write_id, uint64_t{123});
  CHECK_EQ(DecodeRecord(image.data(), bytes, {1}, 400, &out).code(), HETERO_ECORRUPT);
  CHECK_EQ(DecodeRecord(image.data(), bytes, record.uuid, 399, &out).code(), HETERO_ECORRUPT);
  const int64_t used = 56 + 400 * 24 + 3000;
  for (int64_t cut = 0; cut < used; cut += 512) {
    std::vector<uint8_t> torn = image;
    torn.resize(static_cast<size_t>(cut));
    torn.resize(image.size());
    CHECK_EQ(DecodeRecord(torn.data(), bytes, record.uuid, 400, &out).code(), cut == 0 ? HETERO_ESTATE : HETERO_ECORRUPT);
  }
  std::mt19937 random(1);
  for (int i = 0; i < 500; ++i) {
    std::vector<uint8_t> noise = image;
    for (int k = 0; k < 3; ++k) noise[random() % static_cast<size_t>(used)] ^= static_cast<uint8_t>(1 + random() % 255);
    if (noise != image) CHECK_EQ(DecodeRecord(noise.data(), bytes, record.uuid, 400, &out).code(), HETERO_ECORRUPT);
  }
}

TEST(recover_finds_the_newest_commit_after_the_ring_went_round) {
  Trained t;
  REQUIRE(t.Begin());
  for (int64_t step = 2; step < 40; ++step) {
    CHECK_EQ(t.Update(step), 0);
    CHECK_EQ(t.run.Complete(t.run.Commit(step, "user " + std::to_string(step))), 0);
  }
  t.End();
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step), int64_t{7});
  CHECK_EQ(step, 39);
  CHECK(t.run.Holds(t.block));
  CHECK_EQ(hetero_block_slot(t.block.handle, &step), 0);
  // Training goes on from there.
  CHECK_EQ(t.Update(40), 0);
  CHECK_EQ(t.run.Complete(t.run.Commit(40)), 0);
  CHECK(t.run.Holds(t.block));
  t.End();
}

TEST(an_uncommitted_step_is_forgotten) {
  Trained t;
  REQUIRE(t.Begin());
  CHECK_EQ(t.Update(2), 0);
  CHECK_EQ(t.run.Complete(t.run.Commit(2)), 0);
  const std::vector<uint8_t> weights = t.block.expected_weights;
  const std::vector<std::vector<float>> state = t.block.expected_state;
  CHECK_EQ(t.Update(3), 0);
  t.End();
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step), 0);
  CHECK_EQ(step, 2);
  t.block.expected_weights = weights;
  t.block.expected_state = state;
  CHECK(t.run.Holds(t.block));
  t.End();
}

TEST(a_torn_newest_record_falls_back_to_the_one_before) {
  Trained t;
  REQUIRE(t.Begin());
  CHECK_EQ(t.run.Complete(t.run.Commit(2, "two")), 0);
  t.End();
  const int64_t record_bytes = hetero::RecordBytes(1, 64);
  EditFile(t.directory.File("COMMIT"), 2 * record_bytes + 60, [](uint8_t* byte) { *byte ^= 1; });
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step), 3);
  CHECK_EQ(step, 1);
  t.End();
  EditFile(t.directory.File("COMMIT"), 1 * record_bytes + 60, [](uint8_t* byte) { *byte ^= 1; });
  CHECK_EQ(t.Reopen(&step), HETERO_ECORRUPT);
  t.End();
}

TEST(a_second_rewrite_between_commits_is_refused) {
  Trained t;
  REQUIRE(t.Begin());
  CHECK_EQ(t.Update(2), 0);
  CHECK_EQ(t.run.OpenUpdate(t.block, false), HETERO_ESTATE);
  CHECK(strstr(hetero_last_error(), "commit") != nullptr);
  CHECK_EQ(t.run.StoreModel(t.block, 3), HETERO_ESTATE);
  CHECK_EQ(t.run.Complete(t.run.Commit(2)), 0);
  CHECK_EQ(t.Update(3), 0);
  CHECK(t.run.Holds(t.block));
  t.End();
}

TEST(nothing_stored_is_an_error_before_any_io) {
  Trained t;
  const hetero_block_geometry g = Geometry(0, HETERO_BF16, kElements, true, true);
  REQUIRE(t.run.OpenStore(t.directory, StoreOptions(1)));
  REQUIRE(t.block.Open(t.run.store, g, &t.random));
  REQUIRE(t.run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 3, 1)));
  int64_t step = 0;
  CHECK_EQ(hetero_block_slot(t.block.handle, &step), HETERO_ESTATE);
  CHECK_EQ(t.run.Fetch(t.block), HETERO_ESTATE);
  CHECK_EQ(t.run.OpenUpdate(t.block, false), HETERO_ESTATE);
  CHECK_EQ(t.run.OpenUpdate(t.block, true), HETERO_ESTATE);  // its master is nowhere
  CHECK(strstr(hetero_last_error(), "master") != nullptr);
  CHECK_EQ(hetero_store_recover(t.run.store, &step, nullptr, 0), HETERO_ESTATE);
  t.End();
}

TEST(without_durability_slots_flip_in_memory_only) {
  Trained t;
  hetero_store_options options = StoreOptions(1);
  options.durability = HETERO_DURABILITY_NONE;
  REQUIRE(t.Begin(options));
  for (int64_t step = 2; step < 5; ++step) {
    CHECK_EQ(t.Update(step), 0);
    CHECK(t.run.Holds(t.block));
    CHECK_EQ(t.run.Complete(t.run.Commit(step)), 0);
  }
  t.End();
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step, options), HETERO_ESTATE);
  t.End();
}

TEST(durability_power_commits_and_recovers) {
  Trained t;
  hetero_store_options options = StoreOptions(1);
  options.durability = HETERO_DURABILITY_POWER;
  REQUIRE(t.Begin(options));
  CHECK_EQ(t.Update(2), 0);
  CHECK_EQ(t.run.Complete(t.run.Commit(2)), 0);
  t.End();
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step, options), 0);
  CHECK_EQ(step, 2);
  CHECK(t.run.Holds(t.block));
  t.End();
}

TEST(a_frozen_block_has_one_slot_and_is_written_in_place) {
  Trained t;
  const hetero_block_geometry g = Geometry(0, HETERO_U8, kElements, true, false);
  REQUIRE(t.Begin(StoreOptions(1), g));
  CHECK(t.run.Holds(t.block));
  for (int round = 0; round < 3; ++round) {  // piece by piece, without commits
    std::fill_n(t.block.expected_weights.begin() + 3500 * round, 5000, static_cast<uint8_t>(round));
    const hetero_patch patch{3500 * round, 5000, t.block.expected_weights.data() + 3500 * round, -1};
    CHECK_EQ(t.run.Complete(t.run.Store(t.block, {patch}, false, 0)), 0);
    CHECK(t.run.Holds(t.block));
  }
  CHECK_EQ(t.run.OpenUpdate(t.block, true), HETERO_EINVAL);
  CHECK_EQ(t.run.Complete(t.run.Commit(2)), 0);
  t.End();
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step), 0);
  CHECK_EQ(t.run.Complete(t.run.Fetch(t.block)), 0);
  CHECK_EQ(memcmp(t.block.weights, t.block.expected_weights.data(), t.block.expected_weights.size()), 0);
  CHECK_NE(access(t.directory.File("block-00000.b").c_str(), F_OK), 0);
  t.End();
}

TEST(a_slot_with_other_names_is_never_written) {
  Trained t;
  REQUIRE(t.Begin());
  CHECK_EQ(t.Update(2), 0);
  CHECK_EQ(t.run.Complete(t.run.Commit(2)), 0);
  std::vector<std::vector<uint8_t>> before;
  for (const char* slot : {"a", "b"}) {
    const std::string name = t.directory.File(std::string("block-00000.") + slot);
    CHECK_EQ(link(name.c_str(), t.directory.File(std::string("kept.") + slot).c_str()), 0);
    before.push_back(Content(name));
  }
  for (int64_t step = 3; step <= 5; ++step) {
    CHECK_EQ(t.Update(step), 0);
    CHECK_EQ(t.run.Complete(t.run.Commit(step)), 0);
  }
  CHECK(Content(t.directory.File("kept.a")) == before[0]);
  CHECK(Content(t.directory.File("kept.b")) == before[1]);
  CHECK_NE(access(t.directory.File("block-00000.a.new").c_str(), F_OK), 0);
  t.End();
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step), 0);
  CHECK_EQ(step, 5);
  CHECK(t.run.Holds(t.block));
  t.End();
}

TEST(a_block_opened_after_recovery_needs_only_its_committed_slot) {
  Trained t;
  REQUIRE(t.Begin());
  CHECK_EQ(t.Update(2), 0);  // slot b; the commit names a
  t.End();
  CHECK_EQ(unlink(t.directory.File("block-00000.b").c_str()), 0);
  hetero_store_options options = StoreOptions(1);
  options.create = 0;
  REQUIRE(t.run.OpenStore(t.directory, options));
  int64_t step = 0;
  char user[64];
  CHECK_EQ(hetero_store_recover(t.run.store, &step, user, sizeof(user)), int64_t{3});
  CHECK_EQ(step, 1);
  const hetero_block_geometry g = t.block.geometry;
  REQUIRE(t.block.Open(t.run.store, g, &t.random));
  REQUIRE(t.run.StartEngine(EngineOptions(hetero_block_staged_bytes(&g), 4, 2)));
  CHECK_EQ(ReadAll(t), 0);
  CHECK_EQ(access(t.directory.File("block-00000.b").c_str(), F_OK), 0);
  t.End();
  CHECK_EQ(unlink(t.directory.File("block-00000.a").c_str()), 0);
  CHECK_EQ(t.Reopen(&step), -101);
}

TEST(damage_is_found_and_named) {
  Layout layout;
  REQUIRE_OK(Layout::Make(Geometry(0, HETERO_F32, kElements, true, true), &layout));
  struct Damage {
    int64_t offset;
    const char* words;
    bool digests_needed;
  };
  const Damage cases[] = {
      {layout.WeightsOffset(1) + 4000, "chunk 1: the weights' digest", true},
      {layout.StateOffset(2) + 5000, "chunk 2: the state's digest", true},
      {layout.StateOffset(0) + layout.FooterOffset(0) + 24, "chunk 0: the stamp is of another rewrite", false},
      {layout.StateOffset(3) + layout.FooterOffset(3), "chunk 3: no stamp", false},
      {100, "the head's checksum differs", false},
  };
  for (const bool digests : {true, false}) {
    for (const Damage& damage : cases) {
      Trained t;
      hetero_store_options options = StoreOptions(1);
      options.verify_digests = digests ? 1 : 0;
      REQUIRE(t.Begin(options));
      t.End();
      EditFile(t.directory.File("block-00000.a"), damage.offset, [](uint8_t* byte) { *byte ^= 4; });
      int64_t step = 0;
      int64_t code = t.Reopen(&step, options);
      if (code >= 0) code = ReadAll(t);
      const bool found = digests || !damage.digests_needed;
      CHECK_EQ(code, found ? HETERO_ECORRUPT : 0);
      if (found) CHECK(strstr(hetero_last_error(), damage.words) != nullptr);
      if (found) CHECK(strstr(hetero_last_error(), "block-00000.a") != nullptr);
      t.End();
    }
  }
}

TEST(a_chunk_of_an_earlier_rewrite_is_found_even_without_digests) {
  Trained t;
  hetero_store_options options = StoreOptions(1);
  options.verify_digests = 0;
  REQUIRE(t.Begin(options));
  Layout layout;
  REQUIRE_OK(Layout::Make(t.block.geometry, &layout));
  const std::string slot_a = t.directory.File("block-00000.a");
  const std::vector<uint8_t> before = Content(slot_a);
  for (int64_t step = 2; step < 4; ++step) {  // slots b, then a again
    CHECK_EQ(t.Update(step), 0);
    CHECK_EQ(t.run.Complete(t.run.Commit(step)), 0);
  }
  t.End();
  const int64_t offset = layout.StateOffset(1);
  EditFile(
      slot_a, offset, [&](uint8_t* chunk) { memcpy(chunk, before.data() + offset, static_cast<size_t>(layout.StateBytes(1))); },
      layout.StateBytes(1));
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step, options), 0);
  CHECK_EQ(step, 3);
  CHECK_EQ(ReadAll(t), HETERO_ECORRUPT);
  CHECK(strstr(hetero_last_error(), "another rewrite") != nullptr);
  t.End();
}

TEST(exchanged_slot_files_are_found) {
  Trained t;
  REQUIRE(t.Begin());
  CHECK_EQ(t.Update(2), 0);
  CHECK_EQ(t.run.Complete(t.run.Commit(2)), 0);
  t.End();
  const std::string a = t.directory.File("block-00000.a"), b = t.directory.File("block-00000.b"), c = t.directory.File("c");
  CHECK_EQ(rename(a.c_str(), c.c_str()) | rename(b.c_str(), a.c_str()) | rename(c.c_str(), b.c_str()), 0);
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step), HETERO_ECORRUPT);
  CHECK(strstr(hetero_last_error(), "exchanged") != nullptr);
  t.End();
}

TEST(a_store_in_use_is_busy) {
  Trained t;
  REQUIRE(t.Begin());
  hetero_store_options options = StoreOptions(1);
  options.create = 0;
  options.direct_io = 0;
  CHECK(hetero_store_open(t.directory.path().c_str(), &options) == nullptr);
  CHECK(strstr(hetero_last_error(), "COMMIT is locked") != nullptr);
  t.End();
  hetero_store* store = hetero_store_open(t.directory.path().c_str(), &options);
  CHECK(store != nullptr);
  CHECK_EQ(hetero_store_close(store), 0);
}

TEST(files_are_private_and_links_refused) {
  Trained t;
  REQUIRE(t.Begin());
  t.End();
  const std::string a = t.directory.File("block-00000.a");
  struct stat info{};
  CHECK_EQ(stat(a.c_str(), &info), 0);
  CHECK_EQ(info.st_mode & 0777, mode_t{0600});
  int64_t step = 0;
  const std::string second = t.directory.File("second");
  CHECK_EQ(link(t.directory.File("COMMIT").c_str(), second.c_str()), 0);
  CHECK_EQ(t.Reopen(&step), -100);
  CHECK(strstr(hetero_last_error(), "2 names") != nullptr);
  t.End();
  CHECK_EQ(unlink(second.c_str()) | rename(a.c_str(), second.c_str()) | symlink("second", a.c_str()), 0);
  CHECK_EQ(t.Reopen(&step), -101);
  CHECK(strstr(hetero_last_error(), "symbolic link") != nullptr);
  t.End();
  CHECK_EQ(unlink(a.c_str()) | rename(t.directory.File("second").c_str(), a.c_str()), 0);
  CHECK_EQ(truncate(a.c_str(), 4096), 0);
  CHECK_EQ(t.Reopen(&step), -101);
  CHECK(strstr(hetero_last_error(), "has 4096 bytes; expected") != nullptr);
  t.End();
  hetero_store_options options = StoreOptions(1);
  options.direct_io = 0;
  CHECK(hetero_store_open(t.directory.path().c_str(), &options) == nullptr);  // create where it exists
  CHECK(strstr(hetero_last_error(), "exists already") != nullptr);
}

TEST(too_little_space_is_found_when_a_block_is_opened) {
  Trained t;
  REQUIRE(t.run.OpenStore(t.directory, StoreOptions(1)));
  struct rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small{100 << 10, before.rlim_max};
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  CHECK(!t.block.Open(t.run.store, Geometry(0, HETERO_F32, kElements, true, true), &t.random));
  CHECK(strstr(hetero_last_error(), "block-00000.a needs ") != nullptr);
  CHECK(strstr(hetero_last_error(), "are free") != nullptr);
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, handler);
  CHECK_NE(access(t.directory.File("block-00000.a").c_str(), F_OK), 0);
  CHECK(t.block.Open(t.run.store, Geometry(0, HETERO_F32, kElements, true, true), &t.random));
  t.End();
}

TEST(bad_arguments_are_named) {
  Trained t;
  REQUIRE(t.Begin());
  const auto geometry_fault = [&](const char* word, const std::function<void(hetero_block_geometry*)>& change) {
    hetero_block_geometry g = Geometry(0, HETERO_F32, kElements, false, false);
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
  patch_fault({kElements - 15, 16, data, 0});
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
  arm_fault("segments[1]", [](auto* s, auto*) { s[1].numel = kElements; });
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
  t.End();
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
  REQUIRE(t.Begin());
  t.run.StopEngine();
  REQUIRE(t.run.StartEngine(EngineOptions(4096, 3, 1)));  // smaller than the block's chunks
  CHECK_EQ(t.run.OpenUpdate(t.block, false), HETERO_EINVAL);
  CHECK(strstr(hetero_last_error(), "chunk_bytes_max") != nullptr);
  t.End();
}

TEST(the_id_of_a_discarded_block_serves_another_one) {
  Trained t;
  REQUIRE(t.Begin(StoreOptions(2)));
  const hetero_block_geometry second = Geometry(1, HETERO_F32, kElements, true, false);
  TestBlock other;
  REQUIRE(other.Open(t.run.store, second, &t.random));
  REQUIRE_EQ(t.run.StoreModel(other, 2), 0);
  const int64_t commit = t.run.Commit(2);
  CHECK_EQ(t.run.Wait(commit), 0);
  CHECK_EQ(hetero_block_discard(std::exchange(t.block.handle, nullptr)), 0);
  for (const char* name : {"block-00000.a", "block-00000.b"}) CHECK_EQ(unlink(t.directory.File(name).c_str()), 0);
  CHECK_EQ(t.run.Complete(t.run.Commit(3)), 0);
  const hetero_block_geometry first = Geometry(0, HETERO_F32, kElements * 2, true, true);
  TestBlock heir;
  REQUIRE(heir.Open(t.run.store, first, &t.random));
  int64_t step = 0;
  CHECK_EQ(hetero_block_slot(heir.handle, &step), HETERO_ESTATE);  // nothing of its predecessor
  REQUIRE_EQ(t.run.StoreModel(heir, 4), 0);
  CHECK_EQ(t.run.Complete(t.run.Commit(4)), 0);
  CHECK(t.run.Holds(heir));
  CHECK(t.run.Holds(other));
  t.run.StopEngine();
  heir.Close();
  other.Close();
  t.run.CloseStore();
}
