// One private, locked, preallocated file of a store.
//
// Ownership: a File owns its descriptor; closing drops the lock. Thread-safety: none needed, files are opened and closed by
// the thread that owns the store. Failure: Status with path, operation, errno; a file that Create made is removed again.
#ifndef HETERO_STORE_FILE_H_
#define HETERO_STORE_FILE_H_

#include <stdint.h>
#include <stdlib.h>

#include <memory>
#include <string>
#include <utility>

#include "status.h"

namespace hetero {

class File {
 public:
  File() = default;
  File(int fd, std::string path, int32_t disk = 0) : fd_(fd), disk_(disk), path_(std::move(path)) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)), disk_(other.disk_), path_(std::move(other.path_)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(disk_, other.disk_);
    std::swap(path_, other.path_);
    return *this;
  }
  ~File();

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] int Release() { return std::exchange(fd_, -1); }
  [[nodiscard]] int32_t disk() const { return disk_; }  // which of its store's disks has it
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  int fd_ = -1;
  int32_t disk_ = 0;
  std::string path_;
};

struct FileSpec {
  int directory_fd = -1;
  int32_t disk = 0;
  std::string directory;  // for messages
  std::string name;
  int64_t bytes = 0;  // exact size
  bool create = false;
  bool direct_io = false;
  bool may_have_links = false;  // accept an existing file with other names: whoever writes it gives it a fresh file first
  bool durable = false;         // a new file's allocation and name reach the disk before this returns
};

// Opens without following links, takes flock(LOCK_EX) on the description that does the I/O: requests of a killed process that
// the kernel still carries out hold it too, so its late writes cannot meet ours. EBUSY after half a second of trying.
// create: the file must not exist; its blocks are allocated now (ENOSPC names path, needed and free bytes).
// Otherwise: it must be a regular file of ours with one name and the exact size.
Status OpenFile(const FileSpec& spec, File* out);

// Whether the name is in the directory, and not that of a file of another size.
bool IsThere(const FileSpec& spec);

// Whether the file has other names than its own in the store.
Status HasLinks(const File& file, bool* out);

// Opens `path`, a directory that is not a link and belongs to this user.
Status OpenDirectory(const std::string& path, File* out);

// Synchronous, whole: for the few pages read before an engine exists. `buffer` is page aligned.
Status ReadAt(const File& file, void* buffer, int64_t bytes, int64_t offset);

// Page-aligned, zeroed memory for transfers.
struct FreePages {
  void operator()(uint8_t* pages) const { free(pages); }
};
using Pages = std::unique_ptr<uint8_t[], FreePages>;
Status AllocatePages(int64_t bytes, Pages* out);

}  // namespace hetero

#endif  // HETERO_STORE_FILE_H_
