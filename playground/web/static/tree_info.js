// What is known of the node under the pointer or the focus. Needs dom.js, tree_model.js.
const EXAMPLE_AFTER_MS = 140;

class NodeInfo {
  // example(key) → promise of { before, tokens: [..], seen } or null.
  constructor(example) {
    this.example = example;
    this.key = null;
    this.facts = h("div", { class: "facts" });
    this.loss = h("div", { class: "loss" });
    this.text = h("div", { class: "example" });
    this.host = h("div", { class: "info" }, this.facts, this.loss, this.text);
  }

  show(key, { lines, loss }) {
    this.facts.textContent = lines.join(" \u00b7 ");
    this.loss.textContent = loss;
    if (key !== this.key) this.text.replaceChildren();
    this.key = key;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.fetch(key), EXAMPLE_AFTER_MS);
  }

  async fetch(key) {
    const found = await this.example(key);
    if (key !== this.key) return;
    this.text.replaceChildren();
    if (!found) return;
    const last = found.tokens.length - 1;
    this.text.append("for example ", h("q", {}, h("span", { class: "before" }, visible(found.before)),
      ...found.tokens.map((token, i) => h("b", { class: i === last ? "last" : "" },
        visible(token)))));
    if (found.seen) this.text.append(h("span", { class: "seen" }, ` ${found.seen}`));
  }
}
