// What every back end shares: the intrusive queue, one transfer on the calling thread, and the texts of errors.
//
// Ownership: queues and functions borrow the request; the caller keeps it alive until `done`.
// Thread-safety: IoQueue needs its owner's lock; the functions are pure in their request.
// Failure: a Status with operation, path, offset, length and errno.
#ifndef HETERO_IO_TRANSFER_H_
#define HETERO_IO_TRANSFER_H_

#include "io.h"

namespace hetero {

// First in, first out, through IoRequest::next.
class IoQueue {
 public:
  [[nodiscard]] bool empty() const { return head_ == nullptr; }

  void Push(IoRequest* request) {
    request->next = nullptr;
    (head_ == nullptr ? head_ : tail_->next) = request;
    tail_ = request;
  }

  // Null when empty.
  IoRequest* Pop() {
    IoRequest* request = head_;
    if (request != nullptr) head_ = request->next;
    return request;
  }

 private:
  IoRequest* head_ = nullptr;
  IoRequest* tail_ = nullptr;
};

// The Status of a transfer whose system call failed with errno `error`.
Status TransferError(const IoRequest& request, int error);
// A transfer call that moved nothing: a read past the end of the file, or a write that the file system gave up on.
Status NoProgress(const IoRequest& request);

// Whether what must come has come.
inline bool IsComplete(const IoRequest& request) {
  return request.transferred >= (request.needed > 0 ? request.needed : request.bytes);
}

// The whole transfer by pread/pwrite/fdatasync on the calling thread. Sets started_ns and transferred.
Status TransferBlocking(IoRequest* request);

// Sets finished_ns and calls `done`; the request may be gone afterwards.
void Finish(IoRequest* request, const Status& status);

}  // namespace hetero

#endif  // HETERO_IO_TRANSFER_H_
