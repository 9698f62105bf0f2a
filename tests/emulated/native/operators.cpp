// Kernels: every operator runs at once on the same bytes as CPU tensors, except copies that may be late.
#include "state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

namespace emulated {

using c10::IntArrayRef;
using std::optional;

char* address_of(const Tensor& tensor) {
  return (char*)tensor.unsafeGetTensorImpl()->unsafe_storage().data() + tensor.storage_offset() * tensor.itemsize();
}

Tensor host_alias(const Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(address_of(tensor), tensor.sizes(), tensor.strides(), options);
}

namespace {

// An alias that an operator may try to resize.
Tensor written_alias(const Tensor& tensor) {
  if (tensor.numel() == 0) return host_alias(tensor);
  size_t bytes = tensor.storage().nbytes() - tensor.storage_offset() * tensor.itemsize();
  at::Storage storage(at::Storage::use_byte_size_t(), bytes, c10::DataPtr(address_of(tensor), Device(DeviceType::CPU)),
                      c10::GetAllocator(DeviceType::CPU), true);
  Tensor alias = at::empty({0}, at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  alias.set_(storage, 0, tensor.sizes(), tensor.strides());
  return alias;
}

int index_of(optional<Device> device) { return device && device->index() >= 0 ? device->index() : current_device(); }

at::ScalarType type_of(optional<at::ScalarType> dtype) {
  return dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

Tensor empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<Device> device,
             optional<bool> pin, optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(Device(DeviceType::CUDA, index_of(device)));
  c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, device_allocator(), keys, type_of(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
                     optional<Device> device, optional<bool>) {
  c10::DeviceGuard guard(Device(DeviceType::CUDA, index_of(device)));
  c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), keys, type_of(dtype));
}

}  // namespace

Tensor unowned(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  at::Storage same(at::Storage::use_byte_size_t(), storage.nbytes(),
                   c10::DataPtr((void*)storage.data(), tensor.device()), nullptr, false);
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                         tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return made;
}

namespace {

Tensor on_device(const Tensor& host, Device device) {
  Tensor made = empty_strided(host.sizes(), host.strides(), host.scalar_type(), {}, device, {});
  if (host.numel()) {
    Opened opened;
    opened.add(made);
    host_alias(made).copy_(host);
  }
  return made;
}

}  // namespace

void resize_storage(const at::Storage& storage, int64_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(impl->device());
  c10::DataPtr fresh = allocate(bytes, impl->device().index());
  Site site = here();
  Lock lock;
  size_t kept = std::min<size_t>(bytes, impl->nbytes());
  if (kept) {
    int id = current_stream(impl->device().index());
    flush(id);
    launch(id, "storage.resize_", kept, site);
    char *from = (char*)impl->data(), *to = (char*)fresh.get();
    use(id, {from, from + kept}, false, "storage.resize_", site);
    use(id, {to, to + kept}, true, "storage.resize_", site);
    device_allocator()->copy_data(to, from, kept);
    if (GraphRef graph = capture_of(id))
      add_node(graph, "storage.resize_", [=] { device_allocator()->copy_data(to, from, kept); });
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

namespace {

const Tensor& resize_(const Tensor& self, IntArrayRef size, optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() == size && !format) return self;
  impl->set_sizes_contiguous(size);
  size_t need = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (need > impl->unsafe_storage().nbytes()) resize_storage(impl->unsafe_storage(), need);
  return self;
}

Tensor& set_at(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  TORCH_CHECK(storage.device() == self.device() || storage.nbytes() == 0,
              "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", storage.device(), "\"");
  auto* impl = self.unsafeGetTensorImpl();
  std::vector<int64_t> steps = stride.vec();
  if (steps.empty())
    for (int64_t d = (int64_t)size.size() - 1, step = 1; d >= 0; step *= std::max<int64_t>(size[d--], 1))
      steps.insert(steps.begin(), step);
  size_t need = at::detail::computeStorageNbytes(size, steps, self.itemsize(), offset);
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, steps);
  if (self.numel() && need > storage.nbytes()) resize_storage(storage, need);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage) {
  return set_at(self, storage, 0, {(int64_t)(storage.nbytes() / self.itemsize())}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor unfold(const Tensor& self, int64_t d, int64_t n, int64_t step) { return at::native::unfold(self, d, n, step); }

void record_stream(Tensor& self, c10::Stream on) {
  Lock lock;
  int id = on.id() == 0 ? on.device_index() : on.id();
  if (auto memory = memory_at(self.storage().data())) memory->recorded.insert(id);
  counters["record_stream"]++;
}

// -- copies ----------------------------------------------------------------------------------------------------------

void copy_bytes(Tensor to, const Tensor& from) {
  at::AutoDispatchBelowAutograd below;
  c10::impl::ExcludeDispatchKeyGuard no_python(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  to.copy_(from);
}

void copy_late(int id, const Tensor& to, const Tensor& from, const std::string& what) {
  Range target = range_of(to), source = range_of(from);
  Held target_memory = memory_at(target.low), source_memory = memory_at(source.low);
  if (settings.poison && to.is_contiguous() && !is_late(target) && !target.meets(source)) {
    Opened opened;
    opened.add(target_memory);
    memset(target.low, 0xFF, target.high - target.low);
  }
  Tensor to_alias = host_alias(to), from_alias = host_alias(from);
  push(
      id,
      [=] {
        Opened opened;
        opened.add(target_memory);
        opened.add(source_memory);
        copy_bytes(to_alias, from_alias);
      },
      {target, source});
}

Tensor& copy_(Tensor& self, const Tensor& given, bool non_blocking) {
  Tensor from = self.sizes() == given.sizes() ? given : given.expand(self.sizes());
  if (self.is_same(from) || self.numel() == 0) return self;
  bool to_host = !self.is_cuda(), to_device = !from.is_cuda(), inside = !to_host && !to_device;
  const char* what = inside ? "copy" : to_device ? "copy to device" : "copy to host";
  const Tensor& host = to_device ? from : self;
  bool pinned = !inside && is_pinned(host.unsafeGetTensorImpl()->unsafe_storage().data());
  Site site = here();
  Lock lock;
  int id = current_stream(to_host ? from.device().index() : self.device().index());
  GraphRef graph = capture_of(id);
  if (graph && !inside && !pinned)
    refuse(graph, "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned",
           what, site);
  if (graph && !inside && !non_blocking)
    refuse(graph, "cudaErrorStreamCaptureUnsupported: a copy that is not non_blocking waits for the stream", what,
           site);
  if (graph) {
    launch(id, what, self.nbytes(), site);
    use(id, range_of(from), false, what, site);
    use(id, range_of(self), true, what, site);
    Tensor to_alias = host_alias(self), from_alias = host_alias(from);  // keep no memory, as a graph keeps none
    Held to_memory = memory_at(range_of(self).low), from_memory = memory_at(range_of(from).low);
    auto run = [=] {
      Opened opened;
      opened.add(to_memory);
      opened.add(from_memory);
      copy_bytes(to_alias, from_alias);
    };
    run();
    add_node(graph, what, run);
    return self;
  }
  counters["bytes." + std::string(what)] += self.nbytes();
  counters[std::string(what) + (inside ? "" : pinned ? " pinned" : " pageable")]++;
  launch(id, what, self.nbytes(), site);
  use(id, range_of(from), false, what, site);
  use(id, range_of(self), true, what, site);
  // A device copies whole rows between equal dtypes only; torch does the rest in a buffer of its own, in order.
  if (settings.late && non_blocking && pinned) {
    copy_late(id, self, from, what);
    return self;
  }
  flush(id);
  {
    Opened opened;
    opened.add(self);
    opened.add(from);
    copy_bytes(self.is_cuda() ? host_alias(self) : self, from.is_cuda() ? host_alias(from) : from);
  }
  if (!inside && !(to_device && non_blocking)) {
    host_waits(what, site);
    host_follows(stream(id).seen);
  }
  return self;
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  copy_(target, self, non_blocking);
  return to;
}

at::Scalar item(const Tensor& self) {
  Site site = here();
  Lock lock;
  int id = current_stream(self.device().index());
  may_wait(id, "item", site);
  launch(id, "item", self.itemsize(), site);
  use(id, range_of(self), false, "item", site);
  flush(id);
  host_waits("item", site);
  host_follows(stream(id).seen);
  Opened opened;
  opened.add(self);
  return host_alias(self).item();
}

// -- every other operator --------------------------------------------------------------------------------------------

const std::set<std::string> kTakesHostTensors = {"aten::index",       "aten::index_put",    "aten::index_put_",
                                                 "aten::_index_put_impl_", "aten::_unsafe_index",
                                                 "aten::_unsafe_index_put", "aten::is_set_to", "aten::_to_copy"};
const std::set<std::string> kHostWaits = {"aten::nonzero",    "aten::equal",      "aten::masked_select",
                                          "aten::_unique2",   "aten::unique_dim", "aten::unique_consecutive",
                                          "aten::is_nonzero"};

// One operator call: its device tensors, the CPU tensors over their bytes, and where it runs.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), schema_(op.schema()), name_(schema_.name()),
        begin_(stack->size() - schema_.arguments().size()), given_(stack->begin() + begin_, stack->end()) {
    find_device();
  }

  void run() {
    Site site = here();
    Lock lock;
    int id = current_stream(device_.index());
    GraphRef graph = capture_of(id);
    std::vector<c10::IValue> arguments;
    if (graph) arguments = for_replay(graph, site);
    flush(id);
    int64_t bytes = 0;
    each([&](const Tensor& t, bool) { bytes += t.is_cuda() ? t.numel() * t.itemsize() : 0; });
    launch(id, name_, bytes, site);
    Opened opened;
    each([&](const Tensor& t, bool written) {
      if (!t.is_cuda()) return;
      opened.add(t);
      use(id, range_of(t), written, name_, site);
    });
    swap_arguments();
    compute();
    keep_resized();
    give_back(id, site);
    if (graph) {
      auto again = [op = op_, arguments, fresh = unowned_all(fresh_), resized = resized_] {
        torch::jit::Stack stack(arguments.begin(), arguments.end());
        Call(op, &stack).run_again(fresh, resized);
      };
      add_node(graph, name_, again);
    }
    if (kHostWaits.count(name_)) {
      host_waits(name_, site);
      host_follows(stream(id).seen);
    }
  }

  // The same once more, in a replay: results go where they went before.
  void run_again(const std::vector<Tensor>& fresh, const std::map<size_t, Tensor>& resized) {
    Opened opened;
    each([&](const Tensor& t, bool) {
      if (t.is_cuda()) opened.add(t);
    });
    for (auto& tensor : fresh) opened.add(tensor);
    swap_arguments();
    compute();
    for (auto& [place, tensor] : resized) {
      opened.add(tensor);
      copy_bytes(host_alias(tensor), pairs_[place].second);
    }
    size_t next = 0;
    auto take = [&](const Tensor& t) {
      if (!t.defined()) return;
      for (auto& [device, alias] : pairs_)
        if (alias.is_same(t) || (t.has_storage() && t.storage().data() && t.storage().is_alias_of(alias.storage())))
          return;
      const Tensor& target = fresh.at(next++);
      TORCH_CHECK(target.sizes() == t.sizes(), name_, " has another shape in a replay than in the capture (emulated)");
      if (t.numel()) copy_bytes(host_alias(target), t);
    };
    for (size_t i = stack_->size() - schema_.returns().size(); i < stack_->size(); i++) {
      auto& value = (*stack_)[i];
      if (value.isTensor()) take(value.toTensor());
      else if (value.isTensorList())
        for (auto& t : value.toTensorVector()) take(t);
    }
  }

 private:
  static std::vector<Tensor> unowned_all(const std::vector<Tensor>& tensors) {
    std::vector<Tensor> made;
    for (auto& tensor : tensors) made.push_back(unowned(tensor));
    return made;
  }

  // The arguments as a graph keeps them: addresses of the device's memory, values of the host's numbers.
  std::vector<c10::IValue> for_replay(const GraphRef& graph, const Site& site) {
    if (kHostWaits.count(name_))
      refuse(graph, "cudaErrorStreamCaptureUnsupported: the host waits for the shape of the result", name_, site);
    auto kept = [&](const Tensor& t) {
      if (!t.defined() || t.is_cuda()) return unowned(t);
      if (t.dim()) refuse(graph, "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU "
                                 "tensor is pinned", name_ + " with a tensor of the host", site);
      return t.clone();
    };
    bool indexes = name_ == "aten::index" || name_ == "aten::_unsafe_index";
    std::vector<c10::IValue> made;
    for (auto& value : given_) {
      if (value.isTensor()) {
        made.emplace_back(kept(value.toTensor()));
      } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (auto& t : value.toTensorVector()) list.push_back(kept(t));
        made.emplace_back(list);
      } else if (value.isOptionalTensorList()) {
        c10::List<optional<Tensor>> list;
        for (auto& t : value.toOptionalTensorVector()) {
          if (t && indexes && t->scalar_type() == at::kBool)
            refuse(graph, "cudaErrorStreamCaptureUnsupported: the host waits for the number of true elements", name_,
                   site);
          list.push_back(t ? optional<Tensor>(kept(*t)) : t);
        }
        made.emplace_back(list);
      } else {
        made.push_back(value);
      }
    }
    return made;
  }

  template <typename F>
  void each(F visit) {
    for (size_t i = 0; i < given_.size(); i++) {
      auto* alias = schema_.arguments()[i].alias_info();
      bool written = alias && alias->isWrite();
      auto see = [&](const Tensor& t) {
        if (t.defined()) visit(t, written);
      };
      if (given_[i].isTensor()) see(given_[i].toTensor());
      else if (given_[i].isTensorList())
        for (const Tensor& t : given_[i].toTensorVector()) see(t);
      else if (given_[i].isOptionalTensorList())
        for (const auto& t : given_[i].toOptionalTensorVector())
          if (t) see(*t);
    }
  }

  void find_device() {
    optional<Device> found;
    bool mixed = kTakesHostTensors.count(name_);
    auto differ = [&](Device a, Device b) {
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", a, " and ",
                  b, "! (when checking arguments of ", name_, "; emulated)");
    };
    each([&](const Tensor& t, bool) {
      if (!t.is_cuda()) return;
      if (!found) found = t.device();
      if (*found != t.device() && t.dim() && !mixed) differ(*found, t.device());
    });
    for (auto& value : given_)
      if (value.isDevice() && !found && value.toDevice().is_cuda()) found = value.toDevice();
    device_ = Device(DeviceType::CUDA, index_of(found));
    each([&](const Tensor& t, bool written) {
      if (!t.is_cuda() && (t.dim() || written) && !mixed) differ(device_, t.device());
    });
  }

  Tensor swapped(const Tensor& t, bool written) {
    if (!t.defined() || !t.is_cuda()) return t;
    pairs_.emplace_back(t, written ? written_alias(t) : host_alias(t));
    return pairs_.back().second;
  }

  void swap_arguments() {
    for (size_t i = 0; i < given_.size(); i++) {
      auto& value = (*stack_)[begin_ + i];
      auto* alias = schema_.arguments()[i].alias_info();
      if (value.isTensor()) {
        value = swapped(value.toTensor(), alias && alias->isWrite());
      } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (auto& t : value.toTensorVector()) list.push_back(swapped(t, false));
        value = c10::IValue(list);
      } else if (value.isOptionalTensorList()) {
        c10::List<optional<Tensor>> list;
        for (auto& t : value.toOptionalTensorVector()) list.push_back(t ? optional<Tensor>(swapped(*t, false)) : t);
        value = c10::IValue(list);
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        value = c10::IValue(Device(DeviceType::CPU));
      }
    }
  }

  void compute() {
    at::AutoDispatchBelowAutograd below;
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) {
      op_.callBoxed(stack_);
      return;
    }
    auto host = at::detail::getDefaultCPUGenerator();  // lends itself to the device's numbers for the call
    auto* lent = host.unsafeGetGeneratorImpl();
    auto* own = generator(device_.index()).unsafeGetGeneratorImpl();
    auto before = lent->get_state();
    lent->set_state(*own->get_state());
    try {
      op_.callBoxed(stack_);
    } catch (...) {
      lent->set_state(*before);
      throw;
    }
    own->set_state(*lent->get_state());
    lent->set_state(*before);
  }

