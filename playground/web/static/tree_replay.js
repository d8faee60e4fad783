// The exact what-if: walks every text of a rank table with a choice tree. Pure; needs tree_model.js.
//
// packed: { depths, num_ranks, positions, starts, categories, width, ranks, chains }: `ranks` is base64
// of little-endian integers of `width` bytes, rank + 1 per position and depth, 0 where the true token
// was not among the ranks kept. `chains` instead: steps that a drafter which looks up made while
// measuring, [{ length, category, ends: steps by accepted length, drafted: steps by drafted tokens }].
function unpackTable(packed) {
  const bytes = Uint8Array.from(atob(packed.ranks), (letter) => letter.charCodeAt(0));
  const ranks = packed.width === 1 ? bytes : new Uint16Array(bytes.buffer);
  const { depths, positions, categories } = packed;
  const chains = packed.chains?.length ? packed.chains : null;
  return { ranks, depths, positions, starts: [...packed.starts, positions], categories, chains,
    numRanks: packed.num_ranks,
    lengths: chains ? [...new Set(chains.map((row) => row.length))].sort((a, b) => a - b)
      : Array.from({ length: depths }, (_, i) => i + 1) };
}

// goes[node * width + rank + 1] is the child of that rank, 0 where there is none.
function stepTable(tree) {
  const width = tree.maxRank + 2;
  const goes = new Uint16Array((tree.size + 1) * width);
  tree.keys.forEach((key, i) => {
    goes[tree.nodes.get(parentOf(key)) * width + rankOf(key) + 1] = i + 1;
  });
  return { goes, width };
}

// onStep(position, node) is told every step's root position and deepest accepted node.
function walkTexts(table, tree, category, onStep) {
  const { goes, width } = stepTable(tree);
  const { ranks, depths, starts, categories } = table;
  for (let text = 0; text + 1 < starts.length; text += 1) {
    if (category !== null && categories[text] !== category) continue;
    let at = starts[text];
    while (at < starts[text + 1]) {
      let node = 0, depth = 0;
      while (depth < depths) {
        const rank = ranks[at * depths + depth];
        const child = rank === 0 || rank >= width ? 0 : goes[node * width + rank];
        if (child === 0) break;
        node = child;
        depth += 1;
      }
      onStep(at, node, depth, text);
      at += depth + 1;
    }
  }
}

// counts[node]: steps whose accepted path goes through the node; counts[0] is every step.
// null where the table cannot tell: a chain of a length that was not tried.
function replayTree(table, tree, category = null) {
  if (table.chains) return replayLookUps(table, tree, category);
  const ends = new Uint32Array(tree.size + 1);
  const lengths = [];
  walkTexts(table, tree, category, (at, node, depth) => {
    ends[node] += 1;
    lengths[depth] = (lengths[depth] ?? 0) + 1;
  });
  const counts = Array.from(ends);
  for (let node = tree.size; node > 0; node -= 1) {
    counts[tree.nodes.get(parentOf(tree.keys[node - 1]))] += counts[node];
  }
  return { counts, sizes: [[tree.size, 1]], ...tally(lengths, counts[0]) };
}

function replayLookUps(table, tree, category) {
  if (!tree.isChain || !table.lengths.includes(tree.depth)) return null;
  const lengths = [], sizes = [];
  const add = (sums, counts) => counts.forEach((n, i) => { sums[i] = (sums[i] ?? 0) + n; });
  for (const row of table.chains) {
    if (row.length !== tree.depth || (category !== null && row.category !== category)) continue;
    add(lengths, row.ends);
    add(sizes, row.drafted);
  }
  const counts = Array.from({ length: tree.size + 1 }, (_, depth) =>
    lengths.slice(depth).reduce((sum, count) => sum + (count ?? 0), 0));
  return { counts, sizes: sizes.map((count, n) => [n, count / counts[0]]).filter(([, share]) => share),
    ...tally(lengths, counts[0]) };
}

function tally(lengths, numSteps) {
  let numAccepted = 0;
  const rates = [];
  for (let depth = lengths.length - 1, reached = 0; depth > 0; depth -= 1) {
    reached += lengths[depth] ?? 0;
    numAccepted += depth * (lengths[depth] ?? 0);
    rates[depth - 1] = reached / numSteps;
  }
  return { numSteps, numAccepted, mat: numSteps ? 1 + numAccepted / numSteps : null, rates };
}

// Root positions of the first `most` steps that accepted the node, spread over the texts.
function stepsThrough(table, tree, key, most = 200, category = null) {
  const found = [];
  if (table.chains) return found;
  walkTexts(table, tree, category, (at, node, depth, text) => {
    if (found.length < most && isWithin(node ? tree.keys[node - 1] : "", key)) {
      found.push({ at, text, depth });
    }
  });
  return found;
}
