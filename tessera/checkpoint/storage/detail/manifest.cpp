#include "tessera/checkpoint/storage/detail/manifest.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "tessera/base/error.h"
#include "tessera/base/internal/json_text.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/files/internal/checksum.h"
#include "tessera/files/internal/safetensors.h"
#include "tessera/files/json.h"

namespace tessera {
namespace {

constexpr std::array<const char*, 3> kEntryKinds = {"tensor", "value", "rank_value"};
constexpr std::string_view kManifestHead = "{\"checksum\":\"", kManifestBody = "\",\"body\":";
constexpr std::uint64_t kManifestVersion = 1;
// Of every checksum in it. Earlier manifests do not say so.
constexpr std::string_view kDigest = "xxh64";

std::string record_text(const Record& r) {
  return concat('[', r.file, ',', r.begin, ',', r.bytes, ",\"", to_hex(r.checksum), "\",",
                json_list(r.box, bounds_text), ']');
}

std::string entry_text(const Entry& e) {
  std::string text =
      concat("{\"kind\":\"", kEntryKinds[static_cast<std::size_t>(e.info.kind)],
             "\",\"name\":", json_text(e.info.name), ",\"rank\":", e.info.rank,
             ",\"dtype\":", json_text(e.info.dtype), ",\"shape\":", json_list(e.info.shape));
  if (!e.info.layout.empty()) text += ",\"layout\":" + json_text(e.info.layout);
  return text + ",\"records\":" + json_list(e.records, record_text) + '}';
}

Record parse_record(const Json& json) {
  const auto& items = json.items();
  if (items.size() != 5) throw InvalidArgument("a record has five parts");
  Record r;
  if (items[0].number() > 1u << 30) throw InvalidArgument("the file of a record is too high");
  r.file = static_cast<int>(items[0].number());
  r.begin = items[1].number();
  r.bytes = items[2].number();
  r.checksum = from_hex(items[3].string());
  const auto& bounds = items[4].items();
  for (std::size_t i = 0; i + 1 < bounds.size(); i += 2)
    r.box.push_back({bounds[i].index(), bounds[i + 1].index()});
  return r;
}

Entry parse_entry(const Json& json) {
  Entry e;
  const auto found = std::ranges::find(kEntryKinds, json.at("kind").string());
  if (found == kEntryKinds.end())
    throw InvalidArgument("an entry of unknown kind ", json.at("kind").string());
  e.info.kind = static_cast<EntryKind>(found - kEntryKinds.begin());
  e.info.name = json.at("name").string();
  if (json.at("rank").number() > 1u << 30) throw InvalidArgument("a rank is too high");
  e.info.rank = static_cast<int>(json.at("rank").number());
  e.info.dtype = json.at("dtype").string();
  for (const Json& n : json.at("shape").items()) e.info.shape.push_back(n.index());
  if (const Json* layout = json.find("layout")) e.info.layout = layout->string();
  for (const Json& r : json.at("records").items()) e.records.push_back(parse_record(r));
  return e;
}

void check_entry(const Manifest& manifest, const Entry& e, const std::string& path) {
  const std::size_t element = element_bytes(e.info.dtype);
  std::vector<Box> boxes;
  for (const Record& r : e.records) {
    boxes.push_back(r.box);
    if (r.box.size() != e.info.shape.size()) throw InvalidArgument("a box of other dims");
    if (r.file < 0 || static_cast<std::size_t>(r.file) >= manifest.files.size())
      throw InvalidArgument("a record in a file that is not there");
    const std::uint64_t size = manifest.files[r.file].bytes;
    if (r.begin > size || r.bytes > size - r.begin)
      throw InvalidArgument("a record that leaves its file");
  }
  check_boxes(boxes, e.info, path);
  for (const Record& r : e.records)
    if (static_cast<std::uint64_t>(volume(r.box)) * element != r.bytes)
      throw InvalidArgument("a record whose size is not that of its box");
}

}  // namespace

const Entry* Manifest::find(EntryKind kind, std::string_view name, int rank) const {
  for (const Entry& e : entries)
    if (e.info.kind == kind && e.info.name == name && e.info.rank == rank) return &e;
  return nullptr;
}

std::size_t element_bytes(std::string_view dtype) {
  const SafetensorsDtype* found = find_safetensors_dtype(dtype);
  if (!found || (found->bits % 8 != 0 && found->name != "F4"))
    throw InvalidArgument("the dtype ", dtype, ", which libtorch does not have");
  return static_cast<std::size_t>((found->bits + 7) / 8);
}

std::string shard_name(int rank, int ranks, const std::string& nonce) {
  char text[64];
  std::snprintf(text, sizeof text, "shard-%05d-of-%05d.", rank, ranks);
  return text + nonce + ".safetensors";
}

bool is_checkpoint_file(std::string_view name) {
  const auto is_nonce = [](std::string_view text) {
    return text.size() == 16 && text.find_first_not_of("0123456789abcdef") == text.npos;
  };
  const auto temporary = name.rfind(".tmp-");
  if (temporary != name.npos && is_nonce(name.substr(temporary + 5)))
    name = name.substr(0, temporary);
  if (name == kManifestName) return true;
  constexpr std::string_view end = ".safetensors";
  if (!name.starts_with("shard-") || !name.ends_with(end)) return false;
  name = name.substr(6, name.size() - 6 - end.size());
  const auto dot = name.find('.');
  return dot != name.npos && is_nonce(name.substr(dot + 1)) &&
         name.substr(0, dot).find_first_not_of("0123456789-of") == name.npos;
}

void check_boxes(const std::vector<Box>& boxes, const EntryInfo& info, const std::string& where) {
  const auto refuse = [&](const std::string& why) {
    throw FileError("'", where, "': '", printable(info.name), "' of shape ", list(info.shape), ": ",
                    why);
  };
  // Sums and products of what is inside the shape cannot overflow once the shape's does not.
  std::int64_t total = 1;
  for (const std::int64_t n : info.shape) {
    if (n < 0 || (n > 0 && total > (std::int64_t{1} << 58) / n)) refuse("the shape is too large");
    total *= std::max<std::int64_t>(n, 1);
  }
  for (const std::int64_t n : info.shape)
    if (n == 0) total = 0;
  std::int64_t covered = 0;
  std::vector<const Box*> sorted;
  for (const Box& box : boxes) {
    if (box.size() != info.shape.size()) refuse("a shard has another number of dims");
    for (std::size_t d = 0; d < box.size(); ++d)
      if (box[d].begin < 0 || box[d].end < box[d].begin || box[d].end > info.shape[d])
        refuse(concat("the shard ", list(box), " leaves the shape"));
    if (volume(box) == 0) continue;
    covered += volume(box);
    if (covered > total) refuse("its shards overlap");
    sorted.push_back(&box);
  }
  if (covered < total)
    refuse(concat("its shards hold ", covered, " of ", total, " elements: some are missing"));
  if (info.shape.empty()) return;
  std::ranges::sort(sorted,
                    [](const Box* a, const Box* b) { return (*a)[0].begin < (*b)[0].begin; });
  for (std::size_t i = 0; i < sorted.size(); ++i)
    for (std::size_t k = i + 1; k < sorted.size() && (*sorted[k])[0].begin < (*sorted[i])[0].end;
         ++k)
      if (volume(intersect(*sorted[i], *sorted[k])) > 0)
        refuse(concat("the shards ", list(*sorted[i]), " and ", list(*sorted[k]), " overlap"));
}

std::string to_json(const Manifest& manifest) {
  std::string body = concat("{\"format\":\"tessera-checkpoint\",\"version\":", kManifestVersion,
                            ",\"digest\":\"", kDigest, "\",\"sequence\":", manifest.sequence,
                            ",\"ranks\":", manifest.ranks, ",\"files\":");
  body += json_list(manifest.files, [](const ManifestFile& f) {
    return concat("[", json_text(f.name), ',', f.bytes, ']');
  });
  body += ",\"entries\":[";
  for (std::size_t i = 0; i < manifest.entries.size(); ++i)
    body += (i > 0 ? ",\n" : "\n") + entry_text(manifest.entries[i]);
  body += "\n]}";
  return concat(kManifestHead, to_hex(Checksum().add(body).value()), kManifestBody, body, "}\n");
}

Manifest parse_manifest(std::string_view text, const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    return FileError(concat("'", path, "' is not the manifest of a checkpoint, or a damaged one: ",
                            printable(why, 2000)));
  };
  constexpr std::size_t head = kManifestHead.size() + 16 + kManifestBody.size();
  if (text.size() < head + 2 || !text.starts_with(kManifestHead) ||
      text.substr(kManifestHead.size() + 16, kManifestBody.size()) != kManifestBody ||
      !text.ends_with("}\n"))
    throw refuse("it does not begin and end as one");
  const std::string_view body = text.substr(head, text.size() - head - 2);
  Manifest manifest;
  try {
    if (from_hex(text.substr(kManifestHead.size(), 16)) != Checksum().add(body).value())
      throw InvalidArgument("its checksum does not fit its contents");
    const Json json = Json::parse(body);
    if (json.at("format").string() != "tessera-checkpoint") throw InvalidArgument("another format");
    if (json.at("version").number() > kManifestVersion)
      throw InvalidArgument("version ", json.at("version").number(), ", this library reads up to ",
                            kManifestVersion, ": use a later one");
    if (const Json* digest = json.find("digest"); digest && digest->string() != kDigest)
      throw InvalidArgument("its checksums are ", digest->string(), ", this library knows ",
                            kDigest, ": use a later one");
    manifest.sequence = json.at("sequence").number();
    manifest.ranks = static_cast<int>(std::min<std::uint64_t>(json.at("ranks").number(), 1u << 30));
    for (const Json& f : json.at("files").items()) {
      if (f.items().size() != 2 || !is_checkpoint_file(f.items()[0].string()))
        throw InvalidArgument("a file that no checkpoint writes");
      manifest.files.push_back({f.items()[0].string(), f.items()[1].number()});
    }
    for (const Json& e : json.at("entries").items()) {
      manifest.entries.push_back(parse_entry(e));
      check_entry(manifest, manifest.entries.back(), path);
    }
  } catch (const InvalidArgument& e) {
    throw refuse(e.what());
  }
  return manifest;
}

}  // namespace tessera
