// SafetensorsSource in a build without nlohmann-json: it can be named, and says how to get it.
#include "tessera/data/sources/safetensors_source.h"

namespace tessera {

namespace {

[[noreturn]] void refuse_safetensors() {
  throw NotAvailable(
      "this Tessera was built without nlohmann-json, so SafetensorsSource cannot read files: "
      "install it (Debian: nlohmann-json3-dev) and configure "
      "again");
}

}  // namespace

struct SafetensorsSource::File {};

SafetensorsSource::SafetensorsSource(const std::string&) { refuse_safetensors(); }
SafetensorsSource::~SafetensorsSource() = default;
std::string SafetensorsSource::name() const { refuse_safetensors(); }
std::vector<std::string> SafetensorsSource::variables() const { refuse_safetensors(); }
const VariableInfo& SafetensorsSource::info(const std::string&) const { refuse_safetensors(); }
const std::map<std::string, std::string>& SafetensorsSource::metadata() const { refuse_safetensors(); }
at::Tensor SafetensorsSource::read_box(const VariableInfo&, const Hyperslab&,
                                       const ReadOptions&) const {
  refuse_safetensors();
}

}  // namespace tessera
