// A device of our own for tests, from torch's public interface: memory that the host cannot touch,
// streams that run behind the host, a capacity, and random numbers of its own.
//
// Each device has a range of addresses without access, which tensors have, and the same pages at
// other addresses, which only the threads of its streams use. So code that takes a tensor of the
// device for one of the host ends in SIGSEGV, and a copy that nobody waited for leaves old bytes.
// Operators run on the host in the stream's order, and their results arrive late. Memory that is
// freed is filled with ones by the stream that it was allocated on.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr size_t kRange = size_t{1} << 34;  // addresses of a device
constexpr size_t kAlign = 512;

using Clock = std::chrono::steady_clock;

// ---- streams ---------------------------------------------------------------------------------------

struct Point {  // of a queue: all that was put before
  struct Queue* queue = nullptr;
  uint64_t ticket = 0;
};

struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  uint64_t put_count = 0, done_count = 0;
  std::atomic<int64_t> delay_us{0};
  std::mt19937 random{0};

  Queue() {
    std::thread([this] { run(); }).detach();
  }

  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      if (int64_t most = delay_us.load()) std::this_thread::sleep_for(std::chrono::microseconds(random() % (most + 1)));
      task();
      task = nullptr;
      std::lock_guard lock(mutex);
      ++done_count;
      changed.notify_all();
    }
  }

  Point put(std::function<void()> task) {
    std::lock_guard lock(mutex);
    tasks.push_back(std::move(task));
    changed.notify_all();
    return {this, ++put_count};
  }

  Point now() {
    std::lock_guard lock(mutex);
    return {this, put_count};
  }

  bool passed(uint64_t ticket) {
    std::lock_guard lock(mutex);
    return done_count >= ticket;
  }

  void wait(uint64_t ticket) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done_count >= ticket; });
  }
};

struct Device {
  std::mutex mutex;
  std::deque<std::unique_ptr<Queue>> queues;  // the first is the default stream's
  Queue& queue(c10::StreamId id) {
    std::lock_guard lock(mutex);
    if (queues.empty()) queues.push_back(std::make_unique<Queue>());
    TORCH_CHECK(id >= 0 && id < static_cast<int64_t>(queues.size()), "there is no stream ", id);
    return *queues[id];
  }
  c10::StreamId add() {
    queue(0);
    std::lock_guard lock(mutex);
    queues.push_back(std::make_unique<Queue>());
    queues.back()->delay_us = queues.front()->delay_us.load();
    return static_cast<c10::StreamId>(queues.size()) - 1;
  }
  void drain() {
    queue(0);
    std::vector<Queue*> all;
    {
      std::lock_guard lock(mutex);
      for (auto& q : queues) all.push_back(q.get());
    }
    for (auto* q : all) q->wait(q->now().ticket);
  }
};

Device& device_of(c10::DeviceIndex index) {
  static auto* devices = new std::array<Device, kDevices>;  // outlives all threads
  return (*devices)[index];
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};
std::array<std::atomic<bool>, kDevices> contexts{};  // devices that have been used

Queue& current_queue(c10::DeviceIndex index) {
  contexts[index] = true;
  return device_of(index).queue(current_streams[index]);
}

// ---- memory ----------------------------------------------------------------------------------------

struct Range {
  char *front = nullptr, *back = nullptr;
};

