#include <torch/library.h>

#include <algorithm>

#include "convert.h"
#include "library.h"
#include "mesh.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/file.h"
#include "tessera/gradient/sync.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::python {

namespace {

using Texts = Names;

using PySpec = Held<ShardSpec>;
using SpecPtr = c10::intrusive_ptr<PySpec>;

// Scopes nest: one is opened by each begin() and closed by each end().
struct PyNoSync : torch::CustomClassHolder {
  explicit PyNoSync(const Tensors& p) : parameters(p) {}
  void begin() { scopes.emplace_back(parameters); }
  void end() {
    if (!scopes.empty()) scopes.pop_back();
  }
  Tensors parameters;
  std::vector<NoSync> scopes;
};

NamedTensors named(const Texts& names, const Tensors& tensors) {
  if (names.size() != tensors.size()) throw InvalidArgument("names and tensors differ in number");
  NamedTensors all;
  for (std::size_t i = 0; i < names.size(); ++i) all.emplace_back(names[i], tensors[i]);
  return all;
}

// All tensors of a file. Those named are placed as `where` and `sizes_of` say, the others
// replicated.
std::tuple<Texts, Tensors> load_all(const MeshPtr& mesh, const std::string& path,
                                    const Texts& names, const std::vector<Texts>& where,
                                    const std::vector<SizesDict>& sizes_of) {
  std::map<std::string, ParameterPlacement> rules;
  for (std::size_t i = 0; i < names.size(); ++i)
    rules[names[i]] = {placements(where.at(i)), sizes(sizes_of.at(i))};
  std::tuple<Texts, Tensors> loaded;
  for (auto& [name, tensor] :
       load(mesh->mesh, path, [&](const std::string& name) -> std::optional<ParameterPlacement> {
         const auto it = rules.find(name);
         return it == rules.end() ? std::nullopt : std::optional(it->second);
       })) {
    std::get<0>(loaded).push_back(name);
    std::get<1>(loaded).push_back(tensor);
  }
  const Texts& there = std::get<0>(loaded);
  for (const auto& name : names) {
    if (std::ranges::find(there, name) == there.end())
      throw InvalidArgument("load: placements name ", name, ", which is not in the file ", path,
                            "; it holds ", list(there));
  }
  return loaded;
}

// What the rule says of one tensor, which has been asked in Python: placements, sizes, and the axis
// and dim of its data's sequence with whether it stays.
using Placed = std::tuple<Texts, SizesDict, std::tuple<std::int64_t, std::int64_t, bool>>;

// One entry of `where` a tensor. The first `parameters` of them are parameters, the others buffers.
void distribute_parameters(const Texts& names, const Tensors& tensors, std::int64_t parameters,
                           const MeshPtr& mesh, const std::vector<Placed>& where) {
  if (names.size() != tensors.size() || names.size() != where.size())
    throw InvalidArgument("distribute_parameters: names, tensors and placements differ in number");
  std::map<std::string, ParameterPlacement> rules;
  std::vector<NamedTensor> all;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto& [placed, parts, use] = where[i];
    const auto& [axis, dim, stays] = use;
    rules[names[i]] = {
        placements(placed), sizes(parts), {static_cast<int>(axis), static_cast<int>(dim)}, stays};
    all.push_back({names[i], tensors[i], static_cast<std::int64_t>(i) < parameters});
  }
  distribute_in_place(
      all, mesh->mesh,
      [&](const std::string& name, const at::Tensor&) -> std::optional<ParameterPlacement> {
        return rules.at(name);
      });
}

}  // namespace

