// The store section of api.h: opening, closing and recovering. Validates every argument.
#include <string.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "api_engine_handles.h"
#include "hetero/api.h"
#include "store.h"

using hetero::Block;
using hetero::Fail;
using hetero::FromHandle;
using hetero::Guarded;
using hetero::Layout;
using hetero::Report;
using hetero::Runs;
using hetero::Status;
using hetero::Store;
using hetero::ToHandle;

namespace {

// A commit walks over the store's blocks.
Status NoCommitPending(const Store* store) {
  if (store == nullptr || store->pending == 0) return Status::Ok();
  return Fail(HETERO_ESTATE, "a commit of the store is not DONE; wait for it, or destroy the engine first");
}

Status Idle(const Block& block) {
  if (block.pending > 0)
    return Fail(HETERO_ESTATE, "block %d has tasks that are not DONE; wait for them, or destroy the engine first", block.id());
  return NoCommitPending(block.store());
}

}  // namespace

hetero_store* hetero_store_open(const char* directory, const hetero_store_options* options) {
  std::unique_ptr<Store> store;
  const Status status = Guarded([&] {
    if (directory == nullptr || directory[0] == '\0') return Fail(HETERO_EINVAL, "directory is null or empty");
    if (options == nullptr) return Fail(HETERO_EINVAL, "options is null");
    return Store::Open(directory, *options, &store);
  });
  return Report(status) == 0 ? ToHandle(store.release()) : nullptr;
}

int32_t hetero_store_close(hetero_store* handle) {
  if (handle == nullptr) return 0;
  Store* store = FromHandle(handle);
  const bool open =
      std::any_of(store->blocks().begin(), store->blocks().end(), [](const Block* block) { return block != nullptr; });
  if (open) return Report(Fail(HETERO_ESTATE, "the store still has open blocks; close them first"));
  const int32_t code = Report(NoCommitPending(store));
  if (code != 0) return code;
  delete store;
  return 0;
}

int32_t hetero_store_names(hetero_store* handle, int32_t id) {
  if (handle == nullptr) return Report(Fail(HETERO_EINVAL, "store is null"));
  const Store* store = FromHandle(handle);
  if (id < 0 || id >= store->options().num_blocks)
    return Report(Fail(HETERO_EINVAL, "id is %d; allowed: 0 to %d (options.num_blocks)", id, store->options().num_blocks - 1));
  const int32_t code = Report(NoCommitPending(FromHandle(handle)));
  if (code != 0) return code;
  return store->has_record() && store->committed().blocks[static_cast<size_t>(id)].slot >= 0 ? 1 : 0;
}

int32_t hetero_store_add_directory(hetero_store* handle, const char* directory) {
  int32_t disk = 0;
  const int32_t code = Report(Guarded([&] {
    if (handle == nullptr || directory == nullptr || directory[0] == '\0')
      return Fail(HETERO_EINVAL, "store is null, or directory null or empty");
    return FromHandle(handle)->AddDirectory(directory, &disk);
  }));
  return code != 0 ? code : disk;
}

hetero_block* hetero_block_open(hetero_store* store, const hetero_block_geometry* geometry, void* weights) {
  return hetero_block_open_on(store, geometry, weights, 0);
}

hetero_block* hetero_block_open_on(hetero_store* store, const hetero_block_geometry* geometry, void* weights, int32_t disk) {
  std::unique_ptr<Block> block;
  const Status status = Guarded([&] {
    if (geometry == nullptr) return Fail(HETERO_EINVAL, "geometry is null");
    HETERO_RETURN_IF_ERROR(NoCommitPending(FromHandle(store)));
    return Block::Open(FromHandle(store), *geometry, weights, disk, &block);
  });
  return Report(status) == 0 ? ToHandle(block.release()) : nullptr;
}

hetero_block* hetero_block_open_runs(const hetero_block_geometry* geometry, void* weights, const hetero_run_file* files,
                                     int32_t num_files, const hetero_run* runs, int32_t num_runs, int32_t direct_io) {
  std::unique_ptr<Block> block;
  const Status status = Guarded([&] {
    if (geometry == nullptr) return Fail(HETERO_EINVAL, "geometry is null");
    Layout layout;
    HETERO_RETURN_IF_ERROR(Layout::Make(*geometry, &layout));
    std::unique_ptr<Runs> source;
    HETERO_RETURN_IF_ERROR(Runs::Open(layout, files, num_files, runs, num_runs, direct_io != 0, &source));
    return Block::OpenRuns(layout, weights, std::move(source), &block);
  });
  return Report(status) == 0 ? ToHandle(block.release()) : nullptr;
}