Range& range_of(c10::DeviceIndex index) {
  static auto* ranges = [] {
    auto* made = new std::array<Range, kDevices>;
    for (auto& range : *made) {
      int file = memfd_create("foreign", MFD_CLOEXEC);
      TORCH_CHECK(file >= 0 && ftruncate(file, kRange) == 0, "no memory for the foreign device");
      range.front = static_cast<char*>(mmap(nullptr, kRange, PROT_NONE, MAP_SHARED, file, 0));
      range.back =
          static_cast<char*>(mmap(nullptr, kRange, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
      TORCH_CHECK(range.front != MAP_FAILED && range.back != MAP_FAILED, "no addresses for the foreign device");
      close(file);
    }
    return made;
  }();
  return (*ranges)[index];
}

// Where the threads of streams find memory of a device; -1: it is of none.
c10::DeviceIndex owner_of(const void* pointer) {
  for (c10::DeviceIndex index = 0; index < kDevices; ++index) {
    auto* front = range_of(index).front;
    if (pointer >= front && pointer < front + kRange) return index;
  }
  return -1;
}

void* reach(const void* pointer) {
  auto index = owner_of(pointer);
  if (index < 0) return const_cast<void*>(pointer);
  auto& range = range_of(index);
  return range.back + (static_cast<const char*>(pointer) - range.front);
}

struct Allocator final : c10::DeviceAllocator {
  struct Block {
    size_t size;
    c10::DeviceIndex device;
    Queue* queue;
  };
  struct Freed {
    size_t begin, end;
    Point at;
  };
  struct Heap {
    std::map<size_t, size_t> free{{0, kRange}};  // by offset
    std::vector<Freed> freed;                    // that a stream may still use
    size_t capacity = size_t{1} << 30, used = 0;
    c10::CachingDeviceAllocator::DeviceStats stats;
  };
  std::mutex mutex;
  std::array<Heap, kDevices> heaps;
  std::map<void*, Block> blocks;

  c10::DataPtr allocate(size_t num_bytes) override {
    auto device = c10::Device(kType, current_device);
    if (num_bytes == 0) return {nullptr, nullptr, &Allocator::release, device};
    auto* pointer = take(current_device, num_bytes);
    return {pointer, pointer, &Allocator::release, device};
  }

  void* take(c10::DeviceIndex index, size_t num_bytes) {
    size_t size = (num_bytes + kAlign - 1) / kAlign * kAlign;
    auto& queue = current_queue(index);
    std::lock_guard lock(mutex);
    auto& heap = heaps[index];
    if (heap.used + size > heap.capacity) {
      ++heap.stats.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "foreign out of memory. Tried to allocate ", num_bytes, " bytes; ",
                       heap.capacity - heap.used, " bytes are free.");
    }
    auto found = heap.free.begin();
    while (found != heap.free.end() && found->second < size) ++found;
    TORCH_CHECK_WITH(OutOfMemoryError, found != heap.free.end(), "foreign out of memory: no addresses.");
    auto [begin, length] = *found;
    heap.free.erase(found);
    if (length > size) heap.free[begin + size] = length - size;
    for (auto it = heap.freed.begin(); it != heap.freed.end();) {
      if (it->begin < begin + size && begin < it->end && it->at.queue != &queue) {
        auto at = it->at;
        queue.put([at] { at.queue->wait(at.ticket); });
      }
      it = it->at.queue->passed(it->at.ticket) ? heap.freed.erase(it) : std::next(it);
    }
    heap.used += size;
    heap.stats.allocation[0].increase(1);
    heap.stats.allocated_bytes[0].increase(size);
    heap.stats.reserved_bytes[0].increase(size);
    auto* pointer = range_of(index).front + begin;
    blocks[pointer] = {size, index, &queue};
    return pointer;
  }

  static void release(void* pointer);

  void give_back(void* pointer) {
    std::lock_guard lock(mutex);
    auto found = blocks.find(pointer);
    auto [size, index, queue] = found->second;
    blocks.erase(found);
    auto* back = reach(pointer);
    auto at = queue->put([back, size = size] { std::memset(back, 0xff, size); });
    auto& heap = heaps[index];
    size_t begin = static_cast<char*>(pointer) - range_of(index).front;
    heap.freed.push_back({begin, begin + size, at});
    auto next = heap.free.lower_bound(begin);
    size_t end = begin + size;
    if (next != heap.free.end() && next->first == end) {
      end += next->second;
      next = heap.free.erase(next);
    }
    if (next != heap.free.begin() && std::prev(next)->first + std::prev(next)->second == begin) {
      begin = std::prev(next)->first;
    }
    heap.free[begin] = end - begin;
    heap.used -= size;
    heap.stats.allocated_bytes[0].decrease(size);
    heap.stats.reserved_bytes[0].decrease(size);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::release; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    auto& queue = current_queue(std::max<c10::DeviceIndex>(0, owner_of(target)));
    queue.wait(queue.put([=] { std::memcpy(reach(target), reach(source), num_bytes); }).ticket);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard lock(mutex);
    return heaps[index].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    std::lock_guard lock(mutex);
    heaps[index].stats.allocation[0].reset_accumulated();
    heaps[index].stats.allocated_bytes[0].reset_accumulated();
    heaps[index].stats.reserved_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard lock(mutex);
    heaps[index].stats.allocation[0].reset_peak();
    heaps[index].stats.allocated_bytes[0].reset_peak();
    heaps[index].stats.reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    std::lock_guard lock(mutex);
    return {heaps[index].capacity - heaps[index].used, heaps[index].capacity};
  }
};

Allocator& allocator() {
  static auto* made = new Allocator;
  return *made;
}

void Allocator::release(void* pointer) {
  if (pointer != nullptr) allocator().give_back(pointer);
}

// Page-locked memory: the host's, which copies need not wait for.
struct Locked final : c10::Allocator {
  std::mutex mutex;
  std::map<const char*, size_t> ranges;

  c10::DataPtr allocate(size_t num_bytes) override {
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, kAlign, std::max<size_t>(num_bytes, kAlign)) == 0, "no host memory");
    add(pointer, num_bytes);
    return {pointer, pointer, &Locked::release, c10::Device(c10::DeviceType::CPU)};
  }
  void add(const void* pointer, size_t num_bytes) {
    std::lock_guard lock(mutex);
    ranges[static_cast<const char*>(pointer)] = std::max<size_t>(num_bytes, 1);
  }
  void remove(const void* pointer) {
    std::lock_guard lock(mutex);
    TORCH_CHECK(ranges.erase(static_cast<const char*>(pointer)), "this memory is not page-locked");
  }
  bool has(const void* pointer) {
    std::lock_guard lock(mutex);
    auto next = ranges.upper_bound(static_cast<const char*>(pointer));
    return next != ranges.begin() && std::prev(next)->first + std::prev(next)->second > pointer;
  }
  static void release(void* pointer);  // as torch's own allocator of page-locked memory: after all copies
  c10::DeleterFnPtr raw_deleter() const override { return &Locked::release; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
};

