// Damage, other processes, links and full disks: found and named.
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store_layout.h"
#include "trained_fixture.h"

using fixture::Content;
using fixture::EditFile;
using fixture::Geometry;
using fixture::kTrainedElements;
using fixture::ReadAll;
using fixture::Run;
using fixture::StoreOptions;
using fixture::TempDirectory;
using fixture::TestBlock;
using fixture::Trained;
using hetero::Layout;

TEST(damage_is_found_and_named) {
  Layout layout;
  REQUIRE_OK(Layout::Make(Geometry(0, HETERO_F32, kTrainedElements, true, true), &layout));
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
  for (const int32_t digests : {HETERO_DIGESTS_NONE, HETERO_DIGESTS_ALWAYS, HETERO_DIGESTS_RECOVERED}) {
    for (const Damage& damage : cases) {
      hetero_store_options options = StoreOptions(1);
      options.verify_digests = digests;
      Trained t(options);
      t.End();
      EditFile(t.directory.File("block-00000.a"), damage.offset, [](uint8_t* byte) { *byte ^= 4; });
      int64_t step = 0;
      int64_t code = t.Reopen(&step, options);
      if (code >= 0) code = ReadAll(t);
      const bool found = digests != HETERO_DIGESTS_NONE || !damage.digests_needed;
      CHECK_EQ(code, found ? HETERO_ECORRUPT : 0);
      if (found) CHECK(strstr(hetero_last_error(), damage.words) != nullptr);
      if (found) CHECK(strstr(hetero_last_error(), "block-00000.a") != nullptr);
    }
  }
}

TEST(a_chunk_of_an_earlier_rewrite_is_found_even_without_digests) {
  const hetero_store_options options = StoreOptions(1, false);
  Trained t(options);
  Layout layout;
  REQUIRE_OK(Layout::Make(t.block.geometry, &layout));
  const std::string slot_a = t.directory.File("block-00000.a");
  const std::vector<uint8_t> before = Content(slot_a);
  for (int64_t step = 2; step < 4; ++step) {  // slots b, then a again
    CHECK_EQ(t.Step(step), 0);
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
}

TEST(exchanged_slot_files_are_found) {
  Trained t;
  CHECK_EQ(t.Step(2), 0);
  t.End();
  const std::string a = t.directory.File("block-00000.a"), b = t.directory.File("block-00000.b"), c = t.directory.File("c");
  CHECK_EQ(rename(a.c_str(), c.c_str()) | rename(b.c_str(), a.c_str()) | rename(c.c_str(), b.c_str()), 0);
  int64_t step = 0;
  CHECK_EQ(t.Reopen(&step), HETERO_ECORRUPT);
  CHECK(strstr(hetero_last_error(), "exchanged") != nullptr);
}

TEST(a_store_in_use_is_busy) {
  Trained t;
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
  std::mt19937 random(42);
  const TempDirectory directory;
  TestBlock block;
  Run run;
  REQUIRE(run.OpenStore(directory, StoreOptions(1)));
  {
    const fixture::SmallFiles full(100 << 10);
    CHECK(!block.Open(run.store, Geometry(0, HETERO_F32, kTrainedElements, true, true), &random));
    CHECK(strstr(hetero_last_error(), "block-00000.a needs ") != nullptr);
    CHECK(strstr(hetero_last_error(), "are free") != nullptr);
  }
  CHECK_NE(access(directory.File("block-00000.a").c_str(), F_OK), 0);
  CHECK(block.Open(run.store, Geometry(0, HETERO_F32, kTrainedElements, true, true), &random));
  block.Close();
}
