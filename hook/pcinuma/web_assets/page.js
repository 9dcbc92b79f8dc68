// What the page does beyond its forms: files are dropped, texts copied, and a long wait is told.
"use strict";

for (const field of document.querySelectorAll("[data-drop]")) {
  const input = document.getElementById(field.dataset.drop);
  let inside = 0;
  const shown = (over) => field.classList.toggle("over", over);
  const files = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
  field.addEventListener("dragenter", (event) => {
    if (!files(event)) return;
    event.preventDefault();
    inside += 1;
    shown(true);
  });
  field.addEventListener("dragover", (event) => {
    if (files(event)) event.preventDefault();
  });
  field.addEventListener("dragleave", (event) => {
    if (!files(event)) return;
    inside -= 1;
    shown(inside > 0);
  });
  field.addEventListener("drop", (event) => {
    if (!files(event)) return;
    event.preventDefault();
    inside = 0;
    shown(false);
    const one = new DataTransfer();
    one.items.add(event.dataTransfer.files[0]);
    input.files = one.files;
    input.dispatchEvent(new Event("change", { bubbles: true }));
    say(`${event.dataTransfer.files[0].name} is chosen`);
  });
}

// a file that misses a field must not replace the page
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if (event.dataTransfer && [...event.dataTransfer.types].includes("Files")) event.preventDefault();
  });
}

// a record is given: then it is meant
for (const id of ["host", "host-file"]) {
  const input = document.getElementById(id);
  const recorded = document.getElementById("source-recorded");
  if (input && recorded) input.addEventListener("change", () => { if (input.value) recorded.checked = true; });
}

for (const button of document.querySelectorAll("[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
      say("Copied");
    } catch {
      say("The browser does not let this page copy");
    }
  });
}

for (const form of document.querySelectorAll("form[method=post]")) {
  form.addEventListener("submit", () => say("Working…"));
}
window.addEventListener("pageshow", () => say(""));

function say(text) {
  document.getElementById("status").textContent = text;
}
