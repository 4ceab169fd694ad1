// The C interface of the native core: the only door between Python and C++.
//
// Conventions
//   * Every function that can fail returns 0 (or a positive handle/ticket) on success and a negative HETERO_E* code on
//     failure; hetero_last_error() then gives the calling thread one line: what, path, offset, errno.
//   * Bytes, elements and offsets are int64_t; seconds are double; times are CLOCK_MONOTONIC nanoseconds.
//   * No function keeps the GIL: the library knows neither Python nor torch. Callers keep every buffer that they pass to a
//     submit alive until its ticket is DONE.
//   * Thread safety: an engine may be used from any thread. A store and its blocks are changed only through one engine.
//   * The library never retries a failed write and never writes after a failure: the engine is then *poisoned*, every
//     later submit and wait reports the first error (store.md: PostgreSQL's rule).
#ifndef HETERO_API_H_
#define HETERO_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HETERO_API __attribute__((visibility("default")))
#define HETERO_ABI_VERSION 1

// Negative return codes.
enum {
  HETERO_EINVAL = -1,         // a bad argument: the text names it
  HETERO_EIO = -2,            // a system call failed: the text has path, offset, errno
  HETERO_ENOSPC = -3,         // the disk or the quota is full: the text has path, needed and free bytes
  HETERO_ENOMEM = -4,         // memory could not be reserved
  HETERO_ECORRUPT = -5,       // a header, footer or digest does not match: block, chunk, file, offset
  HETERO_EBUSY = -6,          // another process holds the store (flock)
  HETERO_ESTATE = -7,         // the call breaks the protocol (a commit before a verdict, unknown ticket)
  HETERO_EPOISONED = -8,      // an earlier error stopped the engine; its text is repeated
  HETERO_ETIMEDOUT = -9,      // hetero_wait's time ran out; the task goes on
  HETERO_EUNSUPPORTED = -10,  // this machine cannot do it (io_uring denied, O_DIRECT refused); the text names the option
};

// Element types.
enum { HETERO_F32 = 0, HETERO_BF16 = 1, HETERO_F16 = 2, HETERO_U8 = 3 };

HETERO_API int32_t hetero_abi_version(void);
HETERO_API const char* hetero_last_error(void);
// The code of that error, for functions that return a null pointer.
HETERO_API int32_t hetero_last_code(void);

// Instruction sets, best last. The kernels give the same bits on all of them.
enum { HETERO_ISA_BASE = 0, HETERO_ISA_V3 = 1, HETERO_ISA_V4 = 2 };
HETERO_API int32_t hetero_isa(void);               // the one in use
HETERO_API int32_t hetero_force_isa(int32_t isa);  // for tests and benchmarks; EUNSUPPORTED when the CPU lacks it

// ---- memory ---------------------------------------------------------------------------------------------------------
// Anonymous address space, 2 MiB aligned, huge pages advised, no page present until touched. Null on failure.
HETERO_API void* hetero_reserve(int64_t bytes);
// Puts a file's pages from `offset` on in the place of the reserved pages of [p, p + bytes), whose content is lost; all three
// are multiples of a page. `shared`: writes reach the file, and so every process that maps it; else they stay here.
HETERO_API int32_t hetero_map(void* p, int64_t bytes, int32_t file, int64_t offset, int32_t shared);
// Gives the pages of [p, p + bytes) back; the addresses stay valid. Whole pages inside the range only. Shared pages of a file
// go back for every process; where a file is mapped but not shared, its own pages are seen again.
HETERO_API int32_t hetero_drop(void* p, int64_t bytes);
HETERO_API int32_t hetero_unreserve(void* p, int64_t bytes);

// ---- kernels, synchronous (also what the engine runs) -----------------------------------------------------------------
enum {
  HETERO_ADAMW = 1,     // decoupled weight decay; without it weight decay is added to the gradient (Adam)
  HETERO_MAXIMIZE = 2,  // the gradient is negated
};
// One set of hyper-parameters. `step` is the count after the increment: 1 for the first update.
typedef struct hetero_hyper {
  double lr, beta1, beta2, eps, weight_decay, step;
  int64_t flags;
} hetero_hyper;

// A run of elements inside a block's flat order that shares one gradient tensor and one set of hyper-parameters.
// The last (numel % 8) elements are torch's scalar tail and follow its contraction (see kernels.h).
typedef struct hetero_segment {
  int64_t offset;  // first element in the block's flat order
  int64_t numel;
  const void* grad;  // dense, numel elements of grad_dtype
  int32_t grad_dtype;
  int32_t hyper;  // index into the hypers of the same call
} hetero_segment;

