// A form made from settings classes: one group per class, one control per field. Needs dom.js.
//
// value: { groups: [{ name, title, note, open, fields: [{ name, kind, help, value, min, max, step,
//          choices }] }], values: { group: { field: raw } } }
const formHost = element.querySelector(".form");
let drawn = null;

function rawValue(group, field) {
  return props.value?.values?.[group.name]?.[field.name] ?? field.value;
}

// A new object, so that the page sends it; the form itself is not drawn again.
function setRaw(group, field, raw) {
  const values = { ...(props.value.values ?? {}) };
  values[group.name] = { ...(values[group.name] ?? {}), [field.name]: raw };
  props.value = { ...props.value, values };
}

const CONTROLS = {
  slider(group, field, changed) {
    const box = h("input", { type: "text", inputmode: "decimal", class: "box",
      "aria-label": field.name, value: rawValue(group, field) });
    const slide = h("input", { type: "range", min: field.min, max: field.max, step: field.step,
      tabindex: "-1", "aria-hidden": "true", value: rawValue(group, field) });
    box.addEventListener("input", () => { slide.value = box.value; changed(box.value); });
    slide.addEventListener("input", () => { box.value = slide.value; changed(slide.value); });
    box.addEventListener("keydown", (event) => {
      const sign = { ArrowUp: 1, ArrowDown: -1 }[event.key];
      if (!sign) return;
      event.preventDefault();
      slide.value = Number(box.value) + sign * Number(field.step);
      box.value = slide.value;
      changed(box.value);
    });
    return { box, below: slide };
  },
  number(group, field, changed) {
    const box = h("input", { type: "text", inputmode: "decimal", class: "box wide",
      "aria-label": field.name, value: rawValue(group, field) ?? "",
      placeholder: field.optional ? "none" : "", oninput: (event) => changed(event.target.value) });
    return { box };
  },
  choice(group, field, changed) {
    const box = h("select", { class: "box wide", "aria-label": field.name,
      onchange: (event) => changed(field.choices[event.target.selectedIndex]) });
    for (const choice of field.choices) {
      box.append(h("option", { selected: choice === rawValue(group, field) }, String(choice ?? "none")));
    }
    return { box };
  },
  flag(group, field, changed) {
    const box = h("input", { type: "checkbox", "aria-label": field.name,
      onchange: (event) => changed(event.target.checked) });
    box.checked = Boolean(rawValue(group, field));
    return { box };
  },
  text(group, field, changed) {
    return { below: h("input", { type: "text", class: "line", "aria-label": field.name,
      value: rawValue(group, field) ?? "", placeholder: field.placeholder ?? "",
      oninput: (event) => changed(event.target.value) }) };
  },
  lines(group, field, changed) {
    const area = h("textarea", { class: "line", rows: 2, spellcheck: "false",
      "aria-label": field.name, placeholder: field.placeholder ?? "",
      oninput: (event) => changed(event.target.value) });
    area.value = rawValue(group, field) ?? "";
    return { below: area };
  },
};

function fieldRow(group, field) {
  const row = h("div", { class: `field ${field.kind}`, "data-field": field.name });
  const changed = (raw) => { setRaw(group, field, raw); tint(); };
  const tint = () => row.classList.toggle(
    "changed", String(rawValue(group, field) ?? "") !== String(field.value ?? ""));
  const { box = null, below = null } = CONTROLS[field.kind](group, field, changed);
  const name = h("label", { class: "name", title: field.name }, field.label);
  row.append(h("div", { class: "row" }, name, box), ...(below ? [below] : []),
    h("div", { class: "help" }, field.help));
  tint();
  return row;
}

function drawForm() {
  const value = props.value;
  if (!value || !Array.isArray(value.groups)) return;
  const shape = JSON.stringify([value.groups, value.values]);
  if (shape === drawn) return;
  drawn = shape;
  const narrow = matchMedia("(max-width: 720px)").matches;
  formHost.replaceChildren(...value.groups.map((group) => {
    const title = h("summary", {}, group.title);
    if (group.badge) title.append(h("span", { class: `badge ${group.badge}` }, group.badge));
    const details = h("details", { class: "group", "data-group": group.name }, title);
    details.open = group.open && !narrow;
    if (group.note) details.append(h("p", { class: "note" }, group.note));
    details.append(...group.fields.map((field) => fieldRow(group, field)));
    if (!group.fields.length) details.append(h("p", { class: "note" }, "Nothing to set."));
    return details;
  }));
}

watch("value", drawForm);
drawForm();
