// A benchmark as it stands: progress, stop and resume, tables, plots, downloads. Needs dom.js,
// benchmark_tables.js and benchmark_plots.js.
const POLL_MS = 1000;
const STATUS_WORDS = { running: "running", completed: "complete", cancelled: "stopped",
  interrupted: "interrupted", failed: "failed" };
const DOWNLOADS = [["report.json", "JSON"], ["speedup.csv", "speedups CSV"],
  ["latency.csv", "latencies CSV"], ["requests.csv", "requests CSV"]];

function tool(words, title, onclick, name) {
  return h("button", { type: "button", class: "tool", title, onclick, "data-do": name }, words);
}

class BenchResults {
  constructor() {
    this.id = null;
    this.version = null;
    this.kind = "speedup";
    this.menus = { formulas: {}, latency_rows: {} };
    this.picker = h("select", { class: "line", "aria-label": "benchmark",
      onchange: () => this.open(this.picker.value) });
    this.stopper = tool("Stop", "end it after the running step; what is done is kept",
      () => this.ask("stop"), "stop");
    this.resumer = tool("Resume", "run exactly the requests that are missing",
      () => this.ask("resume"), "resume");
    this.bar = h("i");
    this.progress = h("span", { class: "progress", role: "progressbar", hidden: true }, this.bar);
    this.words = h("span", { class: "words", role: "status" });
    this.fault = h("div", { class: "alert", role: "alert", hidden: true });
    this.body = h("div", { class: "found" });
    this.plots = new BenchPlots();
    this.empty = h("p", { class: "empty" }, "No benchmark yet. Choose suites and methods, then "
      + "start: plain decoding and every configuration answer each prompt in turn.");
    this.host = h("section", { class: "results", "aria-label": "Benchmarks" },
      h("div", { class: "bar" }, this.picker, this.stopper, this.resumer),
      h("div", { class: "bar state" }, this.progress, this.words), this.fault, this.empty,
      this.body);
  }

  complain(sentence) {
    this.fault.hidden = !sentence;
    this.fault.textContent = sentence ?? "";
  }

  // The list of benchmarks; `open` is shown, or the newest if nothing is.
  async list(open = null) {
    const found = await server.benchmarks({});
    if (!found || found.error) {
      this.complain(found?.error ?? "The server did not answer. Reload the page.");
      return;
    }
    this.heads = found.benchmarks;
    this.host.dataset.listed = "true";
    const pairs = found.benchmarks.map((head) => [this.lineOf(head), head.id]);
    const wanted = open ?? this.id ?? pairs[0]?.[1] ?? "";
    fillChooser(this.picker, pairs, wanted);
    const nothing = !pairs.length && !open;
    this.empty.hidden = !nothing;
    this.picker.parentElement.hidden = nothing;
    if (!nothing) await this.open(open ?? this.picker.value);
  }

  lineOf(head) {
    const when = new Date(head.created_at);
    const time = when.toLocaleString([], { month: "short", day: "numeric", hour: "2-digit",
      minute: "2-digit" });
    return `${time} \u00b7 ${head.name} \u00b7 ${STATUS_WORDS[head.status] ?? head.status}`;
  }

  async open(id) {
    if (id !== this.id) this.forget();
    this.id = id;
    await this.poll();
  }

  // Nothing of the benchmark before may stand under another one's name.
  forget() {
    this.version = this.status = null;
    delete this.host.dataset.state;
    this.words.textContent = "";
    this.progress.hidden = true;
    this.body.replaceChildren();
  }

  // Look again and again while it runs and can be seen.
  async poll() {
    clearTimeout(this.timer);
    if (!this.id) return;
    const id = this.id;
    const now = await server.look({ id, have: this.version });
    if (id !== this.id) return;
    if (!now || now.error) {
      this.complain(now?.error ?? "The server did not answer. It is asked again in a while.");
      this.later(now ? null : 5 * POLL_MS);
      return;
    }
    const ended = this.status === "running" && now.status !== "running";
    this.showState(now);
    if (now.report) {
      this.version = now.version;
      this.showReport(now);
    }
    if (ended) await this.list(id);
    else if (now.here || now.status === "running") this.later(POLL_MS);
  }

  later(ms) {
    clearTimeout(this.timer);
    if (ms && element.offsetParent && !document.hidden) {
      this.timer = setTimeout(() => this.poll(), ms);
    }
  }

  async ask(what) {
    this.complain(null);
    const answer = await server[what]({ id: this.id });
    if (!answer || answer.error) this.complain(answer?.error ?? "The server did not answer.");
    await this.poll();
    if (what === "resume") await this.list(this.id);
  }

  showState(now) {
    this.status = now.status;
    this.complain(now.error && now.status !== "running" ? now.error : null);
    this.stopper.hidden = !now.here;
    this.resumer.hidden = now.here || !["cancelled", "interrupted", "failed"].includes(now.status);
    const { progress } = now;
    this.progress.hidden = !progress;
    this.host.dataset.state = now.status;
    if (!progress) {
      this.words.textContent = this.overWords(now);
      return;
    }
    const share = progress.share ?? 0;
    this.bar.style.width = `${100 * share}%`;
    this.progress.setAttribute("aria-valuenow", String(Math.round(100 * share)));
    const failed = progress.num_failed ? `${progress.num_failed} failed` : "";
    this.words.textContent = [progress.counts, progress.left, failed, progress.words]
      .filter(Boolean).join(" \u00b7 ");
  }

