#include "page.h"

#include <filesystem>
#include <fstream>
#include <system_error>

#include "tessera/base/text.h"
#include "tessera/data/errors.h"

namespace pictures {

namespace {

constexpr const char* common_style = R"(
:root{color-scheme:light}

body{margin:0;background:#f5f6f4;color:#1b2a41;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main{max-width:1320px;margin:0 auto;padding:36px 28px 60px}
h1{font-size:30px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:19px;margin:42px 0 4px}
h3{font-size:14px;margin:0 0 4px;font-weight:600}
p{margin:4px 0 12px;max-width:78ch}
.sub{color:#5b6778}
.card{background:#fff;border:1px solid #e2e5e3;border-radius:8px;padding:16px 18px;margin:10px 0}
.two{display:grid;grid-template-columns:1fr 1fr;gap:14px}
.two .card{margin:10px 0 0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:7px 12px;border-bottom:1px solid #eceeec}
th{font-weight:600;color:#5b6778;font-size:13px}
th:first-child,td:first-child{text-align:left}
svg{display:block;width:100%;height:auto;overflow:visible}
.chart text{font-size:12px;fill:#5b6778}.grid{stroke:#e8eae8}.axis,.mark{stroke:#8a94a0}
.legend{margin:2px 0 0;font-size:13px;color:#45505f}
.legend span{margin-right:18px;white-space:nowrap}

.legend i{display:inline-block;width:18px;height:3px;border-radius:2px;
margin-right:6px;vertical-align:middle}
)";

}  // namespace

void write_page(const Page& page, const std::string& path) {
  const std::filesystem::path target(path);
  std::error_code ignored;  // a folder that cannot be made shows when the file is opened
  if (target.has_parent_path()) std::filesystem::create_directories(target.parent_path(), ignored);
  std::ofstream file(target, std::ios::binary);
  file << "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport "
          "content='width=device-width,initial-scale=1'><title>"
       << page.title << "</title><style>" << common_style << page.style
       << "</style></head><body><main>" << page.body << "</main></body></html>\n";
  file.close();
  if (!file) throw tessera::FileError(tessera::concat("the report cannot be written to ", path));
}

}  // namespace pictures
