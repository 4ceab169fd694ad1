#include "store_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "store_layout.h"

namespace hetero {

namespace {

constexpr int kLockTries = 25;
constexpr int64_t kLockPauseNs = 20'000'000;

Status Lock(const File& file) {
  for (int i = 0; i < kLockTries; ++i) {
    if (flock(file.fd(), LOCK_EX | LOCK_NB) == 0) return Status::Ok();
    if (errno != EWOULDBLOCK && errno != EINTR) return FailErrno(file.path() + ": flock", errno);
    const timespec pause{0, kLockPauseNs};
    nanosleep(&pause, nullptr);
  }
  return Fail(HETERO_EBUSY,
              "%s is locked by another process (or a second open in this one); end that one or use another directory",
              file.path().c_str());
}

// File systems without fallocate get their blocks by being written.
Status WriteZeros(const File& file, int64_t bytes) {
  constexpr int64_t kPieceBytes = 1 << 20;
  Pages zeros;
  HETERO_RETURN_IF_ERROR(AllocatePages(kPieceBytes, &zeros));
  for (int64_t offset = 0; offset < bytes;) {
    const auto length = static_cast<size_t>(bytes - offset < kPieceBytes ? bytes - offset : kPieceBytes);
    const ssize_t n = pwrite(file.fd(), zeros.get(), length, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FailErrno(file.path() + ": pwrite at " + std::to_string(offset), errno);
    offset += n;
  }
  return Status::Ok();
}

Status FailSpace(const File& file, int64_t bytes, int error) {
  struct statvfs fs{};
  const int64_t free_bytes = fstatvfs(file.fd(), &fs) == 0 ? static_cast<int64_t>(fs.f_bavail * fs.f_frsize) : -1;
  return Fail(HETERO_ENOSPC,
              "%s needs %lld bytes; %lld are free: %s (errno %d). Free space, raise the quota or use another directory",
              file.path().c_str(), static_cast<long long>(bytes), static_cast<long long>(free_bytes), strerror(error), error);
}

Status Allocate(const File& file, int64_t bytes) {
  int error = 0;
  do {
    error = fallocate(file.fd(), 0, 0, bytes) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == 0) return Status::Ok();
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) return FailSpace(file, bytes, error);
  if (error != EOPNOTSUPP && error != ENOSYS) return FailErrno(file.path() + ": fallocate", error);
  const Status status = WriteZeros(file, bytes);
  return status.code() == HETERO_ENOSPC ? FailSpace(file, bytes, ENOSPC) : status;
}

Status MakeDurable(const File& file, int directory_fd) {
  if (fsync(file.fd()) != 0) return FailErrno(file.path() + ": fsync", errno);
  if (fsync(directory_fd) != 0) return FailErrno(file.path() + ": fsync of its directory", errno);
  return Status::Ok();
}

Status CheckIdentity(const File& file, int64_t bytes, bool may_have_links) {
  struct stat info{};
  const char* path = file.path().c_str();
  if (fstat(file.fd(), &info) != 0) return FailErrno(file.path() + ": fstat", errno);
  if (!S_ISREG(info.st_mode)) return Fail(HETERO_EINVAL, "%s is not a regular file; remove it", path);
  if (info.st_uid != geteuid()) return Fail(HETERO_EINVAL, "%s belongs to user %u, not to %u", path, info.st_uid, geteuid());
  if (info.st_nlink != 1 && !may_have_links)
    return Fail(HETERO_EINVAL, "%s has %llu names; allowed: one. A hard link would be overwritten", path,
                static_cast<unsigned long long>(info.st_nlink));
  if (info.st_size != bytes)
    return Fail(HETERO_ECORRUPT, "%s has %lld bytes; expected %lld: it is of another geometry or was truncated", path,
                static_cast<long long>(info.st_size), static_cast<long long>(bytes));
  return Status::Ok();
}

Status FailOpen(const FileSpec& spec, const std::string& path, int error) {
  if (error == EINVAL && spec.direct_io)
    return Fail(HETERO_EUNSUPPORTED, "%s: the file system refuses O_DIRECT; use another one or set direct_io to 0",
                path.c_str());
  if (error == ELOOP) return Fail(HETERO_EINVAL, "%s is a symbolic link; links are not followed: remove it", path.c_str());
  if (error == EEXIST)
    return Fail(HETERO_ESTATE, "%s exists already; open the store without create, or remove it", path.c_str());
  if (error == ENOENT && !spec.create)
    return Fail(HETERO_ESTATE, "%s does not exist: this store was not created here", path.c_str());
  return FailErrno(path + ": open", error);
}

}  // namespace

File::~File() {
  if (fd_ >= 0) close(fd_);
}

Status OpenFile(const FileSpec& spec, File* out) {
  const std::string path = spec.directory + "/" + spec.name;
  const int flags = O_RDWR | O_NOFOLLOW | O_CLOEXEC | (spec.direct_io ? O_DIRECT : 0) | (spec.create ? O_CREAT | O_EXCL : 0);
  int fd = -1;
  do {
    fd = openat(spec.directory_fd, spec.name.c_str(), flags, 0600);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) {
    const int error = errno;
    // ext4 and others create the name before they refuse O_DIRECT.
    if (spec.create && error == EINVAL) unlinkat(spec.directory_fd, spec.name.c_str(), 0);
    return FailOpen(spec, path, error);
  }
  File file(fd, path, spec.disk);
  Status status = Lock(file);
  if (status.ok() && spec.create) {
    if (fchmod(fd, 0600) != 0) status = FailErrno(path + ": fchmod", errno);
    if (status.ok()) status = Allocate(file, spec.bytes);
    if (status.ok() && spec.durable) status = MakeDurable(file, spec.directory_fd);
  }
  if (status.ok()) status = CheckIdentity(file, spec.bytes, spec.may_have_links && !spec.create);
  if (!status.ok()) {
    if (spec.create) unlinkat(spec.directory_fd, spec.name.c_str(), 0);
    return status;
  }
  *out = std::move(file);
  return Status::Ok();
}

bool IsThere(const FileSpec& spec) {
  struct stat info{};
  if (fstatat(spec.directory_fd, spec.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) return false;
  return !S_ISREG(info.st_mode) || info.st_size == spec.bytes;
}

Status HasLinks(const File& file, bool* out) {
  struct stat info{};
  if (fstat(file.fd(), &info) != 0) return FailErrno(file.path() + ": fstat", errno);
  *out = info.st_nlink > 1;
  return Status::Ok();
}

Status OpenDirectory(const std::string& path, File* out) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return FailErrno(path + ": open directory", errno);
  File directory(fd, path);
  struct stat info{};
  if (fstat(fd, &info) != 0) return FailErrno(path + ": fstat", errno);
  if (info.st_uid != geteuid())
    return Fail(HETERO_EINVAL, "%s belongs to user %u, not to %u; use a directory of your own", path.c_str(), info.st_uid,
                geteuid());
  *out = std::move(directory);
  return Status::Ok();
}

Status ReadAt(const File& file, void* buffer, int64_t bytes, int64_t offset) {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t n = pread(file.fd(), static_cast<uint8_t*>(buffer) + done, static_cast<size_t>(bytes - done), offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      return FailErrno(file.path() + ": pread of " + std::to_string(bytes) + " bytes at " + std::to_string(offset), errno);
    if (n == 0) return Fail(HETERO_ECORRUPT, "%s ends at %lld", file.path().c_str(), static_cast<long long>(offset + done));
    done += n;
  }
  return Status::Ok();
}

Status AllocatePages(int64_t bytes, Pages* out) {
  const auto size = static_cast<size_t>(RoundUp(bytes, kPageBytes));
  auto* pages = static_cast<uint8_t*>(aligned_alloc(kPageBytes, size));
  if (pages == nullptr)
    return Fail(HETERO_ENOMEM, "no memory for %lld bytes of transfer buffer", static_cast<long long>(bytes));
  memset(pages, 0, size);
  out->reset(pages);
  return Status::Ok();
}

}  // namespace hetero
