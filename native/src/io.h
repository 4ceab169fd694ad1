// Transfers between files and memory: one contract, several back ends, chosen at run time.
//
// Ownership: the caller owns requests, buffers and descriptors and keeps them alive until `done` has been called.
// Thread-safety: Submit may be called from any thread, also from inside `done`. `done` runs on a back end's thread, without
// any lock of the back end held, once per request.
// Failure: short transfers are continued and EINTR/EAGAIN retried by the back end; every other error, and a read past the end
// of the file, reaches `done` as a Status with operation, path, offset, length and errno. Nothing is retried after a real
// error.
#ifndef HETERO_IO_H_
#define HETERO_IO_H_

#include <stdint.h>

#include <memory>

#include "hetero/api.h"
#include "status.h"

namespace hetero {

enum class IoKind : uint8_t { kRead, kWrite, kDataSync };

struct IoRequest {
  IoKind kind = IoKind::kRead;
  int fd = -1;
  int32_t disk = 0;       // below the back end's number of disks
  const char* path = "";  // for messages
  void* buffer = nullptr;
  int64_t bytes = 0;
  int64_t needed = 0;  // reads: so many bytes must come, the file may end behind them; 0: all
  int64_t offset = 0;
  bool dsync = false;  // writes: durable when done (RWF_DSYNC)
  void (*done)(IoRequest* request, const Status& status) = nullptr;
  void* context = nullptr;    // for `done`
  int64_t started_ns = 0;     // set by the back end: CLOCK_MONOTONIC when the transfer was handed to the system
  int64_t finished_ns = 0;    // and when it ended
  IoRequest* next = nullptr;  // the back end's intrusive queue
  int64_t transferred = 0;    // the back end's
};

class IoBackend {
 public:
  virtual ~IoBackend() = default;  // waits for what is in flight; the owner has nothing queued any more
  virtual void Submit(IoRequest* request) = 0;
  virtual int32_t kind() const = 0;  // HETERO_IO_*
};

// The back end that options.io_backend asks for. AUTO: io_uring where the kernel allows it, else the pool.
// Queue depth, threads and rates are those of each disk; no disk waits for another.
Status MakeIoBackend(const hetero_engine_options& options, std::unique_ptr<IoBackend>* out, int32_t num_disks = 1);

}  // namespace hetero

#endif  // HETERO_IO_H_
