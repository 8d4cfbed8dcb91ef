// A click on a column's title sorts the rows by it, and once more the other way round.
for (const table of document.querySelectorAll("table.dataframe")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    const value = (row) => {
      const cell = row.cells[column];
      return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
    };
    const order = (a, b) => {
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
      return typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
    };
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      const unknown = (row) => Number.isNaN(value(row)); // last either way
      const rows = [...body.rows].sort((a, b) =>
        down && !unknown(a) && !unknown(b)
          ? order(value(b), value(a))
          : order(value(a), value(b))
      );
      body.append(...rows);
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
    });
  });
}
