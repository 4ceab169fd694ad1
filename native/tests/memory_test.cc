#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

int64_t PageBytes() { return sysconf(_SC_PAGESIZE); }

int64_t ResidentPages(void* p, int64_t bytes) {
  const int64_t num_pages = (bytes + PageBytes() - 1) / PageBytes();
  std::vector<unsigned char> present(static_cast<size_t>(num_pages));
  if (mincore(p, static_cast<size_t>(bytes), present.data()) != 0) return -1;
  int64_t count = 0;
  for (const unsigned char flag : present) count += flag & 1;
  return count;
}

}  // namespace

TEST(reserved_memory_is_aligned_zero_and_not_present_until_touched) {
  for (const int64_t bytes : {int64_t{1}, int64_t{4096}, kHugePage - 1, kHugePage, 5 * kHugePage + 12345}) {
    void* p = hetero::Reserve(bytes);
    REQUIRE(p != nullptr);
    CHECK_EQ(reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(kHugePage), 0u);
    CHECK_EQ(ResidentPages(p, bytes), 0);
    char* c = static_cast<char*>(p);
    CHECK_EQ(c[0], 0);
    c[bytes - 1] = 7;
    CHECK_EQ(c[bytes - 1], 7);
    CHECK_OK(hetero::Unreserve(p, bytes));
  }
}

TEST(a_size_that_cannot_be_had_is_null) {
  CHECK(hetero::Reserve(0) == nullptr);
  CHECK(hetero::Reserve(-1) == nullptr);
  CHECK(hetero::Reserve(INT64_MAX) == nullptr);
  CHECK(hetero::Reserve((int64_t{1} << 46) + 1) == nullptr);
}

TEST(drop_gives_back_whole_pages_inside_the_range_only) {
  const int64_t page = PageBytes();
  const int64_t bytes = 8 * page;
  auto* p = static_cast<char*>(hetero::Reserve(bytes));
  REQUIRE(p != nullptr);
  for (int64_t i = 0; i < bytes; ++i) p[i] = 1;
  CHECK_OK(hetero::Drop(p + 1, 3 * page));  // covers pages 1 and 2 whole, 0 and 3 in part
  CHECK_EQ(p[page - 1], 1);
  CHECK_EQ(p[page], 0);
  CHECK_EQ(p[3 * page - 1], 0);
  CHECK_EQ(p[3 * page], 1);
  CHECK_OK(hetero::Drop(p + 4 * page + 1, page));  // no whole page
  CHECK_EQ(p[4 * page], 1);
  CHECK_EQ(p[5 * page], 1);
  CHECK_OK(hetero::Drop(p, bytes));
  CHECK_EQ(ResidentPages(p, bytes), 0);
  CHECK_OK(hetero::Unreserve(p, bytes));
}

TEST(a_shared_file_has_one_page_for_all_that_map_it) {
  const int64_t bytes = 4 * PageBytes();
  const int file = memfd_create("test", MFD_CLOEXEC);
  REQUIRE(file >= 0 && ftruncate(file, 2 * bytes) == 0);
  auto* one = static_cast<char*>(hetero::Reserve(bytes));
  auto* other = static_cast<char*>(hetero::Reserve(bytes));
  REQUIRE(one != nullptr && other != nullptr);
  CHECK_OK(hetero::Map(one, bytes, file, bytes, true));
  CHECK_OK(hetero::Map(other, bytes, file, bytes, false));
  one[0] = 1;
  CHECK_EQ(other[0], 1);
  other[PageBytes()] = 2;  // stays there
  CHECK_EQ(one[PageBytes()], 0);
  one[PageBytes()] = 3;
  CHECK_OK(hetero::Drop(other, bytes));
  CHECK_EQ(other[PageBytes()], 3);
  CHECK_OK(hetero::Map(other, bytes, file, bytes, true));
  other[0] = 4;
  CHECK_EQ(one[0], 4);
  CHECK_OK(hetero::Drop(one, bytes));
  CHECK_EQ(other[0], 0);
  CHECK_EQ(ResidentPages(other + PageBytes(), bytes - PageBytes()), 0);
  CHECK_EQ(hetero::Map(one, bytes, -1, 0, true).code(), HETERO_EINVAL);
  CHECK_EQ(hetero::Map(one + 1, bytes, file, 0, true).code(), HETERO_EINVAL);
  CHECK_OK(hetero::Unreserve(one, bytes));
  CHECK_OK(hetero::Unreserve(other, bytes));
  close(file);
}

TEST(bad_ranges_are_refused) {
  CHECK_EQ(hetero::Drop(nullptr, 4096).code(), HETERO_EINVAL);
  int local = 0;
  CHECK_EQ(hetero::Drop(&local, -1).code(), HETERO_EINVAL);
  CHECK_EQ(hetero::Unreserve(nullptr, 4096).code(), HETERO_EINVAL);
  CHECK_EQ(hetero::Unreserve(&local, 4096).code(), HETERO_EINVAL);
}

TEST(the_c_interface_reports_code_and_text) {
  CHECK(hetero_reserve(-5) == nullptr);
  CHECK_NE(hetero_last_code(), 0);
  CHECK(std::strstr(hetero_last_error(), "-5") != nullptr);
  CHECK_EQ(hetero_drop(nullptr, 1), HETERO_EINVAL);
  CHECK_EQ(hetero_last_code(), HETERO_EINVAL);
  void* p = hetero_reserve(100);
  REQUIRE(p != nullptr);
  CHECK_EQ(hetero_unreserve(p, 100), 0);
}
