#include "store_runs.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace hetero {

namespace {

Status CheckIdentity(const File& file, int64_t bytes, int64_t mtime_ns) {
  struct stat info{};
  if (fstat(file.fd(), &info) != 0) return FailErrno(file.path() + ": fstat", errno);
  if (!S_ISREG(info.st_mode)) return Fail(HETERO_EINVAL, "%s is not a regular file", file.path().c_str());
  const int64_t modified_ns = static_cast<int64_t>(info.st_mtim.tv_sec) * 1'000'000'000 + info.st_mtim.tv_nsec;
  if (info.st_size == bytes && modified_ns == mtime_ns) return Status::Ok();
  return Fail(
      HETERO_ECORRUPT,
      "%s, from which weights are read in place, has changed: it has %lld bytes, modified at %lld ns; expected %lld bytes, "
      "modified at %lld ns. Bring the file back as it was",
      file.path().c_str(), static_cast<long long>(info.st_size), static_cast<long long>(modified_ns),
      static_cast<long long>(bytes), static_cast<long long>(mtime_ns));
}

int OpenOnce(const char* path, int flags) {
  int fd = -1;
  do {
    fd = open(path, O_RDONLY | O_CLOEXEC | flags);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

}  // namespace

Status Runs::Open(const Layout& layout, const hetero_run_file* files, int32_t num_files, const hetero_run* runs,
                  int32_t num_runs, bool direct_io, std::unique_ptr<Runs>* out) {
  const hetero_block_geometry& g = layout.geometry();
  if (g.weight_dtype != HETERO_U8 || g.num_slots != 1 || !layout.weights_in_file())
    return Fail(HETERO_EINVAL, "block %d: weights that are read in place are U8, on disk, with 1 slot", g.id);
  if (num_files < 0 || num_runs < 0 || (num_files > 0 && files == nullptr) || (num_runs > 0 && runs == nullptr))
    return Fail(HETERO_EINVAL, "block %d: num_files is %d and num_runs %d; allowed: as many as are passed", g.id, num_files,
                num_runs);
  std::unique_ptr<Runs> found(new Runs);
  const std::vector<hetero_run> wanted(runs, runs + num_runs);
  HETERO_RETURN_IF_ERROR(found->OpenFiles(files, num_files, direct_io));
  HETERO_RETURN_IF_ERROR(found->CheckRuns(layout, wanted));
  // A byte may lie in two pages' reach: the least that holds any run.
  found->staged_bytes_ = std::max(layout.staged_bytes(), 2 * kPageBytes);
  found->Pack(wanted);
  found->AddGaps(layout, wanted);
  *out = std::move(found);
  return Status::Ok();
}

Status Runs::OpenFiles(const hetero_run_file* files, int32_t num_files, bool direct_io) {
  for (int32_t i = 0; i < num_files; ++i) {
    const char* path = files[i].path;
    if (path == nullptr || path[0] != '/') return Fail(HETERO_EINVAL, "files[%d].path is not absolute", i);
    Source source;
    int fd = direct_io ? OpenOnce(path, O_DIRECT) : -1;
    source.alignment = fd >= 0 ? kPageBytes : 1;
    if (fd < 0 && (!direct_io || errno == EINVAL)) fd = OpenOnce(path, 0);
    if (fd < 0 && (errno == ENOENT || errno == ENOTDIR))
      return Fail(HETERO_ECORRUPT, "%s, from which weights are read in place, is gone. Bring the file back", path);
    if (fd < 0) return FailErrno(std::string(path) + ": open", errno);
    source.file = File(fd, path);
    source.bytes = files[i].bytes;
    source.mtime_ns = files[i].mtime_ns;
    HETERO_RETURN_IF_ERROR(CheckIdentity(source.file, source.bytes, source.mtime_ns));
    files_.push_back(std::move(source));
  }
  return Status::Ok();
}

Status Runs::CheckRuns(const Layout& layout, const std::vector<hetero_run>& runs) const {
  int64_t end = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    const hetero_run& run = runs[i];
    const bool in_block = run.bytes > 0 && run.offset >= end && run.bytes <= layout.geometry().num_elements - run.offset;
    if (!in_block || run.file < 0 || static_cast<size_t>(run.file) >= files_.size())
      return Fail(HETERO_EINVAL, "block %d: runs[%zu] is empty, leaves the block or its files, or is not sorted by offset",
                  layout.geometry().id, i);
    const Source& source = files_[static_cast<size_t>(run.file)];
    if (run.file_offset < 0 || run.bytes > source.bytes - run.file_offset)
      return Fail(HETERO_EINVAL, "block %d: runs[%zu] of %lld bytes at %lld leaves %s", layout.geometry().id, i,
                  static_cast<long long>(run.bytes), static_cast<long long>(run.file_offset), source.file.path().c_str());
    end = run.offset + run.bytes;
  }
  return Status::Ok();
}

void Runs::Pack(std::vector<hetero_run> runs) {
  std::sort(runs.begin(), runs.end(), [](const hetero_run& a, const hetero_run& b) {
    return std::tie(a.file, a.file_offset) < std::tie(b.file, b.file_offset);
  });
  units_.emplace_back();
  int64_t used = 0;
  for (const hetero_run& run : runs) {
    for (int64_t done = 0; done < run.bytes;) {
      const int64_t added = Add(run, done, &used);
      done += added;
      if (added > 0) continue;
      units_.emplace_back();
      used = 0;
    }
  }
}

// Adds what has room in the last unit; returns how many bytes.
int64_t Runs::Add(const hetero_run& run, int64_t done, int64_t* used) {
  RunUnit& unit = units_.back();
  const int64_t at = run.file_offset + done;
  const int64_t alignment = files_[static_cast<size_t>(run.file)].alignment;
  const bool goes_on = !unit.spans.empty() && unit.spans.back().file == run.file && at >= unit.spans.back().wanted_end &&
                       at <= unit.spans.back().end;
  if (!goes_on) {
    const int64_t begin = at / alignment * alignment;
    if (begin + staged_bytes_ - *used <= at) return 0;
    unit.spans.push_back({run.file, begin, begin, at, 0, *used});
  }
  RunSpan& span = unit.spans.back();
  const int64_t bytes = std::min(run.bytes - done, span.end + staged_bytes_ - *used - at);
  if (bytes <= 0) return 0;
  *used -= span.end - span.begin;
  span.wanted_end = at + bytes;
  span.end = std::max(span.end, RoundUp(span.wanted_end, alignment));
  span.wanted += bytes;
  *used += span.end - span.begin;
  unit.pieces.push_back({run.offset + done, span.staged + at - span.begin, bytes});
  return bytes;
}

void Runs::AddGaps(const Layout& layout, const std::vector<hetero_run>& runs) {
  int64_t end = 0;
  std::vector<RunPiece>& pieces = units_.front().pieces;
  for (const hetero_run& run : runs) {
    if (run.offset > end) pieces.push_back({end, -1, run.offset - end});
    end = run.offset + run.bytes;
  }
  if (layout.geometry().num_elements > end) pieces.push_back({end, -1, layout.geometry().num_elements - end});
}

Status Runs::CheckUnchanged() const {
  for (const Source& source : files_) HETERO_RETURN_IF_ERROR(CheckIdentity(source.file, source.bytes, source.mtime_ns));
  return Status::Ok();
}

}  // namespace hetero
