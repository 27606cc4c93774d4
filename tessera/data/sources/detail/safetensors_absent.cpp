// SafetensorsSource in a build without nlohmann-json: it can be named, and says how to get it.
#include "tessera/data/sources/safetensors_source.h"

namespace tessera {

namespace {

[[noreturn]] void refuse() {
  throw NotAvailable(
      "this Tessera was built without nlohmann-json, so SafetensorsSource cannot read files: "
      "install it (Debian: nlohmann-json3-dev) and configure "
      "again");
}

}  // namespace

struct SafetensorsSource::File {};

SafetensorsSource::SafetensorsSource(const std::string&) { refuse(); }
SafetensorsSource::~SafetensorsSource() = default;
std::string SafetensorsSource::name() const { refuse(); }
std::vector<std::string> SafetensorsSource::variables() const { refuse(); }
const VariableInfo& SafetensorsSource::info(const std::string&) const { refuse(); }
const std::map<std::string, std::string>& SafetensorsSource::metadata() const { refuse(); }
at::Tensor SafetensorsSource::read_box(const VariableInfo&, const Hyperslab&,
                                       const ReadOptions&) const {
  refuse();
}

}  // namespace tessera
