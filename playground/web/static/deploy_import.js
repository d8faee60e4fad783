// The way back: paste another engine's config, read it as a method here. Needs deploy_parts.js.
const SAMPLES = {
  trtllm: "speculative_config:\n  decoding_type: Eagle3\n  max_draft_len: 4\n  speculative_model: \u2026",
  vllm: '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}',
  sglang: "--speculative-algorithm EAGLE3 --speculative-draft-model-path \u2026 --speculative-num-steps 3 \u2026",
  triton: 'parameters: { key: "decoding_mode" value: { string_value: "medusa" } } \u2026',
  llamacpp: "llama-server -m target.gguf --spec-type draft-simple -md draft.gguf --spec-draft-n-max 8",
  transformers: "model.generate(**inputs, prompt_lookup_num_tokens=10)",
};

class ConfigReader {
  // onUse({ engine, text }): try the config on the Generate page.
  constructor(onUse) {
    this.onUse = onUse;
    this.asking = 0;
    this.engine = chooser("engine of the pasted config", () => this.pick());
    this.text = h("textarea", { class: "paste", rows: 7, spellcheck: "false",
      "aria-label": "config to read", oninput: () => this.later() });
    this.found = h("div", { class: "found", "aria-live": "polite" });
    this.host = h("section", { class: "card" }, h("h4", {}, "Read a config back"),
      h("p", { class: "note" }, "Paste a file or a command of another engine; it becomes a method here."),
      labelled("engine", this.engine), this.text, this.found);
    this.text.addEventListener("keydown", (event) => event.stopPropagation());
  }

  fill(engines) {
    fillChooser(this.engine, engines.map(({ title, name }) => [title, name]), "vllm");
    this.pick();
  }

  pick() {
    this.text.placeholder = SAMPLES[this.engine.value] ?? "";
    this.read();
  }

  later() { clearTimeout(this.timer); this.timer = setTimeout(() => this.read(), 250); }

  async read() {
    const asked = { engine: this.engine.value, text: this.text.value };
    const ticket = ++this.asking;
    if (!asked.text.trim()) { this.found.replaceChildren(); return; }
    const found = await server.read(asked);
    if (ticket !== this.asking) return;
    if (!found || found.error) {
      this.found.replaceChildren(h("p", { class: "alert", role: "alert" },
        found?.error ?? "The server did not answer."));
      return;
    }
    this.show(asked, found);
  }

  show(asked, found) {
    const copy = h("button", { type: "button", class: "tool",
      onclick: () => copyText(found.yaml, copy) }, "Copy YAML");
    this.found.replaceChildren(
      h("div", { class: "head" }, h("b", {}, found.title),
        h("span", { class: `badge ${found.lossless ? "lossless" : "lossy"}` },
          found.lossless ? "lossless" : "lossy")),
      settingsLine(found.settings),
      ...[found.target && h("p", { class: "note" }, `It served ${found.target}.`),
        sentences("unknown", "Not known", found.unknown),
        sentences("ignored", "Ignored, no meaning here", found.ignored),
        sentences("note", "Notes", found.notes)].filter(Boolean),
      h("div", { class: "head" },
        h("button", { type: "button", class: "primary", onclick: () => this.onUse(asked) },
          "Use in Generate"), copy,
        h("button", { type: "button", class: "tool",
          onclick: () => saveText(`${found.decoding_type}.yaml`, found.yaml) }, "Download")));
  }
}
