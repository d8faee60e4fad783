// Parts of the cards beside the tree. Needs dom.js.
function card(name, title, ...children) {
  return h("section", { class: "card", "data-card": name }, h("h4", {}, title), ...children);
}

function numberField(name, title, help, attributes, work) {
  const box = h("input", { type: "number", class: "box", "data-field": name, "aria-label": help,
    title: help, oninput: work, ...attributes });
  return { box, field: h("label", { class: "field" }, h("span", {}, title), box) };
}
