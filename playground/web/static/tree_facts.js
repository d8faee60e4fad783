// What is known of every node, for its size, colour, label and words. Needs dom.js, tree_model.js,
// tree_dynamic.js.
// What is known of a node: { size, share, label, words, known } by key.
function factsOf(tree, replay, table) {
  const steps = replay?.numSteps ?? 0;
  return (key) => {
    const place = key === "" ? "root, the last committed token"
      : `${pathWords(key)}, depth ${depthOf(key)}, rank ${rankOf(key)}`;
    const node = tree.nodes.get(key);
    if (node === undefined) return { size: 0.3, share: 0, label: "", words: `${place}, proposed`,
      known: true };
    if (!replay || !steps) return { size: 0.5, share: 0, label: "", words: place, known: false };
    if (key === "") return { size: 1, share: 1, label: "", known: true,
      words: `${place}; ${plural(steps, "step")} replayed` };
    const known = Boolean(table.chains)
      || (depthOf(key) <= table.depths && rankOf(key) < table.numRanks);
    const count = replay.counts[node], tries = replay.counts[tree.nodes.get(parentOf(key))];
    const share = count / steps, chance = tries ? count / tries : 0;
    const words = `${place}: tried ${plural(tries, "time")}, accepted ${count} `
      + `(${fine(chance)} of tries, ${fine(share)} of steps)`;
    return { size: Math.sqrt(share), share, known, words, label: known ? percent(chance) : "?" };
  };
}

// Figures of trees that a drafter grew, as `worth` gives them.
function worthOf(drafted, speed) {
  const { mat, rates, nodes, steps, tokens, counts } = drafted;
  const depth = Math.max(0, ...counts.depths.map(([depth]) => depth));
  return { replay: null, mat, rates, nodes: Math.round(10 * nodes) / 10, depth, steps, tokens,
    ...predictDrafted(speed, drafted) };
}

function draftedFacts({ paths, steps }) {
  const known = new Map(paths.map(([path, drafted, accepted]) => [keyOf(path), { drafted, accepted }]));
  return (key) => {
    const found = key === "" ? { drafted: steps, accepted: steps } : known.get(key);
    const { drafted, accepted } = found ?? { drafted: 0, accepted: 0 };
    const share = drafted / steps, chance = drafted ? accepted / drafted : 0;
    const words = key === "" ? `root; ${plural(steps, "tree")} drafted`
      : `${pathWords(key)}: drafted in ${fine(share)} of the steps, accepted in ${fine(chance)} of those`;
    return { size: Math.sqrt(share), share, known: true, words, label: key ? percent(chance) : "" };
  };
}

function fine(share) {
  return share > 0 && share < 0.1 ? `${(100 * share).toFixed(1)} %` : percent(share);
}
