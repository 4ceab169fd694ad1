#include "io.h"

#include "io_pool.h"
#include "io_synthetic.h"
#include "io_uring.h"

namespace hetero {

namespace {

Status Validate(const hetero_engine_options& options) {
  if (options.io_threads < 1 || options.io_threads > 256) {
    return Fail(HETERO_EINVAL, "io_threads is %d; allowed: 1 to 256", options.io_threads);
  }
  if (options.queue_depth < 1 || options.queue_depth > 1024) {
    return Fail(HETERO_EINVAL, "queue_depth is %d; allowed: 1 to 1024", options.queue_depth);
  }
  return Status::Ok();
}

}  // namespace

Status MakeIoBackend(const hetero_engine_options& options, std::unique_ptr<IoBackend>* out, int32_t num_disks) {
  HETERO_RETURN_IF_ERROR(Validate(options));
  switch (options.io_backend) {
    case HETERO_IO_AUTO: {
      const Status status = IoUring::Create(options, num_disks, out);
      return status.code() == HETERO_EUNSUPPORTED ? IoPool::Create(options, num_disks, out) : status;
    }
    case HETERO_IO_URING:
      return IoUring::Create(options, num_disks, out);
    case HETERO_IO_POOL:
      return IoPool::Create(options, num_disks, out);
    case HETERO_IO_SYNTHETIC:
      return IoSynthetic::Create(options, num_disks, out);
    default:
      return Fail(HETERO_EINVAL, "io_backend is %d; allowed: 0 (auto), 1 (uring), 2 (pool), 3 (synthetic)", options.io_backend);
  }
}

}  // namespace hetero
