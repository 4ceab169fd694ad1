#include "memory.h"

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

namespace hetero {

namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kLargest = int64_t{1} << 46;  // more than x86-64's user half has: sums of it and a huge page do not overflow

int64_t PageBytes() noexcept {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

int64_t RoundUp(int64_t value, int64_t unit) noexcept { return (value + unit - 1) / unit * unit; }

}  // namespace

void* Reserve(int64_t bytes) noexcept {
  if (bytes <= 0 || bytes > kLargest) {
    errno = bytes <= 0 ? EINVAL : ENOMEM;
    return nullptr;
  }
  const int64_t length = RoundUp(bytes, PageBytes());
  const int64_t mapped = length + kHugePage;
  void* base =
      mmap(nullptr, static_cast<size_t>(mapped), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  // What the alignment leaves over on both sides goes back at once, so that the mapping is exactly what Unreserve is given.
  const auto address = reinterpret_cast<intptr_t>(base);
  const int64_t before = RoundUp(address, kHugePage) - address;
  char* aligned = static_cast<char*>(base) + before;
  if (before > 0) munmap(base, static_cast<size_t>(before));
  if (before < kHugePage) munmap(aligned + length, static_cast<size_t>(kHugePage - before));
  // Advice only: a kernel without transparent huge pages is slower, not wrong.
  (void)madvise(aligned, static_cast<size_t>(length), MADV_HUGEPAGE);
  return aligned;
}

Status Map(void* p, int64_t bytes, int file, int64_t offset, bool shared) {
  const int64_t page = PageBytes();
  if (p == nullptr || bytes <= 0 || bytes > kLargest || offset < 0 || file < 0 ||
      (reinterpret_cast<intptr_t>(p) | bytes | offset) % page != 0) {
    return Fail(HETERO_EINVAL, "map of %lld bytes at %p from %lld of file %d: whole pages of an open file are allowed",
                static_cast<long long>(bytes), p, static_cast<long long>(offset), file);
  }
  const auto length = static_cast<size_t>(bytes);
  const int kind = shared ? MAP_SHARED : MAP_PRIVATE | MAP_NORESERVE;
  if (mmap(p, length, PROT_READ | PROT_WRITE, MAP_FIXED | kind, file, offset) == MAP_FAILED) {
    return FailErrno("mapping " + std::to_string(bytes) + " bytes of a file", errno);
  }
  (void)madvise(p, length, MADV_HUGEPAGE);  // advice only, as in Reserve
  return Status::Ok();
}

Status Drop(void* p, int64_t bytes) {
  if (p == nullptr || bytes < 0 || bytes > kLargest) {
    return Fail(HETERO_EINVAL, "drop of %lld bytes at %p: the address must not be null, the length not negative",
                static_cast<long long>(bytes), p);
  }
  const int64_t page = PageBytes();
  const auto address = reinterpret_cast<intptr_t>(p);
  const int64_t begin = RoundUp(address, page);
  const int64_t end = (address + bytes) / page * page;
  if (end <= begin) return Status::Ok();
  char* first = static_cast<char*>(p) + (begin - address);
  const auto length = static_cast<size_t>(end - begin);
  // Only shared pages of a file can be removed from it; others are this process's own.
  if (madvise(first, length, MADV_REMOVE) == 0 || madvise(first, length, MADV_DONTNEED) == 0) return Status::Ok();
  return FailErrno("madvise(MADV_DONTNEED) of " + std::to_string(end - begin) + " bytes", errno);
}

Status Unreserve(void* p, int64_t bytes) {
  if (p == nullptr || bytes <= 0 || bytes > kLargest || reinterpret_cast<intptr_t>(p) % kHugePage != 0) {
    return Fail(HETERO_EINVAL, "unreserve of %lld bytes at %p: not a range that was reserved", static_cast<long long>(bytes),
                p);
  }
  const int64_t length = RoundUp(bytes, PageBytes());
  if (munmap(p, static_cast<size_t>(length)) != 0) {
    return FailErrno("munmap of " + std::to_string(length) + " bytes", errno);
  }
  return Status::Ok();
}

}  // namespace hetero