// Adam over plain arrays. param: fp32 master. copy: null, or `copy_dtype` (BF16/F16) output of the new weights.
// grad_scale multiplies the gradient in fp32 first (1.0: no multiplication takes place).
HETERO_API int32_t hetero_adam(float* param, float* exp_avg, float* exp_avg_sq, const void* grad, int32_t grad_dtype,
                               void* copy, int32_t copy_dtype, int64_t numel, const hetero_hyper* hyper, double grad_scale,
                               int32_t threads);
// Sum of squares of numel elements, accumulated in double in a fixed order that does not depend on threads or ISA.
HETERO_API int32_t hetero_sum_of_squares(const void* x, int32_t dtype, int64_t numel, int32_t threads, double* out);
// CRC32C digest (4 interleaved streams, 16 bytes) of a buffer.
HETERO_API int32_t hetero_digest(const void* x, int64_t bytes, uint8_t out[16]);

// ---- measurement ------------------------------------------------------------------------------------------------------
// Reads and writes the bytes that hetero_adam would, with next to no arithmetic: the memory's own speed, the limit that
// benchmarks compare with. The arrays hold meaningless values afterwards.
HETERO_API int32_t hetero_move_like_adam(float* param, float* exp_avg, float* exp_avg_sq, const void* grad, int32_t grad_dtype,
                                         void* copy, int64_t numel, int32_t threads);

// ---- store: block files in two slots and the commit ring --------------------------------------------------------------
typedef struct hetero_store hetero_store;
typedef struct hetero_block hetero_block;
typedef struct hetero_engine hetero_engine;

enum { HETERO_DURABILITY_NONE = 0, HETERO_DURABILITY_PROCESS = 1, HETERO_DURABILITY_POWER = 2 };
// Digests of payloads: none are written; or they are, and checked on every read; or on reads of what a record was recovered
// with.
enum { HETERO_DIGESTS_NONE = 0, HETERO_DIGESTS_ALWAYS = 1, HETERO_DIGESTS_RECOVERED = 2 };

typedef struct hetero_store_options {
  uint8_t uuid[16];
  int32_t create;  // 1: files are created (O_EXCL); 0: they must exist with the exact size. Once a store is recovered, files of
                   // blocks that its record does not name are created
  int32_t direct_io;  // 1: O_DIRECT (EUNSUPPORTED when the file system refuses it); 0: page cache
  int32_t durability;
  int32_t verify_digests;  // HETERO_DIGESTS_*
  int32_t num_blocks;      // disk blocks that the store holds (sizes the commit record)
  int32_t user_bytes;      // largest user blob of a commit record
} hetero_store_options;

// Opens the commit ring in `directory` (which exists, private, checked by the caller) through openat with O_NOFOLLOW,
// O_CLOEXEC, mode 0600, takes flock(LOCK_EX|LOCK_NB) on every file's own description: EBUSY names the file.
HETERO_API hetero_store* hetero_store_open(const char* directory, const hetero_store_options* options);
HETERO_API int32_t hetero_store_close(hetero_store* store);
// Another directory, on another disk, for files of blocks; rules as for the first. Returns its number: 1 for the first one that
// is added. The ring stays in the first directory.
HETERO_API int32_t hetero_store_add_directory(hetero_store* store, const char* directory);

typedef struct hetero_block_geometry {
  int32_t id;            // 0..num_blocks-1 for disk blocks; any for RAM blocks
  int32_t weight_dtype;  // F32: the weights are the fp32 master. BF16/F16: fp32 master is state array 0. U8: opaque
  int64_t num_elements;  // flat length; a multiple of 16
  int32_t num_state;     // fp32 state arrays: Adam 2 (exp_avg, exp_avg_sq) with F32, 3 (master, exp_avg, exp_avg_sq) with
                         // BF16/F16; 0 for frozen or opaque blocks
  int32_t weights_on_disk_file;  // 1: the weights have a section in the block's file
  int32_t state_on_disk_file;    // 1: so have the state arrays
  int32_t num_slots;             // 2; 1 for blocks that are never updated
  int64_t chunk_elements;        // elements per chunk; a multiple of 4096
} hetero_block_geometry;

