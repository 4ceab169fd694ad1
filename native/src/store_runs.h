// Weights that are read in place: runs of files that belong to somebody else and are never written.
//
// Ownership: Runs owns its descriptors; a Block owns its Runs. Thread-safety: immutable after Open. Failure: Status with the
// file's name; a file that is not the one that is expected is ECORRUPT.
//
// [Note: Runs]
// A run may begin at any byte of its file, and a transfer without the page cache moves whole pages between page-aligned places.
// So a transfer reads the pages that a run lies in to a staging buffer, and the run is copied from there. Runs that follow each
// other in the file are read together, in whatever order they are in memory. Transfers are cut at pages, so only the ends of
// what is contiguous in the file cost bytes that nobody wants. Where a file system refuses such transfers they are exact.
#ifndef HETERO_STORE_RUNS_H_
#define HETERO_STORE_RUNS_H_

#include <stdint.h>

#include <memory>
#include <vector>

#include "hetero/api.h"
#include "status.h"
#include "store_file.h"
#include "store_layout.h"

namespace hetero {

// A stretch of one file that one transfer reads into staging.
struct RunSpan {
  int32_t file = 0;
  int64_t begin = 0;  // the transfer: whole pages where the file is read past the page cache
  int64_t end = 0;
  int64_t wanted_end = 0;  // the file may end behind it
  int64_t wanted = 0;      // bytes of runs
  int64_t staged = 0;      // where it starts in staging
};

// Bytes that go from staging to the weight memory.
struct RunPiece {
  int64_t offset = 0;   // in the weight memory
  int64_t staged = -1;  // -1: zeros, between two runs
  int64_t bytes = 0;
};

// What passes through one staging buffer.
struct RunUnit {
  std::vector<RunSpan> spans;
  std::vector<RunPiece> pieces;
};

class Runs {
 public:
  static Status Open(const Layout& layout, const hetero_run_file* files, int32_t num_files, const hetero_run* runs,
                     int32_t num_runs, bool direct_io, std::unique_ptr<Runs>* out);

  [[nodiscard]] const std::vector<RunUnit>& units() const { return units_; }
  [[nodiscard]] const File& file(int32_t index) const { return files_[static_cast<size_t>(index)].file; }
  [[nodiscard]] int64_t staged_bytes() const { return staged_bytes_; }
  // ECORRUPT if a file was written since it was opened.
  [[nodiscard]] Status CheckUnchanged() const;

 private:
  struct Source {
    File file;
    int64_t bytes = 0;
    int64_t mtime_ns = 0;
    int64_t alignment = 1;
  };

  Status OpenFiles(const hetero_run_file* files, int32_t num_files, bool direct_io);
  Status CheckRuns(const Layout& layout, const std::vector<hetero_run>& runs) const;
  void Pack(std::vector<hetero_run> runs);
  int64_t Add(const hetero_run& run, int64_t done, int64_t* used);
  void AddGaps(const Layout& layout, const std::vector<hetero_run>& runs);

  std::vector<Source> files_;
  std::vector<RunUnit> units_;
  int64_t staged_bytes_ = 0;
};

}  // namespace hetero

#endif  // HETERO_STORE_RUNS_H_