// Without a dispatch key each of these is taken as it is, below no autograd of the dispatcher's:
// what is differentiable says so itself.
void register_tensor(Library& library) {
  library.class_<PySpec>("Spec")
      .def("shape", [](const SpecPtr& self) { return self->value.shape(); })
      .def("placements", [](const SpecPtr& self) { return texts(self->value.placements()); })
      .def("sizes", [](const SpecPtr& self) { return sizes(self->value.sizes()); })
      .def("local_shape", [](const SpecPtr& self) { return self->value.local_shape(); })
      .def("local_offset", [](const SpecPtr& self) { return self->value.local_offset(); })
      .def("mesh",
           [](const SpecPtr& self) { return c10::make_intrusive<PyMesh>(self->value.mesh()); })
      .def("text", [](const SpecPtr& self) { return self->value.to_string(); })
      .def("same",
           [](const SpecPtr& self, const SpecPtr& other) { return self->value == other->value; });

  library.class_<PyNoSync>("NoSync")
      .def(torch::init<Tensors>())
      .def("begin", [](const c10::intrusive_ptr<PyNoSync>& self) { self->begin(); })
      .def("end", [](const c10::intrusive_ptr<PyNoSync>& self) { self->end(); });
  library.def("reduce_gradients", [](const Tensors& parameters) { reduce_gradients(parameters); });
  library.def("save",
              [](const Texts& names, const Tensors& tensors, const MeshPtr& mesh,
                 const std::string& path) { save(named(names, tensors), mesh->mesh, path); });
  library.def("save_folder", [](const Texts& names, const Tensors& tensors, const MeshPtr& mesh,
                                const std::string& folder, std::int64_t max_bytes) {
    save_folder(named(names, tensors), mesh->mesh, folder, static_cast<std::uint64_t>(max_bytes));
  });
  library.def("load_into",
              [](const Texts& names, const Tensors& tensors, const MeshPtr& mesh,
                 const std::string& path) { load_into(named(names, tensors), mesh->mesh, path); });
  library.def("load", &load_all);

  library.def("is_sharded", [](const at::Tensor& t) { return is_sharded(t); });
  library.def("spec", [](const at::Tensor& t) { return c10::make_intrusive<PySpec>(spec(t)); });
  library.def("summary", [](const at::Tensor& t) { return summary(t); });
  library.def("from_local", [](const at::Tensor& local, const MeshPtr& mesh, const Texts& where,
                               const SizesDict& parts) {
    return from_local(local, mesh->mesh, placements(where), sizes(parts));
  });
  // The whole spec is known, and nothing is compared.
  library.def(
      "from_local_of_spec", [](const at::Tensor& local, const MeshPtr& mesh, const Numbers& shape,
                               const Texts& where, const SizesDict& parts) {
        return from_local(local, ShardSpec(mesh->mesh, shape, placements(where), sizes(parts)));
      });
  library.def("distribute_tensor", [](const at::Tensor& full, const MeshPtr& mesh,
                                      const Texts& where, const SizesDict& parts) {
    return distribute_tensor(full, mesh->mesh, placements(where), sizes(parts));
  });
  library.def("scatter", [](const std::optional<at::Tensor>& full, const MeshPtr& mesh,
                            const Texts& where, const SizesDict& parts, std::int64_t root) {
    return scatter(full.value_or(at::Tensor()), mesh->mesh, placements(where), sizes(parts),
                   static_cast<int>(root));
  });
  library.def("redistribute", [](const at::Tensor& t, const Texts& where, const SizesDict& parts) {
    return redistribute(t, placements(where), sizes(parts));
  });
  library.def("full_tensor", [](const at::Tensor& t) { return full_tensor(t); });
  library.def("to_local", [](const at::Tensor& t, const std::optional<Texts>& gradient) {
    return to_local(t, gradient ? std::optional(placements(*gradient)) : std::nullopt);
  });
  library.def("distribute_parameters", &distribute_parameters);
  library.def("is_reduced",
              [](const at::Tensor& t) { return is_sharded(t) && !gradient_syncs({t}).empty(); });
  library.def("copy_parameter", &copy_parameter);
  library.def("reduce_copies", [](const Texts& names, const Tensors& parameters) {
    reduce_copies(named(names, parameters));
  });
}

}  // namespace tessera::python