Locked& locked() {
  static auto* made = new Locked;
  return *made;
}

void Locked::release(void* pointer) {
  for (c10::DeviceIndex index = 0; index < kDevices; ++index) device_of(index).drain();
  locked().remove(pointer);
  std::free(pointer);
}

// ---- guard: devices, streams and events ------------------------------------------------------------

struct Event {
  Point at;
  std::shared_ptr<Clock::time_point> time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "there is no foreign device ", int(device.index()));
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Stream stream(c10::DeviceIndex index, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
  }
  static c10::DeviceIndex index_of(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    auto index = index_of(device);
    return stream(index, current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto index = index_of(device);
    contexts[index] = true;
    return stream(index, device_of(index).add());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream wanted) const override {
    auto index = wanted.device_index();
    auto before = stream(index, current_streams[index]);
    current_streams[index] = wanted.id();
    return before;
  }
  static Queue& queue_of(const c10::Stream& of) { return device_of(of.device_index()).queue(of.id()); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& of, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    auto time = std::make_shared<Clock::time_point>();
    auto* ours = static_cast<Event*>(*event);
    ours->at = queue_of(of).put([time] { *time = Clock::now(); });
    ours->time = time;
  }
  void block(void* event, const c10::Stream& of) const override {
    if (event == nullptr || static_cast<Event*>(event)->at.queue == nullptr) return;
    auto at = static_cast<Event*>(event)->at;
    auto& queue = queue_of(of);
    if (at.queue != &queue) queue.put([at] { at.queue->wait(at.ticket); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    auto at = static_cast<Event*>(event)->at;
    return at.queue == nullptr || at.queue->passed(at.ticket);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    auto at = static_cast<Event*>(event)->at;
    if (at.queue != nullptr) at.queue->wait(at.ticket);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(first) && queryEvent(second) && first && second, "both events must have passed");
    auto span = *static_cast<Event*>(second)->time - *static_cast<Event*>(first)->time;
    return static_cast<float>(std::chrono::duration<double, std::milli>(span).count());  // as CUDA: 32 bits
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& of) const override {
    auto& queue = queue_of(of);
    return queue.passed(queue.now().ticket);
  }
  void synchronizeStream(const c10::Stream& of) const override {
    auto& queue = queue_of(of);
    queue.wait(queue.now().ticket);
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    device_of(index < 0 ? current_device : index).drain();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- random numbers --------------------------------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  at::Generator host = at::detail::createCPUGenerator();
  explicit Generator(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed + 1); }  // other numbers than the host's
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed() - 1; }
  uint64_t seed() override {
    auto seed = c10::detail::getNonDeterministicRandom();
    set_current_seed(seed);
    return seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    host.set_state(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&state))));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.get_state().unsafeGetTensorImpl()->shallow_copy_and_detach(0, false);
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->host = host.clone();
    return copy;
  }
};

