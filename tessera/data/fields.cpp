#include "tessera/data/fields.h"

#include <algorithm>
#include <set>

#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"

namespace tessera {

namespace {

std::string quoted_name(std::string_view name) { return concat("'", printable(name), "'"); }

void require_parts(const std::string& name) {
  const auto fault = name_fault(name, /*spaces=*/true);
  if (fault) throw InvalidArgument("the field name ", quoted_name(name), " ", *fault);
  if (name.front() == '/' || name.back() == '/' || name.find("//") != std::string::npos)
    throw InvalidArgument("the field name ", quoted_name(name), " has an empty part beside a '/'");
}

}  // namespace

void require_field_names(const std::vector<std::string>& names) {
  std::set<std::string_view> tensors, groups;
  for (const std::string& name : names) {
    require_parts(name);
    if (!tensors.insert(name).second)
      throw InvalidArgument("two fields have the name ", quoted_name(name));
    const std::string_view whole = name;
    for (auto at = whole.find('/'); at != std::string_view::npos; at = whole.find('/', at + 1))
      groups.insert(whole.substr(0, at));
  }
  for (const std::string_view name : tensors)
    if (groups.contains(name))
      throw InvalidArgument("the field ", quoted_name(name),
                            " is a tensor, and a group of others too: ", list(names));
}

Fields::Fields(std::vector<std::string> names, std::vector<at::Tensor> tensors)
    : names_(std::move(names)), tensors_(std::move(tensors)) {
  if (names_.size() != tensors_.size())
    throw InvalidArgument(names_.size(), " names for ", tensors_.size(),
                          " tensors: ", list(names_));
  require_field_names(names_);
}

Fields::Fields(std::initializer_list<std::pair<std::string, at::Tensor>> fields) {
  for (const auto& [name, tensor] : fields) {
    names_.push_back(name);
    tensors_.push_back(tensor);
  }
  require_field_names(names_);
}

bool Fields::contains(std::string_view name) const {
  return std::ranges::find(names_, name) != names_.end();
}

at::Tensor Fields::at(std::string_view name) const {
  return detail::field_of(names_, tensors_, name);
}

Fields Fields::under(std::string_view group) const {
  Fields members;
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (names_[i] == group || !detail::names_field(group, names_[i])) continue;
    members.names_.push_back(names_[i].substr(group.size() + 1));
    members.tensors_.push_back(tensors_[i]);
  }
  if (members.names_.empty())
    throw InvalidArgument("no group of fields ", quoted_name(group), "; there are: ", list(names_));
  return members;
}

void Fields::add(const std::string& name, at::Tensor tensor) {
  auto names = names_;
  names.push_back(name);
  require_field_names(names);
  tensors_.push_back(std::move(tensor));
  names_ = std::move(names);
}

void Fields::add(const std::string& group, const Fields& members) {
  Fields all = *this;
  for (std::size_t i = 0; i < members.names_.size(); ++i)
    all.add(concat(group, '/', members.names_[i]), members.tensors_[i]);
  *this = std::move(all);
}

namespace detail {

at::Tensor field_of(const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
                    std::string_view name) {
  const auto found = std::ranges::find(names, name);
  if (found == names.end() && names.empty())
    throw InvalidArgument("no field ", quoted_name(name), ": the ", tensors.size(),
                          " tensors have no names; the dataset or the loader's options give them");
  if (found == names.end())
    throw InvalidArgument("no field ", quoted_name(name), "; there are: ", list(names));
  return tensors.at(static_cast<std::size_t>(found - names.begin()));
}

bool names_field(std::string_view name, std::string_view field) {
  if (!field.starts_with(name)) return false;
  return field.size() == name.size() || field[name.size()] == '/';
}

}  // namespace detail
}  // namespace tessera
