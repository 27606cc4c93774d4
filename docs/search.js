/* The order of what the search finds: guides before tutorials before the reference, and pages that are about the words before those that have them. */
var Scorer = {
  score: ([page, title, anchor, , score, , kind]) => {
    const tables = /^docs\/(names|model_table|operator_table|pytorch_tests|status|compared|benchmarks|index|examples|progress|architecture)$/;
    const asked = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().trim();
    const about = !anchor && !title.includes(">") && asked.split(/\s+/).every((word) => title.toLowerCase().includes(word.slice(0, 6)));
    if (/^docs\/\w+$/.test(page) && !tables.test(page)) score += 12;
    else if (page.startsWith("docs/tutorials/")) score += 4;
    else if (page.startsWith("docs/operators/")) score += 3;
    if (kind === "object") score -= 10;
    return score + (about ? 10 + Math.round((10 * asked.length) / Math.max(title.length, asked.length)) : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
