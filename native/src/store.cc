#include "store.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include <utility>

#include "memory.h"

namespace hetero {

namespace {

constexpr int32_t kMaxBlocks = 1 << 20;
constexpr int32_t kMaxUserBytes = 1 << 26;

Status CheckOptions(const hetero_store_options& o) {
  if (o.durability < HETERO_DURABILITY_NONE || o.durability > HETERO_DURABILITY_POWER)
    return Fail(HETERO_EINVAL, "options.durability is %d; allowed: 0 (none), 1 (process), 2 (power)", o.durability);
  if (o.num_blocks < 0 || o.num_blocks > kMaxBlocks)
    return Fail(HETERO_EINVAL, "options.num_blocks is %d; allowed: 0 to %d", o.num_blocks, kMaxBlocks);
  if (o.user_bytes < 0 || o.user_bytes > kMaxUserBytes)
    return Fail(HETERO_EINVAL, "options.user_bytes is %d; allowed: 0 to %d", o.user_bytes, kMaxUserBytes);
  return Status::Ok();
}

FileSpec SpecFor(const Store& store, int32_t disk, std::string name, int64_t bytes) {
  FileSpec spec;
  spec.directory_fd = store.directory(disk).fd();
  spec.directory = store.directory(disk).path();
  spec.disk = disk;
  spec.name = std::move(name);
  spec.bytes = bytes;
  spec.create = store.options().create != 0;
  spec.direct_io = store.options().direct_io != 0;
  spec.durable = store.options().durability == HETERO_DURABILITY_POWER;
  return spec;
}

Status CheckWeightMemory(int32_t block, const void* weights) {
  if (weights != nullptr && reinterpret_cast<uintptr_t>(weights) % kPageBytes == 0) return Status::Ok();
  return Fail(HETERO_EINVAL, "block %d: weights is %p; allowed: a page-aligned address from hetero_reserve", block, weights);
}

std::string SlotName(int32_t block, int32_t slot) {
  char name[32];
  snprintf(name, sizeof(name), "block-%05d.%c", block, slot == 0 ? 'a' : 'b');
  return name;
}

}  // namespace

Status Store::Open(const std::string& directory, const hetero_store_options& options, std::unique_ptr<Store>* out) {
  HETERO_RETURN_IF_ERROR(CheckOptions(options));
  std::unique_ptr<Store> store(new Store);
  store->options_ = options;
  memcpy(store->uuid_.data(), options.uuid, sizeof(options.uuid));
  store->record_bytes_ = RecordBytes(options.num_blocks, options.user_bytes);
  store->blocks_.resize(static_cast<size_t>(options.num_blocks));
  int32_t first = 0;
  HETERO_RETURN_IF_ERROR(store->AddDirectory(directory, &first));
  HETERO_RETURN_IF_ERROR(OpenFile(SpecFor(*store, first, "COMMIT", store->record_bytes_ * kRingRecords), &store->ring_));
  // A random start: rewrites of an earlier process must not look like ours.
  if (getrandom(&store->next_write_id_, sizeof(store->next_write_id_), 0) != sizeof(store->next_write_id_))
    return FailErrno("getrandom", errno);
  *out = std::move(store);
  return Status::Ok();
}

Status Store::AddDirectory(const std::string& directory, int32_t* disk) {
  if (num_disks() == kMaxDisks)
    return Fail(HETERO_EINVAL, "the store has %d directories already, which is the most", kMaxDisks);
  File opened;
  HETERO_RETURN_IF_ERROR(OpenDirectory(directory, &opened));
  *disk = num_disks();
  directories_.push_back(std::move(opened));
  return Status::Ok();
}

Status Store::Recover(int64_t* step, std::string* user) {
  Pages bytes;
  HETERO_RETURN_IF_ERROR(AllocatePages(record_bytes_, &bytes));
  CommitRecord best;
  std::string damage;
  for (int64_t i = 0; i < kRingRecords; ++i) {
    HETERO_RETURN_IF_ERROR(ReadAt(ring_, bytes.get(), record_bytes_, i * record_bytes_));
    CommitRecord record;
    const Status status = DecodeRecord(bytes.get(), record_bytes_, uuid_, options_.num_blocks, &record);
    if (status.ok() && record.sequence > best.sequence) best = std::move(record);
    if (status.code() == HETERO_ECORRUPT) damage = status.message();
  }
  if (best.sequence == 0 && !damage.empty())
    return Fail(HETERO_ECORRUPT, "%s has no valid record: %s", ring_.path().c_str(), damage.c_str());
  if (best.sequence == 0) return Fail(HETERO_ESTATE, "%s has no record: nothing was committed yet", ring_.path().c_str());
  for (Block* block : blocks_) {
    if (block != nullptr) HETERO_RETURN_IF_ERROR(block->Apply(best.blocks[static_cast<size_t>(block->id())]));
  }
  *step = best.step;
  *user = best.user;
  committed_ = std::move(best);
  return Status::Ok();
}

Rewrite Store::NextRewrite(int32_t block, int32_t slot, int64_t step) {
  Rewrite rewrite;
  rewrite.uuid = uuid_;
  rewrite.write_id = ++next_write_id_;
  rewrite.step = step;
  rewrite.block = block;
  rewrite.slot = slot;
  return rewrite;
}

void Store::Attach(Block* block) { blocks_[static_cast<size_t>(block->id())] = block; }

void Store::Detach(Block* block) { blocks_[static_cast<size_t>(block->id())] = nullptr; }

void Store::Forget(int32_t block) {
  if (has_record()) committed_.blocks[static_cast<size_t>(block)] = CommittedBlock{};
}

Status Block::Open(Store* store, const hetero_block_geometry& geometry, void* weights, int32_t disk,
                   std::unique_ptr<Block>* out) {
  std::unique_ptr<Block> block(new Block);
  HETERO_RETURN_IF_ERROR(Layout::Make(geometry, &block->layout_));
  HETERO_RETURN_IF_ERROR(CheckWeightMemory(geometry.id, weights));
  block->weights_ = static_cast<uint8_t*>(weights);
  if (geometry.num_state > 0 && !block->layout_.state_in_file()) HETERO_RETURN_IF_ERROR(block->ReserveState());
  if (block->layout_.has_file()) {
    if (store == nullptr)
      return Fail(HETERO_EINVAL, "block %d: store is null, but the block has a section on disk", geometry.id);
    if (geometry.id >= store->options().num_blocks)
      return Fail(HETERO_EINVAL, "geometry.id is %d; allowed: 0 to %d (options.num_blocks)", geometry.id,
                  store->options().num_blocks - 1);
    if (disk < 0 || disk >= store->num_disks())
      return Fail(HETERO_EINVAL, "block %d: disk is %d; allowed: 0 to %d", geometry.id, disk, store->num_disks() - 1);
    if (store->blocks()[static_cast<size_t>(geometry.id)] != nullptr)
      return Fail(HETERO_ESTATE, "block %d of this store is open already", geometry.id);
    block->store_ = store;
    block->disk_ = disk;
    // A recovered store has the files of blocks that its record names; those of others are new.
    const bool fresh = store->has_record() && store->committed().blocks[static_cast<size_t>(geometry.id)].slot < 0;
    HETERO_RETURN_IF_ERROR(block->OpenFiles(store->options().create != 0 || fresh));
    if (store->has_record()) HETERO_RETURN_IF_ERROR(block->Apply(store->committed().blocks[static_cast<size_t>(geometry.id)]));
    store->Attach(block.get());
  }
  *out = std::move(block);
  return Status::Ok();
}

Status Block::OpenRuns(const Layout& layout, void* weights, std::unique_ptr<Runs> runs, std::unique_ptr<Block>* out) {
  HETERO_RETURN_IF_ERROR(CheckWeightMemory(layout.geometry().id, weights));
  std::unique_ptr<Block> block(new Block);
  block->layout_ = layout;
  block->weights_ = static_cast<uint8_t*>(weights);
  block->runs_ = std::move(runs);
  block->newest_.rewrite.slot = 0;
  block->content_promised = true;
  *out = std::move(block);
  return Status::Ok();
}

Status Block::Bind(void* weights) {
  HETERO_RETURN_IF_ERROR(CheckWeightMemory(id(), weights));
  if (!layout_.weights_in_file())
    return Fail(HETERO_EINVAL, "block %d keeps its weights in RAM only; binding other memory would lose them", id());
  weights_ = static_cast<uint8_t*>(weights);
  return Status::Ok();
}

Block::~Block() {
  if (store_ != nullptr && store_->blocks()[static_cast<size_t>(id())] == this) store_->Detach(this);
  if (state_ != nullptr) (void)Unreserve(state_, state_bytes_).ok();
  if (spare_ != nullptr) (void)Unreserve(spare_, spare_bytes_).ok();
}

Status Block::OpenFiles(bool create) {
  for (int32_t slot = 0; slot < layout_.geometry().num_slots; ++slot) {
    FileSpec spec = SpecFor(*store_, disk_, SlotName(id(), slot), layout_.file_bytes());
    spec.may_have_links = true;
    // Of a recovered block only the committed slot counts. A checkpoint by hard links has no other; a process that died may
    // have left half of it, or the one of another block that had its number in the meantime.
    const bool counts = !store_->has_record() || store_->committed().blocks[static_cast<size_t>(id())].slot == slot;
    const bool anew = !create && !counts && !IsThere(spec);
    if (anew) unlinkat(spec.directory_fd, spec.name.c_str(), 0);
    spec.create = create || anew;
    const Status status = OpenFile(spec, &files_[slot]);
    if (!status.ok() && create && slot == 1) unlinkat(spec.directory_fd, SlotName(id(), 0).c_str(), 0);
    HETERO_RETURN_IF_ERROR(status);
  }
  return Status::Ok();
}

Status Block::Unlink(int32_t slot) {
  bool linked = false;
  HETERO_RETURN_IF_ERROR(HasLinks(files_[slot], &linked));
  if (!linked) return Status::Ok();
  if (layout_.geometry().num_slots == 1)
    return Fail(HETERO_EINVAL, "%s has other names and would be written in place; a block with links needs two slots",
                files_[slot].path().c_str());
  const int directory = store_->directory(disk_).fd();
  const std::string name = SlotName(id(), slot);
  FileSpec spec = SpecFor(*store_, disk_, name + ".new", layout_.file_bytes());
  spec.create = true;
  unlinkat(directory, spec.name.c_str(), 0);  // of a process that died here
  File fresh;
  HETERO_RETURN_IF_ERROR(OpenFile(spec, &fresh));
  if (renameat(directory, spec.name.c_str(), directory, name.c_str()) != 0)
    return FailErrno(fresh.path() + ": rename to " + name, errno);
  if (spec.durable && fsync(directory) != 0) return FailErrno(store_->directory(disk_).path() + ": fsync", errno);
  files_[slot] = File(fresh.Release(), files_[slot].path(), disk_);
  return Status::Ok();
}

Status Block::ReserveState() {
  const int64_t array_bytes = layout_.geometry().num_elements * static_cast<int64_t>(sizeof(float));
  int64_t offset = 0;
  for (int32_t k = 0; k < layout_.geometry().num_state; ++k) {
    state_offsets_.push_back(offset + (k + 1) * kStaggerBytes);
    offset = RoundUp(state_offsets_.back() + array_bytes, kPageBytes);
  }
  state_bytes_ = offset;
  state_ = static_cast<uint8_t*>(Reserve(state_bytes_));
  if (state_ != nullptr) return Status::Ok();
  return Fail(HETERO_ENOMEM, "block %d: no address space for %lld bytes of state", id(), static_cast<long long>(state_bytes_));
}

float* Block::state(int32_t array) const {
  if (state_ == nullptr || array < 0 || array >= layout_.geometry().num_state) return nullptr;
  return reinterpret_cast<float*>(state_ + state_offsets_[static_cast<size_t>(array)]);
}

// Calls copy(array in RAM, its place in the spare, bytes) for each array's run of a chunk.
template <class Copy>
void Block::ForSpareRuns(int64_t chunk, const Copy& copy) {
  const auto float_bytes = static_cast<int64_t>(sizeof(float));
  const int64_t start = layout_.ChunkStart(chunk);
  const int64_t length = layout_.ChunkElements(chunk);
  uint8_t* spare = spare_;
  if (!layout_.weights_in_file()) {
    const int64_t width = layout_.weight_bytes_per_element();
    copy(weights_ + start * width, spare + start * width, static_cast<size_t>(length * width));
    spare += layout_.weights_padded_bytes();
  }
  for (int32_t k = 0; k < layout_.geometry().num_state && !layout_.state_in_file(); ++k) {
    auto* array = reinterpret_cast<uint8_t*>(state(k));
    copy(array + start * float_bytes, spare + start * float_bytes, static_cast<size_t>(length * float_bytes));
    spare += RoundUp(layout_.geometry().num_elements * float_bytes, kPageBytes);
  }
}

Status Block::ReserveSpare() {
  if (spare_ != nullptr) return Status::Ok();
  const int64_t array_bytes = RoundUp(layout_.geometry().num_elements * static_cast<int64_t>(sizeof(float)), kPageBytes);
  spare_bytes_ = layout_.weights_in_file() ? 0 : layout_.weights_padded_bytes();
  spare_bytes_ += layout_.state_in_file() ? 0 : layout_.geometry().num_state * array_bytes;
  if (spare_bytes_ == 0) return Status::Ok();
  spare_ = static_cast<uint8_t*>(Reserve(spare_bytes_));
  if (spare_ != nullptr) return Status::Ok();
  return Fail(HETERO_ENOMEM, "block %d: no address space for %lld bytes of a spare copy", id(),
              static_cast<long long>(spare_bytes_));
}

void Block::BeginSpare(int64_t update) {
  spare_of_ = update;
  saved_.assign(spare_ == nullptr ? 0 : static_cast<size_t>(layout_.num_chunks()), 0);
}

void Block::SaveChunk(int64_t chunk) {
  if (spare_ == nullptr) return;
  ForSpareRuns(chunk, [](uint8_t* array, uint8_t* spare, size_t bytes) { memcpy(spare, array, bytes); });
  saved_[static_cast<size_t>(chunk)] = 1;
}

void Block::RestoreChunk(int64_t chunk) {
  if (saved_[static_cast<size_t>(chunk)] == 0) return;
  ForSpareRuns(chunk, [](uint8_t* array, uint8_t* spare, size_t bytes) { memcpy(array, spare, bytes); });
}

void Block::Replace(int64_t update, SlotContent content) {
  replaced_ = newest_;
  replaced_by_ = update;
  SetNewest(std::move(content));
}

void Block::TakeBack(int64_t update) {
  if (replaced_by_ == update) SetNewest(std::move(replaced_));
  replaced_by_ = 0;
}

void Block::ForgetRewrite(int64_t ticket) {
  if (store_ != nullptr && ticket > store_->last_commit && rewrites > 0) --rewrites;
}

int32_t Block::target_slot(bool record_pending) const {
  const int32_t newest = newest_.rewrite.slot;
  if (layout_.geometry().num_slots == 1) return 0;
  if (record_pending) return newest == 0 ? 1 : 0;
  const int32_t committed = committed_slot();
  if (committed >= 0) return 1 - committed;
  return newest < 0 ? 0 : newest;
}

int32_t Block::committed_slot() const {
  if (store_ == nullptr || !store_->has_record()) return -1;
  return store_->committed().blocks[static_cast<size_t>(id())].slot;
}

void Block::SetNewest(SlotContent content) {
  const std::lock_guard<std::mutex> lock(newest_mutex_);
  newest_ = std::move(content);
}

void Block::Newest(int32_t* slot, int64_t* step) const {
  const std::lock_guard<std::mutex> lock(newest_mutex_);
  *slot = newest_.rewrite.slot;
  *step = newest_.rewrite.step;
}

Status Block::Apply(const CommittedBlock& committed) {
  SlotContent content;
  if (committed.slot >= layout_.geometry().num_slots)
    return Fail(HETERO_ECORRUPT, "block %d: the commit record names slot %d of %d", id(), committed.slot,
                layout_.geometry().num_slots);
  if (committed.slot >= 0) {
    content.rewrite = {store_->uuid(), committed.write_id, committed.step, id(), committed.slot};
    content.has_state = committed.has_state != 0;
    content.recovered = true;
    Pages head;
    HETERO_RETURN_IF_ERROR(AllocatePages(layout_.head_bytes(), &head));
    const File& slot_file = files_[committed.slot];
    HETERO_RETURN_IF_ERROR(ReadAt(slot_file, head.get(), layout_.head_bytes(), 0));
    HETERO_RETURN_IF_ERROR(CheckHead(layout_, content.rewrite, head.get(), slot_file.path(), &content.weight_digests));
  }
  content_promised = committed.slot >= 0;
  state_promised = content.has_state;
  SetNewest(std::move(content));
  return Status::Ok();
}

}  // namespace hetero
