// What goes into checkpoints, and comes back.

#include <algorithm>
#include <map>

#include "tessera/c/detail/call.h"
#include "tessera/c/detail/objects.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/checkpoint/optimizer_state.h"

namespace tessera::c {
namespace {

struct StateObject : Object {
  static constexpr Kind kind = Kind::state;
  using Object::Object;
  struct Item {
    std::string name;
    std::shared_ptr<Object> object;
    Kind kind;
  };
  std::vector<Item> items;
  std::map<std::string, std::int64_t> integers;
  std::map<std::string, double> reals;
  // Values that the last load has brought.
  CheckpointState loaded;

  Session* session() const {
    for (const Item& item : items)
      if (item.kind == Kind::session)
        return static_cast<SessionObject&>(*item.object).session.get();
    return nullptr;
  }
  void require_new(const std::string& name) const {
    const bool taken = integers.count(name) || reals.count(name) ||
                       std::ranges::any_of(items, [&](const Item& i) { return i.name == name; });
    if (taken) refuse("the state has something named '", name, "' already");
  }
  // Tensors and models: what a load writes into.
  void add_tensors(CheckpointState& all) const {
    for (const Item& item : items) {
      if (item.kind == Kind::tensor)
        all.add(item.name, static_cast<TensorObject&>(*item.object).value.detach());
      if (item.kind == Kind::model)
        all.add(item.name + ".", *static_cast<ModelObject&>(*item.object).model.module);
    }
  }
};

template <class Value>
using Values = std::map<std::string, Value> StateObject::*;

template <class Value>
tessera_result set_value(const char* call_name, tessera_state state, const char* name,
                         Values<Value> values, Value value) {
  return run(call_name, Reach::own, [&](Call& call) {
    auto& its = call.use<StateObject>(state, "state");
    const std::string under = need_text(name, "name");
    if (!(its.*values).count(under)) its.require_new(under);
    (its.*values)[under] = value;
  });
}

template <class Value>
tessera_result get_value(const char* call_name, tessera_state state, const char* name,
                         Values<Value> values, Value* value,
                         Value (CheckpointState::*brought)(const std::string&) const) {
  return run(call_name, Reach::own, [&](Call& call) {
    const auto& its = call.use<StateObject>(state, "state");
    const std::string under = need_text(name, "name");
    const auto set = (its.*values).find(under);
    try {
      *need(value, "value") =
          set != (its.*values).end() ? set->second : (its.loaded.*brought)(under);
    } catch (const InvalidArgument&) {
      refuse("no such value is named '", under, "': none was set, and no checkpoint brought one");
    }
  });
}

}  // namespace

extern "C" {

tessera_result tessera_state_create(tessera_job job, tessera_state* state) {
  return make("tessera_state_create", Reach::own, state, "state", [&](Call& call) {
    call.use<JobObject>(job, "job");
    return std::make_shared<StateObject>(call.job());
  });
}

tessera_result tessera_state_add(tessera_state state, const char* name, void* handle) {
  return run("tessera_state_add", Reach::own, [&](Call& call) {
    auto& its = call.use<StateObject>(state, "state");
    const std::string under = need_text(name, "name");
    Kind kind = Kind::tensor;
    auto object = call.share_any(handle, "handle", kind);
    its.require_new(under);
    if (kind != Kind::tensor && kind != Kind::model && kind != Kind::optimizer &&
        kind != Kind::session)
      refuse("a ", to_string(kind),
             " cannot be saved: a tensor, a model, an optimizer or a session");
    if (kind == Kind::session && its.session()) refuse("the state has a session already");
    its.items.push_back({under, std::move(object), kind});
  });
}

tessera_result tessera_state_set_integer(tessera_state state, const char* name, int64_t value) {
  return set_value("tessera_state_set_integer", state, name, &StateObject::integers, value);
}

tessera_result tessera_state_set_real(tessera_state state, const char* name, double value) {
  return set_value("tessera_state_set_real", state, name, &StateObject::reals, value);
}

tessera_result tessera_state_get_integer(tessera_state state, const char* name, int64_t* value) {
  return get_value("tessera_state_get_integer", state, name, &StateObject::integers, value,
                   &CheckpointState::get_integer);
}

tessera_result tessera_state_get_real(tessera_state state, const char* name, double* value) {
  return get_value("tessera_state_get_real", state, name, &StateObject::reals, value,
                   &CheckpointState::get_real);
}

tessera_result tessera_save(tessera_state state, const char* folder, const char* name,
                            int keep_last) {
  return run("tessera_save", Reach::all, [&](Call& call) {
    const auto& its = call.use<StateObject>(state, "state");
    const std::string at = need_text(folder, "folder"), under = need_text(name, "name");
    if (keep_last < 0) refuse("keep_last is ", keep_last, ": 0 keeps all");
    CheckpointState all = its.session() ? its.session()->state() : CheckpointState();
    its.add_tensors(all);
    for (const auto& item : its.items) {
      if (item.kind != Kind::optimizer) continue;
      const auto& of = static_cast<OptimizerObject&>(*item.object);
      add_optimizer(all, item.name + ".", *of.optimizer, *of.module);
    }
    for (const auto& [key, value] : its.integers) all.set_integer(key, value);
    for (const auto& [key, value] : its.reals) all.set_real(key, value);
    Checkpointer(call.manager(), at, {.keep_last = keep_last}).save(under, all);
  });
}

tessera_result tessera_load(tessera_state state, const char* folder, const char* name) {
  return run("tessera_load", Reach::all, [&](Call& call) {
    auto& its = call.use<StateObject>(state, "state");
    const std::string at = need_text(folder, "folder"), under = need_text(name, "name");
    const CheckpointReader saved(call.manager().world(), at, under);
    CheckpointState values;
    for (const auto& key : saved.value_names()) values.set(key, saved.value(key));
    std::vector<std::function<void()>> apply;
    for (const auto& item : its.items) {
      if (item.kind != Kind::optimizer) continue;
      const auto& of = static_cast<OptimizerObject&>(*item.object);
      apply.push_back(read_optimizer(saved, item.name + ".", *of.optimizer, *of.module));
    }
    CheckpointState rest;
    its.add_tensors(rest);
    if (its.session())
      its.session()->load(saved, &rest);
    else
      saved.load(rest, {.allow_extra = true});
    for (const auto& one : apply) one();
    for (const auto& key : saved.value_names()) {
      its.integers.erase(key);
      its.reals.erase(key);
    }
    its.loaded = std::move(values);
  });
}

tessera_result tessera_latest(tessera_job job, const char* folder, size_t room, char* name) {
  return run("tessera_latest", Reach::all, [&](Call& call) {
    call.use<JobObject>(job, "job");
    const std::string at = need_text(folder, "folder");
    if (room < 1) refuse("room is 0: name has no place for a zero");
    *need(name, "name") = 0;
    const std::string latest = Checkpointer(call.manager(), at).to_resume().value_or("");
    if (latest.size() + 1 > room)
      refuse("the checkpoint is named '", latest, "', name has room for ", room, " bytes");
    latest.copy(name, latest.size());
    name[latest.size()] = 0;
  });
}
}

}  // namespace tessera::c