int32_t hetero_block_close(hetero_block* handle) {
  if (handle == nullptr) return 0;
  const int32_t code = Report(Idle(*FromHandle(handle)));
  if (code == 0) delete FromHandle(handle);
  return code;
}

int32_t hetero_block_discard(hetero_block* handle) {
  if (handle == nullptr) return 0;
  const Block* block = FromHandle(handle);
  const int32_t code = Report(Idle(*block));
  if (code != 0) return code;
  if (block->store() != nullptr) block->store()->Forget(block->id());
  delete block;
  return 0;
}

int32_t hetero_block_retire(hetero_block* handle) {
  if (handle == nullptr) return Report(Fail(HETERO_EINVAL, "block is null"));
  FromHandle(handle)->retired = true;
  return 0;
}

int32_t hetero_block_bind(hetero_block* handle, void* weights) {
  if (handle == nullptr) return Report(Fail(HETERO_EINVAL, "block is null"));
  Block* block = FromHandle(handle);
  if (block->pending > 0)
    return Report(
        Fail(HETERO_ESTATE, "block %d has tasks that are not DONE; wait for them before other memory is bound", block->id()));
  return Report(block->Bind(weights));
}

float* hetero_block_state(hetero_block* block, int32_t array) {
  return block == nullptr ? nullptr : FromHandle(block)->state(array);
}

int64_t hetero_block_file_bytes(const hetero_block_geometry* geometry) {
  if (geometry == nullptr) return Report(Fail(HETERO_EINVAL, "geometry is null"));
  Layout layout;
  const int32_t code = Report(Layout::Make(*geometry, &layout));
  return code != 0 ? code : layout.file_bytes();
}

int64_t hetero_block_staged_bytes(const hetero_block_geometry* geometry) {
  if (geometry == nullptr) return Report(Fail(HETERO_EINVAL, "geometry is null"));
  Layout layout;
  const int32_t code = Report(Layout::Make(*geometry, &layout));
  return code != 0 ? code : layout.staged_bytes();
}

int32_t hetero_block_slot(hetero_block* handle, int64_t* step) {
  if (handle == nullptr || step == nullptr)
    return Report(Fail(HETERO_EINVAL, "%s is null", handle == nullptr ? "block" : "step"));
  const Block* block = FromHandle(handle);
  int32_t slot = -1;
  block->Newest(&slot, step);
  if (slot >= 0) return slot;
  if (!block->layout().has_file()) return 0;
  return Report(Fail(HETERO_ESTATE, "block %d: nothing was stored yet", block->id()));
}

int32_t hetero_block_committed_slot(hetero_block* handle) {
  if (handle == nullptr) return Report(Fail(HETERO_EINVAL, "block is null"));
  const Block* block = FromHandle(handle);
  if (block->store() != nullptr && block->store()->pending > 0)
    return Report(Fail(HETERO_ESTATE, "block %d: a commit of its store is not DONE; wait for it first", block->id()));
  const int32_t slot = block->committed_slot();
  return slot >= 0 ? slot : 2;
}

int64_t hetero_store_recover(hetero_store* store, int64_t* step, void* user, int64_t user_capacity) {
  int64_t length = 0;
  const Status status = Guarded([&] {
    if (store == nullptr || step == nullptr) return Fail(HETERO_EINVAL, "%s is null", store == nullptr ? "store" : "step");
    if (user_capacity < 0 || (user == nullptr && user_capacity > 0))
      return Fail(HETERO_EINVAL, "user is null or user_capacity negative");
    std::string blob;
    HETERO_RETURN_IF_ERROR(FromHandle(store)->Recover(step, &blob));
    length = static_cast<int64_t>(blob.size());
    if (length > user_capacity)
      return Fail(HETERO_EINVAL, "user_capacity is %lld; the record's blob has %lld bytes",
                  static_cast<long long>(user_capacity), static_cast<long long>(length));
    if (length > 0) memcpy(user, blob.data(), blob.size());
    return Status::Ok();
  });
  const int32_t code = Report(status);
  return code != 0 ? code : length;
}