  overWords(now) {
    if (now.status === "running") return "running in another process";
    const hint = { cancelled: "Resume runs what is missing.",
      interrupted: "Its process ended. Resume runs what is missing.",
      failed: "Resume tries again." }[now.status];
    return [STATUS_WORDS[now.status], hint].filter(Boolean).join(". ");
  }

  showReport(now) {
    const { report, conditions } = now;
    this.now = now;
    const colour = (name) => this.plots.colour(name);
    this.plots.report = report;
    const about = [now.target, conditions.dtype, conditions.device, conditions.sampling,
      `${conditions.max_new_tokens} new tokens at most`, `concurrency ${conditions.concurrency}`]
      .filter(Boolean).join(" \u00b7 ");
    const extent = `${plural(now.num_prompts, "prompt")} \u00d7 ${now.configurations.length} `
      + `configurations \u00d7 ${plural(now.num_repeats, "repeat")}: ${report.num_done} of `
      + `${plural(now.num_requests, "request")} done`;
    const formulas = this.menus.formulas;
    this.groupHost = h("div");
    this.latencyHost = h("div");
    const parts = [this.head(now, about, extent)];
    if (report.num_done) {
      const deploy = (section) => trigger("deploy", { id: section.example_run,
        target: now.target_name });
      parts.push(summaryTable(report, formulas, colour, deploy), this.groupCard(), this.plots.host,
        this.latencyCard(report), divergenceList(report));
    }
    parts.push(this.leftOut(now), this.definitions());
    this.body.replaceChildren(...parts.filter(Boolean));
    if (report.num_done) this.plots.show(report, now.group_titles);
  }

  head(now, about, extent) {
    const downloads = DOWNLOADS.map(([name, words]) =>
      tool(words, `download ${name}`, () => this.download(name), name));
    return h("div", { class: "card head" }, h("h4", {}, now.name),
      h("p", { class: "headline" }, now.report.headline), h("p", { class: "note" }, about),
      h("p", { class: "note" }, extent),
      h("div", { class: "tools" },
        tool("Runs", "its runs on the Runs page", () => trigger("runs", { id: now.id }), "runs"),
        tool("Tune the tree", "measure and draw choice trees on this benchmark's texts",
          () => trigger("tune", { id: now.id, target: now.target_name }), "tune"),
        this.permalink(now.id), h("span", { class: "spring" }), ...downloads));
  }

  // The address that opens this benchmark, for whoever shares this log.
  permalink(id) {
    const url = new URL(location.href);
    url.search = "";
    url.searchParams.set("benchmark", id);
    return h("a", { class: "tool", href: url.href, "data-do": "link" }, "Permalink");
  }

  groupCard() {
    const pick = (kind) => {
      this.kind = kind;
      for (const tab of tabs) tab.setAttribute("aria-selected", String(tab.dataset.kind === kind));
      this.groupHost.replaceChildren(groupTable(this.now.report, this.now.group_titles,
        this.menus.formulas, kind, (name) => this.plots.colour(name)));
    };
    const tabs = [["speedup", "Speedup"], ["mat", "MAT"]].map(([kind, words]) => h("button",
      { type: "button", role: "tab", "data-kind": kind, onclick: () => pick(kind) }, words));
    pick(this.kind);
    return h("div", { class: "card" }, h("div", { class: "line-head" },
      h("h4", {}, "By kind of task"), h("div", { class: "tabs", role: "tablist" }, ...tabs)),
    this.groupHost);
  }

  latencyCard(report) {
    const known = report.configurations.filter((section) => section.latency);
    const select = chooser("configuration of the latency table", () => show());
    const note = h("p", { class: "note" });
    const show = () => {
      this.latencyOf = select.value;
      const section = known.find(({ name }) => name === select.value);
      const { formulas } = this.menus;
      this.latencyHost.replaceChildren(latencyTable(section, this.menus.latency_rows));
      note.replaceChildren(
        h("span", { title: formulas.output_token_throughput }, "output token throughput "
          + `${number(section.latency.output_token_throughput, 2)} per second`), " \u00b7 ",
        h("span", { title: formulas.request_throughput }, "request throughput "
          + `${number(section.latency.request_throughput, 2)} per second`), " \u00b7 "
          + `${plural(section.latency.num_requests, "request")}, concurrency `
          + `${section.latency.concurrency}`);
    };
    fillChooser(select, known.map(({ name }) => [name, name]), this.latencyOf);
    show();
    return h("div", { class: "card" }, h("div", { class: "line-head" }, h("h4", {}, "Latency"),
      select), this.latencyHost, note);
  }

  leftOut(now) {
    const lines = now.skipped.map((skip) =>
      h("li", {}, `${skip.suite} ${skip.prompt}, turn ${skip.turn + 1}: ${skip.reason}`));
    if (!lines.length) return null;
    return h("details", { class: "card" }, h("summary", {}, `${plural(lines.length, "turn")} left `
      + "out"), h("ul", { class: "lines" }, ...lines));
  }

  definitions() {
    const pairs = Object.entries(this.menus.formulas).flatMap(([key, words]) =>
      [h("dt", {}, key.replaceAll("_", " ")), h("dd", {}, words)]);
    return h("details", { class: "card" }, h("summary", {}, "How every figure is computed"),
      h("dl", {}, ...pairs));
  }

  async download(name) {
    const file = await server.file({ id: this.id, name });
    if (!file || file.error) {
      this.complain(file?.error ?? "The server did not answer. Try again.");
      return;
    }
    const link = h("a", { href: URL.createObjectURL(new Blob([file.text])), download: file.name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
}
