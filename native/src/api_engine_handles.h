// The opaque handles of api.h and the objects behind them.
//
// Ownership: a handle is the object's address; hetero_*_close and hetero_engine_destroy delete it. Thread-safety: none needed.
// Failure: Guarded turns want of memory into a Status, so that no exception leaves the library.
#ifndef HETERO_API_ENGINE_HANDLES_H_
#define HETERO_API_ENGINE_HANDLES_H_

#include <exception>
#include <new>

#include "engine.h"
#include "hetero/api.h"
#include "status.h"
#include "store.h"

namespace hetero {

inline Store* FromHandle(hetero_store* handle) { return reinterpret_cast<Store*>(handle); }
inline Block* FromHandle(hetero_block* handle) { return reinterpret_cast<Block*>(handle); }
inline Engine* FromHandle(hetero_engine* handle) { return reinterpret_cast<Engine*>(handle); }
inline hetero_store* ToHandle(Store* object) { return reinterpret_cast<hetero_store*>(object); }
inline hetero_block* ToHandle(Block* object) { return reinterpret_cast<hetero_block*>(object); }
inline hetero_engine* ToHandle(Engine* object) { return reinterpret_cast<hetero_engine*>(object); }

template <class Body>
Status Guarded(const Body& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Status(HETERO_ENOMEM, "out of memory");
  } catch (const std::exception& error) {
    return Status(HETERO_EIO, error.what());
  }
}

}  // namespace hetero

#endif  // HETERO_API_ENGINE_HANDLES_H_