  void keep_resized() {
    for (size_t place = 0; place < pairs_.size(); place++) {
      auto& [device, alias] = pairs_[place];
      if (alias.sizes() == device.sizes() && (!alias.numel() || alias.data_ptr() == address_of(device))) continue;
      resize_(device, alias.sizes(), {});
      if (alias.numel()) resized_[place] = unowned(device);
      Opened opened;
      opened.add(device);
      if (alias.numel()) copy_bytes(host_alias(device), alias);
    }
  }

  Tensor returned(const Tensor& t, int id, const Site& site) {
    if (!t.defined()) return t;
    for (auto& [device, alias] : pairs_)
      if (alias.is_same(t)) return device;
    if (t.has_storage() && t.storage().data())
      for (auto& [device, alias] : pairs_) {
        if (!t.storage().is_alias_of(alias.storage())) continue;
        int64_t offset = ((char*)t.data_ptr() - (char*)device.storage().data()) / (int64_t)t.itemsize();
        return at::native::as_strided_tensorimpl(device, t.sizes(), t.strides(), offset);
      }
    Tensor made = on_device(t, device_);
    use(id, range_of(made), true, name_, site);
    fresh_.push_back(made);
    return made;
  }

  void give_back(int id, const Site& site) {
    size_t first = stack_->size() - schema_.returns().size();
    for (size_t i = first; i < stack_->size(); i++) {
      auto& value = (*stack_)[i];
      if (value.isTensor()) {
        value = returned(value.toTensor(), id, site);
      } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (auto& t : value.toTensorVector()) list.push_back(returned(t, id, site));
        value = c10::IValue(list);
      }
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  size_t begin_;
  std::vector<c10::IValue> given_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
  std::vector<Tensor> fresh_;          // results in memory of their own
  std::map<size_t, Tensor> resized_;   // by place in the pairs: where a written argument lies now
  Device device_{DeviceType::CUDA, 0};
};

void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_at);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("record_stream", record_stream);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
}

}  // namespace emulated
