// Rules for operators that Python has defined: in index notation, or a function of Python's, which
// asks for the call that it is to plan and answers with placements.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "convert.h"
#include "handles.h"
#include "library.h"
#include "mesh.h"
#include "tessera/base/text.h"
#include "tessera/ops/rules/index_rule.h"
#include "tessera/tensor/errors.h"

namespace tessera::python {

namespace {

using Texts = Names;
/// Placements of a tensor and sizes of its shards; without placements: as it is.
using SpecOf = std::tuple<Texts, SizesDict>;

void require_operator(const std::string& op) {
  Texts near;
  const std::string space = op.substr(0, op.find("::"));
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (op == name.name || op == concat(name.name, ".", name.overload_name)) return;
    if (name.name.starts_with(space + "::") && near.size() < 20) near.push_back(name.name);
  }
  throw InvalidArgument("there is no operator '", op,
                        "' that a rule could be for: define it first, and name it as "
                        "torch.library.custom_op did, 'mylib::blur'; with this prefix there "
                        "are ",
                        list(near));
}

// The call that a function of Python's plans on this thread, and what it has answered.
struct Planning {
  const OpCall* call;
  std::vector<SpecOf> inputs = {}, outputs = {};
  std::string problem = {};
};
Planning*& planning() {
  thread_local Planning* here = nullptr;
  return here;
}
Planning& planned_now() {
  if (!planning())
    throw InvalidArgument("a call that is planned can be asked while its rule runs, and not later");
  return *planning();
}

/// Returns 0 if it has answered, else after it has handed over what it raised.
using PythonRule = int (*)();

Plan plan_by(PythonRule rule, const OpCall& call) {
  Planning mine{.call = &call};
  Planning* const before = std::exchange(planning(), &mine);
  const int failed = rule();
  planning() = before;
  if (failed != 0) throw ShardingError("the rule of ", call.name(), ": ", mine.problem);
  Plan plan;
  if (mine.inputs.size() > call.tensors().size())
    throw RuleError("the rule of ", call.name(), " places ", mine.inputs.size(),
                    " inputs, and the call has ", call.tensors().size(), " tensors");
  for (std::size_t i = 0; i < mine.inputs.size(); ++i) {
    const auto& [where, parts] = mine.inputs[i];
    const ShardSpec& given = call.tensor(i).spec;
    if (where.empty())
      plan.inputs.emplace_back(std::nullopt);
    else if (parts.empty())
      plan.inputs.emplace_back(given.with_placements(placements(where)));
    else
      plan.inputs.emplace_back(
          ShardSpec(given.mesh(), given.shape(), placements(where), sizes(parts)));
  }
  const auto* made = call.outputs();
  if (!made)
    throw RuleError("the rule of ", call.name(),
                    " needs the shapes of its results: give the operator a fake "
                    "(register_fake), which says them");
  if (made->size() != mine.outputs.size())
    throw RuleError("the rule of ", call.name(), " places ", mine.outputs.size(),
                    " results, and the operator has ", made->size());
  for (std::size_t i = 0; i < made->size(); ++i)
    plan.outputs.push_back(
        {ShardSpec(call.mesh(), (*made)[i].shape, placements(std::get<0>(mine.outputs[i])),
                   sizes(std::get<1>(mine.outputs[i])))});
  return plan;
}

/// (argument, position in a list or -1, written, shape, placements, sizes) of each tensor.
using RuleTensors =
    std::vector<std::tuple<std::string, std::int64_t, bool, Numbers, Texts, SizesDict>>;
RuleTensors tensors_of(const OpCall& call) {
  RuleTensors all;
  for (const TensorInfo& t : call.tensors())
    all.emplace_back(call.schema().arguments()[static_cast<std::size_t>(t.argument)].name(),
                     t.element, t.written, t.spec.shape(), texts(t.spec.placements()),
                     sizes(t.spec.sizes()));
  return all;
}

}  // namespace

void register_rules(Library& library) {
  library.def("register_index_rule",
              [](const std::string& op, const std::string& notation, bool linear,
                 const std::string& reduce, const Numbers& added, bool replaces) {
                require_operator(op);
                IndexRuleOptions options{linear, reduce_op(reduce).kind, {}};
                options.added.insert(added.begin(), added.end());
                register_rule(op, index_rule(notation, options), {.replaces = replaces});
              });
  library.def("register_python_rule", [](const std::string& op, std::int64_t rule, bool replaces) {
    require_operator(op);
    const auto function = reinterpret_cast<PythonRule>(rule);  // NOLINT(performance-no-int-to-ptr)
    register_rule(op, [function](const OpCall& call) { return plan_by(function, call); },
                  {.replaces = replaces});
  });
  library.def("registered_rules", [] { return registered_rules(); });

  // Of the call that is planned now.
  library.def("planned_name", [] { return planned_now().call->name(); });
  library.def("planned_mesh",
              [] { return c10::make_intrusive<PyMesh>(planned_now().call->mesh()); });
  library.def("planned_tensors", [] { return tensors_of(*planned_now().call); });
  library.def("planned_shapes", []() -> std::optional<std::vector<Numbers>> {
    const auto* made = planned_now().call->outputs();
    if (!made) return std::nullopt;
    std::vector<Numbers> all;
    for (const OutputInfo& o : *made) all.push_back(o.shape);
    return all;
  });
  library.def("planned_integers", [](const std::string& name) {
    const OpCall& call = *planned_now().call;
    const c10::IValue& value = call.value(name);
    if (value.isInt()) return Numbers{value.toInt()};
    if (value.isBool()) return Numbers{value.toBool()};
    return call.integers(name);
  });
  library.def("planned_number",
              [](const std::string& name) { return planned_now().call->number(name); });
  library.def("planned_has", [](const std::string& name) { return planned_now().call->has(name); });
  library.def("plan", [](const std::vector<SpecOf>& inputs, const std::vector<SpecOf>& outputs) {
    planned_now().inputs = inputs;
    planned_now().outputs = outputs;
  });
  library.def("refuse_plan", [](const std::string& why) { planned_now().problem = why; });
}

}  // namespace tessera::python
