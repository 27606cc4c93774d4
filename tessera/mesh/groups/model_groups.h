#pragma once
// A model says which process groups it needs, and the manager makes them.
//
//   struct UNetImpl : torch::nn::Module {
//     static ProcessGroupConfig process_groups() {
//       ProcessGroupConfig tree({.name = "unet", .orthogonal_group = "data"});  // and its replicas
//       tree.add_node({.name = "domain"}, "unet");
//       return tree;
//     }
//     explicit UNetImpl(const DistributedManager& manager) : mesh(manager.mesh("domain")) { ... }
//   };
//   TORCH_MODULE(UNet);
//
//   manager.create_process_groups<UNet>({{"domain", 4}});   // the sizes are the run's choice
//   UNet net(manager);                                      // it asks for the groups by name
//   DistributedDataParallel ddp(net, manager.group("data"));
//
// The structure belongs to the type, the sizes to the run, and whoever writes the loop needs to
// know neither.

#include <concepts>
#include <map>
#include <string>

#include "tessera/mesh/groups/group_config.h"

namespace tessera {

namespace detail {

template <class Model, class... Arguments>
concept HasProcessGroups = requires(const Arguments&... arguments) {
  { Model::process_groups(arguments...) } -> std::convertible_to<ProcessGroupConfig>;
};

/// What a holder of TORCH_MODULE() holds has them.
template <class Holder, class... Arguments>
concept HoldsProcessGroups = HasProcessGroups<typename Holder::Impl, Arguments...>;

}  // namespace detail

/// A model (or the holder that TORCH_MODULE() makes of it) with a static process_groups() that
/// gives the tree of groups it needs. It may take arguments, such as the model's options.
template <class Model, class... Arguments>
concept SaysProcessGroups = detail::HasProcessGroups<Model, Arguments...> ||
                            detail::HoldsProcessGroups<Model, Arguments...>;

/// The tree of groups that the model needs, with what its own process_groups() is given.
template <class Model, class... Arguments>
  requires SaysProcessGroups<Model, Arguments...>
ProcessGroupConfig process_groups_of(const Arguments&... arguments) {
  if constexpr (detail::HasProcessGroups<Model, Arguments...>) {
    return Model::process_groups(arguments...);
  } else {
    return Model::Impl::process_groups(arguments...);
  }
}

/// Does the same with these sizes of its leaves. Throws UnknownName and GroupConfigError as
/// ProcessGroupConfig::set_leaf_group_sizes() does.
template <class Model, class... Arguments>
  requires SaysProcessGroups<Model, Arguments...>
ProcessGroupConfig process_groups_of(const std::map<std::string, int>& sizes,
                                     const Arguments&... arguments) {
  ProcessGroupConfig config = process_groups_of<Model>(arguments...);
  config.set_leaf_group_sizes(sizes);
  return config;
}

}  // namespace tessera
