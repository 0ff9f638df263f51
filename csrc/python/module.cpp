// The Python binding: thin, and nothing but it.
#include "aten/activity_ranges.h"
#include "aten/autocast_copies.h"
#include "aten/context.h"
#include "aten/cuda_glue.h"
#include "aten/device_work.h"
#include "aten/fetch.h"
#include "aten/generator.h"
#include "aten/lookup.h"
#include "aten/needless_work.h"
#include "aten/placement.h"
#include "aten/refusals.h"
#include "aten/settings_check.h"
#include "aten/sharing.h"
#include "aten/tensors.h"
#include "autograd/generic.h"
#include "autograd/nodes.h"
#include "autograd/release_refill.h"
#include "compat/accelerator.h"
#include "compat/registration.h"
#include "compat/torch_version.h"
#include "core/host_wait.h"
#include "core/memory_limits.h"
#include "python/dlpack.h"
#include "python/elementwise.h"
#include "python/file_bindings.h"
#include "python/graphs.h"
#include "python/purposes.h"
#include "python/saved_tensors.h"
#include "python/snapshot.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace offload {
namespace {

Context& context() {
  return Context::get();
}

FaultLink& faults() {
  TORCH_CHECK(
      context().faults() != nullptr,
      "offload: no call can be made to fail; set TORCH_OFFLOAD_FAULT=0 in the environment, and "
      "TORCH_OFFLOAD_LINK=sim where there is no GPU.");
  return *context().faults();
}

int checkedIndex(int index) {
  TORCH_CHECK(
      index >= 0 && index < deviceCount(), "offload: there is no device offload:", index, "; this machine has ",
      static_cast<int>(deviceCount()), ".");
  return index;
}

// Bytes and counts since the process began; its peaks, and what has come and gone, since those were reset.
py::dict statistics(int index) {
  py::dict result;
  const Context* now = Context::ifCreated();
  const ArenaStats host = now != nullptr ? now->arena().stats() : ArenaStats{};
  const AccountsStats accounts = now != nullptr ? now->accounts().stats() : AccountsStats{};
  auto add = [&result](const std::string& name, std::size_t current, std::size_t peak, std::size_t ever) {
    result[py::str(name + ".current")] = current;
    result[py::str(name + ".peak")] = peak;
    result[py::str(name + ".allocated")] = ever;
    result[py::str(name + ".freed")] = ever - current;
  };
  auto addAccount = [&add](const std::string& name, const AccountStats& account) {
    add("host." + name + "_bytes", account.bytes, account.bytesPeak, account.bytesEver);
    add("host." + name + "_count", account.count, account.countPeak, account.countEver);
  };
  addAccount("allocated", accounts.all);
  addAccount("file", accounts.files);
  for (const Purpose purpose : kPurposes) addAccount(nameOf(purpose), accounts.of(purpose));
  add("host.reserved_bytes", host.reserved, host.reservedPeak, host.reservedEver);
  result["host.pinned_bytes.current"] = host.pinned;
  result["host.shared_bytes.current"] = host.shared;
  result["host.allocations.current"] = host.count;
  result["host.allocations.total"] = host.allocations;
  const bool cache = now != nullptr && now->hasCache();
  const ResidencyStats slots = cache ? now->residency().stats(checkedIndex(index)) : ResidencyStats{};
  add("device.slot_bytes", slots.slotBytes, slots.slotBytesPeak, slots.slotBytesEver);
  result["device.pinned_slot_bytes.current"] = slots.pinnedBytes;
  result["device.staying_bytes.current"] = slots.stayingBytes;
  result["device.passing_bytes.current"] = slots.slotBytes - slots.stayingBytes - slots.dirtyBytes;
  result["device.dirty_bytes.current"] = slots.dirtyBytes;
  result["cache.fetches"] = slots.fetches;
  result["cache.hits"] = slots.hits;
  result["cache.evictions"] = slots.evictions;
  result["cache.reads_in_place"] = slots.readsInPlace;
  result["cache.prefetches"] = slots.prefetches;
  result["cache.updates"] = slots.updates;
  result["cache.prefetches_wasted"] = slots.prefetchesWasted;
  const TransferStats link = cache ? now->residency().transferStats(index) : TransferStats{};
  std::size_t rings = 0; // of all devices, as all that is said of the host
  for (int each = 0; cache && each < now->link()->deviceCount(); ++each) {
    rings += now->residency().transferStats(each).ringBytes;
  }
  result["host.ring_bytes.current"] = rings;
  result["link.bytes_to_device"] = link.bytesToDevice;
  result["link.bytes_to_host"] = link.bytesToHost;
  result["link.bytes_read_in_place"] = slots.bytesReadInPlace;
  result["link.copies_to_device"] = link.copiesToDevice;
  result["link.copies_to_host"] = link.copiesToHost;
  const StallStats stalls = cache ? now->residency().stallStats(index) : StallStats{};
  result["link.stalls"] = stalls.count;
  result["link.stall_seconds"] = stalls.time.count();
  const HostJobStats jobs = cache ? now->residency().hostJobStats() : HostJobStats{};
  result["host_jobs.submitted"] = jobs.submitted;
  result["host_jobs.pending"] = jobs.pending;
  const HostWaitStats waits = hostWaitStats();
  result["host_waits.count"] = waits.count;
  result["host_waits.seconds"] = std::chrono::duration<double>(waits.time).count();
  result["host_fallbacks"] = hostFallbacks();
  result["excess_bytes"] = excessBytes();
  return result;
}

void resetPeaks(int index) {
  Context* now = Context::ifCreated();
  if (now == nullptr) return;
  now->accounts().resetPeaks();
  now->arena().resetPeaks();
  if (now->hasCache()) now->residency().resetPeaks(checkedIndex(index));
}

void resetEver(int index) {
  Context* now = Context::ifCreated();
  if (now == nullptr) return;
  now->accounts().resetEver();
  now->arena().resetEver();
  if (now->hasCache()) now->residency().resetEver(checkedIndex(index));
}

void emptyCache() {
  const Context* now = Context::ifCreated();
  if (now == nullptr) return;
  if (now->hasCache()) {
    for (int index = 0; index < now->link()->deviceCount(); ++index) now->residency().emptyCache(index);
    now->residency().trimRings();
  }
  if (now->backend() == Backend::Cuda) cuda::releaseCached();
  now->arena().trim();
}

} // namespace

