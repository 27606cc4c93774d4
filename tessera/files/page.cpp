#include "tessera/files/page.h"

#include <filesystem>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/base/markup_text.h"
#include "tessera/base/text.h"
#include "tessera/files/operations.h"

namespace tessera {

namespace {

constexpr const char* kCommonStyle = R"(
:root{color-scheme:light;--page:#f5f6f4;--text:#1b2a41;--faint:#5b6778;--card:#fff;
--edge:#e2e5e3;--grid:#e8eae8;--axis:#8a94a0}

body{margin:0;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main{max-width:1320px;margin:0 auto;padding:36px 28px 60px}
h1{font-size:30px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:19px;margin:42px 0 4px}
h3{font-size:14px;margin:0 0 4px;font-weight:600}
p{margin:4px 0 12px;max-width:78ch}
.sub{color:var(--faint)}
.card{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:16px 18px;
margin:10px 0;overflow-x:auto}
.two{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px}
.two .card{margin:10px 0 0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:7px 12px;border-bottom:1px solid var(--grid)}
th{font-weight:600;color:var(--faint);font-size:13px}
th:first-child,td:first-child{text-align:left}
svg{display:block;width:100%;height:auto;overflow:visible}
.chart text{font-size:12px;fill:var(--faint)}.grid{stroke:var(--grid)}
.axis,.mark{stroke:var(--axis)}
.legend{margin:2px 0 0;font-size:13px;color:var(--faint)}
.legend span{display:inline-block;margin-right:18px;overflow-wrap:anywhere}

.legend i{display:inline-block;width:18px;height:3px;border-radius:2px;
margin-right:6px;vertical-align:middle}
@media(max-width:820px){.two{grid-template-columns:minmax(0,1fr)}main{padding:20px 14px 40px}}
@media(max-width:520px){.chart text{font-size:17px}}
)";

constexpr const char* kDarkStyle = R"(
@media(prefers-color-scheme:dark){:root{color-scheme:dark;--page:#14181f;--text:#e6e9ee;
--faint:#9aa6b5;--card:#1c222b;--edge:#2d3541;--grid:#2a313b;--axis:#6b7684}}
)";

}  // namespace

void write_page(const Page& page, const std::string& path) {
  std::error_code ignored;  // a folder that cannot be made shows when the file is opened
  std::filesystem::create_directories(folder_of(path), ignored);
  AtomicFile file(path);
  file.write(
      concat("<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport "
             "content='width=device-width,initial-scale=1'>",
             page.refresh > 0 ? concat("<meta http-equiv=refresh content=", page.refresh, ">") : "",
             "<title>", markup_text(page.title), "</title><style>", kCommonStyle,
             page.dark ? kDarkStyle : "", page.style, "</style></head><body><main>", page.body,
             "</main></body></html>\n"));
  file.commit();
}

}  // namespace tessera
