"use strict";
const $ = (selector, root = document) => Array.from(root.querySelectorAll(selector));
const blocks = JSON.parse(document.getElementById("blocks").textContent);

// Where everything lives: a click on a cell shows its block; a click on a tier dims the others.
function showBlock(index) {
  const block = blocks[index], out = document.getElementById("block");
  $(".cell").forEach(cell => cell.classList.toggle("on", cell.dataset.block == index));
  out.replaceChildren();
  const line = document.createElement("p");
  line.textContent = block.text;
  out.append(line);
  if (block.tensors.length) {
    const list = document.createElement("ul");
    for (const tensor of block.tensors) list.append(Object.assign(document.createElement("li"), { textContent: tensor }));
    out.append(list);
  }
}
$(".cell").forEach(cell => cell.addEventListener("click", () => showBlock(cell.dataset.block)));
$("[data-tier]").forEach(chip => chip.addEventListener("click", () => {
  const pressed = chip.getAttribute("aria-pressed") !== "true";
  $("[data-tier]").forEach(other => other.setAttribute("aria-pressed", other === chip && pressed));
  $(".cell").forEach(cell => cell.classList.toggle("off", pressed && !cell.classList.contains("t-" + chip.dataset.tier)));
}));
const search = document.getElementById("search");
if (search) search.addEventListener("input", () => {
  const words = search.value.toLowerCase();
  $("#placement tbody tr").forEach(row => { row.hidden = !row.textContent.toLowerCase().includes(words); });
});

// The timeline: a click on a bar says what it is; zooming widens the lanes inside their own box.
$(".k").forEach(bar => bar.addEventListener("click", () => {
  $(".k.on").forEach(other => other.classList.remove("on"));
  bar.classList.add("on");
  document.getElementById("detail").textContent = bar.dataset.t;
}));
$("[data-zoom]").forEach(button => button.addEventListener("click", () => {
  document.getElementById("lanes").style.width = 100 * button.dataset.zoom + "%";
}));