PYBIND11_MODULE(_C, m) {
  // Whoever waits for a copy lets other Python threads run.
  setHostWaitScope([](const std::function<void()>& wait) {
    if (PyGILState_Check() == 0) return wait();
    py::gil_scoped_release release;
    wait();
  });

  setWrapperTest([](const at::Tensor& subclass) {
    const py::gil_scoped_acquire gil;
    const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(subclass));
    return py::hasattr(py::type::of(object), "__tensor_flatten__");
  });

  m.def("unsupported_torch", [](const std::string& version) { return compat::unsupportedTorch(version); });
  // All that can refuse comes before anything that changes the process. A test gives names that no library calls.
  const compat::AcceleratorSymbols symbols;
  m.def(
      "register_device",
      [](const std::string& get, const std::string& is) {
        try {
          compat::checkAlone();
          compat::correctAccelerator({get, is}, &compat::registerAll);
        } catch (const compat::ImportRefused& refused) {
          throw py::import_error(refused.what());
        }
      },
      py::arg("get") = symbols.get, py::arg("is_one") = symbols.is);
  m.def("intercept_operations", &interceptOperations);
  Context::atFirstUse([] { interceptOperations(); });
  Context::atFirstUse(&interceptAutocast);
  Context::atFirstUse(&interceptRecordStream);
  Context::atFirstUse(&interceptCollectives);

  m.def("device_count", [] { return static_cast<int>(deviceCount()); });
  m.def("current_device", [] { return static_cast<int>(currentIndex()); });
  m.def("set_device", [](int index) { setCurrentIndex(static_cast<c10::DeviceIndex>(checkedIndex(index))); });
  m.def("in_use", &Context::inUse);
  m.def("refuse_dlpack", &refuseDlpack);
  m.def("guarded_dlpack_table", &guardedDlpackTable);
  m.def("backend", [] {
    switch (context().backend()) {
      case Backend::Cuda:
        return "cuda";
      case Backend::Sim:
        return "sim";
      default:
        return "host";
    }
  });
  m.attr("LEAST_TABLE") = kLeastTable;
  m.def("paired_device", [](int index) {
    const c10::Device device = pairedDevice(static_cast<c10::DeviceIndex>(index));
    return py::reinterpret_steal<py::object>(THPDevice_New(device));
  });
  m.def("default_generator", [](int index) { return defaultGenerator(static_cast<c10::DeviceIndex>(checkedIndex(index))); });
  m.def("host_memory", [] {
    const MemoryLimits limits = readMemoryLimits();
    return std::make_pair(limits.available, limits.total);
  });
  py::class_<ReleaseRefill>(m, "ReleaseRefill")
      .def(py::init<c10::Device>())
      .def("add", &ReleaseRefill::add)
      .def("finish", &ReleaseRefill::finish);
  m.def("fetch_together", torch::wrap_pybind_function_no_gil([](const std::vector<at::Tensor>& tensors, c10::Device target) {
          return fetch(tensors, target);
        }));
  m.def("before_change", &beforeChange, py::call_guard<py::gil_scoped_release>());
  m.def("is_fetched", &isFetched);
  m.def("bring_home", &bringHome, py::call_guard<py::gil_scoped_release>());
  m.def("rebase", &rebase);
  // Python's `.grad` warns where a tensor is no leaf.
  m.def("take_gradient", [](const at::Tensor& tensor) {
    const bool has = torch::autograd::impl::get_autograd_meta(tensor) != nullptr;
    return has ? std::exchange(tensor.mutable_grad(), at::Tensor()) : at::Tensor();
  });
  m.def("is_shared", [](const c10::Storage& storage) { return isShared(*storage.unsafeGetStorageImpl()); });
  m.def(
      "share", torch::wrap_pybind_function_no_gil([](const c10::Storage& storage) { share(*storage.unsafeGetStorageImpl()); }));
  m.def("require_descriptor", [] { context().arena().requireDescriptor(); });
  m.def("shared_descriptor", [](const c10::Storage& storage) { return sharedDescriptor(*storage.unsafeGetStorageImpl()); });
  m.def("open_shared", torch::wrap_pybind_function([](int descriptor, int index) {
          return openShared(descriptor, static_cast<c10::DeviceIndex>(index));
        }));
  m.def("claim", &claimTensors, py::arg("tensors"), py::arg("purpose"));
  m.def("snapshot", &takeSnapshot);
  m.def("record_history", [](std::size_t most) { context().accounts().recordHistory(most); });
  m.def("look_at_host_work", [](bool look) {
    lookAtHostWork(look);
    const py::gil_scoped_release others;
    if (!look && Context::get().hasCache()) Context::get().residency().finishJobs();
  });
  m.def("name_tensor", [](py::handle tensor, const std::string& name, bool replace) {
    nameTensor(THPVariable_Unpack(tensor.ptr()), name, replace);
  });
  bindElementwise(m);
  py::class_<HostScope>(m, "HostScope")
      .def(py::init<>())
      .def("__enter__", [](const HostScope&) { HostScope::enter(); })
      .def("__exit__", [](const HostScope&, const py::args&) { HostScope::leave(); })
      .def_static("active", &HostScope::active);
  // Leaves the innermost scope for a while, where there is one.
  struct HostScopeBreak {
    bool left = false;
  };
  py::class_<HostScopeBreak>(m, "HostScopeBreak")
      .def(py::init<>())
      .def(
          "__enter__",
          [](HostScopeBreak& self) {
            self.left = HostScope::active();
            HostScope::leave();
          })
      .def("__exit__", [](const HostScopeBreak& self, const py::args&) {
        if (self.left) HostScope::enter();
      });
  m.def("statistics", &statistics, py::arg("index") = 0);
  m.def("reset_peaks", &resetPeaks, py::arg("index") = 0);
  m.def("reset_ever", &resetEver, py::arg("index") = 0);
  m.def("empty_cache", &emptyCache, py::call_guard<py::gil_scoped_release>());
  m.def("budget", [](int index) {
    if (!context().hasCache()) return std::size_t{0};
    const py::gil_scoped_release release;
    return context().residency().budget(checkedIndex(index));
  });
  m.def("set_budget", [](std::optional<std::size_t> bytes) {
    py::gil_scoped_release release;
    if (context().hasCache()) context().residency().setBudget(bytes);
  });
  m.def("budget_of", [](const std::string& text) { return budgetOf(text, context().deviceBytes()); });
  m.def("problem_of", [](const char* what, const std::string& said, std::size_t bytes) {
    return problemOf(what, said, bytes, context().backend(), context().deviceBytes());
  });
  m.def("ring_bytes", [] { return context().hasCache() ? context().residency().ringBytes() : 0; });
  bindFiles(m);
  bindSavedTensors(m);
  bindGraphs(m);
  m.def("set_autocast_copies", &setAutocastCopies, py::arg("kept"), py::arg("least_bytes") = std::size_t{1} << 20);
  m.def("autocast_copies", &autocastCopies);
  m.def("set_work_on_device", &setWorkOnDevice);
  m.def("may_work_on_device", &mayWorkOnDevice);
  m.def("set_ring_bytes", [](std::size_t bytes) {
    if (context().hasCache()) context().residency().setRingBytes(bytes);
  });
  // For tests: the `n`-th call of the Link from now on fails, and with `lost` all that follow.
  m.def(
      "fail_call", [](std::uint64_t n, bool lost) { faults().fail(n, lost ? Failing::FromThenOn : Failing::Once); },
      py::arg("n"), py::arg("lost") = false);
  m.def("failed_calls", [] { return faults().failures(); });
  m.def("link_use", [] {
    const LinkUse use = faults().use();
    py::dict result;
    result["streams"] = use.streams;
    result["events"] = use.events;
    result["buffers"] = use.buffers;
    result["locked_bytes"] = use.lockedBytes;
    return result;
  });
  m.def(
      "drain",
      [](bool close) {
        if (const Context* now = Context::ifCreated()) now->drain(close);
      },
      py::arg("close") = false);
}

} // namespace offload
