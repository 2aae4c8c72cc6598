// Each search field hides the rows of its table that do not contain the typed words.
for (const field of document.querySelectorAll(".search")) {
  const input = field.querySelector("input"), count = field.querySelector("output");
  const rows = [...document.getElementById(input.dataset.table).tBodies[0].rows];
  const texts = rows.map((row) => [...row.cells].filter((cell) => cell.className !== "number")
    .map((cell) => cell.textContent).join(" ").toLowerCase());
  const search = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, i) => { row.hidden = !words.every((word) => texts[i].includes(word)); });
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  input.addEventListener("input", search);
  search();
  field.hidden = false;
}
