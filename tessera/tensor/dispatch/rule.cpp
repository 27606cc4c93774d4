#include "tessera/tensor/dispatch/rule.h"

#include <ATen/core/enum_tag.h>

#include <map>
#include <mutex>
#include <set>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/tensor/dispatch/detail/make_plan.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/errors.h"

namespace tessera {

namespace detail {
namespace {

// Process-wide, because operators are: rules are registered with them, by static objects of the
// libraries that define them.
struct Rules {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const RegisteredRule>, std::less<>> by_name;
  std::shared_ptr<const RegisteredRule> pointwise;
};

Rules& rules() {
  static Rules all;
  return all;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : concat(name.name, ".", name.overload_name);
}

c10::TypePtr without_optional(const c10::TypePtr& type) {
  const auto optional = type->cast<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

OpInfo::Kind kind_of(const c10::TypePtr& type) {
  const c10::TypePtr given = without_optional(type);
  const auto list = given->cast<c10::ListType>();
  const c10::TypePtr one = list ? list->getElementType() : given;
  const auto is_tensor = [](const c10::TypePtr& t) {
    return t->kind() == c10::TypeKind::TensorType;
  };
  if (is_tensor(one)) return list ? OpInfo::Kind::tensor_list : OpInfo::Kind::tensor;
  if (list && is_tensor(without_optional(one))) return OpInfo::Kind::optional_tensor_list;
  const bool number =
      one->kind() == c10::TypeKind::FloatType || one->kind() == c10::TypeKind::NumberType;
  return number ? OpInfo::Kind::floating : OpInfo::Kind::other;
}

bool is_write(const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); }

// The overloads of an operator, sorted, so that all ranks choose the same one. Operators may be
// defined later: what is not known is looked up again.
std::vector<std::string> overloads_of(const std::string& base) {
  static std::mutex mutex;
  static std::map<std::string, std::set<std::string>> all;
  const std::lock_guard lock(mutex);
  if (!all.contains(base)) {
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames())
      all[name.name].insert(name.overload_name);
    all.try_emplace(base);
  }
  return {all[base].begin(), all[base].end()};
}

// The overload of the functional form whose arguments are the first ones of `schema`.
std::optional<c10::OperatorHandle> functional_form(const c10::FunctionSchema& schema,
                                                   bool out_variant) {
  std::string base = schema.name();
  if (!out_variant) {
    if (base.empty() || base.back() != '_') return std::nullopt;
    base.pop_back();
  }
  std::size_t inputs = 0;
  for (const auto& a : schema.arguments()) inputs += !(out_variant && is_write(a));
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto matches = [&](const std::string& overload) -> std::optional<c10::OperatorHandle> {
    auto op = dispatcher.findSchema({base, overload});
    if (!op || op->schema().arguments().size() != inputs) return std::nullopt;
    for (std::size_t i = 0; i < inputs; ++i) {
      const auto& a = op->schema().arguments()[i];
      if (is_write(a) || a.name() != schema.arguments()[i].name() ||
          *a.type() != *schema.arguments()[i].type())
        return std::nullopt;
    }
    return op;
  };
  std::string overload = schema.overload_name();
  if (auto op = matches(overload)) return op;
  // "Scalar_out" -> "Scalar": the overload of the same name comes first.
  if (out_variant && overload.size() > 4 && overload.ends_with("_out")) {
    if (auto op = matches(overload.substr(0, overload.size() - 4))) return op;
  }
  // transpose_ is transpose.int, sort.values_stable is sort.stable: names and types of the
  // arguments decide.
  for (const std::string& other : overloads_of(base))
    if (auto op = matches(other)) return op;
  return std::nullopt;
}

}  // namespace

OpInfo::OpInfo(const c10::OperatorHandle& handle, int number)
    : op(handle), id(number), name(full_name(handle.operator_name())) {
  const auto& schema = op.schema();
  for (const auto& a : schema.arguments()) {
    kinds.push_back(kind_of(a.type()));
    written.push_back(is_write(a));
    writes_many |= written.back() && (writes || kinds.back() == Kind::tensor_list);
    writes |= written.back();
    out_variant |= written.back() && a.kwarg_only() && a.is_out();
  }
  for (const auto& r : schema.returns()) {
    Return out;
    const auto kind = kind_of(r.type());
    out.tensor = kind == Kind::tensor;
    out.list = kind == Kind::tensor_list;
    if (r.alias_info()) {
      for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto& a = schema.arguments()[i];
        if (r.alias_info()->isWrite() && is_write(a) &&
            a.alias_info()->beforeSets() == r.alias_info()->beforeSets())
          out.argument = static_cast<int>(i);
      }
      out.view = out.argument < 0;
      view |= out.view;
    }
    returns.push_back(out);
  }
  in_place_view = op.hasTag(at::Tag::inplace_view) && !out_variant;
  const std::string base = schema.name();
  resizes = base == "aten::resize_" || base == "aten::resize_as_" || base == "aten::set_" ||
            base == "aten::_resize_output_";
  random = op.hasTag(at::Tag::nondeterministic_seeded);
  pointwise = op.hasTag(at::Tag::pointwise);
  if (writes) functional = functional_form(schema, out_variant);
}

