// Duplex devices made of sleep: real transfers whose duration is bytes / rate, one clock per disk and direction.
//
// For tests and benchmarks: a machine with a half-duplex disk cannot show that reads, kernels and writes overlap.
// Reads never wait for writes nor the other way round; within a direction transfers take their turns on a serial clock. A
// data sync belongs to the writes: it ends after every write submitted before it.
// Ownership, thread-safety, failure: as io.h says; one thread per disk and direction.
#ifndef HETERO_IO_SYNTHETIC_H_
#define HETERO_IO_SYNTHETIC_H_

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "io_transfer.h"

namespace hetero {

class IoSynthetic final : public IoBackend {
 public:
  static Status Create(const hetero_engine_options& options, int32_t num_disks, std::unique_ptr<IoBackend>* out);
  ~IoSynthetic() override;
  IoSynthetic(const IoSynthetic&) = delete;
  IoSynthetic& operator=(const IoSynthetic&) = delete;

  void Submit(IoRequest* request) override;
  [[nodiscard]] int32_t kind() const override { return HETERO_IO_SYNTHETIC; }

 private:
  struct Direction {
    explicit Direction(double rate) : bytes_per_s(rate) {}
    const double bytes_per_s;
    IoQueue queue;       // guarded by mutex_
    double free_ns = 0;  // its thread's: when the device is done with what it was given
    std::condition_variable arrived;
    std::thread thread;
  };

  IoSynthetic(const hetero_engine_options& options, int32_t num_disks);
  void Run(Direction* direction);
  static Status Transfer(Direction* direction, IoRequest* request);

  std::mutex mutex_;
  std::condition_variable idle_;
  int64_t unfinished_ = 0;       // guarded by mutex_
  bool stopping_ = false;        // guarded by mutex_
  std::deque<Direction> reads_;  // by disk
  std::deque<Direction> writes_;
};

}  // namespace hetero

#endif  // HETERO_IO_SYNTHETIC_H_