// A block bound to `weights`, the page-aligned address where its weights (num_elements of weight_dtype, from hetero_reserve)
// appear. Whole pages are moved: the memory reaches to the end of the last page and shares it with nothing else.
// Arrays without a file section live in RAM: the weights at `weights`, state arrays in memory that the block reserves
// (staggered starts), zero at first. With a file section: files "block-%05d.a"/".b" of the store, preallocated (ENOSPC here,
// not later). A block with neither section needs no store (pass null).
HETERO_API hetero_block* hetero_block_open(hetero_store* store, const hetero_block_geometry* geometry, void* weights);
// The same with its files in another of the store's directories; hetero_block_open means the first, 0.
HETERO_API hetero_block* hetero_block_open_on(hetero_store* store, const hetero_block_geometry* geometry, void* weights,
                                              int32_t disk);
HETERO_API int32_t hetero_block_close(hetero_block* block);

// [Note: Weights that are read in place]
// A block without a store may read its weights from runs of files that belong to somebody else: a safetensors file. Such a
// block is U8 without state, with weights_on_disk_file 1 and num_slots 1. It is fetched, read and released as others; a store
// or an update is EINVAL, and no commit record names it.
typedef struct hetero_run_file {
  const char* path;  // absolute; links are followed
  int64_t bytes;     // its size and time of modification: ECORRUPT when they differ, here or when a fetch begins
  int64_t mtime_ns;
} hetero_run_file;
// Bytes [file_offset, file_offset + bytes) of a file appear at byte `offset` of the block. Sorted by offset, disjoint. Bytes of
// the block in no run are zero: all of them if there is none, as in a slice that is padding alone.
typedef struct hetero_run {
  int64_t offset;
  int64_t file_offset;
  int64_t bytes;
  int32_t file;  // index into the files of the same call
} hetero_run;
// direct_io 1: past the page cache where the file system can; whole pages are then read.
HETERO_API hetero_block* hetero_block_open_runs(const hetero_block_geometry* geometry, void* weights,
                                                const hetero_run_file* files, int32_t num_files, const hetero_run* runs,
                                                int32_t num_runs, int32_t direct_io);
// Closes a block whose files the caller removes: later commit records do not name it, and once the next one is there (and the
// files are gone) another block may have its id.
HETERO_API int32_t hetero_block_discard(hetero_block* block);
// No commit that is submitted from now on names the block, which is to be discarded once one of them is DONE: so no record ever
// names files that are gone.
HETERO_API int32_t hetero_block_retire(hetero_block* block);
// From now on the weights appear at `weights`: for files whose content passes through memory that is lent from use to use. The
// rules for the address are those of hetero_block_open; it need not come from hetero_reserve, where nothing is released to
// the system. EINVAL for weights that live in RAM. ESTATE while a task of the block is not DONE.
HETERO_API int32_t hetero_block_bind(hetero_block* block, void* weights);
// The address of RAM state array k (null when it is on disk).
HETERO_API float* hetero_block_state(hetero_block* block, int32_t array);
// Bytes of one slot's file; 0 without file sections.
HETERO_API int64_t hetero_block_file_bytes(const hetero_block_geometry* geometry);
// Bytes of staging that one chunk of the block takes (0 without file sections): chunk_bytes_max is the largest of them.
HETERO_API int64_t hetero_block_staged_bytes(const hetero_block_geometry* geometry);
// Newest slot (0/1) and the step that wrote it; step 0: only weights were stored, state reads as zeros. ESTATE when nothing
// was stored yet. Blocks without file sections: 0 and the last step.
HETERO_API int32_t hetero_block_slot(hetero_block* block, int64_t* step);
// The slot that the last record names (0/1), which is as it was then, whatever was written since; 2: the record names none.
// ESTATE while a commit is not DONE.
HETERO_API int32_t hetero_block_committed_slot(hetero_block* block);

// Commit records: the newest valid one. Its slots are applied to the open blocks, whose heads are read and checked, and to
// blocks opened later. Before any task. Returns the user blob's length, or
// HETERO_ECORRUPT / HETERO_ESTATE when there is none.
HETERO_API int64_t hetero_store_recover(hetero_store* store, int64_t* step, void* user, int64_t user_capacity);
// 1 if the last record names files of the block with this number, else 0. ESTATE while a commit is not DONE.
HETERO_API int32_t hetero_store_names(hetero_store* store, int32_t id);

