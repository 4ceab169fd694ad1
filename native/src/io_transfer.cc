#include "io_transfer.h"

#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "clock.h"

namespace hetero {

namespace {

std::string Describe(const IoRequest& request) {
  if (request.kind == IoKind::kDataSync) return std::string("fdatasync of ") + request.path;
  return std::string(request.kind == IoKind::kRead ? "read of " : "write of ") + request.path + " at offset " +
         std::to_string(request.offset) + ", " + std::to_string(request.bytes) + " bytes";
}

// Waits longer each time: the kernel is short of requests or memory and says "later".
void BackOff(int* attempt) {
  const timespec pause = {0, std::min(50'000L << std::min(*attempt, 8), 10'000'000L)};
  ++*attempt;
  nanosleep(&pause, nullptr);
}

ssize_t WriteDurably(int fd, const void* data, size_t bytes, off_t offset) {
  const iovec vector = {const_cast<void*>(data), bytes};
  const ssize_t moved = pwritev2(fd, &vector, 1, offset, RWF_DSYNC);
  if (moved >= 0 || (errno != EOPNOTSUPP && errno != ENOSYS)) return moved;
  const ssize_t written = pwrite(fd, data, bytes, offset);
  return written > 0 && fdatasync(fd) != 0 ? -1 : written;
}

// One system call for what is left of the transfer.
ssize_t TransferOnce(const IoRequest& request) {
  char* data = static_cast<char*>(request.buffer) + request.transferred;
  const auto bytes = static_cast<size_t>(request.bytes - request.transferred);
  const off_t offset = request.offset + request.transferred;
  if (request.kind == IoKind::kRead) return pread(request.fd, data, bytes, offset);
  return request.dsync ? WriteDurably(request.fd, data, bytes, offset) : pwrite(request.fd, data, bytes, offset);
}

}  // namespace

Status TransferError(const IoRequest& request, int error) { return FailErrno(Describe(request), error); }

Status NoProgress(const IoRequest& request) {
  const char* reason = request.kind == IoKind::kRead ? "the file ends after" : "the file system stopped after";
  return Fail(HETERO_EIO, "%s: %s %lld of them", Describe(request).c_str(), reason,
              static_cast<long long>(request.transferred));
}

Status TransferBlocking(IoRequest* request) {
  request->started_ns = MonotonicNs();
  request->transferred = 0;
  int attempt = 0;
  if (request->kind == IoKind::kDataSync) {
    while (fdatasync(request->fd) != 0) {
      if (errno != EINTR) return TransferError(*request, errno);
    }
    return Status::Ok();
  }
  while (!IsComplete(*request)) {
    const ssize_t moved = TransferOnce(*request);
    if (moved > 0) {
      request->transferred += moved;
    } else if (moved == 0) {
      return NoProgress(*request);
    } else if (errno == EAGAIN) {
      BackOff(&attempt);
    } else if (errno != EINTR) {
      return TransferError(*request, errno);
    }
  }
  return Status::Ok();
}

void Finish(IoRequest* request, const Status& status) {
  request->finished_ns = MonotonicNs();
  request->done(request, status);
}

}  // namespace hetero