std::shared_ptr<const RegisteredRule> OpInfo::rule() const {
  Rules& all = rules();
  const std::lock_guard lock(all.mutex);
  const auto find = [&](const c10::OperatorHandle& o) -> std::shared_ptr<const RegisteredRule> {
    auto it = all.by_name.find(full_name(o.operator_name()));
    if (it == all.by_name.end()) it = all.by_name.find(o.operator_name().name);
    return it == all.by_name.end() ? nullptr : it->second;
  };
  if (auto own = find(op)) return own;
  if (functional) {
    if (auto of_functional = find(*functional)) return of_functional;
  }
  if (pointwise || (functional && functional->hasTag(at::Tag::pointwise))) return all.pointwise;
  return nullptr;
}

void set_pointwise_rule(Rule rule) {
  const std::lock_guard lock(rules().mutex);
  rules().pointwise = std::make_shared<RegisteredRule>(RegisteredRule{std::move(rule), {}});
}

}  // namespace detail

void register_rule(const std::string& op, Rule rule, RuleOptions options) {
  auto& all = detail::rules();
  const std::lock_guard lock(all.mutex);
  const auto it = all.by_name.find(op);
  if (it != all.by_name.end() && !options.replaces) {
    throw RuleError("'", op,
                    "' has a rule already. Set RuleOptions::replaces to put another one in "
                    "its place, or register a rule for one overload.");
  }
  if (it == all.by_name.end() && options.replaces) {
    throw RuleError("'", op,
                    "' has no rule that another one could replace: the name must be the one "
                    "it was registered under (registered_rules()).");
  }
  all.by_name[op] =
      std::make_shared<detail::RegisteredRule>(detail::RegisteredRule{std::move(rule), options});
}

std::vector<std::string> registered_rules() {
  auto& all = detail::rules();
  const std::lock_guard lock(all.mutex);
  return mapped(all.by_name, [](const auto& rule) { return rule.first; });
}

OpCall::OpCall(const detail::OpInfo& info, at::ArrayRef<c10::IValue> arguments)
    : info_(info), arguments_(arguments.vec()) {
  detail::each_tensor(info_, arguments_.data(), [&](const at::Tensor& t, int i, int element) {
    const auto* meta = detail::meta_of(t);
    if (!meta) return;
    const auto& layout = *meta->layout;
    tensors_.push_back({i, element, info_.written[i], layout.spec, layout.strides, layout.offset,
                        layout.dtype, layout.parameter, layout.stays});
  });
}

std::string OpCall::name() const { return info_.name; }
const c10::FunctionSchema& OpCall::schema() const { return info_.op.schema(); }
const DeviceMesh& OpCall::mesh() const { return tensors_.at(0).spec.mesh(); }
bool OpCall::in_place() const { return !info_.written.empty() && info_.written[0]; }

int OpCall::argument(std::string_view name) const {
  const auto& arguments = schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == name) return static_cast<int>(i);
  return -1;
}

const TensorInfo* OpCall::find(std::string_view name) const {
  const int i = argument(name);
  for (const TensorInfo& t : tensors_)
    if (t.argument == i) return &t;
  return nullptr;
}

bool OpCall::has(std::string_view name) const {
  const int i = argument(name);
  return i >= 0 && !arguments_[i].isNone();
}

const c10::IValue& OpCall::value(std::string_view name) const {
  const int i = argument(name);
  if (i < 0) throw InvalidArgument(info_.name, " has no argument '", name, "'");
  return arguments_[i];
}

std::int64_t OpCall::integer(std::string_view name) const { return value(name).toInt(); }
bool OpCall::boolean(std::string_view name) const { return value(name).toBool(); }

std::vector<std::int64_t> OpCall::integers(std::string_view name) const {
  const c10::IValue& v = value(name);
  if (v.isNone()) return {};
  if (v.isInt()) return {v.toInt()};
  return mapped(v.toListRef(), [](const c10::IValue& i) { return i.toInt(); });
}

double OpCall::number(std::string_view name) const {
  asked_for_numbers_ = true;
  return value(name).toScalar().toDouble();
}

const std::vector<OutputInfo>* OpCall::outputs() const {
  if (!inferred_) {
    outputs_ = detail::infer_outputs(info_, arguments_, tensors_);
    inferred_ = true;
  }
  return outputs_ ? &*outputs_ : nullptr;
}

const TensorInfo& OpCall::tensor(std::size_t i) const {
  if (i < tensors_.size()) return tensors_[i];
  throw InvalidArgument(info_.name, " is given ", tensors_.size(),
                        " sharded tensors where its rule looks for ", i + 1);
}

}  // namespace tessera