// ---- engine -----------------------------------------------------------------------------------------------------------
enum { HETERO_IO_AUTO = 0, HETERO_IO_URING = 1, HETERO_IO_POOL = 2, HETERO_IO_SYNTHETIC = 3 };

typedef struct hetero_engine_options {
  int32_t io_backend;                 // AUTO: io_uring where the kernel allows it, else the pool
  int32_t io_threads;                 // pool (and synthetic): threads per direction-neutral queue, >= 1
  int32_t queue_depth;                // at most this many transfers in flight
  int32_t update_threads;             // threads that run kernels
  int64_t staging_bytes;              // staging memory for state that streams from disk; bounded, huge pages
  double synthetic_read_bytes_per_s;  // SYNTHETIC: a duplex device that sleeps (tests and benchmarks)
  double synthetic_write_bytes_per_s;
  int64_t chunk_bytes_max;  // the largest staged chunk of any block that will be used; staging must hold >= 3
} hetero_engine_options;

HETERO_API hetero_engine* hetero_engine_create(const hetero_engine_options* options);
// For stores with files on so many disks. Each disk has io_threads, a queue_depth and (synthetic) rates of its own, and an
// equal part of the staging memory, which must hold >= 3 chunks: transfers of one disk never wait for those of another.
HETERO_API hetero_engine* hetero_engine_create_for(const hetero_engine_options* options, int32_t num_disks);
// Waits for running tasks, joins all threads. Returns the first error the engine met, or 0.
HETERO_API int32_t hetero_engine_destroy(hetero_engine* engine);
HETERO_API int32_t hetero_engine_io_backend(hetero_engine* engine);  // the one in use
// Another size of the staging memory, rules as for options.staging_bytes. ESTATE while a task is not DONE.
HETERO_API int32_t hetero_engine_resize_staging(hetero_engine* engine, int64_t staging_bytes);
// The error that poisoned the engine: its own code, its text in hetero_last_error(). 0 while there is none.
HETERO_API int32_t hetero_engine_error(hetero_engine* engine);

// [Note: Tasks]
// A submit returns a ticket (> 0). Tasks of one block run in submission order. `after` adds edges to other tickets: the
// task starts when those are DONE. Among tasks that may start, the lowest `priority` goes first, then submission order; a chunk
// in progress is never interrupted, a task may be overtaken between chunks. A ticket passes READY (the new weights are in host
// memory, or the data asked for is there) and then DONE (all its transfers have completed; its buffers are no longer touched).
// An engine keeps the state of a ticket until hetero_release_ticket; waiting on a released ticket is ESTATE; a released ticket
// in `after` counts as DONE.
enum { HETERO_READY = 1, HETERO_DONE = 2 };

typedef struct hetero_task {
  int64_t priority;
  const int64_t* after;
  int32_t num_after;
} hetero_task;

// Weights of the newest slot -> the block's weight memory.
HETERO_API int64_t hetero_submit_fetch(hetero_engine* engine, hetero_block* block, const hetero_task* task);
// Gives the pages of the block's weight memory back.
HETERO_API int64_t hetero_submit_release(hetero_engine* engine, hetero_block* block, const hetero_task* task);
// Opens an update: its state may stream into staging from now on (within the staging left over by armed updates), and the
// kernels run once hetero_arm_update has handed over the gradients.
//   weights_resident 1: the weight memory holds the current weights and receives the new ones in place; READY = they are all
//   there. 0: weights are read from the file's section, and the new ones only written there.
//   step: the stamp of the slot written.
// It writes the slot that the last record does not name; if the block was rewritten since then, that slot again, in place.
// ESTATE: weights, or the fp32 master of 16-bit weights, were never stored. Reading may run ahead of a commit, computing waits
// for it.
HETERO_API int64_t hetero_open_update(hetero_engine* engine, hetero_block* block, int32_t weights_resident,
                                      const hetero_task* task);
// Elements outside every segment keep weights and state. Segments are copied; sorted by offset, disjoint. `priority` replaces
// that of the open: among updates, armed ones go before unarmed ones (which keep submission order), and may take their staging.
HETERO_API int32_t hetero_arm_update(hetero_engine* engine, int64_t ticket, const hetero_segment* segments,
                                     int32_t num_segments, const hetero_hyper* hypers, int32_t num_hypers, double grad_scale,
                                     int64_t step, int64_t priority);
// An opened update that was never armed is taken back (nothing was written).
HETERO_API int32_t hetero_cancel_update(hetero_engine* engine, int64_t ticket);

