#include "engine_rewrite.h"

#include <string.h>

#include <algorithm>
#include <utility>

#include "kernels.h"

namespace hetero {

namespace {

constexpr int64_t kTorchVector = 8;  // a tensor's last numel % 8 elements are torch's scalar tail

}  // namespace

RewriteTask::RewriteTask(Block* block, bool weights_from_memory)
    : Task(block),
      weights_staged_(block->layout().weights_in_file() && !weights_from_memory),
      state_staged_(block->layout().state_in_file()) {}

Status RewriteTask::Admit() {
  if (block()->runs() != nullptr)
    return Fail(HETERO_EINVAL, "block %d is read in place from files that are never written", block()->id());
  if (block()->speculation != 0)
    return Fail(HETERO_ESTATE, "block %d has an update that awaits its verdict; keep or discard it first", block()->id());
  return Status::Ok();
}

Status RewriteTask::Start(int64_t* num_units) {
  const Layout& layout = block()->layout();
  *num_units = layout.num_chunks();
  has_state_ = state_staged_ && block()->stored() && block()->newest().has_state;
  if (!layout.has_file()) return Status::Ok();
  target_ = block()->store()->NextRewrite(block()->id(), block()->target_slot(write_edges > 0), 0);
  if (layout.weights_in_file() && block()->store()->writes_digests())
    weight_digests_.resize(static_cast<size_t>(layout.num_chunks()));
  return AllocatePages(layout.head_bytes(), &head_);
}

void RewriteTask::ReadWeights(Unit* unit, Transfers* transfers) {
  unit->weights_read = true;
  AddWeights(transfers, IoKind::kRead, *block(), block()->newest().rewrite.slot, unit->index, unit->staging);
}

void RewriteTask::Reads(Unit* unit, Transfers* transfers) {
  if (weights_staged_ && block()->stored() && NeedsWeights(unit->index)) ReadWeights(unit, transfers);
  if (has_state_) {
    AddState(transfers, IoKind::kRead, *block(), block()->newest().rewrite.slot, unit->index,
             unit->staging + block()->layout().staged_state_offset());
  }
}

uint8_t* RewriteTask::WeightsOf(const Unit& unit) const {
  if (weights_staged_) return unit.staging;
  const Layout& layout = block()->layout();
  return block()->weights() + layout.ChunkStart(unit.index) * layout.weight_bytes_per_element();
}

float* RewriteTask::StateOf(const Unit& unit, int32_t array) const {
  const Layout& layout = block()->layout();
  if (!state_staged_) return block()->state(array) + layout.ChunkStart(unit.index);
  return reinterpret_cast<float*>(unit.staging + layout.staged_state_offset() + layout.ArrayOffset(unit.index, array));
}

// Checks what was read; what was never written is zero.
Status RewriteTask::LoadStaged(Unit* unit) {
  const Layout& layout = block()->layout();
  if (unit->weights_read) {
    HETERO_RETURN_IF_ERROR(CheckStagedWeights(*block(), unit->index, unit->staging));
  } else if (weights_staged_) {
    memset(unit->staging, 0, static_cast<size_t>(RoundUp(layout.WeightsBytes(unit->index), kPageBytes)));
  }
  if (!state_staged_) return Status::Ok();
  uint8_t* image = unit->staging + layout.staged_state_offset();
  if (has_state_) return CheckStagedState(*block(), unit->index, image);
  memset(image, 0, static_cast<size_t>(layout.StateBytes(unit->index)));
  return Status::Ok();
}

Status RewriteTask::Compute(Unit* unit) {
  if (staged()) HETERO_RETURN_IF_ERROR(LoadStaged(unit));
  Change(unit);
  const Layout& layout = block()->layout();
  if (!layout.has_file()) return Status::Ok();
  Rewrite stamp = target_;
  stamp.step = step_;
  const bool digests = block()->store()->writes_digests();
  if (state_staged_) SealState(layout, stamp, unit->index, digests, unit->staging + layout.staged_state_offset());
  if (!weight_digests_.empty())
    weight_digests_[static_cast<size_t>(unit->index)] = DigestOf(WeightsOf(*unit), layout.WeightsBytes(unit->index));
  return Status::Ok();
}

Status RewriteTask::BeginWrites() {
  const Layout& layout = block()->layout();
  if (!layout.has_file()) return Status::Ok();
  // A slot that is written again before its commit has no other names, and chunks of it are still to be read.
  const bool again = layout.geometry().num_slots == 2 && target_.slot == block()->newest().rewrite.slot;
  return again ? Status::Ok() : block()->Unlink(target_.slot);
}

void RewriteTask::Writes(Unit* unit, Transfers* transfers) {
  const Layout& layout = block()->layout();
  if (state_staged_)
    AddState(transfers, IoKind::kWrite, *block(), target_.slot, unit->index, unit->staging + layout.staged_state_offset());
  if (layout.weights_in_file()) AddWeights(transfers, IoKind::kWrite, *block(), target_.slot, unit->index, WeightsOf(*unit));
}

void RewriteTask::Epilogue(Transfers* transfers) {
  const Layout& layout = block()->layout();
  if (!layout.has_file()) return;
  target_.step = step_;
  SealHead(layout, target_, weight_digests_, head_.get());
  AddTransfer(transfers, IoKind::kWrite, block()->file(target_.slot), head_.get(), layout.head_bytes(), 0);
}

void RewriteTask::Finish() {
  SlotContent content;
  content.rewrite = target_;
  content.rewrite.step = step_;
  if (block()->layout().has_file()) {
    block()->unsynced[target_.slot] = true;
  } else {
    content.rewrite.slot = 0;
  }
  content.has_state = state_staged_;
  content.weight_digests = std::move(weight_digests_);
  if (speculative_) {
    block()->Replace(ticket, std::move(content));
  } else {
    block()->SetNewest(std::move(content));
  }
}

UpdateTask::UpdateTask(Block* block, bool weights_resident, bool speculative) : RewriteTask(block, weights_resident) {
  armed = false;
  speculative_ = speculative;
}

Status UpdateTask::Admit() {
  const Layout& layout = block()->layout();
  const int32_t wanted = layout.has_master() ? 3 : 2;
  if (layout.geometry().weight_dtype == HETERO_U8 || layout.geometry().num_state != wanted)
    return Fail(HETERO_EINVAL,
                "block %d has %d state arrays and weights of dtype %d; Adam needs 2 with F32, 3 with BF16 or F16 (the fp32 "
                "master first)",
                block()->id(), layout.geometry().num_state, layout.geometry().weight_dtype);
  if (weights_staged_ && !block()->content_promised)
    return Fail(HETERO_ESTATE, "block %d: nothing was stored yet; submit a store first, or update with weights_resident 1",
                block()->id());
  if (layout.has_master() && state_staged_ && !block()->state_promised)
    return Fail(HETERO_ESTATE,
                "block %d: its fp32 master (state array 0) was never stored; submit a store with patches of array 0 first",
                block()->id());
  HETERO_RETURN_IF_ERROR(RewriteTask::Admit());
  if (speculative_ && block()->rewrites > 0)
    return Fail(HETERO_ESTATE,
                "block %d was rewritten since the last commit; another update of it could not be taken back. Submit a commit "
                "first, or an update that needs no verdict",
                block()->id());
  if (speculative_) {
    HETERO_RETURN_IF_ERROR(block()->ReserveSpare());
    block()->content_promised_before = block()->content_promised;
    block()->state_promised_before = block()->state_promised;
  }
  block()->content_promised |= layout.has_file();
  block()->state_promised |= state_staged_;
  return Status::Ok();
}

Status UpdateTask::Start(int64_t* num_units) {
  if (speculative_) block()->BeginSpare(ticket);
  return RewriteTask::Start(num_units);
}

Status UpdateTask::Arm(Gradients gradients) {
  step_ = gradients.step;
  gradients_ = std::move(gradients);
  return Status::Ok();
}

std::vector<hetero_segment>::const_iterator UpdateTask::FirstSegment(int64_t begin) const {
  return std::partition_point(gradients_.segments.begin(), gradients_.segments.end(),
                              [begin](const hetero_segment& s) { return s.offset + s.numel <= begin; });
}

// With an fp32 master the old 16-bit weights matter only where no segment gives new ones. Known once the update is armed.
bool UpdateTask::NeedsWeights(int64_t chunk) const {
  const Layout& layout = block()->layout();
  if (!layout.has_master()) return true;
  if (!armed) return false;
  int64_t covered = layout.ChunkStart(chunk);
  const int64_t end = covered + layout.ChunkElements(chunk);
  for (auto segment = FirstSegment(covered); segment != gradients_.segments.end() && covered < end; ++segment) {
    if (segment->offset > covered) return true;
    covered = segment->offset + segment->numel;
  }
  return covered < end;
}

void UpdateTask::LateReads(Unit* unit, Transfers* transfers) {
  if (weights_staged_ && !unit->weights_read && NeedsWeights(unit->index)) ReadWeights(unit, transfers);
}

void UpdateTask::Change(Unit* unit) {
  if (speculative_) block()->SaveChunk(unit->index);
  const Layout& layout = block()->layout();
  const int64_t start = layout.ChunkStart(unit->index);
  const bool master = layout.has_master();
  uint8_t* weights = WeightsOf(*unit);
  float* param = master ? StateOf(*unit, 0) : reinterpret_cast<float*>(weights);
  float* exp_avg = StateOf(*unit, master ? 1 : 0);
  float* exp_avg_sq = StateOf(*unit, master ? 2 : 1);
  for (auto segment = FirstSegment(start); segment != gradients_.segments.end(); ++segment) {
    const Overlap part = OverlapOf(layout, unit->index, segment->offset, segment->numel);
    if (part.begin >= part.end) break;
    const int64_t local = part.begin - start;
    AdamRun run;
    run.param = param + local;
    run.exp_avg = exp_avg + local;
    run.exp_avg_sq = exp_avg_sq + local;
    run.grad = static_cast<const uint8_t*>(segment->grad) + (part.begin - segment->offset) * DtypeBytes(segment->grad_dtype);
    run.grad_dtype = segment->grad_dtype;
    run.copy = master ? weights + local * layout.weight_bytes_per_element() : nullptr;
    run.copy_dtype = layout.geometry().weight_dtype;
    run.numel = part.end - part.begin;
    if (part.end == segment->offset + segment->numel) run.tail = segment->numel % kTorchVector;
    run.grad_scale = gradients_.scale;
    UpdateAdam(run, gradients_.hypers[static_cast<size_t>(segment->hyper)]);
  }
}

Status DiscardTask::Admit() {
  Block* b = block();
  if (b->speculation == 0) return Fail(HETERO_ESTATE, "block %d has no update that awaits its verdict", b->id());
  update_ = std::exchange(b->speculation, 0);
  b->ForgetRewrite(update_);
  b->content_promised = b->content_promised_before;
  b->state_promised = b->state_promised_before;
  return Status::Ok();
}

Status DiscardTask::Start(int64_t* num_units) {
  *num_units = block()->HasSpare(update_) ? block()->layout().num_chunks() : 0;
  return Status::Ok();
}

Status DiscardTask::Compute(Unit* unit) {
  block()->RestoreChunk(unit->index);
  return Status::Ok();
}

void DiscardTask::Finish() { block()->TakeBack(update_); }

StoreTask::StoreTask(Block* block, std::vector<hetero_patch> patches, bool weights_from_memory, int64_t step)
    : RewriteTask(block, weights_from_memory), patches_(std::move(patches)) {
  step_ = step;
  // Step 0 without state: nothing is written, it reads as zeros.
  if (step == 0 && !Patches([](int32_t array) { return array >= 0; })) state_staged_ = false;
}

bool StoreTask::Patches(bool (*wanted)(int32_t array)) const {
  return std::any_of(patches_.begin(), patches_.end(), [wanted](const hetero_patch& patch) { return wanted(patch.array); });
}

Status StoreTask::Admit() {
  HETERO_RETURN_IF_ERROR(RewriteTask::Admit());
  block()->content_promised |= rewrites();
  const bool gives_master = Patches([](int32_t array) { return array == 0; });
  const bool knows_master = !block()->layout().has_master() || block()->state_promised || gives_master;
  block()->state_promised = state_staged_ && knows_master;
  return Status::Ok();
}

bool StoreTask::NeedsWeights(int64_t) const { return true; }

void StoreTask::Change(Unit* unit) {
  const Layout& layout = block()->layout();
  for (const hetero_patch& patch : patches_) {
    const Overlap part = OverlapOf(layout, unit->index, patch.offset, patch.numel);
    if (part.begin >= part.end) continue;
    const int64_t width = patch.array < 0 ? layout.weight_bytes_per_element() : static_cast<int64_t>(sizeof(float));
    uint8_t* array = patch.array < 0 ? WeightsOf(*unit) : reinterpret_cast<uint8_t*>(StateOf(*unit, patch.array));
    memcpy(array + (part.begin - layout.ChunkStart(unit->index)) * width,
           static_cast<const uint8_t*>(patch.data) + (part.begin - patch.offset) * width,
           static_cast<size_t>((part.end - part.begin) * width));
  }
}

}  // namespace hetero
