// Of all pages: tables that sort by a click on a column.
"use strict";

function sortKey(cell) { // numbers by value, also of "1,234", "12%", "1.50x", "16/16"; "-" and empty cells last
  const text = cell.textContent.trim();
  const found = /^[<≥~]?\s*-?[\d,]*\.?\d+(e[-+]?\d+)?/i.exec(text);
  if (text === "" || text === "-") return null;
  return found ? Number(found[0].replace(/[<≥~,\s]/g, "")) : text.toLowerCase();
}

function compareKeys(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
  return typeof a === "number" ? -1 : 1;
}

function sortRows(table, column, descending) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row, place) => [sortKey(row.cells[column]), place, row]);
  rows.sort((a, b) => {
    const order = compareKeys(a[0], b[0]);
    const isMissing = a[0] === null || b[0] === null;
    return (descending && !isMissing ? -order : order) || a[1] - b[1];
  });
  body.append(...rows.map((row) => row[2]));
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sortRows(table, column, descending);
    });
  });
}