// [Note: Speculation]
// An update may run before it is known whether it shall be: as soon as the gradients are there, before the verdict on all of
// them (their norm, whether they are finite). What it replaces survives until then: arrays with a section in the file in the
// slot that the commit record names, arrays in RAM in a spare copy that the block reserves at its first speculation and keeps.
// The verdict is hetero_keep_update or hetero_submit_discard. Until it is given the block can neither be rewritten nor
// committed (ESTATE), and fetches and reads see what the update has made so far.
//
// As hetero_open_update. ENOMEM: no address space for the spare copy. ESTATE, too: the block has files and was rewritten since
// the last commit was submitted, so what the update replaces would be nowhere.
HETERO_API int64_t hetero_open_speculative_update(hetero_engine* engine, hetero_block* block, int32_t weights_resident,
                                                  const hetero_task* task);
// The update holds; it goes on if it is not over. ESTATE when none awaits a verdict, or when it was not armed.
HETERO_API int32_t hetero_keep_update(hetero_engine* engine, hetero_block* block);
// The update does not hold: it stops where it is, its ticket ends without error, and once this task is DONE the block is
// what it was before. Weights that have a section in the file are not brought back to the weight memory, which holds anything:
// fetch them. The block may be updated again at once; its gradients are no longer read when the update's ticket is DONE.
// ESTATE when no update awaits a verdict.
HETERO_API int64_t hetero_submit_discard(hetero_engine* engine, hetero_block* block, const hetero_task* task);

// A run of one array of a block with its new content. array -1: weights (weight_dtype); 0..: state arrays (fp32).
typedef struct hetero_patch {
  int64_t offset, numel;
  const void* data;
  int32_t array;
} hetero_patch;
// Writes patches (and everything else as it was; zeros where nothing was yet) into the slot that the last record does not name
// (blocks with one slot: into that), or in place in RAM.
// weights_from_memory 1: the weights section is taken whole from the weight memory.
// step 0 without patches of state on disk means "state is all zeros": no state is written, it reads as zeros. State in RAM
// changes only where it is patched.
HETERO_API int64_t hetero_submit_store(hetero_engine* engine, hetero_block* block, const hetero_patch* patches,
                                       int32_t num_patches, int32_t weights_from_memory, int64_t step, const hetero_task* task);
// Reads runs of arrays from the newest slot (or RAM) into `data` of each patch (written to in spite of const).
HETERO_API int64_t hetero_submit_read(hetero_engine* engine, hetero_block* block, const hetero_patch* patches,
                                      int32_t num_patches, const hetero_task* task);
// One commit record: the newest slots of all blocks become the committed ones. Runs after every task submitted before it that
// writes (and after `task->after`); no task submitted later writes a block before it is DONE.
HETERO_API int64_t hetero_submit_commit(hetero_engine* engine, hetero_store* store, int64_t step, const void* user,
                                        int64_t user_bytes, const hetero_task* task);

// Blocks until the ticket is READY/DONE or seconds passed (< 0: for ever). 0, ETIMEDOUT, or the task's error.
HETERO_API int32_t hetero_wait(hetero_engine* engine, int64_t ticket, int32_t what, double timeout_s);
// 0: neither, else READY or DONE; negative: the task's error.
HETERO_API int32_t hetero_poll(hetero_engine* engine, int64_t ticket);
HETERO_API int32_t hetero_release_ticket(hetero_engine* engine, int64_t ticket);

typedef struct hetero_times {
  int64_t submitted_ns, started_ns, ready_ns, done_ns;  // 0 where not reached
  int64_t bytes_read, bytes_written;
  int64_t read_busy_ns, compute_busy_ns, write_busy_ns;  // sums over chunks
} hetero_times;
HETERO_API int32_t hetero_ticket_times(hetero_engine* engine, int64_t ticket, hetero_times* out);

typedef struct hetero_engine_stats {
  int64_t bytes_read, bytes_written, staging_bytes, staging_in_use_peak_bytes, tasks_done;
} hetero_engine_stats;
HETERO_API int32_t hetero_engine_get_stats(hetero_engine* engine, hetero_engine_stats* out);
// Of the bytes read, those that nobody wanted: pages are read whole at the ends of runs.
HETERO_API int64_t hetero_engine_bytes_beyond(hetero_engine* engine);

#ifdef __cplusplus
}
#endif
#endif  // HETERO_API_H_
