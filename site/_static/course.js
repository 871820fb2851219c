// What scrolls sideways inside itself (code, tables, formulas) can be reached and moved by the keyboard.
function reachable() {
  const wide = document.querySelectorAll(".highlight pre, .table-wrapper, div.table, .formula, .cell_output pre, .cell_output .text_html, .taste");
  for (const box of wide) {
    if (box.scrollWidth > box.clientWidth) box.setAttribute("tabindex", "0");
    else box.removeAttribute("tabindex");
  }
}
window.addEventListener("load", reachable);
window.addEventListener("resize", reachable);
document.addEventListener("toggle", reachable, true); // a folded source has no width until it is opened
