// A folded list of names and remarks from Python, kept plain text.
const summary = element.querySelector("summary");
const list = element.querySelector("dl");
const cell = (tag, text) => {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
};
const show = () => {
  const { title = "", rows = [] } = props.value ?? {};
  summary.textContent = title;
  element.querySelector("details").hidden = !rows.length;
  list.replaceChildren(...rows.flatMap(([name, remark]) => [cell("dt", name), cell("dd", remark)]));
};
watch("value", show);
show();
