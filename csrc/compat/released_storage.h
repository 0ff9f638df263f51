// Storages whose memory is given up for a while, and that say so to whoever reads them meanwhile.
//
// PyTorch has a check for this in every read and write of a storage's address; older versions can set it and never clear it. Its
// member is private: an explicit instantiation may name it.
#pragma once

#include <c10/core/StorageImpl.h>

namespace offload::compat {

template <bool c10::StorageImpl::*member>
struct RefusesReads {
  friend bool& refusesReads(c10::StorageImpl& storage) {
    return storage.*member;
  }
};
bool& refusesReads(c10::StorageImpl& storage);
template struct RefusesReads<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

/// Gives up the memory, and keeps the size, so that views can be made. Until there is other memory, a read or write raises
/// `sentence`, and so does every data_ptr().
inline void releaseMemory(c10::StorageImpl& storage, const char* sentence) {
  auto& said = storage.get_extra_meta().custom_data_ptr_error_msg_;
  if (!said) said = sentence;
  refusesReads(storage) = true;
  storage.set_data_ptr_noswap({nullptr, storage.device()});
}

inline bool isReleased(c10::StorageImpl& storage) {
  return refusesReads(storage);
}

inline void giveMemory(c10::StorageImpl& storage, c10::DataPtr data) {
  refusesReads(storage) = false;
  storage.set_data_ptr_noswap(std::move(data));
}

} // namespace offload::compat
