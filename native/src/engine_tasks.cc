#include "engine_tasks.h"

#include <string.h>

#include <algorithm>

#include "memory.h"

namespace hetero {

namespace {

constexpr int64_t kFetchBytes = 4 << 20;  // one transfer of weights: several chunks, but no more than this unless one has more

Status NothingStored(const Block& block) {
  return Fail(HETERO_ESTATE, "block %d: nothing was stored yet; submit a store first, or recover the last commit", block.id());
}

}  // namespace

Overlap OverlapOf(const Layout& layout, int64_t chunk, int64_t offset, int64_t numel) {
  const int64_t start = layout.ChunkStart(chunk);
  return {std::max(offset, start), std::min(offset + numel, start + layout.ChunkElements(chunk))};
}

void AddWeights(Transfers* transfers, IoKind kind, const Block& block, int32_t slot, int64_t chunk, uint8_t* memory) {
  const Layout& layout = block.layout();
  AddTransfer(transfers, kind, block.file(slot), memory, RoundUp(layout.WeightsBytes(chunk), kPageBytes),
              layout.WeightsOffset(chunk));
}

void AddState(Transfers* transfers, IoKind kind, const Block& block, int32_t slot, int64_t chunk, uint8_t* memory) {
  AddTransfer(transfers, kind, block.file(slot), memory, block.layout().StateBytes(chunk), block.layout().StateOffset(chunk));
}

void AddRuns(Transfers* transfers, const Runs& runs, const RunUnit& unit, uint8_t* staging) {
  for (const RunSpan& span : unit.spans) {
    AddTransfer(transfers, IoKind::kRead, runs.file(span.file), staging + span.staged, span.end - span.begin, span.begin);
    transfers->back()->needed = span.wanted_end - span.begin;
    transfers->back()->beyond = span.end - span.begin - span.wanted;
  }
}

Status CheckStagedState(const Block& block, int64_t chunk, const uint8_t* image) {
  const Rewrite& rewrite = block.newest().rewrite;
  return CheckState(block.layout(), rewrite, chunk, block.checks_digests(), image, block.file(rewrite.slot).path());
}

Status CheckStagedWeights(const Block& block, int64_t chunk, const uint8_t* weights) {
  const SlotContent& source = block.newest();
  if (!block.checks_digests() || source.weight_digests.empty()) return Status::Ok();
  return CheckWeights(block.layout(), chunk, source.weight_digests[static_cast<size_t>(chunk)], weights,
                      block.file(source.rewrite.slot).path());
}

Status FetchTask::Admit() {
  return block()->layout().weights_in_file() && !block()->content_promised ? NothingStored(*block()) : Status::Ok();
}

Status FetchTask::Start(int64_t* num_units) {
  const Layout& layout = block()->layout();
  *num_units = 0;
  if (!layout.weights_in_file()) return Status::Ok();
  if (!block()->stored()) return NothingStored(*block());
  if (const Runs* runs = block()->runs()) {
    *num_units = static_cast<int64_t>(runs->units().size());
    return runs->CheckUnchanged();
  }
  check_ = block()->checks_digests() && !block()->newest().weight_digests.empty();
  chunks_per_unit_ = std::max<int64_t>(1, kFetchBytes / layout.WeightsBytes(0));
  *num_units = (layout.num_chunks() + chunks_per_unit_ - 1) / chunks_per_unit_;
  return Status::Ok();
}

int64_t FetchTask::LastChunk(const Unit& unit) const {
  return std::min((unit.index + 1) * chunks_per_unit_, block()->layout().num_chunks()) - 1;
}

void FetchTask::Reads(Unit* unit, Transfers* transfers) {
  if (const Runs* runs = block()->runs())
    return AddRuns(transfers, *runs, runs->units()[static_cast<size_t>(unit->index)], unit->staging);
  const Layout& layout = block()->layout();
  const int64_t first = unit->index * chunks_per_unit_;
  const int64_t last = LastChunk(*unit);
  const int64_t offset = layout.WeightsOffset(first);
  const int64_t bytes = RoundUp(layout.WeightsOffset(last) + layout.WeightsBytes(last) - offset, kPageBytes);
  AddTransfer(transfers, IoKind::kRead, block()->file(block()->newest().rewrite.slot),
              block()->weights() + layout.ChunkStart(first) * layout.weight_bytes_per_element(), bytes, offset);
}

Status FetchTask::Compute(Unit* unit) {
  if (const Runs* runs = block()->runs()) {
    for (const RunPiece& piece : runs->units()[static_cast<size_t>(unit->index)].pieces) {
      uint8_t* out = block()->weights() + piece.offset;
      if (piece.staged < 0) {
        memset(out, 0, static_cast<size_t>(piece.bytes));
      } else {
        memcpy(out, unit->staging + piece.staged, static_cast<size_t>(piece.bytes));
      }
    }
    return Status::Ok();
  }
  const Layout& layout = block()->layout();
  for (int64_t chunk = unit->index * chunks_per_unit_; chunk <= LastChunk(*unit); ++chunk) {
    const uint8_t* weights = block()->weights() + layout.ChunkStart(chunk) * layout.weight_bytes_per_element();
    HETERO_RETURN_IF_ERROR(CheckStagedWeights(*block(), chunk, weights));
  }
  return Status::Ok();
}

Status ReleaseTask::Admit() {
  if (!block()->layout().weights_in_file())
    return Fail(HETERO_EINVAL, "block %d keeps its weights in RAM only; releasing them would lose them", block()->id());
  return block()->content_promised ? Status::Ok() : NothingStored(*block());
}

Status ReleaseTask::Start(int64_t* num_units) {
  *num_units = 1;
  return Status::Ok();
}

Status ReleaseTask::Compute(Unit*) { return Drop(block()->weights(), block()->layout().weights_padded_bytes()); }

ReadTask::ReadTask(Block* block, std::vector<hetero_patch> patches) : Task(block), patches_(std::move(patches)) {
  for (const hetero_patch& patch : patches_) {
    weights_from_file_ |= patch.array < 0 && block->layout().weights_in_file();
    state_from_file_ |= patch.array >= 0 && block->layout().state_in_file();
  }
}

Status ReadTask::Admit() { return staged() && !block()->content_promised ? NothingStored(*block()) : Status::Ok(); }

Status ReadTask::Start(int64_t* num_units) {
  if (staged() && !block()->stored()) return NothingStored(*block());
  if (const Runs* runs = block()->runs()) {
    const auto wanted = [this](const RunPiece& piece) {
      return std::any_of(patches_.begin(), patches_.end(), [&piece](const hetero_patch& patch) {
        return piece.offset < patch.offset + patch.numel && patch.offset < piece.offset + piece.bytes;
      });
    };
    for (size_t i = 0; i < runs->units().size(); ++i) {
      const std::vector<RunPiece>& pieces = runs->units()[i].pieces;
      if (std::any_of(pieces.begin(), pieces.end(), wanted)) chunks_.push_back(static_cast<int64_t>(i));
    }
    *num_units = static_cast<int64_t>(chunks_.size());
    return runs->CheckUnchanged();
  }
  state_is_zero_ = state_from_file_ && !block()->newest().has_state;
  const int64_t chunk_elements = block()->layout().geometry().chunk_elements;
  for (const hetero_patch& patch : patches_) {
    for (int64_t chunk = patch.offset / chunk_elements; chunk <= (patch.offset + patch.numel - 1) / chunk_elements; ++chunk)
      chunks_.push_back(chunk);
  }
  std::sort(chunks_.begin(), chunks_.end());
  chunks_.erase(std::unique(chunks_.begin(), chunks_.end()), chunks_.end());
  *num_units = static_cast<int64_t>(chunks_.size());
  return Status::Ok();
}

void ReadTask::Reads(Unit* unit, Transfers* transfers) {
  const int64_t chunk = chunks_[static_cast<size_t>(unit->index)];
  if (const Runs* runs = block()->runs())
    return AddRuns(transfers, *runs, runs->units()[static_cast<size_t>(chunk)], unit->staging);
  const int32_t slot = block()->newest().rewrite.slot;
  if (weights_from_file_) AddWeights(transfers, IoKind::kRead, *block(), slot, chunk, unit->staging);
  if (state_from_file_ && !state_is_zero_)
    AddState(transfers, IoKind::kRead, *block(), slot, chunk, unit->staging + block()->layout().staged_state_offset());
}

// Elements are bytes here.
void ReadTask::CopyRuns(const Unit& unit) const {
  const int64_t index = chunks_[static_cast<size_t>(unit.index)];
  for (const RunPiece& piece : block()->runs()->units()[static_cast<size_t>(index)].pieces) {
    for (const hetero_patch& patch : patches_) {
      const int64_t begin = std::max(piece.offset, patch.offset);
      const int64_t end = std::min(piece.offset + piece.bytes, patch.offset + patch.numel);
      if (begin >= end) continue;
      auto* out = static_cast<uint8_t*>(const_cast<void*>(patch.data)) + (begin - patch.offset);
      const auto bytes = static_cast<size_t>(end - begin);
      if (piece.staged < 0) {
        memset(out, 0, bytes);
      } else {
        memcpy(out, unit.staging + piece.staged + (begin - piece.offset), bytes);
      }
    }
  }
}

Status ReadTask::Compute(Unit* unit) {
  if (block()->runs() != nullptr) {
    CopyRuns(*unit);
    return Status::Ok();
  }
  const Layout& layout = block()->layout();
  const int64_t chunk = chunks_[static_cast<size_t>(unit->index)];
  const uint8_t* image = unit->staging + layout.staged_state_offset();
  if (weights_from_file_) HETERO_RETURN_IF_ERROR(CheckStagedWeights(*block(), chunk, unit->staging));
  if (state_from_file_ && !state_is_zero_) HETERO_RETURN_IF_ERROR(CheckStagedState(*block(), chunk, image));
  for (const hetero_patch& patch : patches_) {
    const Overlap part = OverlapOf(layout, chunk, patch.offset, patch.numel);
    if (part.begin >= part.end) continue;
    const int64_t width = patch.array < 0 ? layout.weight_bytes_per_element() : static_cast<int64_t>(sizeof(float));
    auto* out = static_cast<uint8_t*>(const_cast<void*>(patch.data)) + (part.begin - patch.offset) * width;
    const auto bytes = static_cast<size_t>((part.end - part.begin) * width);
    const int64_t local = (part.begin - layout.ChunkStart(chunk)) * width;
    if (patch.array < 0) {
      const uint8_t* weights = weights_from_file_ ? unit->staging + local : block()->weights() + part.begin * width;
      memcpy(out, weights, bytes);
    } else if (!state_from_file_) {
      memcpy(out, block()->state(patch.array) + part.begin, bytes);
    } else if (state_is_zero_) {
      memset(out, 0, bytes);
    } else {
      memcpy(out, image + layout.ArrayOffset(chunk, patch.array) + local, bytes);
    }
  }
  return Status::Ok();
}

Status CommitTask::Admit() {
  for (const Block* block : store_->blocks()) {
    if (block != nullptr && block->speculation != 0)
      return Fail(HETERO_ESTATE, "block %d has an update that awaits its verdict; keep or discard it before the commit",
                  block->id());
    if (block != nullptr && block->retired) retired_.push_back(block->id());
  }
  return Status::Ok();
}

Status CommitTask::Start(int64_t* num_units) {
  *num_units = 1;
  // What lies behind the record's own end in its place of the ring means nothing.
  num_bytes_ = RecordBytes(store_->options().num_blocks, static_cast<int32_t>(user_.size()));
  return AllocatePages(num_bytes_, &bytes_);
}

void CommitTask::Reads(Unit*, Transfers* transfers) {
  if (store_->options().durability != HETERO_DURABILITY_POWER) return;
  for (const Block* block : store_->blocks()) {
    for (int32_t slot = 0; block != nullptr && slot < 2; ++slot) {
      if (block->unsynced[slot]) AddTransfer(transfers, IoKind::kDataSync, block->file(slot), nullptr, 0, 0);
    }
  }
}

Status CommitTask::Compute(Unit*) {
  record_.uuid = store_->uuid();
  record_.sequence = store_->committed().sequence + 1;
  record_.step = step_;
  record_.user = std::move(user_);
  record_.blocks.resize(store_->blocks().size());
  // A block that is not open keeps what the last record says of it.
  if (store_->has_record()) record_.blocks = store_->committed().blocks;
  for (const Block* block : store_->blocks()) {
    if (block == nullptr) continue;
    const SlotContent& newest = block->newest();
    record_.blocks[static_cast<size_t>(block->id())] = {newest.rewrite.step, newest.rewrite.write_id, newest.rewrite.slot,
                                                        newest.has_state ? 1 : 0};
  }
  for (const int32_t id : retired_) record_.blocks[static_cast<size_t>(id)] = CommittedBlock{};
  EncodeRecord(record_, num_bytes_, bytes_.get());
  return Status::Ok();
}

void CommitTask::Writes(Unit*, Transfers* transfers) {
  if (store_->options().durability == HETERO_DURABILITY_NONE) return;
  const int64_t place = record_.sequence % kRingRecords * store_->record_bytes();
  AddTransfer(transfers, IoKind::kWrite, store_->ring(), bytes_.get(), num_bytes_, place);
  transfers->back()->dsync = store_->options().durability == HETERO_DURABILITY_POWER;
}

void CommitTask::Finish() {
  for (Block* block : store_->blocks()) {
    if (block != nullptr) block->unsynced[0] = block->unsynced[1] = false;
  }
  store_->SetCommitted(std::move(record_));
}

}  // namespace hetero