at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* made =
      new std::array<at::Generator, kDevices>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return (*made)[index < 0 ? current_device : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  at::Device getDeviceFromPtr(void* data) const override { return {kType, owner_of(data)}; }
  bool isPinnedPtr(const void* data) const override { return locked().has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &locked(); }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return contexts[index]; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kType, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({kType, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    c10::OptionalDeviceGuard guard(storage.device());
    auto data = allocator().allocate(num_bytes);
    if (auto both = std::min(num_bytes, storage.nbytes())) allocator().copy_data(data.get(), storage.data(), both);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
  }
};

// ---- operators -------------------------------------------------------------------------------------

thread_local bool computes = false;  // results of operators arrive late

at::Tensor seen_by_streams(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::DeviceType::CPU);
  return at::from_blob(reach(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  auto on = target.device().type() == kType ? target.device() : source.device();
  auto& queue = current_queue(on.index());
  at::Tensor host = source.device().is_cpu() ? source : target.device().is_cpu() ? target : at::Tensor();
  bool late = computes || (non_blocking && (!host.defined() || locked().has(host.data_ptr())));
  at::Tensor kept, given = source;
  if (non_blocking && !late && source.device().is_cpu()) {  // pageable: read before this returns, written later
    given = source.clone();
    late = true;
  }
  // A fallback's own result, or a clone, which nobody else changes. Without the Python object, whose end would wait for
  // the interpreter.
  if (late && given.device().is_cpu() && !locked().has(given.data_ptr())) {
    kept = at::Tensor(given.unsafeGetTensorImpl()->shallow_copy_and_detach(0, false));
  }
  if (computes && target.device().is_cpu()) late = false;
  auto work = [from = seen_by_streams(given), to = seen_by_streams(target), kept, conj = source.is_conj(),
               neg = source.is_neg()] {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto value = conj ? from.conj().resolve_conj() : from;
    to.copy_(neg ? value.neg() : value);
  };
  auto at = queue.put(std::move(work));
  if (!late) at.queue->wait(at.ticket);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  auto& queue = current_queue(tensor.device().index());
  auto value = at::empty_like(tensor, tensor.options().device(c10::DeviceType::CPU));
  queue.wait(queue
                 .put([from = seen_by_streams(tensor), value] {
                   at::AutoDispatchBelowADInplaceOrView guard;
                   value.copy_(from);
                 })
                 .ticket);
  return value.item();
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, sizes, strides, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef sizes) { return at::native::view(self, sizes); }

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  if (format) tensor->empty_tensor_restride(*format);
  size_t needed = (tensor->storage_offset() + tensor->numel()) * self.dtype().itemsize();
  if (needed > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes,
                        c10::SymIntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                                    offset.guard_int(__FILE__, __LINE__));
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage storage) {
  auto numel = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {c10::SymInt(numel)}, {c10::SymInt(1)});
}

// `param.data = tensor` between host and device, which torch allows for its own devices.
bool has_compatible_type(const at::Tensor& self, const at::Tensor& from) {
  auto known = [](const at::Tensor& tensor) { return tensor.device().is_cpu() || tensor.device().type() == kType; };
  return known(self) && known(from) && self.layout() == at::kStrided && from.layout() == at::kStrided;
}

// Runs an operator on the host. Random numbers are the device's.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& arguments = op.schema().arguments();
  auto index = current_device;
  for (auto& value : torch::jit::last(stack, arguments.size())) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kType) {
      index = value.toTensor().device().index();
      break;
    }
  }
  c10::DeviceGuard guard(c10::Device(kType, index));
  bool was = computes, random = op.hasTag(at::Tag::nondeterministic_seeded);
  computes = true;
  auto generator = default_generator(index);
  for (size_t place = stack->size() - arguments.size(); place < stack->size(); ++place) {
    auto& value = (*stack)[place];
    if (value.isGenerator() && value.toGenerator().device().type() == kType) {
      generator = value.toGenerator();
      value = c10::IValue();
    }
  }
  auto& hosts = const_cast<at::Generator&>(at::detail::getDefaultCPUGenerator());
  at::Tensor before;
  auto* ours = static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  if (random) {
    before = hosts.get_state();
    hosts.set_state(ours->host.get_state());
  }
  auto restore = [&] {
    if (random) {
      ours->host.set_state(hosts.get_state());
      hosts.set_state(before);
    }
    computes = was;
  };
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("resize_", &resize);
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_type);
  library.impl("set_.source_Storage", &set_source);
  for (auto* name : {"native_layer_norm", "native_layer_norm_backward"}) {  // else torch takes them apart
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  library.impl("set_.source_Storage_storage_offset", &set_storage);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // torch's macros have this name
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOW)
#undef LOW
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FULL)
#undef FULL
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
#undef PROMOTE
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(kType, &allocator(), 1);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  module.def("set_capacity", [](c10::DeviceIndex index, size_t num_bytes) {
    std::lock_guard lock(allocator().mutex);
    allocator().heaps[index].capacity = num_bytes;
  });
  module.def(
      "set_delay",
      [](c10::DeviceIndex index, int64_t most_us) {
        auto& device = device_of(index);
        device.queue(0);
        std::lock_guard lock(device.mutex);
        for (auto& queue : device.queues) queue->delay_us = most_us;
      },
      "Every task of the device's streams begins up to so many microseconds late.");
  module.def("lock",
             [](uintptr_t pointer, size_t num_bytes) { locked().add(reinterpret_cast<void*>(pointer), num_bytes); });
  module.def("unlock", [](uintptr_t pointer) { locked().remove(reinterpret_cast<void*>(pointer)); });
  module.def("has_context", [](c10::DeviceIndex index) { return contexts[index].load(); });
  module.def("default_generator", [](c10::DeviceIndex index) { return default_generator(index); });
}
